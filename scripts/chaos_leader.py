"""Breaks the leader of a fleet, and its other workers, at random."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import statistics
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import msgspec

import riverpy
from riverpy.drivers.asyncpg import DATABASE_ERRORS
from tests.kit.fleet import Shutdown, WorkerSettings, running_fleet
from tests.kit.history import POLICIES, STATEMENTS, Crash, Violation, check, read
from tests.kit.proxy import Partition

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from anyio.abc import TaskGroup

    from tests.kit.fleet import Fleet, Worker
    from tests.kit.history import History

SHORT = WorkerSettings(elect_interval=0.5, leader_ttl=1.5, dead_after=3.0)
DEFAULT = WorkerSettings()
PROGRESS_INTERVAL = 5.0
INSERT_INTERVAL = 0.05
JOB_SECONDS_MOST = 1.0
CALM_LIMIT = 60.0
"""Seconds, beyond what the rescue of jobs takes, until the fleet must work again when nothing is
broken any more."""
EXPECTED_CODES = {0, 3, 4, -signal.SIGKILL, -signal.SIGTERM}
"""Exit codes of workers: stopped, had no database at the start, stopped without one, killed,
stopped while Python was starting."""


# --- the plan


class FaultKind(StrEnum):
    """What is done to a worker, or to the server."""

    KILL = "kill"
    STOP = "stop"
    FREEZE_SHORT = "freeze, short"
    FREEZE_LONG = "freeze, long"
    REQUESTS_LOST = "partition, requests lost"
    ANSWERS_LOST = "partition, answers lost"
    HELD = "partition, held"
    CUT = "connections cut"
    RESTART = "server restarted"
    CRASH = "server crashed"


WEIGHTS = {
    FaultKind.KILL: 6,
    FaultKind.STOP: 5,
    FaultKind.FREEZE_SHORT: 3,
    FaultKind.FREEZE_LONG: 8,
    FaultKind.REQUESTS_LOST: 4,
    FaultKind.ANSWERS_LOST: 4,
    FaultKind.HELD: 4,
    FaultKind.CUT: 3,
    FaultKind.RESTART: 1,
    FaultKind.CRASH: 1,
}
"""How often each is chosen, in comparison."""
PARTITIONS = {
    FaultKind.REQUESTS_LOST: Partition.REQUESTS_LOST,
    FaultKind.ANSWERS_LOST: Partition.ANSWERS_LOST,
    FaultKind.HELD: Partition.HELD,
}


class Fault(NamedTuple):
    """One thing to be done."""

    at: float
    """Seconds since the start."""
    kind: FaultKind
    hits_leader: bool
    """Whether it is done to whoever leads then, otherwise to the worker of this number."""
    number: int
    seconds: float
    """How long it lasts."""


def make_plan(seed: int, *, seconds: float, workers: int, ttl: float) -> list[Fault]:
    """The faults of a seed: the same each time. `ttl` is the lease's time, in seconds."""
    dice = random.Random(seed)
    plan: list[Fault] = []
    at = 2 * ttl
    while at < seconds:
        kind = dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        hits_leader, number = dice.random() < 0.7, dice.randrange(workers)
        plan.append(Fault(at, kind, hits_leader, number, _duration(kind, dice) * ttl))
        at += dice.uniform(0.3, 1.7) * ttl
    return plan


def _duration(kind: FaultKind, dice: random.Random) -> float:
    """In lease times. A partition or a frozen process is of interest around one."""
    match kind:
        case FaultKind.FREEZE_SHORT:
            return dice.uniform(0.05, 0.6)
        case FaultKind.FREEZE_LONG:
            return dice.uniform(1.0, 2.5)
        case FaultKind.REQUESTS_LOST | FaultKind.ANSWERS_LOST | FaultKind.HELD:
            return dice.uniform(0.3, 2.5)
        case _:
            return dice.uniform(0.0, 1.0)


# --- doing it


