"""Injects planned faults into a fleet of workers: it kills, stops, freezes and cuts off workers,
mostly the leader, and restarts and crashes the server."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from riverpy._postgres.driver import DATABASE_ERRORS
from tests.kit import server_faults
from tests.kit.bad_rows import refused_rows, slow_rows
from tests.kit.fleet import Shutdown
from tests.kit.history import ClockStep, Crash, Violation
from tests.kit.lease_history import Span
from tests.kit.proxy import Partition
from tests.kit.stepped_server import CLOCK_STEP, SteppedServer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Sequence

    from anyio.abc import TaskGroup

    from tests.kit.bad_rows import Table
    from tests.kit.fleet import Fleet, Worker, WorkerSettings

PROGRESS_INTERVAL = 5.0
EXPECTED_CODES = {0, 3, 4, -signal.SIGKILL, -signal.SIGTERM}
"""Exit codes of workers: stopped, no database at the start, stopped without a database, killed,
stopped while Python was starting."""


# --- the plan


class FaultKind(StrEnum):
    """A kind of fault, of a worker or of the server."""

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
    CLOCK_STEP = "server clock stepped"
    SLOW_ROWS = "rows slow"
    REFUSED_ROWS = "rows refused"


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
    FaultKind.CLOCK_STEP: 2,
    FaultKind.SLOW_ROWS: 2,
    FaultKind.REFUSED_ROWS: 2,
}
"""Relative frequency of each kind."""
OF_SERVER = {
    FaultKind.RESTART,
    FaultKind.CRASH,
    FaultKind.CLOCK_STEP,
    FaultKind.SLOW_ROWS,
    FaultKind.REFUSED_ROWS,
}
"""The kinds of faults of the server. Only one of them happens at a time."""
PARTITIONS = {
    FaultKind.REQUESTS_LOST: Partition.REQUESTS_LOST,
    FaultKind.ANSWERS_LOST: Partition.ANSWERS_LOST,
    FaultKind.HELD: Partition.HELD,
}


class Fault(NamedTuple):
    """A fault of the plan."""

    at: float
    """Seconds from the start of the run to the fault."""
    kind: FaultKind
    hits_leader: bool
    """Whether the fault hits the leader. Otherwise it hits the worker with the number of the
    fault."""
    number: int
    seconds: float
    """How long the fault lasts, in seconds."""


def make_plan(seed: int, *, seconds: float, workers: int, ttl: float) -> list[Fault]:
    """Return the faults of a seed, always the same. `ttl` is the lease time in seconds."""
    rng = random.Random(seed)
    plan: list[Fault] = []
    at = 2 * ttl
    while at < seconds:
        kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        hits_leader, number = rng.random() < 0.7, rng.randrange(workers)
        plan.append(Fault(at, kind, hits_leader, number, _duration(kind, rng) * ttl))
        at += rng.uniform(0.3, 1.7) * ttl
    return plan


def _duration(kind: FaultKind, rng: random.Random) -> float:
    """Return a duration as a multiple of the lease time. Partitions and frozen processes are
    interesting near one lease time."""
    match kind:
        case FaultKind.FREEZE_SHORT:
            return rng.uniform(0.05, 0.6)
        case FaultKind.FREEZE_LONG:
            return rng.uniform(1.0, 2.5)
        case FaultKind.REQUESTS_LOST | FaultKind.ANSWERS_LOST | FaultKind.HELD:
            return rng.uniform(0.3, 2.5)
        case FaultKind.CLOCK_STEP | FaultKind.SLOW_ROWS | FaultKind.REFUSED_ROWS:
            return rng.uniform(0.3, 2.5)
        case _:
            return rng.uniform(0.0, 1.0)


# --- doing it


class ChaosOfFleet:
    """One run over a fleet. Subclasses define the load of the workers and the rules to check."""

    def __init__(self, fleet: Fleet, settings: WorkerSettings, plan: Sequence[Fault]) -> None:
        self._fleet, self._settings, self._plan = fleet, settings, plan
        self._broken: set[Worker] = set()
        self._ending: set[Worker] = set()
        self._server_lock = asyncio.Lock()
        self._began = 0.0
        self.done: Counter[str] = Counter()
        self.crashes: list[Crash] = []
        self.clock_steps: list[ClockStep] = []
        self.spans: list[Span] = []
        """The faults that happened, with their times."""
        self.row_spans: list[Span] = []
        """The times at which rows were slow or refused."""
        self.violations: list[Violation] = []
        """Violations found during the run. The history shows others."""

    async def _break(self, seconds: float) -> None:
        """Inject the faults of the plan for this many seconds."""
        self._began = time.monotonic()
        async with _tasks_until_left() as tasks:
            tasks.start_soon(self._load)
            tasks.start_soon(self._start_what_ended)
            tasks.start_soon(self._show_progress)
            for fault in self._plan:
                await anyio.sleep_until(self._loop_time(fault.at))
                tasks.start_soon(self._do, fault)
            await anyio.sleep_until(self._loop_time(seconds))

    async def _load(self) -> None:
        """Put load on the database during the faults."""

    @property
    def _table(self) -> Table:
        """Return the table whose rows are made slow or refused."""
        raise NotImplementedError

    async def _leader_name(self) -> str:
        """Return the worker that most faults hit."""
        raise NotImplementedError

    async def _progress(self) -> str:
        """Return the progress of the run as text."""
        raise NotImplementedError

    # -- faults

    async def _do(self, fault: Fault) -> None:
        if fault.kind in OF_SERVER:
            await self._do_to_server(fault)
            return
        worker = await self._choose(fault)
        if worker is None:
            return
        self._broken.add(worker)
        self.done[fault.kind] += 1
        is_restart = fault.kind in {FaultKind.KILL, FaultKind.STOP}
        with self._noting(worker.name, is_restart=is_restart):
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
        if self._server_lock.locked():
            return
        with anyio.CancelScope(shield=True):  # undo it completely, even if this task is cancelled
            async with self._server_lock:
                match fault.kind:
                    case FaultKind.CLOCK_STEP:
                        await self._step_clock(fault)
                    case FaultKind.SLOW_ROWS | FaultKind.REFUSED_ROWS:
                        await self._break_rows(fault)
                    case _:
                        await self._shut_down(fault)

    async def _shut_down(self, fault: Fault) -> None:
        self.done[fault.kind] += 1
        is_crash = fault.kind is FaultKind.CRASH
        with self._noting(""):
            began = datetime.now(UTC)
            await self._fleet.server.shut_down(Shutdown.IMMEDIATE if is_crash else Shutdown.FAST)
            await anyio.sleep(fault.seconds)
            await self._fleet.server.come_back()
        if is_crash:
            self.crashes.append(Crash(began, datetime.now(UTC)))

    async def _step_clock(self, fault: Fault) -> None:
        """Set the clock back, and later forward to the true time. A process that reads it only then
        sees a step forward."""
        server = self._fleet.server
        if not isinstance(server, SteppedServer):
            return
        self.done[fault.kind] += 1
        began = datetime.now(UTC)
        await server_faults.step_clock_often(server.clock, -CLOCK_STEP, lasting=fault.seconds)
        self.clock_steps.append(ClockStep(began, datetime.now(UTC)))

    async def _break_rows(self, fault: Fault) -> None:
        """Make rows of a table slow, or refuse them."""
        self.done[fault.kind] += 1
        began = time.time()
        breaking = slow_rows if fault.kind is FaultKind.SLOW_ROWS else refused_rows
        with suppress(*DATABASE_ERRORS):
            async with breaking(self._fleet.server.url, self._table):
                await anyio.sleep(fault.seconds)
        self.row_spans.append(Span("", began, time.time()))

    @contextmanager
    def _noting(self, name: str, *, is_restart: bool = False) -> Generator[None]:
        began = time.time()
        try:
            yield
        finally:
            self.spans.append(Span(name, began, time.time(), is_restart))

    async def _choose(self, fault: Fault) -> Worker | None:
        """Choose a worker without a fault; the leader if the fault is meant for it."""
        workers = self._fleet.workers
        healthy = [worker for worker in workers if worker not in self._broken and worker.is_running]
        leader = await self._leader_name() if fault.hits_leader else None
        for worker in healthy:
            if worker.name == leader:
                return worker
        turned = workers[fault.number :] + workers[: fault.number]
        return next((worker for worker in turned if worker in healthy), None)

    # -- during the faults

    async def _start_what_ended(self) -> None:
        while True:
            await anyio.sleep(1)
            await self._start_ended()

    async def _start_ended(self) -> None:
        """Start workers again that exited because they found no database at their start."""
        for worker in self._fleet.workers:
            if worker not in self._broken and not worker.is_running:
                with self._noting(worker.name, is_restart=True):
                    await self._note_end(worker)
                    await worker.start()

    async def _note_end(self, worker: Worker) -> None:
        code = await worker.ended()
        if code not in EXPECTED_CODES:
            self.violations.append(
                Violation(
                    "no worker fails", f"{worker.name} exited with code {code}: see {worker.log}"
                )
            )

    async def _show_progress(self) -> None:
        while True:
            await anyio.sleep(PROGRESS_INTERVAL)
            running = sum(w.is_running and not w.is_frozen for w in self._fleet.workers)
            print(
                f"{time.monotonic() - self._began:5.0f} s  faults {self.done.total()}  "
                f"running workers {running}  {await self._progress()}",
                file=sys.stderr,
            )

    # -- afterwards

    async def _end_faults(self) -> None:
        """End all faults, and start the workers that exited."""
        self._broken.clear()
        for worker in self._fleet.workers:
            worker.thaw()
            await worker.proxy.heal()
        for worker in self._fleet.workers:
            if worker in self._ending or not worker.is_running:
                await self._note_end(worker)
                await worker.start()

    async def _stop(self) -> None:
        for worker in self._fleet.workers:
            worker.terminate()
        for worker in self._fleet.workers:
            code = await worker.ended()
            if code:
                self.violations.append(
                    Violation(
                        "a stop without faults is clean", f"{worker.name} exited with code {code}"
                    )
                )

    # -- help

    async def _fetch_value(self, statement: str, *arguments: object) -> Any:
        """Return the value of a statement; None where the server does not answer."""
        try:
            async with self._fleet.server.connected() as connection:
                return await connection.fetchval(statement, *arguments)
        except DATABASE_ERRORS:
            return None

    def _loop_time(self, seconds: float) -> float:
        return anyio.current_time() + self._began + seconds - time.monotonic()


@asynccontextmanager
async def _tasks_until_left() -> AsyncGenerator[TaskGroup]:
    async with anyio.create_task_group() as tasks:
        yield tasks
        tasks.cancel_scope.cancel()
