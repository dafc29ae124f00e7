"""The yardstick: what asyncpg alone reaches on River's tables, with nothing around it.

Claims in batches, runs one task for each job, completes in batches. No retries, no timeouts, no
cancelling, no events, no reconnecting: a queue that does these cannot be expected to be faster.

usage: bare_loop.py URL JOBS SLOTS   deletes all jobs in the database's table river_job, and prints
                                     {"work_per_s": ..., "slots": ..., "left": 0}
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import uvloop

STATEMENTS = dict(
    re.findall(
        r"^-- name: (\w+)\n(.*?);$",
        Path(__file__).with_suffix(".sql").read_text(),
        re.MULTILINE | re.DOTALL,
    )
)


class BareLoop:
    """Works all jobs of a table once."""

    def __init__(self, claims: asyncpg.Connection, results: asyncpg.Connection, slots: int) -> None:
        self._claims, self._results = claims, results
        self._free = slots
        self._slot_free, self._finished = asyncio.Event(), asyncio.Event()
        self._done: deque[tuple[int, int, datetime]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, jobs: int) -> float:
        """Work so many jobs and return the seconds from the first claim to the last completion."""
        claim = await self._claims.prepare(STATEMENTS["claim"])
        complete = await self._results.prepare(STATEMENTS["complete"])
        began = time.perf_counter()
        completing = asyncio.create_task(self._complete(complete, jobs))
        claimed = 0
        while claimed < jobs:
            while not self._free:
                self._slot_free.clear()
                await self._slot_free.wait()
            rows = await claim.fetch(self._free, "bare loop")
            self._free -= len(rows)
            claimed += len(rows)
            for row in rows:
                task = asyncio.create_task(self._work(row))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0)
        await completing
        return time.perf_counter() - began

    async def _work(self, row: asyncpg.Record) -> None:
        json.loads(row[2])
        self._done.append((row[0], row[1], datetime.now(UTC)))
        self._free += 1
        self._slot_free.set()
        self._finished.set()

    async def _complete(self, complete: asyncpg.prepared_stmt.PreparedStatement, jobs: int) -> None:
        completed = 0
        while completed < jobs:
            await self._finished.wait()
            self._finished.clear()
            batch = list(self._done)
            self._done.clear()
            if batch:
                await complete.fetch(*map(list, zip(*batch, strict=True)))
                completed += len(batch)


async def main(url: str, jobs: int, slots: int) -> None:
    """Fill the table, work it, and print what came out."""
    connections = [await asyncpg.connect(url) for _ in range(3)]
    admin, claims, results = connections
    await admin.execute(STATEMENTS["empty"])
    await admin.execute(STATEMENTS["insert"], jobs)
    await admin.execute(STATEMENTS["settle"])
    seconds = await BareLoop(claims, results, slots).run(jobs)
    left = await admin.fetchval(STATEMENTS["left"])
    print(json.dumps({"work_per_s": jobs / seconds, "slots": slots, "left": left}))
    for connection in connections:
        await connection.close()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
