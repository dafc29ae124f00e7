"""Work rate, pickup and inserts, measured in rounds in which all competitors take turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripts._bench.competitors import Peer

if TYPE_CHECKING:
    from scripts._bench.competitors import Competitor
    from scripts._bench.run import Run

SLOTS = (100, 1000)
INSERT_ONE_SHARE = 0.1
"""The share of a run's jobs that is inserted one at a time, at most 5,000 jobs."""
INSERT_MANY = 20_000


async def rounds(run: Run) -> None:
    """Run all rounds."""
    for number in range(run.options.rounds):
        for slots in SLOTS:
            if run.options.wants(f"work_{slots}") or (slots == 100 and _wants_pickup(run)):
                await _work(run, number, slots)
        for how in ("one", "100_callers", "100_shared", "many", "fast"):
            if run.options.wants(f"insert_{how}"):
                await _insert(run, number, how)


def _wants_pickup(run: Run) -> bool:
    return run.options.wants("pickup_p50_ms", "pickup_p99_ms")


async def _work(run: Run, number: int, slots: int) -> None:
    for one in run.in_turn(number):
        async with run.trying(one.name, f"round {number + 1}, work, {slots} slots"):
            await (await one.database()).fetch("checkpoint")
            jobs = max(100, int(run.options.jobs * one.share))
            work = await one.work(jobs, slots)
            if run.options.wants(f"work_{slots}"):
                run.samples.add(f"work_{slots}", one.name, number, work.per_s)
            if slots == 1000 and isinstance(one, Peer) and run.options.wants("rss_mib"):
                run.samples.add("rss_mib", one.name, number, work.rss_mib)
            if slots == 100 and _wants_pickup(run):
                found = (work.pickup_p50_ms, work.pickup_p99_ms)
                await _pickup(run, number, one, found if None not in found else None)  # type: ignore[arg-type]


async def _pickup(
    run: Run, number: int, one: Competitor, found: tuple[float, float] | None
) -> None:
    """Measure pickup on the table that the work has left. `riverpy bench` measures it with the
    work."""
    found = found or await one.pickup(run.options.pickups)
    if found:
        run.samples.add("pickup_p50_ms", one.name, number, found[0])
        run.samples.add("pickup_p99_ms", one.name, number, found[1])


async def _insert(run: Run, number: int, how: str) -> None:
    jobs = min(run.options.jobs, INSERT_MANY)
    if how in {"one", "100_callers", "100_shared"}:
        jobs = min(5000, max(50, int(run.options.jobs * INSERT_ONE_SHARE)))
    for one in run.in_turn(number):
        async with run.trying(one.name, f"round {number + 1}, insert, {how}"):
            count = max(50, int(jobs * one.share))
            rate = await one.insert(how, count)
            if rate is not None:
                run.samples.add(f"insert_{how}", one.name, number, rate)
