"""Maintainers, a leader election and a resigner that a test controls, and record what happens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import anyio

from riverpy import Config, Workers
from riverpy._leading.queue_scope import ALL_QUEUES, QueueScope
from riverpy._leading.term_context import TermContext
from riverpy._leading.term_fence import TermFence
from riverpy._leading.term_runner import TermServicesRunner
from riverpy._leases.engine import LeaseEngine
from riverpy._leases.lease import Lease
from riverpy._leases.lease_task import LeaseTask
from riverpy._leases.memory import MemoryLeases
from riverpy._leases.timing import LeaseTiming
from riverpy._lifecycle import StopCause
from riverpy._maintenance.base import MaintenanceService
from riverpy._postgres.connection import ConnectionOutageTracker, DedicatedConnection
from riverpy._postgres.leases import LeaseAcquireResult, epoch_from_acquired_at
from tests._time import VirtualTimer, settle

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskStatus

    from riverpy._clock import Timer
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.driver import Connection

GRACE = 3.0
TIMING = LeaseTiming(ttl=15.0, attempt_interval=5.0)
_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class HookError(Exception):
    """The error of a hook or a service."""


def term(number: int, leader_id: str = "me") -> LeaseAcquireResult:
    """Return the n-th term as the database grants it."""
    elected_at = _EPOCH + timedelta(seconds=number)
    return LeaseAcquireResult(True, leader_id, epoch_from_acquired_at(elected_at), elected_at, None)


def lease_of(term: LeaseAcquireResult, timer: Timer) -> Lease:
    """Return the lease of a term that was acquired now."""
    return Lease(
        "default",
        term,
        attempted_at=timer.seconds_since_boot(),
        store=MemoryLeases(timer=timer),
        timing=TIMING,
        timer=timer,
    )


@dataclass(eq=False)
class Plan:
    """Raised instead of a successful start."""

    error: Exception | None = None
    """Raised instead of a successful start."""
    gate: asyncio.Event | None = None
    """The start waits for it first."""
    ignores_cancellation: bool = False
    """Whether that wait ignores its cancellation."""
    end_gate: asyncio.Event | None = None
    """The end waits for it."""
    end_error: Exception | None = None
    """Raised at the end."""


class FakeMaintainer:
    """A maintainer that follows its plan."""

    name = "fake maintainer"

    def __init__(self, maintenance: FakeMaintenance, term: LeaseAcquireResult, plan: Plan) -> None:
        self.maintenance, self.term, self.plan = maintenance, term, plan
        self.is_up = self.is_stopped = False
        self.started_at = 0.0
        self.cause: StopCause | None = None
        """The cause in the scope when the maintainer was cancelled."""
        self._failure = asyncio.Event()

    def fail(self) -> None:
        """Let a service fail after the start."""
        self._failure.set()

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        self.started_at = self.maintenance.timer.seconds_since_boot()
        self.maintenance.record("start", self.term)
        self.maintenance.running.append(self)
        try:
            await self._start()
            self.is_up = True
            self.maintenance.record("up", self.term)
            task_status.started()
            await self._failure.wait()
            raise HookError("a service failed")
        except asyncio.CancelledError:
            self.cause = scope.cause
            raise
        finally:
            if self.plan.end_gate is not None:
                with anyio.CancelScope(shield=True):
                    await self.plan.end_gate.wait()
            self.is_up, self.is_stopped = False, True
            self.maintenance.running.remove(self)
            self.maintenance.record("stop", self.term)
            if self.plan.end_error is not None:
                raise self.plan.end_error

    async def _start(self) -> None:
        if self.plan.gate is not None:
            with anyio.CancelScope(shield=self.plan.ignores_cancellation):
                await self.plan.gate.wait()
        if self.plan.error is not None:
            raise self.plan.error


@dataclass
class FakeMaintenance:
    """The maintenance of terms, on virtual time. A test begins terms with `gain` and ends them with
    `lose`."""

    timer: VirtualTimer = field(default_factory=VirtualTimer)
    plans: list[Plan] = field(default_factory=list[Plan])
    """For the next attempts. After the last plan all attempts succeed."""
    made: list[FakeMaintainer] = field(default_factory=list[FakeMaintainer])
    running: list[FakeMaintainer] = field(default_factory=list[FakeMaintainer])
    """Started and not stopped, in the order of their starts."""
    events: list[tuple[str, LeaseAcquireResult]] = field(
        default_factory=list[tuple[str, LeaseAcquireResult]]
    )
    resigned: list[LeaseAcquireResult] = field(default_factory=list[LeaseAcquireResult])
    holds_term: bool = True
    """Whether a term still exists when it is resigned."""
    watch: Callable[[str, LeaseAcquireResult], None] | None = None
    """Called for each event."""

    def __post_init__(self) -> None:
        self.engine = LeaseEngine(
            MemoryLeases(timer=self.timer), holder="me", timing=TIMING, timer=self.timer
        )
        self.tasks: list[LeaseTask] = []
        """One for each term."""

    def record(self, event: str, term: LeaseAcquireResult) -> None:
        """Record an event."""
        self.events.append((event, term))
        if self.watch is not None:
            self.watch(event, term)

    def begin(self, number: int) -> None:
        """Begin the n-th term and return at once."""
        which = term(number)
        lease = lease_of(which, self.timer)

        async def work(scope: StopScope) -> None:
            await self.run_term(lease, scope, which)

        task = LeaseTask(lease, self.engine, work, loss_cause=StopCause.LEADERSHIP_LOST)
        self.tasks.append(task)
        task.start(f"term {number}")

    async def run_term(self, lease: Lease, scope: StopScope, which: LeaseAcquireResult) -> None:
        """Do the work of a term."""

        def make(_lease: Lease) -> tuple[TermContext, list[FakeMaintainer]]:
            return context_without_database(self.timer, lease), [self.make(which)]

        await TermServicesRunner(
            lease,
            make,
            timer=self.timer,
            on_services_started=lambda: self.record("started", which),
            resign=lambda _error: self._resign(which),
        ).run(scope)

    async def gain(self, number: int) -> None:
        """Let this process be the leader in the n-th term."""
        self.begin(number)
        await settle()

    async def lose(self, cause: StopCause = StopCause.LEADERSHIP_LOST) -> bool:
        """End the last term. Virtual time does not advance, so the test hangs if the end waits for
        time."""
        with anyio.fail_after(10):
            return await self.tasks[-1].stop_and_wait(cause)

    async def close(self, timeout: float) -> bool:
        """Stop everything, as when the client stops."""
        for task in self.tasks:
            task.stop_work(StopCause.CLIENT_STOP)
        return all(
            [await self.timer.wait_for_event(task.lease_released, timeout) for task in self.tasks]
        )

    @property
    def is_clear(self) -> bool:
        """Whether no term has running work."""
        return all(task.lease_released.is_set() for task in self.tasks)

    async def starts(self, number: int) -> int:
        """Return how many maintainers of the n-th term were started."""
        await settle()
        return self.events.count(("start", term(number)))

    def open_gates(self) -> None:
        """Set all gates."""
        for maintainer in self.made:
            for gate in (maintainer.plan.gate, maintainer.plan.end_gate):
                if gate is not None:
                    gate.set()

    def make(self, term: LeaseAcquireResult) -> FakeMaintainer:
        """Create a maintainer with the next plan."""
        plan = self.plans.pop(0) if self.plans else Plan()
        maintainer = FakeMaintainer(self, term, plan)
        self.made.append(maintainer)
        return maintainer

    def _resign(self, term: LeaseAcquireResult) -> bool:
        self.resigned.append(term)
        self.record("resign", term)
        return self.holds_term


class FakeService(MaintenanceService):
    """A service without a database. Counts its calls."""

    def __init__(
        self,
        context: TermContext,
        name: str = "fake",
        *,
        start_gate: asyncio.Event | None = None,
        start_error: Exception | None = None,
    ) -> None:
        self.name = name
        super().__init__(context)
        self.start_gate, self.start_error = start_gate, start_error
        self.pass_error: Exception | None = None
        self.during_pass: Callable[[], object] | None = None
        """Called in the next pass."""
        self.prepared = self.passes = 0
        self.cause: StopCause | None = None
        self.is_over = False

    async def prepare(self) -> None:
        if self.start_gate is not None:
            await self.start_gate.wait()
        if self.start_error is not None:
            raise self.start_error
        self.prepared += 1

    async def run_once(self, scope: StopScope) -> float:
        self.passes += 1
        if self.during_pass is not None:
            during_pass, self.during_pass = self.during_pass, None
            during_pass()
        if self.pass_error is not None:
            raise self.pass_error
        return 30.0

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        try:
            await super().run(scope, task_status=task_status)
        finally:
            self.cause, self.is_over = scope.cause, True


def context_without_database(timer: Timer, lease: Lease) -> TermContext:
    """Return a context of a lease whose connections cannot be opened."""

    async def connect() -> Connection:
        raise ConnectionRefusedError("there is no database")

    async def all_queues() -> QueueScope:
        return ALL_QUEUES

    outage = ConnectionOutageTracker()
    return TermContext(
        fence=TermFence(lease),
        config=Config(),
        workers=Workers(),
        connection=DedicatedConnection("maintenance", connect, outage),
        long_statement_connection=DedicatedConnection("cleaning", connect, outage),
        timer=timer,
        open_direct_connection=None,
        read_queue_scope=all_queues,
    )
