"""Compares riverpy with the bare loop before a merge. Exit code 1: slower than a tolerance allows.

It takes about five minutes. The ratios are medians of the ratios per round. The tolerances leave
room for the noise of a small machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from scripts._bench.goals import Goal, ProbeResult
from scripts._bench.measures.queues import queues
from scripts._bench.measures.rounds import rounds
from scripts._bench.run import Run
from scripts._bench.server import server
from scripts.bench_compare import parse_arguments

TOLERANCES = (
    Goal("work_100", 0.9, "bare"),
    Goal("work_1000", 0.9, "bare"),
    Goal("insert_one", 0.5, "bare"),
    Goal("insert_100_shared", 0.3, "bare"),
    Goal("insert_many", 0.7, "bare"),
    Goal("insert_fast", 0.8, "bare"),
    Goal("pickup_p50_ms", 2.4, "bare", is_least=False),
    Goal("share_35_queues", 0.45),
    Goal("pickup_35_queues", 1.6, is_least=False),
    Goal("idle_35_queues", 2.5, is_least=False),
)
OF_35_QUEUES = {goal.measure for goal in TOLERANCES if goal.measure.endswith("_35_queues")}


async def guard(jobs: int, rounds_count: int) -> list[ProbeResult]:
    """Measure, and compare the result with each tolerance."""
    options = parse_arguments(
        ["--quick", "-n", str(jobs), "--rounds", str(rounds_count), "--competitors", "riverpy,bare"]
    )
    options = options._replace(only=(options.only or frozenset()) | OF_35_QUEUES)
    async with server() as postgres:
        run = Run(postgres, options)
        await run.prepare()
        await rounds(run)
        await queues(run)
    return [one.verdict(run.samples) for one in TOLERANCES]


def main() -> int:
    """Measure and print; exit with 1 if a tolerance is not met or was not measured."""
    parser = argparse.ArgumentParser(prog="scripts/bench guard", description=__doc__)
    parser.add_argument("-n", "--jobs", type=int, default=50_000, help="jobs per run (50000)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    if given.jobs < 1 or given.rounds < 1:
        parser.error("--jobs and --rounds are 1 or more")
    found = asyncio.run(guard(given.jobs, given.rounds))
    is_ok = all(one.met for one in found)
    if given.json:
        ratios = {one.goal.measure: one.value for one in found}
        print(json.dumps({"ok": is_ok, "ratios": ratios}))
    else:
        for one in found:
            print(f"{one.goal.measure:<15} {one.text}")
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
