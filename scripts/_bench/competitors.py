"""The programs that are compared, and the measurements of each one.

A measurement that a competitor does not support is None. A measurement that fails raises
Unavailable.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scripts._bench.environment import make_environment
from scripts._bench.process import Output, Unavailable, program, run_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scripts._bench.server import Database, Server

LIMIT = 600.0
"""Timeout of one program, in seconds."""
PEER_TIMEOUT = 30.0
"""Timeout of a peer's program, in seconds. It is shorter than `LIMIT`, so that a peer that hangs
does not delay the run."""
NAMES = ("riverpy", "river_go", "bare", "pgqueuer", "procrastinate", "oban", "chancy", "awa")


class Work(NamedTuple):
    """Result of one run of a worker."""

    per_s: float
    rss_mib: float | None = None
    pickup_p50_ms: float | None = None
    pickup_p99_ms: float | None = None
    occupancy: float | None = None


class Competitor:
    """A program that is compared, with a database of its own."""

    name = ""
    share = 1.0
    """The fraction of a run's jobs that this competitor works. Slow programs work fewer jobs."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._queues: list[str] = []
        """The queues of served workers; empty: `default` alone."""

    @contextmanager
    def having_queues(self, count: int, first: str = "q0") -> Iterator[None]:
        """Let the workers that start in the `with` block share their slots among `count` queues."""
        self._queues = [first, *(f"q{number}" for number in range(1, count))]
        try:
            yield
        finally:
            self._queues = []

    def _queue_slots(self, slots: int) -> str:
        """Return the queues of a worker with their slots, as in `q0:3,q1:2`."""
        queues = self._queues or ["default"]
        each, more = divmod(slots, len(queues))
        return ",".join(f"{name}:{each + (n < more)}" for n, name in enumerate(queues))

    async def database(self) -> Database:
        """The competitor's own database."""
        return await self._server.river(self.name)

    async def prepare(self) -> str:
        """Check that the competitor can be measured, and return its version.

        Raises: Unavailable: it cannot be measured.
        """
        raise NotImplementedError

    async def work(self, jobs: int, slots: int) -> Work:
        """Work this many no-op jobs."""
        raise NotImplementedError

    async def pickup(self, jobs: int) -> tuple[float, float] | None:
        """Return p50 and p99 in milliseconds with one insert each 20 ms; None if not supported."""
        return None

    async def insert(self, how: str, jobs: int) -> float | None:
        """Return inserted jobs per second: `one` at a time, `many` in a call, `fast`, or
        `100_callers` at the same time. `100_shared` is the same, except that the bare program
        shares one statement and uses no pool."""
        return None

    def serve(self, database: Database, slots: int) -> list[str]:
        """Return the command of a worker of queue `default` that runs until SIGTERM."""
        raise NotImplementedError

    def serve_at_defaults(self, database: Database, slots: int) -> list[str]:
        """Return the command of the same worker with its default settings."""
        return self.serve(database, slots)


class Riverpy(Competitor):
    """riverpy, measured by `riverpy bench`, `riverpy worker` and inserts of its client."""

    name = "riverpy"

    async def prepare(self) -> str:
        return version("riverpy-queue")

    async def work(self, jobs: int, slots: int) -> Work:
        return await self.bench(jobs, slots)

    async def bench(self, jobs: int, slots: int, *options: object) -> Work:
        """Run `riverpy bench` with these options added."""
        database = await self.database()
        command = [
            *(sys.executable, "-m", "riverpy", "bench", "--database-url", database.url),
            *("-n", str(jobs), "--slots", str(slots), "--force", "--json"),
            *map(str, options),
        ]
        found = (await run_json(command, LIMIT)).found
        return Work(
            found["work_per_s"],
            found.get("rss_mib"),
            found.get("pickup_p50_ms"),
            found.get("pickup_p99_ms"),
            found.get("occupancy"),
        )

    async def insert(self, how: str, jobs: int) -> float | None:
        database = await self.database()
        await database.empty()
        return (await run_json(program("riverpy_insert", how, database.url, jobs), LIMIT)).found[
            "per_s"
        ]

    def serve(self, database: Database, slots: int) -> list[str]:
        return [
            *(sys.executable, "-m", "riverpy", "worker", "scripts._bench.riverpy_jobs:client"),
            *("--database-url", database.url, "--queues", self._queue_slots(slots)),
            *("--log-level", "warning"),
        ]


class Bare(Competitor):
    """A loop on asyncpg alone, without a queue library."""

    name = "bare"

    async def prepare(self) -> str:
        return f"asyncpg {version('asyncpg')}"

    async def work(self, jobs: int, slots: int) -> Work:
        database = await self.database()
        script = Path(__file__).parents[1] / "bare_loop.py"
        command = [sys.executable, str(script), database.url, str(jobs), str(slots)]
        out = await run_json(command, LIMIT)
        if out.found["left"]:
            raise Unavailable(f"the bare loop left {out.found['left']} jobs")
        return Work(out.found["work_per_s"], out.rss_mib)

    async def pickup(self, jobs: int) -> tuple[float, float] | None:
        database = await self.database()
        found = (await run_json(program("bare_program", "pickup", database.url, jobs), LIMIT)).found
        return found["p50_ms"], found["p99_ms"]

    async def insert(self, how: str, jobs: int) -> float | None:
        database = await self.database()
        await database.empty()
        command = program("bare_program", "insert", database.url, how, jobs)
        return (await run_json(command, LIMIT)).found["per_s"]

    def serve(self, database: Database, slots: int) -> list[str]:
        return program("bare_program", "serve", database.url, slots)


