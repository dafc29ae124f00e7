"""The start of commands, and calls of the client beside a bare statement."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from scripts._bench.process import program, run_json

if TYPE_CHECKING:
    from scripts._bench.run import Run

STARTS_OF_A_ROUND = 7
"""The number of starts in a round. Only the fastest counts, since other programs can delay a
start."""
CALLS = (
    "insert_many_unique",
    "insert_many_mixed",
    "job_cancel_many",
    "queue_pause_300",
    "job_get_100_tasks",
)
TIMEOUT = 300.0
"""Seconds for all calls of one round."""


async def measure_starts(run: Run) -> None:
    """Measure how long commands take, beside a program that only imports asyncpg and msgspec."""
    if not run.options.wants("start_version", "start_insert"):
        return
    database = await run.server.river("start")
    riverpy = [sys.executable, "-m", "riverpy"]
    commands = {
        "start_version": [*riverpy, "--version"],
        "start_insert": [*riverpy, "insert", "noop", "--database-url", database.url],
    }
    bare = [sys.executable, "-c", "import asyncpg, msgspec"]
    for number in range(run.options.rounds):
        async with run.trying("riverpy", f"round {number + 1}, starts"):
            times: dict[str, list[float]] = {name: [] for name in ("bare", *commands)}
            for _ in range(STARTS_OF_A_ROUND):
                for name, command in {"bare": bare, **commands}.items():
                    times[name].append(await asyncio.to_thread(_time_command, command))
            for name in commands:
                run.samples.add(name, "riverpy", number, min(times[name]))
                run.samples.add(name, "bare", number, min(times["bare"]))


def _time_command(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT)
    return (time.perf_counter() - began) * 1e3


async def measure_calls(run: Run) -> None:
    """Measure calls of the client beside a bare statement."""
    if not run.options.wants(*CALLS):
        return
    database = await run.server.river("calls")
    for number in range(run.options.rounds):
        async with run.trying("riverpy", f"round {number + 1}, calls"):
            found = (await run_json(program("call_program", database.url), TIMEOUT)).found
            for measure, sides in found["ms"].items():
                for name, value in sides.items():
                    run.samples.add(measure, name, number, value)
