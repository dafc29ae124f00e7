"""Compares `riverpy bench` with the bare loop on one embedded database, in turns.

The machine's other load moves both alike, so only the ratio of two runs of one round counts. The
floor of riverpy's work rate is 0.85 of the bare loop's, at each number of slots.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from riverpy.embedded import EmbeddedPostgres

FLOOR = 0.85
SLOTS = (100, 1000)
HERE = Path(__file__).resolve().parent


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/bench floor", description=__doc__)
    parser.add_argument("-n", "--jobs", type=int, default=50_000, help="jobs a run (50000)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (5)")
    parser.add_argument(
        "--bare-loop",
        type=Path,
        default=HERE / "bare_loop.py",
        help="the yardstick, called with URL JOBS SLOTS (scripts/bare_loop.py)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.jobs < 1 or arguments.rounds < 1:
        parser.error("--jobs and --rounds are 1 or more")
    return arguments


def run_bare_loop(script: Path, url: str, jobs: int, slots: int) -> float:
    """Jobs a second of the yardstick."""
    found = run_json(sys.executable, str(script), url, str(jobs), str(slots))
    if found["left"]:
        sys.exit(f"{script} left {found['left']} jobs")
    return found["work_per_s"]


def run_riverpy(url: str, jobs: int, slots: int) -> float:
    """Jobs a second of `riverpy bench`."""
    options = ["--database-url", url, "-n", str(jobs), "--slots", str(slots), "--force", "--json"]
    return run_json(sys.executable, "-m", "riverpy", "bench", *options)["work_per_s"]


def run_json(*command: str) -> dict[str, Any]:
    """What a command prints."""
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr.decode())
        sys.exit(f"{command[1:3]} ended with exit code {done.returncode}")
    return json.loads(done.stdout)


def measure(arguments: argparse.Namespace, url: str, slots: int) -> dict[str, Any]:
    """Some rounds with so many slots; who comes first changes from round to round."""
    bare, riverpy = [], []
    for number in range(arguments.rounds):
        print(f"{slots} slots, round {number + 1} of {arguments.rounds}", file=sys.stderr)
        for turn in (number, number + 1):
            if turn % 2:
                riverpy.append(run_riverpy(url, arguments.jobs, slots))
            else:
                bare.append(run_bare_loop(arguments.bare_loop, url, arguments.jobs, slots))
    ratios = [ours / theirs for ours, theirs in zip(riverpy, bare, strict=True)]
    return {
        "slots": slots,
        "bare_per_s": round(statistics.median(bare)),
        "riverpy_per_s": round(statistics.median(riverpy)),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


def main() -> int:
    """Measure and print; 1 if the floor is not reached."""
    arguments = parse_arguments()
    with EmbeddedPostgres("bench") as url:
        migrate = [sys.executable, "-m", "riverpy", "migrate", "up", "--database-url", url]
        subprocess.run(migrate, stdout=subprocess.DEVNULL, check=True)
        found = [measure(arguments, url, slots) for slots in SLOTS]
    is_reached = all(one["ratio"] >= FLOOR for one in found)
    if arguments.json:
        print(json.dumps({"floor": FLOOR, "ok": is_reached, "jobs": arguments.jobs, "runs": found}))
    else:
        print_table(found)
        print(f"floor {FLOOR}: {'reached' if is_reached else 'MISSED'}")
    return 0 if is_reached else 1


def print_table(found: list[dict[str, Any]]) -> None:
    """Medians, and the ratios of single rounds."""
    print(f"{'SLOTS':>5}  {'BARE LOOP':>10}  {'RIVERPY':>10}  {'RATIO':>5}  ROUNDS")
    for one in found:
        print(
            f"{one['slots']:>5,}  {one['bare_per_s']:>8,}/s  {one['riverpy_per_s']:>8,}/s  "
            f"{one['ratio']:>5.2f}  {one['ratio_min']:.2f} to {one['ratio_max']:.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())
