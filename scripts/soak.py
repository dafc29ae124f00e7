"""Works many jobs and loses many connections, and checks that nothing of them is left in memory.

It uses a PostgreSQL of its own and one worker in this process. Some jobs fail, time out, are
cancelled by themselves or by another session, snooze, run in threads or record outputs. Then queues
are added to the running client and removed. Samples are
taken between batches, while no job runs. Exit code 1: a value at the end exceeds the value after
the warm-up by more than its tolerance.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import threading
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import anyio
import asyncpg
import msgspec
import structlog

import riverpy
from riverpy._tools.bench.process_cost import read_process_memory_mib
from riverpy.embedded import EmbeddedPostgres
from riverpy.migrate import migrate_all

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

BATCH = 10_000
SLOTS = 100
PATIENCE = 120.0
"""The timeout of one batch of jobs, in seconds."""
INSERT = """
INSERT INTO river_job (kind, args, max_attempts, metadata)
SELECT 'soak', jsonb_build_object('n', n % 100), 2, '{}' FROM generate_series(1, $1::int) AS n
"""
INSERT_INTO_QUEUES = """
INSERT INTO river_job (kind, args, max_attempts, metadata, queue)
SELECT 'soak', '{"n": 99}', 2, '{}', name FROM unnest($1::text[]) AS name
"""
CONNECTIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'riverpy %'"
LEFT = "SELECT count(*) FROM river_job WHERE finalized_at IS NULL"
ENDS = "SELECT state::text, count(*) FROM river_job GROUP BY 1"
KILL = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE application_name LIKE 'riverpy %' AND datname = current_database()
"""


class Soak(msgspec.Struct):
    """Args of each job. `n` selects what it does."""

    kind: ClassVar[str] = "soak"
    n: int


class Sample(msgspec.Struct, frozen=True):
    """The resources of the process at one moment."""

    memory_mib: float
    objects: int
    """Objects that the garbage collector tracks."""
    blocks: int
    """Memory blocks that Python has allocated."""
    tasks: int
    threads: int
    descriptors: int


TOLERANCES = Sample(
    memory_mib=16.0, objects=2_000, blocks=5_000, tasks=3, threads=SLOTS, descriptors=2
)
"""How much each value may grow. Each slot may leave one thread."""


def sample() -> Sample:
    """Measure the resources now."""
    gc.collect()
    return Sample(
        memory_mib=round(read_process_memory_mib() or 0.0, 1),
        objects=len(gc.get_objects()),
        blocks=sys.getallocatedblocks(),
        tasks=len(asyncio.all_tasks()),
        threads=threading.active_count(),
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
    )


def growth(first: Sample, last: Sample) -> dict[str, float]:
    """Return the values that grew beyond their tolerance, and by how much."""
    found: dict[str, float] = {}
    for name in Sample.__struct_fields__:
        more = getattr(last, name) - getattr(first, name)
        if more > getattr(TOLERANCES, name):
            found[name] = more
    return found


class AtOnce:
    """A retry policy without a delay."""

    def next_retry(self, job: riverpy.JobRow, /) -> timedelta:
        return timedelta(0)


