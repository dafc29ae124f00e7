"""A server and worker processes that can be killed, frozen, cut off and restarted. Each worker has
a fault proxy of its own. Everything is stopped when the fleet's block ends."""

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
STOP_TIMEOUT = 60.0
"""Seconds for a worker to exit after SIGTERM."""
SERVER_SETTINGS = {
    "max_connections": "200",
    "track_commit_timestamp": "on",  # the checker orders writes by it
    "fsync": "off",  # a crash of the server alone keeps the same data
    "wal_writer_delay": "20ms",  # a crash loses only the last claims, even on a busy machine
}


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a worker process (`tests/kit/fleet_worker.py`). Durations are in seconds."""

    elect_interval: float = 5.0
    leader_ttl: float = 15.0
    dead_after: float = 60.0
    slots: int = 20
    """Number of jobs that run at once."""
    poll_only: bool = False
    periodic_jobs: bool = True
    """Whether it registers the periodic jobs whose slots the checker counts."""
    pool_is_exhausted: bool = False
    """Whether it takes every connection of its own pool."""
    target: str = "tests.kit.fleet_worker:client"
    """The target argument of `riverpy worker`."""
    name: str = ""
    history_url: str = ""
    """URL without the proxy, to record its history. The fleet sets both URLs."""


class Shutdown(Enum):
    """Shutdown mode of the server, as for `pg_ctl stop -m`."""

    FAST = signal.SIGINT
    IMMEDIATE = signal.SIGQUIT


class Server:
    """A PostgreSQL server of the fleet, below `directory`."""

    def __init__(self, directory: Path, name: str = "fleet", **settings: str) -> None:
        """Create it, with settings of PostgreSQL in addition to the usual ones."""
        self._postgres = EmbeddedPostgres(
            name, base_dir=directory, settings=SERVER_SETTINGS | settings
        )

    @property
    def url(self) -> str:
        """The URL without a proxy."""
        return self._postgres.url

    def proxy(self, user: str | None) -> Proxy:
        """Return a new proxy for this role; None: the role of the server's URL."""
        return Proxy(self.url if user is None else with_user(self.url, user))

    async def start(self) -> None:
        """Start the server and create the tables of River, riverpy and the history."""
        await asyncio.to_thread(self._postgres.start)
        async with self.connected() as connection:
            for line in ("main", "riverpy"):
                await Migrator(connection, line=line).up()
            await connection.execute(STATEMENTS["create"])

    @asynccontextmanager
    async def connected(self) -> AsyncGenerator[asyncpg.Connection]:
        """Open a connection without a proxy."""
        connection = await asyncpg.connect(self.url, timeout=20)
        try:
            yield connection
        finally:
            connection.terminate()

    async def shut_down(self, how: Shutdown) -> None:
        """Stop the server; every connection is lost."""
        pid = int((self._postgres.directory / "data" / "postmaster.pid").read_text().split()[0])
        os.kill(pid, how.value)
        async with asyncio.timeout(STOP_TIMEOUT):
            while _exists(pid):
                await asyncio.sleep(0.01)

    async def come_back(self) -> None:
        """Start it again after `shut_down`."""
        await asyncio.to_thread(self._postgres.start)

    async def remove(self) -> None:
        """Stop it and delete its data."""
        await asyncio.to_thread(self._postgres.remove)


class WorkerProcess:
    """One worker of the fleet: `riverpy worker`, started again and again.

    Args: url: the database as the worker reaches it. enter: a command that runs the command after
    it, like `nsenter`.
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
        """The log of all its processes, one after the other."""
        self.is_frozen = False
        self._url = url
        self._enter = enter
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has a process; a frozen one counts."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """The id of its latest process."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start a process. Its terms and its jobs are in the history once it runs."""
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
        """Kill it by SIGKILL, also if it is frozen."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Stop it gracefully by SIGTERM."""
        self.thaw()
        self._signal(signal.SIGTERM)

    def step_clock(self) -> None:
        """Set its wall clock forward by ten minutes, or back again."""
        self._signal(signal.SIGUSR1)

    def freeze(self) -> None:
        """Suspend it by SIGSTOP until `thaw`. Its connections stay open."""
        self._signal(signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        """Continue it by SIGCONT."""
        self._signal(signal.SIGCONT)
        self.is_frozen = False

    async def ended(self) -> int:
        """Wait for the end of the process and return its exit code, negative for a signal.

        Raises: TimeoutError: it did not end in time.
        """
        assert self._process is not None
        async with asyncio.timeout(STOP_TIMEOUT):
            code = await self._process.wait()
        self.is_frozen = False
        return code

    async def close(self) -> None:
        """Kill it if it runs."""
        self.kill()
        if self.is_running:
            await self.ended()

    def _command(self) -> list[str]:
        command = [str(RIVERPY), "worker", self.settings.target]
        return [*command, "--database-url", self._url, "--name", self.name, "--log", "json"]

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):  # it may have exited by itself
                os.killpg(self._process.pid, number)

    def _environment(self) -> dict[str, str]:
        ours = ("RIVERPY_", "PG", "DATABASE_URL")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        settings = msgspec.json.encode(self.settings).decode()
        return {**kept, SETTINGS_VARIABLE: settings, "RIVERPY_DEBUG": "1"}  # show tracebacks


class Worker(WorkerProcess):
    """A worker of the fleet behind a proxy of its own."""

    def __init__(self, name: str, settings: WorkerSettings, proxy: Proxy, log: Path) -> None:
        super().__init__(name, settings, proxy.url, log)
        self.proxy = proxy

    async def close(self) -> None:
        """Stop it and its proxy."""
        await super().close()
        await self.proxy.close()


class Fleet:
    """A server and its workers."""

    def __init__(self, directory: Path, server: Server) -> None:
        self.directory = directory
        """Directory with the logs of the workers. It remains after the end if `is_kept`."""
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
        """Add a worker without starting its process.

        Args: name: its name in the client's id. settings: settings of its process. user: the role
        that it connects as; None: the role of the server's URL.
        """
        proxy = self.server.proxy(user)
        await proxy.start()
        settings = msgspec.structs.replace(settings, name=name, history_url=self.server.url)
        worker = Worker(name, settings, proxy, self.directory / f"{name}.log")
        self.workers.append(worker)
        return worker

    def keep(self, name: str, content: bytes) -> None:
        """Write a file into the directory, and keep the directory with the logs."""
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
    """Yield a fleet without workers. Its server runs and is migrated."""
    directory = _new_directory()
    fleet = Fleet(directory, make_server(directory))
    try:
        await fleet.server.start()
        yield fleet
    finally:
        await _to_the_end(fleet)


def with_user(url: str, user: str) -> str:
    """Return the URL for another role, which needs no password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{user}@{parts.netloc.rpartition('@')[2]}"))


def end_with_the_fleet() -> None:
    """Let the kernel kill this worker when the process that started it ends in any way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _new_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="riverpy-fleet-"))
    directory.chmod(0o711)  # the account that runs the server may be another
    return directory


async def _to_the_end(fleet: Fleet) -> None:
    """Shut the fleet down completely, even if this is cancelled again, as by a second Ctrl-C."""
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
