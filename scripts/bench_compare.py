"""Compares riverpy with a bare asyncpg loop, River in Go and the Python peers, in one run.

All competitors take turns on one embedded PostgreSQL with its default durability. Their order
changes from round to round, and ratios are computed per round. A competitor that is missing or
fails is left out, and the reason is printed. The exit code is 0 whatever the result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from scripts._bench.competitors import NAMES
from scripts._bench.measures import calls, durations, queues, rounds, tables, transactions
from scripts._bench.run import Options, Run
from scripts._bench.server import server
from scripts._bench.table import GROUPS, KEYS, TITLES, as_json, as_text
from scripts._bench.tx_insert.names import INSERT_ONLY

ALL_NAMES = (*NAMES, *INSERT_ONLY)
QUICK_NOTE = (
    "--quick: fewer old rows, a smaller backlog and less work for memory; riverpy alone on "
    "full tables; no steady load, open snapshot, two processes, or sleeping jobs"
)


def parse_arguments(arguments: list[str] | None = None) -> Options:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="scripts/bench compare", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--quick", action="store_true", help="20,000 jobs, and shorter measurements"
    )
    parser.add_argument("-n", "--jobs", type=int, help="jobs per run (50000; --quick: 20000)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each competitor (3)")
    parser.add_argument("--rows", type=int, help="old rows, and jobs of the backlog (1000000)")
    parser.add_argument(
        "--only", help="measurements, as in work_100,insert_one; tx_insert: those of all sessions"
    )
    parser.add_argument(
        "--competitors", default=",".join(ALL_NAMES), help="competitors, joined by commas (all)"
    )
    parser.add_argument(
        "--snapshot-seconds", type=float, default=300, help="how long a snapshot is open (300)"
    )
    given = parser.parse_args(arguments)
    known = {*KEYS, *TITLES, *GROUPS}
    only = frozenset(given.only.split(",")) if given.only else None
    names = given.competitors.split(",")
    if only and only - known:
        parser.error(
            f"no such measurement: {', '.join(sorted(only - known))}; there are "
            f"{', '.join(sorted(known))}"
        )
    if set(names) - set(ALL_NAMES):
        parser.error(f"--competitors are of {', '.join(ALL_NAMES)}")
    if only and only <= {*GROUPS, *GROUPS["tx_insert"]}:
        names = [name for name in names if name != "river_go"]  # nothing is built for it
    if given.rounds < 1 or (given.jobs is not None and given.jobs < 1):
        parser.error("--jobs and --rounds are 1 or more")
    jobs = given.jobs or (20_000 if given.quick else 50_000)
    if given.quick and only is None:
        only = frozenset({*KEYS, "claim_cost", "idle_statements_per_s", "idle_cpu"})
    return Options(
        jobs=jobs,
        rounds=given.rounds,
        is_quick=given.quick,
        only=only,
        names=["riverpy", *(name for name in names if name != "riverpy")],
        snapshot_seconds=given.snapshot_seconds,
        rows=given.rows or (200_000 if given.quick else 1_000_000),
        memory_jobs=jobs if given.quick else 1_000_000,
        pickups=100 if given.quick else 200,
        sustained_seconds=30,
        idle_seconds=10 if given.quick else 60,
    )


async def compare(options: Options, *, is_json: bool) -> str:
    """Measure, and return the text to print."""
    async with server() as postgres:
        run = Run(postgres, options)
        if options.is_quick:
            run.notes.append(QUICK_NOTE)
        await run.prepare()
        await rounds.rounds(run)
        await tables.full_tables(run)
        await tables.memory(run)
        await tables.two_processes(run)
        await transactions.measure_transactions(run)
        await calls.measure_starts(run)
        await calls.measure_calls(run)
        await durations.run_all(run)
        await queues.queues(run)
        about = await run.about()
    if is_json:
        return json.dumps(as_json(run.samples, about))
    return as_text(run.samples, about)


def main() -> int:
    """Measure and print."""
    options = parse_arguments()
    print(asyncio.run(compare(options, is_json="--json" in sys.argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
