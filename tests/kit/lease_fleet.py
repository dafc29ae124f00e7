"""Processes that hold one lease or wait for it (`tests/kit/lease_worker.py`), each behind a fault
proxy of its own. They record their acts in files, so that a killed process loses no record."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tests.kit.fleet import Server, Worker, WorkerSettings, running_fleet
from tests.kit.load import FileReader

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from tests.kit.fleet import Fleet
    from tests.kit.proxy import Proxy

LEASE = "projection"
POLL = 0.005
START_TIMEOUT = 60.0
"""Seconds for the processes to start."""
TABLE = """
CREATE TABLE IF NOT EXISTS lease_write (id bigserial PRIMARY KEY, epoch bigint NOT NULL)
"""
WRITE = """
INSERT INTO lease_write (epoch) VALUES ($1)
RETURNING EXISTS (SELECT FROM lease_write WHERE epoch > $1)
"""
"""Records a write, and whether a write of a later term came before, which must never happen."""


class LeaseSettings(WorkerSettings, frozen=True, kw_only=True):
    """Settings of the process. `elect_interval` and `leader_ttl` are those of the lease."""

    database_url: str = ""
    """URL of its proxy. The fleet sets it, and `notes`."""
    notes: str = ""
    """Path of the file with its records."""
    through: str = "manager"
    """What it acquires the lease with: a `manager` with a connection of its own, a manager on a
    `pool`, or a `client`."""
    is_pooler: bool = False
    """Whether its database URL leads through PgBouncer."""


class Note(NamedTuple):
    """A record of a process, with a time of the clock that all processes of a machine share."""

    at: float
    worker: str
    pid: int
    what: str
    """`stands`: it waits for the lease. `begin`, `act` and `end` of a term. A fenced write `wrote`
    a row, was `refused`, or was `stale` (after a write of a later term). `late_refused`: a write
    after the end was refused."""
    epoch: int
    is_held: bool
    """Whether the lease was valid locally just before."""


class Holding(NamedTuple):
    """A term as its process recorded it."""

    worker: str
    epoch: int
    began: float


class LeaseWorker(Worker):
    """A process of the fleet that runs `tests.kit.lease_worker`."""

    def __init__(
        self, name: str, settings: LeaseSettings, proxy: Proxy, log: Path, extra: dict[str, str]
    ) -> None:
        super().__init__(name, settings, proxy, log)
        self._extra = extra

    def take_connections(self) -> None:
        """Take every connection of its pool until the term ends."""
        self._signal(signal.SIGUSR1)

    def block(self) -> None:
        """Block its event loop for longer than the lease lasts."""
        self._signal(signal.SIGUSR2)

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "tests.kit.lease_worker"]

    def _environment(self) -> dict[str, str]:
        return super()._environment() | self._extra


class LeaseStage:
    """The server, the processes and their records."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.notes: list[Note] = []
        """The records in the order in which they were read."""
        self._tails: dict[str, FileReader] = {}

    async def add(
        self,
        name: str,
        settings: LeaseSettings,
        *,
        proxy: Proxy | None = None,
        environment: dict[str, str] | None = None,
    ) -> LeaseWorker:
        """Add a process and start it.

        Args: name: its name. settings: its settings. proxy: its proxy to the database; None: a new
        one to the server. environment: environment variables in addition to the usual ones.
        """
        if proxy is None:
            proxy = self.fleet.server.proxy(None)
        await proxy.start()
        notes = self.fleet.directory / f"{name}.notes"
        settings = msgspec.structs.replace(
            settings,
            name=name,
            database_url=proxy.url,
            history_url=self.fleet.server.url,
            notes=str(notes),
        )
        log = self.fleet.directory / f"{name}.log"
        worker = LeaseWorker(name, settings, proxy, log, environment or {})
        self._tails[name] = FileReader(notes)
        self.fleet.workers.append(worker)
        await worker.start()
        return worker

    def worker(self, name: str) -> LeaseWorker:
        """Return the worker with this name."""
        found = next(worker for worker in self.fleet.workers if worker.name == name)
        assert isinstance(found, LeaseWorker)
        return found

    def read(self) -> list[Note]:
        """Return all records so far."""
        for name, tail in self._tails.items():
            for line in tail.lines():
                at, pid, what, epoch, is_held = line.split()
                note = Note(float(at), name, int(pid), what, int(epoch), is_held == "True")
                self.notes.append(note)
        return self.notes

    async def until(self, is_true: Callable[[], object], limit: float = START_TIMEOUT) -> None:
        """Return when the condition holds.

        Raises: TimeoutError: it did not hold within the limit in seconds.
        """
        async with asyncio.timeout(limit):
            while True:
                self.read()
                if is_true():
                    return
                await asyncio.sleep(POLL)

    async def until_all_ready(self) -> None:
        """Return when the current process of each worker waits for the lease or holds it."""
        pids = {worker.pid for worker in self.fleet.workers}
        await self.until(lambda: pids <= {note.pid for note in self.notes})

    def holdings(self) -> list[Holding]:
        """Return the recorded terms, ordered by their start."""
        begins = [note for note in self.notes if note.what == "begin"]
        begins.sort()
        return [Holding(note.worker, note.epoch, note.at) for note in begins]

    async def next_holding(self, old: Holding | None, limit: float) -> Holding:
        """Return the first term after `old`."""

        def later() -> list[Holding]:
            return [one for one in self.holdings() if old is None or one.began > old.began]

        await self.until(later, limit)
        return later()[0]

    async def present_holding(self, limit: float) -> Holding:
        """Return the latest term once its holder acts in it."""

        def present() -> list[Holding]:
            return [
                one
                for one in self.holdings()[-1:]
                if any(act.is_held for act in self.of_term(one, "act"))
                and not self.of_term(one, "end")
            ]

        await self.until(present, limit)
        return present()[0]

    def of_term(self, term: Holding, what: str) -> list[Note]:
        """Return the records of this kind in a term."""
        return [
            note
            for note in self.notes
            if (note.worker, note.epoch, note.what) == (term.worker, term.epoch, what)
        ]


@asynccontextmanager
async def lease_stage(
    make_server: Callable[[Path], Server] = Server,
) -> AsyncGenerator[LeaseStage]:
    """Yield a stage without processes. Its server runs and is migrated."""
    async with running_fleet(make_server) as fleet:
        async with fleet.server.connected() as connection:
            await connection.execute(TABLE)
        yield LeaseStage(fleet)
