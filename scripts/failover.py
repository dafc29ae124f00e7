"""Measures the time without a leader after each fault of a leader; `leases`: the same for a lease.

Each row has a PostgreSQL and two workers of its own, and all rows run at the same time. The workers
record times by the clock that the server also reads. `gap` is the time from the end of the old
term, as its process saw it, to the start of the next. `after` is the time from the fault to the
start of the next term. A negative gap is an overlap. Exit code 1: two leaders at once, an old
leader that acted after the start of the next, or no new leader.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from scripts import failover_leases
from tests.kit.fleet import Fleet, Shutdown, WorkerSettings, running_fleet
from tests.kit.history import STATEMENTS
from tests.kit.proxy import Partition

if TYPE_CHECKING:
    from collections.abc import Mapping

    import asyncpg

    from scripts.failover_leases import LeaseRow
    from tests.kit.fleet import Worker

DEFAULT = WorkerSettings(slots=1, periodic_jobs=False)
SHORT = msgspec.structs.replace(DEFAULT, elect_interval=0.5, leader_ttl=1.5)
POLL = 0.01
START_TIMEOUT = 60.0
"""Seconds for the processes to start while all rows are measured at once."""


class Leading(NamedTuple):
    """One leader's term, as the process of the leader recorded it."""

    worker: str
    elected_at: datetime
    began: datetime


class Row:
    """A fault that is injected into the leader again and again."""

    name: str
    what: str
    poll_only = False
    pool_is_exhausted = False
    ends_at_fault = False
    """Whether the fault itself ends the term, so that the leader cannot record its end."""

    def __init__(self, fleet: Fleet, settings: WorkerSettings) -> None:
        self.fleet, self.settings = fleet, settings
        self.gaps: list[float] = []
        self.delays: list[float] = []
        self.late_acts = 0

    async def fault(self, leader: Worker) -> None:
        """Inject the fault. Return when it has happened."""
        raise NotImplementedError

    async def undo(self, leader: Worker) -> None:
        """Undo the fault after the next term started."""

    async def measure(self, repeat: int) -> None:
        """Measure the fault this many times."""
        settings = msgspec.structs.replace(
            self.settings, poll_only=self.poll_only, pool_is_exhausted=self.pool_is_exhausted
        )
        for name in ("one", "two"):
            await (await self.fleet.add(name, settings)).start()
        leading = await self.next_leading(None)
        for _ in range(repeat):
            await self.until_all_ready()
            await asyncio.sleep(settings.elect_interval * (1 + random.random()))
            leading = await self._once(leading)

    async def until_all_ready(self) -> None:
        """Return when the current process of each worker has registered and takes part in leader
        election."""
        names = {f"{worker.name}:{worker.pid}" for worker in self.fleet.workers}
        async with asyncio.timeout(START_TIMEOUT), self.fleet.server.connected() as connection:
            while names - {  # noqa: ASYNC110 (the server does not notify)
                client_id.rpartition(":")[0]
                for (client_id,) in await connection.fetch("SELECT client_id FROM riverpy_client")
            }:
                await asyncio.sleep(POLL)

    async def _once(self, old: Leading) -> Leading:
        leader = next(worker for worker in self.fleet.workers if worker.name == old.worker)
        await self.fault(leader)
        fault_at = datetime.now(UTC)
        new = await self.next_leading(old)
        await self.undo(leader)
        await asyncio.sleep(self.settings.elect_interval / 2)  # give late records time to arrive
        end, late = await self._read(old, new)
        ended = fault_at if self.ends_at_fault else end
        if ended is not None:
            self.gaps.append((new.began - ended).total_seconds())
        self.delays.append((new.began - fault_at).total_seconds())
        self.late_acts += late
        return new

    async def next_leading(self, old: Leading | None) -> Leading:
        """Return the term after `old` as soon as it is recorded."""
        limit = time.monotonic() + 10 * self.settings.leader_ttl
        while time.monotonic() < limit:
            try:
                async with self.fleet.server.connected() as connection:
                    if found := await self._look(connection, old, limit):
                        return found
            except OSError:  # the server is down, which may be the fault
                await asyncio.sleep(POLL)
        raise TimeoutError(f"{self.name}: no new leader")

    async def _look(
        self, connection: asyncpg.Connection, old: Leading | None, limit: float
    ) -> Leading | None:
        while time.monotonic() < limit:
            for act in reversed(await connection.fetch(STATEMENTS["acts"])):
                if act["what"] != "begin":
                    continue
                found = Leading(act["leader_id"].split(":")[0], act["elected_at"], act["at"])
                if old is None or found.began > old.began:
                    return found
                break
            await asyncio.sleep(POLL)
        return None

    async def _read(self, old: Leading, new: Leading) -> tuple[datetime | None, int]:
        """Return when the old leader recorded its end, and how often it acted after the start of
        the next term."""
        async with self.fleet.server.connected() as connection:
            acts = await connection.fetch(STATEMENTS["acts"])
        mine = [act for act in acts if act["elected_at"] == old.elected_at]
        ends = [act["at"] for act in mine if act["what"] == "end"]
        late = [act for act in mine if act["what"] == "pass" and act["at"] > new.began]
        return (ends[0] if ends else None), len(late)


