"""Measurements of worker processes that run on River's tables, read from the table."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple

from scripts._bench.process import Unavailable, memory_mib, running

if TYPE_CHECKING:
    from datetime import datetime

    from scripts._bench.competitors import Competitor
    from scripts._bench.server import Database

LOOK_INTERVAL = 0.25
STALL_LIMIT = 60.0


class Served(NamedTuple):
    """The figures of the workers of one measurement."""

    since: datetime
    per_s: float
    rss_mib: float
    """Memory of the first worker when all jobs were done."""
    rss_early_mib: float
    """Memory of the first worker when a tenth of the jobs was done."""


async def serve(
    one: Competitor, database: Database, jobs: int, *, slots: int, processes: int = 1
) -> Served:
    """Let workers finish at least this many of the jobs in the table.

    The rate counts from the first claim to the last finish in the table.

    Raises: Unavailable: a worker exited, or none finished a job for a minute.
    """
    since: datetime = await database.value("now")
    async with AsyncExitStack() as workers, database.connected() as connection:
        started = [
            await workers.enter_async_context(running(one.serve(database, slots)))
            for _ in range(processes)
        ]
        progress = await connection.prepare(database.statement("progress"))
        done, early = -1, 0.0
        stalled_at = time.monotonic() + STALL_LIMIT
        while done < jobs:
            await asyncio.sleep(LOOK_INTERVAL)
            (found,) = await progress.fetch(since)
            if found["jobs"] > done:
                stalled_at = time.monotonic() + STALL_LIMIT
            elif time.monotonic() > stalled_at:
                raise Unavailable(f"{one.name} finished {done} of {jobs} jobs and then none")
            if any(process.returncode is not None for process in started):
                raise Unavailable(f"a worker of {one.name} ended by itself")
            done = found["jobs"]
            if not early and done >= jobs / 10:
                early = memory_mib(started[0].pid)
        rss = memory_mib(started[0].pid)
    return Served(since, done / found["seconds"], rss, early)
