"""A server and worker processes that can be killed, frozen, cut off and restarted, each worker
behind a fault proxy of its own. Whatever was started has ended when the fleet is left."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import sys
import tempfile
from contextlib import asynccontextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import msgspec

from riverpy.embedded import EmbeddedPostgres
from riverpy.migrate import Migrator
from tests.kit.history import STATEMENTS
from tests.kit.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

ROOT = Path(__file__).resolve().parents[2]
RIVERPY = Path(sys.executable).with_name("riverpy")
SETTINGS_VARIABLE = "FLEET_SETTINGS"
PR_SET_PDEATHSIG = 1
STOP_LIMIT = 60.0
"""Seconds that a worker may take to end after SIGTERM."""
SERVER_SETTINGS = {
    "max_connections": "200",
    "track_commit_timestamp": "on",  # the checker orders writes by it
    "fsync": "off",  # what survives a crash of the server alone is not changed by it
    "wal_writer_delay": "20ms",  # so that a crash forgets but the last claims on a busy machine too
}


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the process of a worker is told (`tests/kit/fleet_worker.py`). Durations in seconds."""

    elect_interval: float = 5.0
    leader_ttl: float = 15.0
    dead_after: float = 60.0
    slots: int = 20
    """Jobs at a time."""
    poll_only: bool = False
    periodic_jobs: bool = True
    """Whether it brings the periodic jobs whose slots the checker counts."""
    pool_is_exhausted: bool = False
    """Whether it holds every connection of its own pool."""
    target: str = "tests.kit.fleet_worker:client"
    """What it works, as `riverpy worker` is told."""
    name: str = ""
    history_url: str = ""
    """Where it records its history: past the proxy. The fleet fills in both."""


class Shutdown(Enum):
    """How the server is told to end, as `pg_ctl stop -m` has it."""

    FAST = signal.SIGINT
    IMMEDIATE = signal.SIGQUIT


class Server:
    """A PostgreSQL of its own, below `directory`."""

    def __init__(self, directory: Path, name: str = "fleet", **settings: str) -> None:
        """Make it, with settings of PostgreSQL beside the usual ones."""
        self._postgres = EmbeddedPostgres(
            name, base_dir=directory, settings=SERVER_SETTINGS | settings
        )

    @property
    def url(self) -> str:
        """The URL past every proxy."""
        return self._postgres.url

    def proxy(self, user: str | None) -> Proxy:
        """A way to it for this role; None: the one of its URL."""
        return Proxy(self.url if user is None else with_user(self.url, user))

    async def start(self) -> None:
        """Have it answer, with River's tables, riverpy's and those of the history."""
        await asyncio.to_thread(self._postgres.start)
        async with self.connected() as connection:
            for line in ("main", "riverpy"):
                await Migrator(connection, line=line).up()
            await connection.execute(STATEMENTS["create"])

    @asynccontextmanager
    async def connected(self) -> AsyncGenerator[asyncpg.Connection]:
        """A connection past every proxy."""
        connection = await asyncpg.connect(self.url, timeout=20)
        try:
            yield connection
        finally:
            connection.terminate()

    async def shut_down(self, how: Shutdown) -> None:
        """End it; every connection is lost."""
        pid = int((self._postgres.directory / "data" / "postmaster.pid").read_text().split()[0])
        os.kill(pid, how.value)
        async with asyncio.timeout(STOP_LIMIT):
            while _exists(pid):
                await asyncio.sleep(0.01)

    async def come_back(self) -> None:
        """Start it again after `shut_down`."""
        await asyncio.to_thread(self._postgres.start)

    async def remove(self) -> None:
        """End it and delete its data."""
        await asyncio.to_thread(self._postgres.remove)


