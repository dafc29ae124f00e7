"""Measurements that run for a fixed time: jobs that sleep, steady load, an open snapshot, idle
workers."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

from scripts._bench.measures.tables import SLOTS
from scripts._bench.process import cpu_seconds, program, run_json, running

if TYPE_CHECKING:
    from datetime import datetime

    from scripts._bench.competitors import Competitor
    from scripts._bench.run import Run
    from scripts._bench.server import Database

LOAD = 0.6
WARM_UP = 4.0
"""Seconds for a worker to start before the measurement."""
TOP_UP = 50_000
"""The number of available jobs that the measurement keeps in the table while the snapshot is
open."""


async def occupancy(run: Run) -> None:
    """Measure the share of busy slots while there is work, with jobs that sleep."""
    for milliseconds in (5, 50):
        key = f"occupancy_{milliseconds}ms"
        if not run.options.wants(key):
            continue
        jobs = max(1000, run.options.jobs // 2 // (1 if milliseconds == 5 else 5))
        for number in range(run.options.rounds):
            async with run.trying("riverpy", f"round {number + 1}, {key}"):
                work = await run.riverpy.bench(
                    jobs, SLOTS, "--sleep-ms", milliseconds, "--prefetch"
                )
                run.samples.add(key, "riverpy", number, work.occupancy)


async def sustained(run: Run) -> None:
    """Insert at a share of the work rate while a worker works."""
    if not run.options.wants("sustained_backlog_growth", "sustained_p99_to_p50"):
        return
    rate = run.samples.median("work_100", "riverpy")
    if rate is None:
        run.samples.reasons["sustained"] = "it needs work_100"
        return
    database = await run.server.river("sustained")
    await database.settle()
    seconds = run.options.sustained_seconds
    async with run.trying("riverpy", "sustained load"):
        async with running(run.riverpy.serve(database, SLOTS)):
            await asyncio.sleep(WARM_UP)
            since: datetime = await database.value("now")
            command = program("riverpy_insert", "steady", database.url, LOAD * rate, seconds)
            inserting = asyncio.create_task(run_json(command, seconds * 2 + 60))
            await asyncio.sleep(seconds / 3)
            early = await database.value("waiting")
            await asyncio.sleep(seconds / 3)
            late = await database.value("waiting")
            inserted = (await inserting).found["per_s"]
        waits = (await database.fetch("waits", since))[0]
        growth = max(0, late - early) / (seconds / 3) / inserted
        run.samples.add("sustained_backlog_growth", "riverpy", 0, growth)
        run.samples.add("sustained_per_s", "riverpy", 0, inserted)
        run.samples.add("sustained_p99_to_p50", "riverpy", 0, waits["p99"] / waits["p50"])


async def open_snapshot(run: Run) -> None:
    """Measure the work rate while a snapshot is open: the last tenth of the time divided by the
    first."""
    if not run.options.wants("open_snapshot") or not run.options.snapshot_seconds:
        return
    for one in run.named("riverpy", "river_go"):
        async with run.trying(one.name, "open snapshot"):
            database = await run.server.river(f"snapshot_{one.name}")
            await database.fill(TOP_UP)
            await database.settle()
            first, last = await _rates(one, database, run.options.snapshot_seconds)
            run.samples.add("open_snapshot", one.name, 0, last / first)
            run.samples.add("open_snapshot_first_per_s", one.name, 0, first)
            run.samples.add("open_snapshot_last_per_s", one.name, 0, last)


async def _rates(one: Competitor, database: Database, seconds: float) -> tuple[float, float]:
    tenth = timedelta(seconds=seconds / 10)
    async with (
        database.connected() as holder,
        holder.transaction(isolation="repeatable_read"),
        running(one.serve(database, SLOTS)),
    ):
        await holder.fetch(database.statement("database"))
        await asyncio.sleep(WARM_UP)
        begin: datetime = await database.value("now")
        end = begin + 10 * tenth
        now = begin
        while now < end:
            if await database.value("waiting") < TOP_UP:
                await database.fill(TOP_UP)
            await asyncio.sleep(0.1)
            now = await database.value("now")
        return (
            await database.value("rate_between", begin, begin + tenth),
            await database.value("rate_between", end - tenth, end),
        )


async def idle(run: Run) -> None:
    """Measure statements and CPU time of an idle worker with default settings, which is also the
    leader."""
    if not run.options.wants("idle_statements_per_s", "idle_cpu"):
        return
    seconds = run.options.idle_seconds
    for one in run.named("riverpy", "river_go"):
        async with run.trying(one.name, "idle"):
            database = await run.server.river(f"idle_{one.name}")
            await database.counted()
            async with running(one.serve_at_defaults(database, SLOTS)) as process:
                await asyncio.sleep(2 * WARM_UP)
                await database.fetch("statements_reset")
                cpu = cpu_seconds(process.pid)
                await asyncio.sleep(seconds)
                cpu = cpu_seconds(process.pid) - cpu
                count = await database.value("statements_count")
            run.samples.add("idle_statements_per_s", one.name, 0, count / seconds)
            run.samples.add("idle_cpu", one.name, 0, cpu / seconds)


async def run_all(run: Run) -> None:
    """Run each of these measurements in turn."""
    await occupancy(run)
    await sustained(run)
    await open_snapshot(run)
    await idle(run)