class SoakClient:
    """A running client, and another connection to its tables."""

    def __init__(self, client: riverpy.Client, connection: asyncpg.Connection) -> None:
        self.client, self._connection = client, connection
        self.ends: dict[str, int] = {}
        """Number of jobs by their final state."""
        self.reconnects = 0
        self.queues = 0
        """Number of queues that were added and removed."""
        self.connections = 0
        """The largest number of connections to the database after a round of queues."""

    async def work(self, jobs: int) -> None:
        """Insert this many jobs, and wait until they are finished."""
        await self._connection.execute(INSERT, jobs)
        await self._until(LEFT, 0)
        for state, count in await self._connection.fetch(ENDS):
            self.ends[state] = self.ends.get(state, 0) + count
        await self._connection.execute("TRUNCATE river_job")

    async def lose_connections(self, *, jobs: int) -> None:
        """Terminate every connection of the client, then work this many jobs."""
        self.reconnects += await self._connection.fetchval(KILL)
        await self.work(jobs)

    async def work_new_queues(self, names: list[str]) -> None:
        """Add these queues, insert a job into each, and remove them: half of them while their jobs
        may still run, half of them after all jobs have ended."""
        queues = self.client.queues
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(queues.add(name, riverpy.QueueConfig(max_workers=2)))
        await self._connection.execute(INSERT_INTO_QUEUES, names)
        half = names[: len(names) // 2]
        async with asyncio.TaskGroup() as tasks:
            for name in half:
                tasks.create_task(queues.remove(name))
        await self._connection.execute("DELETE FROM river_job WHERE queue = any($1)", half)
        await self._until(LEFT, 0)
        async with asyncio.TaskGroup() as tasks:
            for name in names[len(half) :]:
                tasks.create_task(queues.remove(name))
        await self._connection.execute("TRUNCATE river_job, river_queue")
        self.queues += len(names)
        self.connections = max(self.connections, await self._connection.fetchval(CONNECTIONS))

    async def _until(self, sql: str, value: int) -> None:
        with anyio.fail_after(PATIENCE, reason=f"{sql} did not become {value}"):
            while await self._connection.fetchval(sql) != value:  # noqa: ASYNC110 (no notification)
                await asyncio.sleep(0.02)


def make_client(url: str, schema: str) -> riverpy.Client:
    """Return a client whose jobs end in every way."""
    workers = riverpy.Workers()

    @workers.job(timeout=timedelta(minutes=1), kind="soak")
    async def work(job: riverpy.Job[Soak]) -> None:
        match job.args.n:
            case n if n < 15:
                held = bytearray(10_000)
                raise ValueError(f"the {job.attempt}th time, with {len(held)} bytes in a local")
            case n if n < 20:
                raise riverpy.JobCancel("no")
            case n if n < 22:
                await client.job_cancel(job.id)
                await asyncio.sleep(3600)
            case n if n < 30 and not job.metadata.get("snoozes"):
                raise riverpy.JobSnooze(timedelta(0))
            case n if n < 40:
                job.record_output("x" * 1000)
            case n if n < 50:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(asyncio.sleep(0))
            case n if n < 53:
                await client.insert(SoakThread())
            case n if n < 56:
                await client.insert(SoakTimeout(), riverpy.InsertOpts(max_attempts=1))
            case _:
                pass

    @workers.job(timeout=timedelta(milliseconds=10))
    async def time_out(job: riverpy.Job[SoakTimeout]) -> None:
        await asyncio.sleep(3600)

    @workers.blocking_job()
    def work_in_thread(job: riverpy.Job[SoakThread]) -> None:
        job.set_metadata("thread", threading.current_thread().name)

    client = riverpy.Client(
        url,
        workers=workers,
        queues={"default": riverpy.QueueConfig(max_workers=SLOTS)},
        config=riverpy.Config(
            schema=schema,
            retry_policy=AtOnce(),
            fetch_poll_interval=timedelta(milliseconds=50),
        ),
    )
    return client


class SoakThread(msgspec.Struct):
    """Args of a job in a thread."""

    kind: ClassVar[str] = "soak_thread"


class SoakTimeout(msgspec.Struct):
    """Args of a job that times out."""

    kind: ClassVar[str] = "soak_timeout"


@asynccontextmanager
async def working(url: str, schema: str) -> AsyncGenerator[SoakClient]:
    """Run a client on these tables."""
    client = make_client(url, schema)
    connection = await asyncpg.connect(url, server_settings={"search_path": f'"{schema}"'})
    try:
        async with client, client.working():
            yield SoakClient(client, connection)
    finally:
        connection.terminate()


async def soak_jobs(
    soak_client: SoakClient, jobs: int, *, batch: int = BATCH
) -> AsyncIterator[Sample]:
    """Work this many jobs in batches, and yield a sample after each."""
    for first in range(0, jobs, batch):
        await soak_client.work(min(batch, jobs - first))
        yield sample()


async def soak_reconnects(
    soak_client: SoakClient, reconnects: int, *, jobs: int = 100
) -> AsyncIterator[Sample]:
    """Lose all connections again and again until this many are lost. Each time, work `jobs` jobs on
    the new connections, then yield a sample."""
    end = soak_client.reconnects + reconnects
    while soak_client.reconnects < end:
        await soak_client.lose_connections(jobs=jobs)
        yield sample()


async def soak_queues(
    soak_client: SoakClient, rounds: int, *, queues: int = 50
) -> AsyncIterator[Sample]:
    """In each round add this many queues with new names to the running client, insert a job into
    each, and remove them. Yield a sample after each round."""
    for number in range(rounds):
        await soak_client.work_new_queues([f"queue-{number}-{n}" for n in range(queues)])
        yield sample()


@asynccontextmanager
async def server() -> AsyncGenerator[str]:
    """Yield the URL of a server with the tables of River and riverpy. It is deleted at the end."""
    postgres = EmbeddedPostgres(f"soak-{os.getpid()}")
    try:
        url = await asyncio.to_thread(postgres.start)
        await migrate_all(url)
        yield url
    finally:
        await asyncio.to_thread(postgres.remove)


async def run(options: argparse.Namespace) -> int:
    """Soak, print, and return the exit code."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    async with server() as url, working(url, "public") as soak_client:
        soaks = {
            "jobs": soak_jobs(soak_client, options.jobs),
            "reconnects": soak_reconnects(soak_client, options.reconnects),
            "queues": soak_queues(soak_client, options.queue_rounds),
        }
        reports = {name: await report(name, soak) for name, soak in soaks.items()}
    totals = {
        "jobs": dict(sorted(soak_client.ends.items())),
        "reconnects": soak_client.reconnects,
        "queues": soak_client.queues,
        "connections_max": soak_client.connections,
    }
    if options.json:
        print(json.dumps({**totals, "soaks": reports}))
    else:
        print(json.dumps(totals))
    return 1 if any(one.get("grew") for one in reports.values()) else 0


async def report(name: str, samples: AsyncIterator[Sample]) -> dict[str, dict[str, float]]:
    """Take the samples, the first tenth as warm-up, and print how the last one differs."""
    taken: list[Sample] = []
    began = time.monotonic()
    async for one in samples:
        taken.append(one)
        seconds = time.monotonic() - began
        print(f"{name} {len(taken)} {seconds:.0f} s {msgspec.to_builtins(one)}", file=sys.stderr)
    if not taken:
        return {}
    warm, last = taken[len(taken) // 10], taken[-1]
    found = growth(warm, last)
    for title, one in (("after the warm-up", warm), ("at the end", last)):
        print(f"{name} {title}: {msgspec.to_builtins(one)}")
    print(f"{name}: {f'GREW {found}' if found else 'flat'}")
    return {"warm": msgspec.to_builtins(warm), "end": msgspec.to_builtins(last), "grew": found}


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000_000, help="jobs to work (1000000)")
    parser.add_argument("--reconnects", type=int, default=1_000, help="connections to lose (1000)")
    parser.add_argument(
        "--queue-rounds",
        type=int,
        default=500,
        help="rounds in which 50 queues are added and removed (500)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options = parser.parse_args()
    if min(options.jobs, options.reconnects, options.queue_rounds) < 0:
        parser.error("--jobs, --reconnects and --queue-rounds are 0 or more")
    return asyncio.run(run(options))


if __name__ == "__main__":
    sys.exit(main())