class Graceful(Row):
    """The fault: SIGTERM to the leader, which listens."""

    name, what = "graceful", "SIGTERM of the leader, followers listen"

    async def fault(self, leader: Worker) -> None:
        leader.terminate()

    async def undo(self, leader: Worker) -> None:
        await leader.ended()
        await leader.start()


class GracefulPollOnly(Graceful):
    """The fault: SIGTERM to a leader that only polls."""

    name, what = "graceful_poll_only", "SIGTERM of the leader, followers poll"
    poll_only = True


class Killed(Row):
    """The fault: SIGKILL to the leader."""

    name, what = "killed", "SIGKILL of the leader"
    ends_at_fault = True

    async def fault(self, leader: Worker) -> None:
        leader.kill()
        await leader.ended()

    async def undo(self, leader: Worker) -> None:
        await leader.start()


class KilledPollOnly(Killed):
    """The fault: SIGKILL to a leader, while the workers only poll."""

    name, what = "killed_poll_only", "SIGKILL of the leader, followers poll"
    poll_only = True


class Frozen(Row):
    """The fault: SIGSTOP to the leader, for longer than its lease is valid."""

    name, what = "frozen", "SIGSTOP of the leader until the next leads, then SIGCONT"
    ends_at_fault = True

    async def fault(self, leader: Worker) -> None:
        leader.freeze()

    async def undo(self, leader: Worker) -> None:
        leader.thaw()


class RequestsLost(Row):
    """The fault: the network drops what the leader sends."""

    name, what = "requests_lost", "data that the leader sends is dropped"

    async def fault(self, leader: Worker) -> None:
        leader.proxy.partition = Partition.REQUESTS_LOST

    async def undo(self, leader: Worker) -> None:
        await leader.proxy.heal()


class AnswersLost(RequestsLost):
    """The fault: the network drops what the server answers."""

    name, what = "answers_lost", "answers of the server to the leader are dropped"

    async def fault(self, leader: Worker) -> None:
        leader.proxy.partition = Partition.ANSWERS_LOST


class ImmediateStop(Row):
    """The server crashes and comes back. The leader's row is lost."""

    name, what = "immediate_stop", "the server crashes and comes back; the leader's row is lost"

    async def fault(self, leader: Worker) -> None:
        await self.fleet.server.shut_down(Shutdown.IMMEDIATE)
        await self.fleet.server.come_back()


class Steady(Row):
    """A fault that need not end the term. The gap is zero if the term continues."""

    async def _once(self, old: Leading) -> Leading:
        leader = next(worker for worker in self.fleet.workers if worker.name == old.worker)
        await self.fault(leader)
        fault_at = datetime.now(UTC)
        await asyncio.sleep(1.2 * self.settings.leader_ttl)
        new = await self.next_leading(None)
        end, late = await self._read(old, new) if new != old else (None, 0)
        self.late_acts += late
        is_same = new == old
        self.delays.append(0.0 if is_same else (new.began - fault_at).total_seconds())
        self.gaps.append(0.0 if is_same or end is None else (new.began - end).total_seconds())
        return new


class ExhaustedPool(Steady):
    """All connections of the leader's pool are taken."""

    name, what = "exhausted_pool", "every connection of the pools is taken"
    pool_is_exhausted = True

    async def fault(self, leader: Worker) -> None:
        """Do nothing: the fault lasts during the whole run."""


class Restart(Steady):
    """The server restarts cleanly. The leader's row survives."""

    name, what = "restart", "the server restarts cleanly; the leader's row survives"

    async def fault(self, leader: Worker) -> None:
        await self.fleet.server.shut_down(Shutdown.FAST)
        await self.fleet.server.come_back()


class ClockStep(Steady):
    """The wall clock of the leader steps by ten minutes."""

    name, what = "clock_step", "the leader's wall clock steps by ten minutes, there and back"

    async def fault(self, leader: Worker) -> None:
        leader.step_clock()


