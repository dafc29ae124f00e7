"""Measures how soon work is back to normal after each fault.

Two workers, each behind a proxy of its own, work 500 jobs per second on a PostgreSQL of their own.
`back` is the time from the end of the fault until new jobs are completed and none waits longer than
before it. Each row is also checked: every job is completed, none finishes twice, no attempt starts
twice. Exit code 1: a check failed, or work did not come back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from riverpy._log_events import (
    EVENT_LOOP_RESUMED,
    HEARTBEAT_LOST,
    JOB_RESULT_REFUSED,
    JOB_RESULTS_REJECTED,
    LEADERSHIP_LOST,
    LEASE_ACQUISITION_FAILED,
    LEASE_RENEWAL_FAILED,
    PROCESS_PAUSED,
)
from tests.kit.fleet import Shutdown, running_fleet, with_user
from tests.kit.load import LoadSettings, Stage
from tests.kit.server_faults import (
    CONNECTION_NAMES,
    connections_exhausted,
    connections_refused,
    find_backends,
    frozen_backends,
    kill_backends,
    rows_locked,
    server_settings,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.kit.load import Load

EXPECTED = (
    LEASE_ACQUISITION_FAILED,
    JOB_RESULT_REFUSED,
    JOB_RESULTS_REJECTED,
    LEADERSHIP_LOST,
    HEARTBEAT_LOST,
    EVENT_LOOP_RESUMED,
    LEASE_RENEWAL_FAILED,
    PROCESS_PAUSED,
)
"""Warnings that workers may log during a fault, besides the start and the end of an outage."""
TICKS = os.sysconf("SC_CLK_TCK")
RUNNING_ROWS = "SELECT id FROM river_job WHERE state = 'running' FOR UPDATE"


class FaultStage:
    """A stage under load, into which one fault is injected."""

    def __init__(self, stage: Stage, load: Load, seconds: float) -> None:
        self.stage, self.load, self.seconds = stage, load, seconds
        self.users = [member.worker.name for member in stage.members]

    async def kill(self, name: str) -> None:
        """Terminate the connections with this name."""
        await kill_backends(self.stage.url, name)

    async def freeze(self, name: str) -> None:
        """Freeze the server processes of the connections with this name."""
        async with frozen_backends(self.stage.url, await find_backends(self.stage.url, name)):
            await asyncio.sleep(self.seconds)

    async def down(self, how: Shutdown) -> None:
        """Stop the server in the given way, and start it again."""
        began = time.time()
        await self.stage.fleet.server.shut_down(how)
        await asyncio.sleep(self.seconds)
        await self.stage.fleet.server.come_back()
        if how is Shutdown.IMMEDIATE:
            self.load.crashes.append((began, time.time()))

    async def refuse(self) -> None:
        """Refuse new connections, and terminate the existing ones."""
        async with connections_refused(self.stage.url, *self.users):
            await asyncio.sleep(self.seconds)

    async def exhaust(self) -> None:
        """Take all free connections, and terminate those of the workers."""
        async with connections_exhausted(with_user(self.stage.url, self.users[0])):
            for name in CONNECTION_NAMES:
                await self.kill(name)
            await asyncio.sleep(self.seconds)

    async def read_only(self) -> None:
        """Make the server read-only."""
        async with server_settings(self.stage.url, default_transaction_read_only="on"):
            await asyncio.sleep(self.seconds)

    async def lock(self) -> None:
        """Lock the rows of running jobs."""
        async with rows_locked(self.stage.url, RUNNING_ROWS):
            await asyncio.sleep(self.seconds)

    async def stop_process(self) -> None:
        """Suspend both workers by SIGSTOP, then continue them."""
        for member in self.stage.members:
            member.worker.freeze()
        await asyncio.sleep(self.seconds)
        for member in self.stage.members:
            member.worker.thaw()


def _rows() -> dict[str, Callable[[FaultStage], Awaitable[None]]]:
    rows: dict[str, Callable[[FaultStage], Awaitable[None]]] = {}
    for name in CONNECTION_NAMES:
        short = name.removeprefix("riverpy ")
        rows[f"kill_{short}"] = lambda fault_stage, name=name: fault_stage.kill(name)
        rows[f"freeze_{short}"] = lambda fault_stage, name=name: fault_stage.freeze(name)
    return rows | {
        "restart": lambda fault_stage: fault_stage.down(Shutdown.FAST),
        "crash": lambda fault_stage: fault_stage.down(Shutdown.IMMEDIATE),
        "refused": FaultStage.refuse,
        "exhausted": FaultStage.exhaust,
        "read_only": FaultStage.read_only,
        "rows_locked": FaultStage.lock,
        "stopped_processes": FaultStage.stop_process,
    }


ROWS = _rows()


async def measure(name: str, stage: Stage, seconds: float) -> dict[str, Any]:
    """Inject one fault, and return the figures and the broken rules."""
    members = stage.members
    error = None
    back = None
    began = time.monotonic()
    try:
        async with stage.load(expected=EXPECTED) as load:
            cpu, tried = _cpu(stage), [member.worker.proxy.accepted for member in members]
            began = time.monotonic()
            await ROWS[name](FaultStage(stage, load, seconds))
            took = time.monotonic() - began
            cpu = (_cpu(stage) - cpu) / took / len(members)
            most = max(
                member.worker.proxy.accepted - before
                for member, before in zip(members, tried, strict=True)
            )
            back = await load.until_recovered()
    except (AssertionError, TimeoutError) as raised:
        error = f"{raised or 'work did not come back'}"
    log_lines = Counter(line["event"] for member in members for line in member.warnings)
    return {
        "row": name,
        "fault_s": round(took, 1),
        "back_s": None if back is None else round(back, 2),
        "cpu_percent": round(100 * cpu, 1),
        "connects": most,
        "log_lines": dict(log_lines),
        "jobs": len(load.inserted),
        "failed_inserts": len(load.failures),
        "error": error,
    }


def _cpu(stage: Stage) -> float:
    """Return the CPU time of the workers in seconds."""
    total = 0
    for member in stage.members:
        fields = Path(f"/proc/{member.worker.pid}/stat").read_text().rpartition(") ")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


async def run(names: list[str], seconds: float) -> list[dict[str, Any]]:
    """Measure all rows one after the other on one fleet."""
    async with running_fleet() as fleet:
        stage = Stage(fleet)
        await stage.start(LoadSettings(slots=50))
        found: list[dict[str, Any]] = []
        for name in names:
            found.append(await measure(name, stage, seconds))
            print(f"{name}: done", file=sys.stderr, flush=True)
    return found


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(
        f"{'row':20} {'fault s':>8} {'back s':>7} {'CPU %':>6} {'connects':>8} {'jobs':>6} "
        f"{'failed inserts':>14}  log_lines"
    )
    for row in rows:
        log_lines = ", ".join(f"{count} {event}" for event, count in row["log_lines"].items())
        back = "-" if row["back_s"] is None else row["back_s"]
        print(
            f"{row['row']:20} {row['fault_s']:>8} {back:>7} {row['cpu_percent']:>6} "
            f"{row['connects']:>8} {row['jobs']:>6} {row['failed_inserts']:>14}  {log_lines}"
        )
        if row["error"]:
            print(f"  {row['error']}")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        prog="scripts/faults",
        description=__doc__,
        epilog=f"rows: {', '.join(ROWS)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", help="only these, joined by commas (all)")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long a fault lasts (15)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    names = arguments.rows.split(",") if arguments.rows else list(ROWS)
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    rows = asyncio.run(run(names, arguments.seconds))
    if arguments.json:
        print(json.dumps({"seconds": arguments.seconds, "cpus": os.cpu_count(), "rows": rows}))
    else:
        show(rows)
    sys.exit(any(row["error"] for row in rows))


if __name__ == "__main__":
    main()
