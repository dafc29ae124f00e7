"""Effects of the table on the work rate: old rows, a backlog, many jobs, two processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripts._bench.measures.served import serve

if TYPE_CHECKING:
    from scripts._bench.competitors import Competitor
    from scripts._bench.run import Run
    from scripts._bench.server import Database

SLOTS = 100
MEMORY_SLOTS = 1000


async def full_tables(run: Run) -> None:
    """Measure the rate on an empty table, with old rows and with a backlog, in turns."""
    states = [state for state in ("old_rows", "backlog") if run.options.wants(state)]
    if run.options.wants("claim_cost") and "backlog" not in states:
        states.append("backlog")
    if not states:
        return
    names = ("riverpy",) if run.options.is_quick else ("riverpy", "river_go")
    databases = {state: await run.server.river(state) for state in ("no_rows", *states)}
    for state, database in databases.items():
        await database.counted()
        if state != "no_rows":
            await database.fill(
                run.options.rows, "completed" if state == "old_rows" else "available"
            )
    for number in range(run.options.rounds):
        for one in run.in_turn(number, names):
            rates: dict[str, float] = {}
            costs: dict[str, float] = {}
            for state, database in databases.items():
                async with run.trying(one.name, f"round {number + 1}, {state}"):
                    rates[state], costs[state] = await _rate(run, one, state, database)
            _add(run, number, one.name, rates, costs)


async def _rate(run: Run, one: Competitor, state: str, database: Database) -> tuple[float, float]:
    if state == "no_rows":
        await database.empty()
    await database.fill(run.options.jobs)
    await database.settle()
    await database.fetch("statements_reset")
    served = await serve(one, database, run.options.jobs, slots=SLOTS)
    cost = await database.fetch("claim_cost")
    return served.per_s, cost[0]["us_per_job"] or 0.0 if cost else 0.0


def _add(
    run: Run, number: int, name: str, rates: dict[str, float], costs: dict[str, float]
) -> None:
    base, cost = rates.get("no_rows"), costs.get("no_rows")
    for state in ("old_rows", "backlog"):
        if base and state in rates:
            run.samples.add(state, name, number, rates[state] / base)
            run.samples.add(f"{state}_per_s", name, number, rates[state])
    if base:
        run.samples.add("no_rows_per_s", name, number, base)
    if cost and "backlog" in costs:
        run.samples.add("claim_cost", name, number, costs["backlog"] / cost)
        run.samples.add("claim_us_per_job", name, number, cost)


async def memory(run: Run) -> None:
    """Measure the memory of a worker with 1,000 slots after many jobs, and its growth."""
    if not run.options.wants("rss_mib", "rss_growth"):
        return
    database = await run.server.river("memory")
    for one in run.named("riverpy", "river_go", "bare"):
        async with run.trying(one.name, "memory"):
            await database.empty()
            await database.fill(run.options.memory_jobs)
            await database.settle()
            served = await serve(one, database, run.options.memory_jobs, slots=MEMORY_SLOTS)
            run.samples.add("rss_mib", one.name, 0, served.rss_mib)
            if served.rss_early_mib and not run.options.is_quick:
                growth = served.rss_mib / served.rss_early_mib
                run.samples.add("rss_growth", one.name, 0, growth)


async def two_processes(run: Run) -> None:
    """Measure the rate of two workers on one queue, and whether any job ran twice."""
    if not run.options.wants("two_processes", "repeated"):
        return
    database = await run.server.river("two")
    jobs = 2 * run.options.jobs
    for number in range(run.options.rounds):
        for one in run.in_turn(number, ("riverpy", "river_go", "bare")):
            async with run.trying(one.name, f"round {number + 1}, two processes"):
                await database.empty()
                await database.fill(jobs)
                await database.settle()
                served = await serve(one, database, jobs, slots=SLOTS, processes=2)
                repeated = await database.value("repeated", served.since)
                run.samples.add("two_processes", one.name, number, served.per_s)
                run.samples.add("repeated", one.name, number, repeated)