ROWS: dict[str, type[Row]] = {
    row.name: row
    for row in (
        Graceful,
        GracefulPollOnly,
        Killed,
        KilledPollOnly,
        Frozen,
        RequestsLost,
        AnswersLost,
        ImmediateStop,
        Restart,
        ExhaustedPool,
        ClockStep,
    )
}


async def run_row(row_type: type[Row], settings: WorkerSettings, repeat: int) -> dict[str, Any]:
    """Measure one row on a fleet of its own."""
    async with running_fleet() as fleet:
        row = row_type(fleet, settings)
        error = None
        try:
            await row.measure(repeat)
        except TimeoutError as raised:
            error = f"{raised or 'a worker did not start'} (logs: {fleet.directory})"
            fleet.is_kept = True
        return {
            "row": row.name,
            "what": row.what,
            "times": len(row.delays),
            "after": summary(row.delays),
            "gap": summary(row.gaps),
            "late_acts": row.late_acts,
            "error": error,
        }


def summary(values: list[float]) -> dict[str, float] | None:
    """Return median, minimum and maximum in seconds."""
    if not values:
        return None
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in found.items()}


async def run_rows(names: list[str], settings: WorkerSettings, repeat: int) -> list[dict[str, Any]]:
    """Measure all rows at the same time."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run_row(ROWS[name], settings, repeat)) for name in names]
        for done in asyncio.as_completed(running):
            found = await done
            print(f"{found['row']}: done {found['times']} times", file=sys.stderr, flush=True)
    return [task.result() for task in running]


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table of seconds."""
    print(
        f"{'row':20} {'times':>5} {'after: median':>13} {'max':>7} {'gap: median':>12} "
        f"{'min':>7} {'max':>7} {'late acts':>9}"
    )
    for row in rows:
        after, gap = row["after"] or {}, row["gap"] or {}
        numbers = (
            after.get("median"),
            after.get("max"),
            gap.get("median"),
            gap.get("min"),
            gap.get("max"),
        )
        cells = ["-" if number is None else f"{number:.3f}" for number in numbers]
        print(
            f"{row['row']:20} {row['times']:>5} {cells[0]:>13} {cells[1]:>7} {cells[2]:>12} "
            f"{cells[3]:>7} {cells[4]:>7} {row['late_acts']:>9}"
        )
        if row["error"]:
            print(f"  {row['error']}")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/failover",
        description=f"{__doc__}\n{failover_leases.__doc__}",
        epilog=f"rows:\n{_list(ROWS)}\n\nrows of leases:\n{_list(failover_leases.ROWS)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="?", choices=["leader", "leases"], default="leader")
    parser.add_argument("--rows", help="only these, joined by commas (all)")
    parser.add_argument("--repeat", type=int, default=20, help="repetitions of each row (20)")
    parser.add_argument(
        "--short",
        action="store_true",
        help="renew every 0.5 s and expire after 1.5 s, instead of 5 and 15 s",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    known = list(ROWS if arguments.what == "leader" else failover_leases.ROWS)
    arguments.rows = arguments.rows.split(",") if arguments.rows else known
    if unknown := [name for name in arguments.rows if name not in known]:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(known)}")
    return arguments


def _list(rows: Mapping[str, type[Row | LeaseRow]]) -> str:
    return "\n".join(f"  {name:20} {row.what}" for name, row in rows.items())


def main() -> None:
    """Measure and report."""
    arguments = parse_arguments()
    measure = measure_leases if arguments.what == "leases" else measure_leader
    found, is_bad = measure(arguments)
    if arguments.json:
        settings = "short" if arguments.short else "default"
        print(json.dumps({"settings": settings, "cpus": os.cpu_count(), "rows": found}))
    sys.exit(is_bad)


def measure_leader(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Measure the rows of the leader, print them unless JSON is wanted, and return whether one is
    bad."""
    settings = SHORT if arguments.short else DEFAULT
    rows = asyncio.run(run_rows(arguments.rows, settings, arguments.repeat))
    if not arguments.json:
        show(rows)
    return rows, any(row["error"] or row["late_acts"] or is_overlap(row) for row in rows)


def measure_leases(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Measure the rows of a lease in the same way."""
    settings = failover_leases.SHORT if arguments.short else failover_leases.DEFAULT
    rows = asyncio.run(failover_leases.run_rows(arguments.rows, settings, arguments.repeat))
    if not arguments.json:
        failover_leases.show(rows)
    return list(map(failover_leases.as_json, rows)), any(row.is_bad for row in rows)


def is_overlap(row: dict[str, Any]) -> bool:
    """Return whether two workers led at once. This is allowed after a crash of the server, which
    loses the leader's row."""
    return row["row"] != ImmediateStop.name and (row["gap"] or {"min": 0})["min"] < 0


if __name__ == "__main__":
    main()
