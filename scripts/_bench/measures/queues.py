"""Measurements of one worker with 35 queues, beside the same slots in one queue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from scripts._bench.measures.durations import WARM_UP
from scripts._bench.measures.served import serve
from scripts._bench.measures.tables import SLOTS
from scripts._bench.process import program, run_json, running

if TYPE_CHECKING:
    from datetime import datetime

    from scripts._bench.competitors import Competitor
    from scripts._bench.run import Run

QUEUES = 35
PICKUP_RATE, PICKUP_SECONDS = 50, 4


async def queues(run: Run) -> None:
    """Run the wanted measurements."""
    for number in range(run.options.rounds):
        if run.options.wants("work_35_queues", "share_35_queues"):
            await _work(run, number)
        if run.options.wants("pickup_35_queues"):
            await _pickup(run, number)
    if run.options.wants("idle_35_queues"):
        await _idle(run)


async def _rate(run: Run, one: Competitor, count: int) -> float:
    """Return jobs per second with this number of queues, which share 100 slots. Each queue has as
    many jobs for each of its slots."""
    database = await run.server.river(f"queues_{one.name}")
    await database.empty()
    await database.fill(run.options.jobs)
    await database.fetch("spread", count, SLOTS)
    await database.settle()
    with one.having_queues(count):
        return (await serve(one, database, run.options.jobs, slots=SLOTS)).per_s


async def _work(run: Run, number: int) -> None:
    for one in run.in_turn(number, ("riverpy", "river_go")):
        async with run.trying(one.name, f"round {number + 1}, work, {QUEUES} queues"):
            rate = await _rate(run, one, QUEUES)
            run.samples.add("work_35_queues", one.name, number, rate)
            alone = await _rate(run, one, 1)
            run.samples.add("share_35_queues", one.name, number, rate / alone)


async def _pickup(run: Run, number: int) -> None:
    """Measure the median time from an insert to its claim with 34 other idle queues, divided by
    that with one queue."""
    found: dict[int, float] = {}
    async with run.trying("riverpy", f"round {number + 1}, pickup, {QUEUES} queues"):
        for count in (1, QUEUES):
            database = await run.server.river("pickup_queues")
            await database.empty()
            with run.riverpy.having_queues(count, first="default"):
                command = run.riverpy.serve_at_defaults(database, SLOTS)
            async with running(command):
                await asyncio.sleep(WARM_UP)
                since: datetime = await database.value("now")
                steady = ("steady", database.url, PICKUP_RATE, PICKUP_SECONDS)
                await run_json(program("riverpy_insert", *steady), 60)
                await asyncio.sleep(0.5)
                found[count] = (await database.fetch("waits", since))[0]["p50"]
        run.samples.add("pickup_35_queues", "riverpy", number, found[QUEUES] / found[1])


async def _idle(run: Run) -> None:
    """Count the statements of an idle worker with default settings, which is also the leader."""
    for one in run.named("riverpy", "river_go"):
        async with run.trying(one.name, f"idle, {QUEUES} queues"):
            database = await run.server.river(f"idle_queues_{one.name}")
            await database.counted()
            with one.having_queues(QUEUES):
                command = one.serve_at_defaults(database, SLOTS)
            async with running(command):
                await asyncio.sleep(2 * WARM_UP)
                await database.fetch("statements_reset")
                await asyncio.sleep(run.options.idle_seconds)
                count = await database.value("statements_count")
            run.samples.add("idle_35_queues", one.name, 0, count / run.options.idle_seconds)
