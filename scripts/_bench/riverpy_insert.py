"""Inserts by riverpy's client, as a program.

one URL JOBS              one at a time on one connection: {"per_s": ...}
100_callers URL JOBS      100 tasks that insert one job after the other (100_shared: the same)
many URL JOBS             one `insert_many`
fast URL JOBS             one `insert_many_fast`
steady URL RATE SECONDS   `insert_many` each 10 ms: {"per_s": ...}
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop

from riverpy import Client, Config, InsertManyParams
from scripts._bench.callers import call_from_tasks
from scripts._bench.riverpy_jobs import Noop

INTERVAL = 0.01


async def insert(client: Client, how: str, jobs: int) -> float:
    """Insert jobs and return the rate per second."""
    await client.insert(Noop())  # opens the connection
    params = [InsertManyParams(Noop()) for _ in range(jobs)]
    began = time.perf_counter()
    match how:
        case "one":
            for _ in range(jobs):
                await client.insert(Noop())
        case "100_callers" | "100_shared":
            await call_from_tasks(jobs, lambda _number: client.insert(Noop()))
        case "many":
            await client.insert_many(params)
        case "fast":
            await client.insert_many_fast(params)
        case _:
            sys.exit(__doc__)
    return jobs / (time.perf_counter() - began)


async def steady(client: Client, rate: float, seconds: float) -> float:
    """Insert at a given rate and return the rate that was reached."""
    began = time.perf_counter()
    inserted = 0
    while (passed := time.perf_counter() - began) < seconds:
        due = int(rate * passed) - inserted
        if due:
            await client.insert_many([InsertManyParams(Noop()) for _ in range(due)])
            inserted += due
        passed = time.perf_counter() - began
        await asyncio.sleep(INTERVAL - passed % INTERVAL)
    return inserted / (time.perf_counter() - began)


async def main(how: str, url: str, *rest: str) -> None:
    """Run one measurement and print its result."""
    async with Client(url, config=Config(pool_size=1)) as client:
        if how == "steady":
            rate = await steady(client, float(rest[0]), float(rest[1]))
        else:
            rate = await insert(client, how, int(rest[0]))
    print(json.dumps({"per_s": rate}))


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