class Chaos:
    """One run."""

    def __init__(self, fleet: Fleet, settings: WorkerSettings, plan: Sequence[Fault]) -> None:
        self._fleet, self._settings, self._plan = fleet, settings, plan
        self._broken: set[Worker] = set()
        self._ending: set[Worker] = set()
        self._server_lock = asyncio.Lock()
        self.done: Counter[str] = Counter()
        self.inserted: list[int] = []
        self.crashes: list[Crash] = []
        self.violations: list[Violation] = []
        """What is seen while it runs; the history tells more."""

    async def run(self, workers: int, seconds: float) -> History:
        """Break the fleet for so long, let it recover, stop it, and return what it did."""
        for number in range(workers):
            await (await self._fleet.add(f"w{number}", self._settings)).start()
        self._began = time.monotonic()
        async with _tasks_until_left() as tasks:
            tasks.start_soon(self._insert_jobs)
            tasks.start_soon(self._start_what_ended)
            tasks.start_soon(self._show_progress)
            for fault in self._plan:
                await anyio.sleep_until(self._loop_time(fault.at))
                tasks.start_soon(self._do, fault)
            await anyio.sleep_until(self._loop_time(seconds))
        await self._recover()
        await self._stop()
        async with self._fleet.server.connected() as connection:
            history = await read(connection)
        history.inserted, history.crashes = self.inserted, self.crashes
        history.trust = timedelta(seconds=self._settings.leader_ttl)
        return history

    # -- faults

    async def _do(self, fault: Fault) -> None:
        if fault.kind in {FaultKind.RESTART, FaultKind.CRASH}:
            await self._do_to_server(fault)
            return
        worker = await self._choose(fault)
        if worker is None:
            return
        self._broken.add(worker)
        self.done[fault.kind] += 1
        await self._do_to_worker(worker, fault)
        self._broken.discard(worker)

    async def _do_to_worker(self, worker: Worker, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.KILL | FaultKind.STOP:
                self._ending.add(worker)
                worker.kill() if fault.kind is FaultKind.KILL else worker.terminate()
                await self._note_end(worker)
                await anyio.sleep(fault.seconds)
                await worker.start()
                self._ending.discard(worker)
            case FaultKind.FREEZE_SHORT | FaultKind.FREEZE_LONG:
                worker.freeze()
                await anyio.sleep(fault.seconds)
                worker.thaw()
            case FaultKind.CUT:
                worker.proxy.cut()
            case _:
                worker.proxy.partition = PARTITIONS[fault.kind]
                await anyio.sleep(fault.seconds)
                await worker.proxy.heal()

    async def _do_to_server(self, fault: Fault) -> None:
        is_crash = fault.kind is FaultKind.CRASH
        if self._server_lock.locked():
            return
        self.done[fault.kind] += 1
        server = self._fleet.server
        with anyio.CancelScope(shield=True):  # it is of use to nobody half done
            async with self._server_lock:
                began = datetime.now(UTC)
                await server.shut_down(Shutdown.IMMEDIATE if is_crash else Shutdown.FAST)
                await anyio.sleep(fault.seconds)
                await server.come_back()
                if is_crash:
                    self.crashes.append(Crash(began, datetime.now(UTC)))

    async def _choose(self, fault: Fault) -> Worker | None:
        """A worker that is not broken already, the one that leads if it shall be."""
        workers = self._fleet.workers
        healthy = [worker for worker in workers if worker not in self._broken and worker.is_running]
        leader = await self._leader_name() if fault.hits_leader else None
        for worker in healthy:
            if worker.name == leader:
                return worker
        turned = workers[fault.number :] + workers[: fault.number]
        return next((worker for worker in turned if worker in healthy), None)

    async def _leader_name(self) -> str:
        leader_id = await self._fetch_value("leader") or ""
        return leader_id.split(":")[0]

    # -- what goes on meanwhile

    async def _insert_jobs(self) -> None:
        async with riverpy.Client(self._fleet.server.url) as client:
            while True:
                args = {"seconds": random.random() ** 3 * JOB_SECONDS_MOST}
                with suppress(*DATABASE_ERRORS):
                    result = await client.insert(riverpy.RawArgs("touch", json.dumps(args)))
                    self.inserted.append(result.job.id)
                await anyio.sleep(INSERT_INTERVAL)

    async def _start_what_ended(self) -> None:
        """A worker that finds no database at its start ends."""
        while True:
            await anyio.sleep(1)
            for worker in self._fleet.workers:
                if worker not in self._broken and not worker.is_running:
                    await self._note_end(worker)
                    await worker.start()

    async def _note_end(self, worker: Worker) -> None:
        code = await worker.ended()
        if code not in EXPECTED_CODES:
            self.violations.append(
                Violation("no worker fails", f"{worker.name} ended with {code}: see {worker.log}")
            )

    async def _show_progress(self) -> None:
        while True:
            await anyio.sleep(PROGRESS_INTERVAL)
            terms = await self._fetch_value("term_count")
            running = sum(w.is_running and not w.is_frozen for w in self._fleet.workers)
            print(
                f"{time.monotonic() - self._began:5.0f} s  terms {terms or '?'}  "
                f"faults {self.done.total()}  jobs {len(self.inserted)}  running workers {running}",
                file=sys.stderr,
            )

    # -- afterwards

    async def _recover(self) -> None:
        """Mend everything, and wait until the fleet works."""
        for worker in self._fleet.workers:
            worker.thaw()
            await worker.proxy.heal()
        for worker in self._fleet.workers:
            if worker in self._ending or not worker.is_running:
                await self._note_end(worker)
                await worker.start()
        calm_since = datetime.now(UTC)
        limit = time.monotonic() + CALM_LIMIT + 5 * self._settings.dead_after
        while missing := await self._what_is_missing(calm_since):
            if time.monotonic() > limit:
                self.violations.append(Violation("the fleet recovers", missing))
                return
            await anyio.sleep(0.2)

    async def _what_is_missing(self, calm_since: datetime) -> str:
        if unfinished := await self._fetch_value("unfinished"):
            return f"{unfinished} jobs are not finished"
        alive = await self._fetch_value("alive_since", calm_since)
        if alive != len(self._fleet.workers):
            return f"{alive} workers give signs of life"
        policies = await self._fetch_value("policies_since", calm_since)
        missing = sorted(set(POLICIES) - set(policies or ()))
        return f"no slot is inserted of {', '.join(missing)}" if missing else ""

    async def _stop(self) -> None:
        for worker in self._fleet.workers:
            worker.terminate()
        for worker in self._fleet.workers:
            code = await worker.ended()
            if code:
                self.violations.append(
                    Violation("a calm stop is clean", f"{worker.name} ended with {code}")
                )

    # -- help

    async def _fetch_value(self, name: str, *arguments: object) -> Any:
        """None where the server does not answer."""
        try:
            async with self._fleet.server.connected() as connection:
                return await connection.fetchval(STATEMENTS[name], *arguments)
        except DATABASE_ERRORS:
            return None

    def _loop_time(self, seconds: float) -> float:
        return anyio.current_time() + self._began + seconds - time.monotonic()


@asynccontextmanager
async def _tasks_until_left() -> AsyncGenerator[TaskGroup]:
    async with anyio.create_task_group() as tasks:
        yield tasks
        tasks.cancel_scope.cancel()


# --- the command


async def run_chaos(
    seed: int, *, seconds: float, workers: int, settings: WorkerSettings
) -> dict[str, Any]:
    """Run once, and tell what is known: figures and violations."""
    plan = make_plan(seed, seconds=seconds, workers=workers, ttl=settings.leader_ttl)
    async with running_fleet() as fleet:
        chaos = Chaos(fleet, settings, plan)
        history = await chaos.run(workers, seconds)
        violations = [*chaos.violations, *check(history)]
        if violations:
            fleet.keep("history.json", msgspec.json.format(msgspec.json.encode(history)))
        gaps = history.gaps()
        return {
            "seed": seed,
            "seconds": seconds,
            "workers": workers,
            "terms": len(history.spans()),
            "gap_median_s": round(statistics.median(gaps), 3) if gaps else None,
            "gap_max_s": round(max(gaps), 3) if gaps else None,
            "faults": dict(sorted(chaos.done.items())),
            "writes": len(history.writes),
            "slots": len(history.slots),
            "jobs": len(history.jobs),
            "rescues": sum(job.rescues for job in history.jobs),
            "violations": [msgspec.structs.asdict(violation) for violation in violations],
            "logs": str(fleet.directory) if violations else None,
        }


def show(found: dict[str, Any]) -> None:
    """For the eye."""
    print(
        f"{found['terms']} terms; without a leader {found['gap_median_s']} s (median), "
        f"{found['gap_max_s']} s (max)"
    )
    print("faults: " + ", ".join(f"{count} {name}" for name, count in found["faults"].items()))
    print(
        f"{found['writes']} writes of terms, {found['slots']} periodic slots, "
        f"{found['jobs']} jobs, {found['rescues']} of them rescued"
    )
    for violation in found["violations"]:
        print(f"VIOLATION {violation['rule']}: {violation['text']}")
    count = len(found["violations"])
    print(f"{count} violations, the logs are in {found['logs']}" if count else "no violation")