class RiverGo(Competitor):
    """River in Go, with its own client and the settings of its own benchmark."""

    name = "river_go"
    _binary = ""

    async def prepare(self) -> str:
        if not shutil.which("go"):
            raise Unavailable("Go is not installed")
        from tests.interop import river_go

        binary = river_go.build()
        if binary is None:
            raise Unavailable("the Go module cannot be built here")
        self._binary = str(binary)
        module = Path(__file__).parents[2] / "tests/interop/go/go.mod"
        line = next(line for line in module.read_text().splitlines() if "riverqueue/river " in line)
        return line.split()[-1].removeprefix("v")

    async def _bench(self, database: Database, *flags: object) -> Output:
        command = [self._binary, "bench", "--database-url", database.url, *map(str, flags)]
        return await run_json(command, LIMIT)

    async def work(self, jobs: int, slots: int) -> Work:
        database = await self.database()
        await database.empty()
        out = await self._bench(database, "--jobs", jobs, "--slots", slots)
        return Work(out.found["work_per_s"], out.rss_mib)

    async def pickup(self, jobs: int) -> tuple[float, float] | None:
        found = (await self._bench(await self.database(), "--pickup", jobs)).found
        return found["pickup_p50_ms"], found["pickup_p99_ms"]

    async def insert(self, how: str, jobs: int) -> float | None:
        if how == "100_shared":
            return None
        database = await self.database()
        await database.empty()
        return (await self._bench(database, f"--insert-{how.replace('_', '-')}", jobs)).found[
            f"insert_{how}"
        ]

    def serve(self, database: Database, slots: int) -> list[str]:
        command = [self._binary, "bench", "--database-url", database.url, "--serve", str(slots)]
        return [*command, "--queues", self._queue_slots(slots)]

    def serve_at_defaults(self, database: Database, slots: int) -> list[str]:
        queues = self._queue_slots(slots)
        return [self._binary, "work", "--database-url", database.url, "--queues", queues]


class Peer(Competitor):
    """Another Python job queue. `peers` has a program for each."""

    share = 0.25
    python = sys.executable
    """The path of the Python that runs the peer's program."""
    distribution = ""
    """The name of the peer's package. Empty: it is the name of the module."""
    min_batches = 5
    """The minimum number of jobs, as a multiple of the slots."""

    async def database(self) -> Database:
        return await self._server.database(self.name)

    async def prepare(self) -> str:
        found = await self._find_version()
        await self._run("install")
        return found

    async def _find_version(self) -> str:
        """Return the version that is installed.

        Raises: Unavailable: it is not installed.
        """
        if find_spec(self.name) is None:
            raise Unavailable(f"{self.name} is not installed")
        try:
            return version(self.distribution or self.name)
        except PackageNotFoundError:
            return "unknown"

    async def _run(self, verb: str, *rest: object) -> Output:
        database = await self.database()
        return await run_json(self.command(verb, database.url, *rest), PEER_TIMEOUT)

    def command(self, *arguments: object) -> list[str]:
        """Return the command of its program."""
        return program(f"peers.{self.name}", *arguments, python=self.python)

    async def work(self, jobs: int, slots: int) -> Work:
        jobs = max(jobs, self.min_batches * slots)
        await self._run("insert", "many", jobs)
        await (await self.database()).settle()
        out = await self._run("work", jobs, slots)
        return Work(out.found["work_per_s"], out.rss_mib)

    async def insert(self, how: str, jobs: int) -> float | None:
        """Insert into a separate database, so that no worker takes the jobs."""
        if how in {"fast", "100_shared"}:
            return None
        database = await self._server.database(f"{self.name}_insert")
        if not await database.value("table_count"):
            await run_json(self.command("install", database.url), PEER_TIMEOUT)
        found: dict[str, Any] = (
            await run_json(self.command("insert", database.url, how, jobs), PEER_TIMEOUT)
        ).found
        return found["per_s"]


class PgQueuer(Peer):
    """PgQueuer."""

    name = "pgqueuer"


class Procrastinate(Peer):
    """Procrastinate."""

    name = "procrastinate"
    min_batches = 0  # it takes one job at a time, however many slots there are
    share = 0.02


class Oban(Peer):
    """oban-py, in an environment of its own, because it needs Python 3.12."""

    name = "oban"
    release = "0.7.0"

    async def _find_version(self) -> str:
        packages = [f"oban=={self.release}", "psycopg[binary,pool]", "uvloop"]
        self.python = await asyncio.to_thread(make_environment, self.name, (3, 12), packages)
        return self.release


class Awa(Peer):
    """awa."""

    name = "awa"
    distribution = "awa-pg"


class Chancy(Peer):
    """Chancy."""

    name = "chancy"
    share = 0.05


ALL: tuple[type[Competitor], ...] = (
    *(Riverpy, RiverGo, Bare),
    *(PgQueuer, Procrastinate, Oban, Chancy, Awa),
)