class WorkerProcess:
    """One place of the fleet: `riverpy worker`, started again and again.

    Args:
        url: the database as the worker reaches it.
        enter: a command that runs the one after it, as `nsenter` does.
    """

    def __init__(
        self,
        name: str,
        settings: WorkerSettings,
        url: str,
        log: Path,
        *,
        enter: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.settings = settings
        self.log = log
        """What its processes say, one after the other."""
        self.is_frozen = False
        self._url = url
        self._enter = enter
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_running(self) -> bool:
        """Whether there is a process; a frozen one counts."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """The id of its latest process."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start a process. Its leading and its jobs show in the history when it is up."""
        assert not self.is_running
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._enter,
                *self._command(),
                cwd=ROOT,
                env=self._environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL: it ends without a word, frozen or not."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM: it stops gracefully."""
        self.thaw()
        self._signal(signal.SIGTERM)

    def step_clock(self) -> None:
        """Its wall clock goes forward by ten minutes, or back again."""
        self._signal(signal.SIGUSR1)

    def freeze(self) -> None:
        """SIGSTOP: it does nothing until `thaw`; its connections stay open."""
        self._signal(signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)
        self.is_frozen = False

    async def ended(self) -> int:
        """Wait for the end of the process and return its exit code, negative for a signal.

        Raises:
            TimeoutError: it did not end in time.
        """
        assert self._process is not None
        async with asyncio.timeout(STOP_LIMIT):
            code = await self._process.wait()
        self.is_frozen = False
        return code

    async def close(self) -> None:
        """Have it ended, killed if it runs."""
        self.kill()
        if self.is_running:
            await self.ended()

    def _command(self) -> list[str]:
        command = [str(RIVERPY), "worker", self.settings.target]
        return [*command, "--database-url", self._url, "--name", self.name, "--log", "json"]

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):  # it may have ended by itself
                os.killpg(self._process.pid, number)

    def _environment(self) -> dict[str, str]:
        ours = ("RIVERPY_", "PG", "DATABASE_URL")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        settings = msgspec.json.encode(self.settings).decode()
        return {**kept, SETTINGS_VARIABLE: settings, "RIVERPY_DEBUG": "1"}  # show tracebacks


class Worker(WorkerProcess):
    """A place of the fleet behind a proxy of its own."""

    def __init__(self, name: str, settings: WorkerSettings, proxy: Proxy, log: Path) -> None:
        super().__init__(name, settings, proxy.url, log)
        self.proxy = proxy

    async def close(self) -> None:
        """End it and its proxy."""
        await super().close()
        await self.proxy.close()


class Fleet:
    """One server and its workers."""

    def __init__(self, directory: Path, server: Server) -> None:
        self.directory = directory
        """Holds the logs of the workers; kept after the end if `is_kept`."""
        self.is_kept = False
        self.server = server
        self.workers: list[Worker] = []

    async def add(
        self,
        name: str,
        settings: WorkerSettings,
        *,
        user: str | None = None,
    ) -> Worker:
        """A further worker, whose process is not started yet.

        Args:
            name: its name in the client's id.
            settings: what its process is told.
            user: the role that it connects as; None: the one of the server's URL.
        """
        proxy = self.server.proxy(user)
        await proxy.start()
        settings = msgspec.structs.replace(settings, name=name, history_url=self.server.url)
        worker = Worker(name, settings, proxy, self.directory / f"{name}.log")
        self.workers.append(worker)
        return worker

    def keep(self, name: str, content: bytes) -> None:
        """Write a file into the directory, which stays with the logs."""
        self.is_kept = True
        (self.directory / name).write_bytes(content)

    async def end(self) -> None:
        """Kill what still runs and remove the server."""
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            await worker.close()
        await self.server.remove()
        if not self.is_kept:
            shutil.rmtree(self.directory)


@asynccontextmanager
async def running_fleet(make_server: Callable[[Path], Server] = Server) -> AsyncGenerator[Fleet]:
    """A fleet without workers; its server runs and is migrated."""
    directory = _new_directory()
    fleet = Fleet(directory, make_server(directory))
    try:
        await fleet.server.start()
        yield fleet
    finally:
        await _to_the_end(fleet)


def with_user(url: str, user: str) -> str:
    """The URL for another role, which needs no password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{user}@{parts.netloc.rpartition('@')[2]}"))


def end_with_the_fleet() -> None:
    """Have this worker killed with the process that started it, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _new_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="riverpy-fleet-"))
    directory.chmod(0o711)  # the account that runs the server may not be ours
    return directory


async def _to_the_end(fleet: Fleet) -> None:
    """A second cancellation, as by a second Ctrl-C, leaves nothing behind either."""
    ending = asyncio.create_task(fleet.end())
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        await ending
        raise


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
