"""What asyncpg alone reaches beside the bare loop's work, as a program.

serve URL SLOTS              the bare loop on the jobs that are there, until it is ended
pickup URL JOBS              LISTEN and claim, one insert each 20 ms: {"p50_ms": ..., "p99_ms": ...}
insert URL (one|many|fast) JOBS   a row with its NOTIFY / one unnest / one COPY: {"per_s": ...}
insert URL 100_callers JOBS       100 tasks, each row with its NOTIFY, on a pool of ten connections
insert URL 100_shared JOBS        100 tasks whose rows share one statement in flight
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

import asyncpg
import uvloop

from scripts import bare_loop
from scripts._bench.callers import call_from_tasks

INTERVAL = 0.02
SLOTS = 100
COLUMNS = ("args", "kind", "max_attempts", "metadata", "priority", "queue", "scheduled_at", "state")
INSERT_ONE = """
with job as (
  insert into river_job (args, kind, max_attempts, metadata, priority, queue, scheduled_at, state)
  values ($1, $2, $3, $4, $5, $6, $7, $8)
  returning id
)
select id, pg_notify('bare_insert', $6) from job
"""
INSERT_MANY = """
insert into river_job (args, kind, max_attempts, metadata, priority, queue, scheduled_at, state)
select *
from unnest(
  $1::jsonb[], $2::text[], $3::smallint[], $4::jsonb[], $5::smallint[], $6::text[],
  $7::timestamptz[], $8::river_job_state[]
)
returning id
"""

INSERT_SHARED = """
insert into river_job (args, kind, max_attempts, metadata, priority, queue, state)
select given::jsonb, 'bare', 25, '{}', 1, 'default', 'available' from unnest($1::text[]) as given
returning id
"""


class _Prepared(asyncpg.Connection):
    """A connection that does not change the table, which the parent process has prepared."""

    async def execute(self, *_arguments: Any, **_options: Any) -> str:
        return ""


async def serve(url: str, slots: int) -> None:
    """Run the bare loop on the existing jobs until the process is ended."""
    connect = partial(asyncpg.connect, connection_class=_Prepared)
    bare_loop.asyncpg = SimpleNamespace(connect=connect)  # pyright: ignore
    await bare_loop.main(url, sys.maxsize, slots)


def row(number: int) -> tuple[Any, ...]:
    """Return the job with this number, encoded for the statement."""
    args = json.dumps({"number": number})
    return args, "bare", 25, "{}", 1, "default", datetime.now(UTC), "available"


class Pickup:
    """Claims at each notification and completes the jobs, with asyncpg alone."""

    def __init__(self, jobs: int) -> None:
        self.began: dict[int, float] = {}
        self._jobs = jobs
        self._notified = asyncio.Event()
        self._finished: list[tuple[int, int, datetime]] = []
        self._any_finished = asyncio.Event()

    async def claim(self, connection: asyncpg.Connection) -> None:
        """Claim jobs and complete them until all jobs have run."""
        claim = await connection.prepare(bare_loop.CLAIM)
        tasks: set[asyncio.Task[None]] = set()
        while len(self.began) < self._jobs:
            await self._notified.wait()
            self._notified.clear()
            for job in await claim.fetch("default", SLOTS, "bare"):
                task = asyncio.create_task(self._work(job))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.sleep(0)

    def notified(self, *_arguments: object) -> None:
        """Wake the claim loop."""
        self._notified.set()

    async def _work(self, job: asyncpg.Record) -> None:
        self.began[json.loads(job[7])["number"]] = time.perf_counter()
        self._finished.append((job[0], job[1], datetime.now(UTC)))
        self._any_finished.set()

    async def complete(self, connection: asyncpg.Connection) -> None:
        """Store results until cancelled."""
        done = await connection.prepare(bare_loop.DONE)
        while True:
            await self._any_finished.wait()
            self._any_finished.clear()
            batch, self._finished[:] = self._finished[:], []
            await done.fetch(*map(list, zip(*batch, strict=True)))


async def pickup(url: str, jobs: int) -> dict[str, float]:
    """Measure the time from before each insert to the first line of the job, like `riverpy
    bench`."""
    listener, claims, results, inserts = [await asyncpg.connect(url) for _ in range(4)]
    work = Pickup(jobs)
    await listener.add_listener("bare_insert", work.notified)
    insert = await inserts.prepare(INSERT_ONE)
    claiming = asyncio.create_task(work.claim(claims))
    completing = asyncio.create_task(work.complete(results))
    began = time.perf_counter()
    inserted_at: list[float] = []
    for number in range(jobs):
        await asyncio.sleep(max(0.0, began + number * INTERVAL - time.perf_counter()))
        inserted_at.append(time.perf_counter())
        await insert.fetch(*row(number))
    await claiming
    completing.cancel()
    waits = [work.began[number] - at for number, at in enumerate(inserted_at)]
    found = statistics.quantiles(waits, n=100, method="inclusive")
    return {"p50_ms": found[49] * 1e3, "p99_ms": found[98] * 1e3}


class SharedStatement:
    """Inserts the rows of all waiting callers with one statement at a time."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._waiting: list[tuple[str, asyncio.Future[int]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def insert(self, number: int) -> int:
        """Insert a row and return its id."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((json.dumps({"number": number}), future))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return await future

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            ids = await self._connection.fetch(INSERT_SHARED, [args for args, _ in batch])
            for (_, future), found in zip(batch, ids, strict=True):
                future.set_result(found[0])
        self._sending = None


async def insert(url: str, how: str, jobs: int) -> dict[str, float]:
    """Insert jobs and return the rate. Encoding the rows counts, because a client encodes them
    too."""
    connection = await asyncpg.connect(url)
    one, many = await connection.prepare(INSERT_ONE), await connection.prepare(INSERT_MANY)
    began = time.perf_counter()
    match how:
        case "one":
            for number in range(jobs):
                await one.fetch(*row(number))
        case "many":
            await many.fetch(*map(list, zip(*map(row, range(jobs)), strict=True)))
        case "100_callers":
            async with asyncpg.create_pool(url, min_size=10, max_size=10) as pool:
                began = time.perf_counter()
                await call_from_tasks(jobs, lambda number: pool.fetch(INSERT_ONE, *row(number)))
        case "100_shared":
            shared = SharedStatement(connection)
            await call_from_tasks(jobs, shared.insert)
        case "fast":
            await connection.copy_records_to_table(
                "river_job", records=map(row, range(jobs)), columns=COLUMNS
            )
        case _:
            sys.exit(__doc__)
    seconds = time.perf_counter() - began
    await connection.close()
    return {"per_s": jobs / seconds}


async def main(verb: str, url: str, *rest: str) -> None:
    """Run one measurement and print its result."""
    match verb, rest:
        case "serve", [slots]:
            await serve(url, int(slots))
        case "pickup", [jobs]:
            print(json.dumps(await pickup(url, int(jobs))))
        case "insert", [how, jobs]:
            print(json.dumps(await insert(url, how, int(jobs))))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
