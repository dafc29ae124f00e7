"""Plots riverpy's work rate by slots, queues, processes and size of the table.

Writes docs/performance/NAME.json and NAME.svg for each series.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

from scripts._bench.competitors import Riverpy
from scripts._bench.measures.served import serve
from scripts._bench.server import server

if TYPE_CHECKING:
    from scripts._bench.server import Database, Server

SLOTS = 100
SERIES = {
    "slots": (10, 30, 100, 300, 1000, 2000),
    "queues": (1, 5, 10, 20, 35),
    "processes": (1, 2, 3),
    "rows": (0, 300_000, 1_000_000, 3_000_000),
}


class Queues(Riverpy):
    """A worker of several queues that share its slots."""

    count = 1

    def serve(self, database: Database, slots: int) -> list[str]:
        command = super().serve(database, slots)
        each = max(1, slots // self.count)
        command[command.index("--queues") + 1] = ",".join(
            f"q{number}:{each}" for number in range(self.count)
        )
        return command


async def rate(postgres: Server, series: str, value: int, jobs: int) -> float:
    """Return jobs per second at one point of a series."""
    database = await postgres.river(series)
    await database.empty()
    worker = Riverpy(postgres)
    if series == "rows" and value:
        await database.fill(value, "completed")
    await database.fill(jobs)
    if series == "queues":
        worker = Queues(postgres)
        worker.count = value
        await database.fetch("spread", value)
    await database.settle()
    slots = value if series == "slots" else SLOTS
    processes = value if series == "processes" else 1
    return (await serve(worker, database, jobs, slots=slots, processes=processes)).per_s


async def measure(jobs: int, rounds: int, names: list[str]) -> dict[str, dict[int, list[float]]]:
    """Measure all rates; the points of each series take turns."""
    found: dict[str, dict[int, list[float]]] = {}
    async with server() as postgres:
        for name in names:
            found[name] = {value: [] for value in SERIES[name]}
            for number in range(rounds):
                for value, rates in found[name].items():
                    print(f"round {number + 1}, {name}: {value:,}", file=sys.stderr)
                    rates.append(await rate(postgres, name, value, jobs))
    return found


def write(directory: Path, name: str, points: dict[int, list[float]]) -> None:
    """Write the figures and the plot of one series."""
    medians = {value: statistics.median(rates) for value, rates in points.items()}
    rows = [
        {
            name: value,
            "per_s": round(median),
            "us_per_job": round(1e6 / median, 1),
            "least": round(min(points[value])),
            "most": round(max(points[value])),
        }
        for value, median in medians.items()
    ]
    (directory / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot(list(medians), list(medians.values()), marker="o")
    axes.set(xlabel=name, ylabel="jobs per second", ylim=(0, None))
    if name == "slots":
        axes.set_xscale("log")
    figure.tight_layout()
    picture = io.StringIO()
    figure.savefig(picture, format="svg", metadata={"Date": None})
    plt.close(figure)
    lines = [line.rstrip() for line in picture.getvalue().splitlines()]
    (directory / f"{name}.svg").write_text("\n".join(lines) + "\n")


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="scripts/bench plot", description=__doc__)
    parser.add_argument("-n", "--jobs", type=int, default=50_000, help="jobs per point (50000)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each point (3)")
    parser.add_argument("--only", default=",".join(SERIES), help="series (all)")
    parser.add_argument("--to", type=Path, default=Path("docs/performance"), help="directory")
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    found = asyncio.run(measure(given.jobs, given.rounds, given.only.split(",")))
    for name, points in found.items():
        write(given.to, name, points)
    return 0


if __name__ == "__main__":
    sys.exit(main())
