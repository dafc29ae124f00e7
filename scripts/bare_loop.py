# The yardstick of the benchmarks. It is kept as it is, so that figures of different times compare: no
# feature, no tuning. It is left out of formatting and linting for that.
"""The bare loop: what asyncpg alone reaches on River's schema. Claims and completes in batches, one task a job, nothing else.

usage: bare_loop.py URL JOBS SLOTS   (the schema must exist; river_job is truncated)
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from datetime import UTC, datetime

import asyncpg
import uvloop

CLAIM = """
with picked as materialized (
  select id from river_job where state = 'available' and queue = $1 and scheduled_at <= now()
  order by priority, scheduled_at, id limit $2 for update skip locked)
update river_job j set state = 'running', attempt = j.attempt + 1, attempted_at = now(),
  attempted_by = array_append(case when array_length(j.attempted_by, 1) >= 100 then j.attempted_by[array_length(j.attempted_by, 1) - 98:] else j.attempted_by end, $3)
from picked where j.id = picked.id
returning j.id, j.attempt, j.max_attempts, j.attempted_at, j.created_at, j.scheduled_at, j.priority, j.args::text, j.kind, j.metadata::text, j.queue, j.tags
"""
DONE = """
update river_job j set state = 'completed', finalized_at = i.at from unnest($1::bigint[], $2::smallint[], $3::timestamptz[]) i(id, attempt, at)
where j.id = i.id and j.state = 'running' and j.attempt = i.attempt
"""


async def main(url: str, jobs: int, slots: int) -> None:
    admin, claim_c, done_c = [await asyncpg.connect(url) for _ in range(3)]
    await admin.execute("truncate river_job")
    await admin.execute("insert into river_job (args, kind, max_attempts) select '{}', 'noop', 25 from generate_series(1, $1::int)", jobs)
    await admin.execute("vacuum analyze river_job")
    claim, done = await claim_c.prepare(CLAIM), await done_c.prepare(DONE)
    running, finished, total = 0, [], 0
    wake, ready = asyncio.Event(), asyncio.Event()

    async def work(row) -> None:
        nonlocal running
        json.loads(row[7])
        finished.append((row[0], row[1], datetime.now(UTC)))
        running -= 1
        ready.set()
        wake.set()

    async def complete() -> None:
        nonlocal total
        while total < jobs:
            await ready.wait()
            ready.clear()
            batch, finished[:] = finished[:], []
            if batch:
                await done.fetch(*(list(c) for c in zip(*batch, strict=True)))
                total += len(batch)

    began = time.perf_counter()
    ending = asyncio.create_task(complete())
    tasks: set[asyncio.Task[None]] = set()
    while not ending.done():
        free = slots - running
        rows = await claim.fetch("default", free, "bare") if free else []
        for row in rows:
            running += 1
            task = asyncio.create_task(work(row))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if not rows:
            wake.clear()
            await asyncio.wait([ending, t := asyncio.create_task(wake.wait())], timeout=1, return_when=asyncio.FIRST_COMPLETED)
            t.cancel()
        else:
            await asyncio.sleep(0)
    took = time.perf_counter() - began
    left = await admin.fetchval("select count(*) from river_job where state <> 'completed'")
    print(json.dumps({"work_per_s": jobs / took, "left": left, "slots": slots}))
    for c in (admin, claim_c, done_c):
        await c.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
