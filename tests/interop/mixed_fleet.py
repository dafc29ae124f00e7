"""A fleet of workers of both languages on one database, with a record of its acts."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from riverpy._log_events import WORKER_STARTED
from riverpy._postgres.leaders import leader_request_resign
from riverpy.migrate import migrate_all
from tests._database import connected
from tests.cli.worker_process import running_worker
from tests.interop.river_go import RiverGo

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import asyncpg

    from tests.cli.worker_process import WorkerProcess
    from tests.interop.river_go import GoProcess

HISTORY = Path(__file__).with_name("mixed_fleet.sql").read_text("utf-8")
PATIENCE = 60.0
"""Timeout of a wait for the fleet, in seconds."""
LANGUAGES = ("go", "python")
GO_FLAGS = (
    *("--queues", "default:5", "--no-stagger", "--periodic", "noop:1"),
    *("--job-timeout", "5s", "--rescue-after", "5s", "--retry-after", "1s"),
)
JOBS = """
import asyncio
from datetime import timedelta
from typing import ClassVar
import msgspec, riverpy
from riverpy.periodic import PeriodicJob
from riverpy.schedules import every

workers = riverpy.Workers()


class Sleep(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "sleep"
    ms: int


class Noop(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "noop"
    by: str = "python"


@workers.job
async def sleep(job: riverpy.Job[Sleep]) -> None:
    await asyncio.sleep(job.args.ms / 1000)


@workers.job
async def noop(job: riverpy.Job[Noop]) -> None:
    pass


client = riverpy.Client(
    workers=workers,
    queues={"default": riverpy.QueueConfig(max_workers=5)},
    config=riverpy.Config(
        elect_interval=timedelta(milliseconds=500),
        leader_ttl=timedelta(seconds=4),
        dead_after=timedelta(seconds=3),
        job_timeout=timedelta(seconds=5),
        rescue_after=timedelta(seconds=5),
    ),
)
second = timedelta(seconds=1)
client.periodic_jobs.add(
    PeriodicJob(
        every(second),
        lambda: (
            Noop(),
            riverpy.InsertOpts(unique_opts=riverpy.UniqueOpts(by_period=second)),
        ),
        id="noop",
        run_on_start="each_term",
    )
)
"""


class MixedFleet:
    """Starts workers of both languages, and stops them by name."""

    def __init__(
        self,
        stack: AsyncExitStack,
        connection: asyncpg.Connection[Any],
        binary: Path,
        url: str,
        directory: Path,
    ) -> None:
        self.connection = connection
        self.go = RiverGo(binary, f"{url}{'&' if '?' in url else '?'}application_name=go", "")
        self._stack, self._directory, self._url = stack, directory, url
        self._go_workers: dict[str, GoProcess] = {}
        self._python_workers: dict[str, WorkerProcess] = {}
        self._started = 0

    async def start(self, language: str) -> None:
        """Start another worker of a language, and wait until it works."""
        self._started += 1
        name = f"{language}-{self._started}"
        if language == "go":
            worker = self.go.worker(*GO_FLAGS, "--client-id", name)
            self._go_workers[name] = await self._stack.enter_async_context(worker)
            return
        directory = self._directory / name
        directory.mkdir()
        arguments = ("jobs:client", "--database-url", self._url, "--name", name)
        worker = await self._stack.enter_async_context(
            running_worker(directory, *arguments, code=JOBS)
        )
        await worker.until_logged(WORKER_STARTED)
        self._python_workers[name] = worker

    async def terminate(self, client_id: str) -> None:
        """Stop a client's worker by SIGTERM, and check that it stops cleanly."""
        name = name_of(client_id)
        if process := self._go_workers.pop(name, None):
            process.terminate()
            assert await process.wait() == 0
            return
        worker = self._python_workers.pop(name)
        worker.send(signal.SIGTERM)
        assert await worker.exit_code() == 0

    async def kill(self, client_id: str) -> None:
        """Kill a client's worker by SIGKILL."""
        name = name_of(client_id)
        if process := self._go_workers.pop(name, None):
            process.kill()
            await process.wait()
            return
        worker = self._python_workers.pop(name)
        worker.send(signal.SIGKILL)
        await worker.exit_code()

    async def until_led_by(self, language: str) -> str:
        """Wait until a client of the language is the leader and its maintenance has run, and return
        its id. While a client of the other language is the leader, ask it to resign."""
        reason = f"no client of {language} becomes leader and runs maintenance"
        with anyio.fail_after(PATIENCE, reason=reason):
            while True:
                leader_id = await self.connection.fetchval("SELECT leader_id FROM river_leader")
                if leader_id and language_of(leader_id) != language:
                    await leader_request_resign(self.connection, None)
                elif leader_id and await self._maintenance_of(leader_id) == {
                    "scheduled",
                    "cleaned",
                }:
                    return leader_id
                await asyncio.sleep(0.02)

    async def _maintenance_of(self, leader_id: str) -> set[str]:
        """Return the maintenance acts in the current term of this leader."""
        rows = await self.connection.fetch(
            "SELECT act FROM maintenance_history NATURAL JOIN river_leader WHERE leader_id = $1",
            leader_id,
        )
        return {row["act"] for row in rows}

    async def until_it_works(self, client_id: str) -> None:
        """Wait until this client has just started a job of one second."""
        just_begun = (
            "attempted_at > clock_timestamp() - interval '100 ms' AND args @> '{\"ms\": 1000}'"
        )
        with anyio.fail_after(PATIENCE, reason=f"{client_id} runs no job"):
            while not await self.running(client_id, just_begun):
                await asyncio.sleep(0.005)

    async def running(self, client_id: str, condition: str = "true") -> set[int]:
        """Return the ids of the jobs that this client runs and that meet a condition."""
        rows = await self.connection.fetch(
            f"SELECT id FROM river_job WHERE state = 'running' AND {condition}"
            " AND attempted_by[cardinality(attempted_by)] = $1",
            client_id,
        )
        return {row["id"] for row in rows}

    async def expire_lease_of(self, client_id: str) -> None:
        """Expire the lease of a killed leader, so that the test need not wait."""
        await self.connection.execute(
            "UPDATE river_leader SET expires_at = clock_timestamp() WHERE leader_id = $1",
            client_id,
        )

    async def terms(self) -> list[str]:
        """Check that no two terms overlap, and return the language of each leader in turn."""
        return holders(await self.connection.fetch("SELECT * FROM leader_history ORDER BY number"))

    async def maintainers(self) -> set[tuple[str, str, str]]:
        """Return which language's connections did what in terms of which language."""
        rows = await self.connection.fetch("SELECT * FROM maintenance_history")
        return {
            (language_of(row["application"]), row["act"], language_of(row["leader_id"]))
            for row in rows
        }


@asynccontextmanager
async def mixed_fleet(
    binary: Path, url: str, directory: Path, *, each: int
) -> AsyncGenerator[MixedFleet]:
    """Create a migrated and recorded database with this many workers of each language."""
    await migrate_all(url)
    async with connected(url) as connection, AsyncExitStack() as stack:
        await connection.execute(HISTORY)
        fleet = MixedFleet(stack, connection, binary, url, directory)
        for language in LANGUAGES * each:
            await fleet.start(language)
        yield fleet


def name_of(client_id: str) -> str:
    """Return the test's name of a client."""
    return client_id.partition(":")[0]


def language_of(name: str) -> str:
    """Return the language of a client or of a connection."""
    return "go" if name.startswith("go") else "python"


def holders(rows: list[asyncpg.Record]) -> list[str]:
    """Return the language of each leader in turn.

    A term starts when the row is free: its holder has released it, or it has expired by the
    server's clock. It is renewed only while it is held.
    """
    found: list[str] = []
    held: asyncpg.Record | None = None
    for row in rows:
        is_same = held is not None and held["elected_at"] == row["elected_at"]
        has_expired = held is not None and held["expires_at"] < row["at"]
        match row["act"]:
            case "delete":
                assert is_same, row
                is_own = language_of(row["application"]) == language_of(row["leader_id"])
                assert has_expired or is_own, row
                held = None
                continue
            case "update" if is_same:
                assert held is not None
                assert held["leader_id"] == row["leader_id"], row
                assert not has_expired, row
            case _:
                assert held is None or has_expired, row
                found.append(language_of(row["leader_id"]))
        held = row
    return found
