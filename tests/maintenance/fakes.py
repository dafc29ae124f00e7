"""Maintainers, an elector and a resigner that do what a test says, and record what happens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import anyio

from riverpy import Config, Workers
from riverpy._leading.term_fence import TermFence
from riverpy._leading.term_runner import TermRunner
from riverpy._leases.validity import LeaseTiming, LeaseValidity, Term
from riverpy._lifecycle import StopCause
from riverpy._maintenance.base import MaintenanceService, TermContext
from riverpy._postgres.connection import ConnectionOutage, DedicatedConnection
from riverpy._postgres.leaders import LeaderTable
from tests._time import VirtualTimer, settle

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskStatus

    from riverpy._clock import Timer
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.driver import Connection

GRACE = 3.0
TIMING = LeaseTiming(ttl=15.0, interval=5.0)
_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class HookError(Exception):
    """What a hook or a service raises."""


def term(number: int, leader_id: str = "me") -> Term:
    """The n-th term."""
    return Term(leader_id, _EPOCH + timedelta(seconds=number))


@dataclass(eq=False)
class Plan:
    """What one attempt to start does: it comes up, unless told otherwise."""

    error: Exception | None = None
    """Raised instead of coming up."""
    gate: asyncio.Event | None = None
    """The start waits for it first."""
    is_deaf: bool = False
    """That wait ignores its cancellation."""
    end_gate: asyncio.Event | None = None
    """The end waits for it, whatever happens."""
    end_error: Exception | None = None
    """Raised at the end."""


class FakeMaintainer:
    """One maintainer, which lives as its plan says."""

    name = "fake maintainer"

    def __init__(self, house: House, term: Term, plan: Plan) -> None:
        self.house, self.term, self.plan = house, term, plan
        self.is_up = self.is_stopped = False
        self.started_at = 0.0
        self.cause: StopCause | None = None
        """What the scope said when the maintainer was cancelled."""
        self._failure = asyncio.Event()

    def fail(self) -> None:
        """A bug in a service, after the start."""
        self._failure.set()

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        self.started_at = self.house.timer.boottime()
        self.house.say("start", self.term)
        self.house.running.append(self)
        try:
            await self._start()
            self.is_up = True
            self.house.say("up", self.term)
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
            self.house.running.remove(self)
            self.house.say("stop", self.term)
            if self.plan.end_error is not None:
                raise self.plan.end_error

    async def _start(self) -> None:
        if self.plan.gate is not None:
            with anyio.CancelScope(shield=self.plan.is_deaf):
                await self.plan.gate.wait()
        if self.plan.error is not None:
            raise self.plan.error


@dataclass
class House:
    """A TermRunner on virtual time. The test is its elector: `gain`, `lose`."""

    timer: VirtualTimer = field(default_factory=VirtualTimer)
    plans: list[Plan] = field(default_factory=list[Plan])
    """Of the attempts to come; when they are used up, each comes up."""
    made: list[FakeMaintainer] = field(default_factory=list[FakeMaintainer])
    running: list[FakeMaintainer] = field(default_factory=list[FakeMaintainer])
    """Started and not stopped, in the order of their starts."""
    events: list[tuple[str, Term]] = field(default_factory=list[tuple[str, Term]])
    resigned: list[Term] = field(default_factory=list[Term])
    resign_error: Exception | None = None
    holds_term: bool = True
    """Whether a term that is resigned has not ended before."""
    watch: Callable[[str, Term], None] | None = None
    """Called when something happens."""

    def __post_init__(self) -> None:
        self.leader = TermRunner(self._make, grace=GRACE, timer=self.timer)
        self.leader.resign = self._resign
        self.leader.is_up = lambda term: self.say("told up", term)

    def say(self, event: str, term: Term) -> None:
        """Record it."""
        self.events.append((event, term))
        if self.watch is not None:
            self.watch(event, term)

    async def gain(self, number: int) -> None:
        """This process leads the n-th term."""
        self.leader.begin(term(number))
        await settle()

    async def lose(self, cause: StopCause = StopCause.LEADERSHIP_LOST) -> bool:
        """The term is over. Time stands still meanwhile: what must wait for it hangs the test."""
        with anyio.fail_after(10):
            return await self.leader.end(cause)

    async def starts(self, number: int) -> int:
        """How many maintainers of the n-th term were started."""
        await settle()
        return self.events.count(("start", term(number)))

    def open_gates(self) -> None:
        """Let everything go on that a gate holds."""
        for maintainer in self.made:
            for gate in (maintainer.plan.gate, maintainer.plan.end_gate):
                if gate is not None:
                    gate.set()

    def _make(self, term: Term) -> FakeMaintainer:
        plan = self.plans.pop(0) if self.plans else Plan()
        maintainer = FakeMaintainer(self, term, plan)
        self.made.append(maintainer)
        return maintainer

    def _resign(self, term: Term) -> bool:
        self.resigned.append(term)
        self.say("resign", term)
        if self.resign_error is not None:
            raise self.resign_error
        return self.holds_term


class FakeService(MaintenanceService):
    """A service without a database, which counts."""

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


def context_without_database(timer: Timer, term: Term) -> tuple[TermContext, LeaseValidity]:
    """A context whose term is trusted for as long as a real one, and whose connections cannot be
    made."""

    async def connect() -> Connection:
        raise ConnectionRefusedError("there is no database")

    trust = LeaseValidity(TIMING, timer)
    trust.granted(term, asked_at=timer.boottime())
    outage = ConnectionOutage()
    connection = DedicatedConnection("maintenance", connect, outage)
    context = TermContext(
        fence=TermFence(
            term, trust, store=LeaderTable(connection, None), fenced_out=lambda _term: None
        ),
        config=Config(),
        workers=Workers(),
        connection=connection,
        cleaning=DedicatedConnection("cleaning", connect, outage),
        timer=timer,
    )
    return context, trust
