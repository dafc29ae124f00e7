"""TermServicesRunner, alone and with Election, on virtual time (P1 to P22)."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy._leading.election import Election
from riverpy._leading.term_runner import TermServicesRunner
from riverpy._leases.engine import LeaseEngine
from riverpy._leases.lease_task import LeaseTask
from riverpy._leases.memory import MemoryLeases
from riverpy._leases.store import LeaseStore
from riverpy._lifecycle import ServiceGroup, StopCause
from riverpy._log_events import (
    LEADER_TERM_FAILED,
    MAINTENANCE_FAILED,
    MAINTENANCE_FAILED_TOO_OFTEN,
    MAINTENANCE_FAILED_WHILE_STOPPING,
    WORK_RAN_PAST_ITS_LEASE,
)
from riverpy._names import DEFAULT_DOMAIN
from riverpy.errors import FencedOutError
from tests._time import VirtualTimer, settle
from tests.maintenance.fakes import (
    GRACE,
    TIMING,
    FakeMaintainer,
    FakeMaintenance,
    FakeService,
    HookError,
    Plan,
    context_without_database,
    lease_of,
    term,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable
    from datetime import timedelta

    from riverpy._leading.term_context import TermContext
    from riverpy._leases.lease import Lease
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.leases import LeaseAcquireResult

pytestmark = pytest.mark.usefixtures("log")
FOR_EVER = 3600.0


@pytest.fixture
async def maintenance() -> AsyncGenerator[FakeMaintenance]:
    """A TermServicesRunner with fakes. After the test no task is left."""
    before = asyncio.all_tasks()
    maintenance = FakeMaintenance()
    yield maintenance
    maintenance.open_gates()
    await maintenance.close(0.0)
    await settle()
    assert maintenance.is_clear
    assert asyncio.all_tasks() - before == {asyncio.current_task()}


def failing(count: int) -> list[Plan]:
    """Return this many plans for starts that fail."""
    return [Plan(error=HookError(f"start {number}")) for number in range(1, count + 1)]


def lines_of(log: list[dict[str, object]], event: str) -> list[dict[str, object]]:
    """Return the log lines of one event."""
    return [entry for entry in log if entry["event"] == event]


# -- starting


async def test_p01_three_attempts(maintenance: FakeMaintenance) -> None:
    """A failed start is repeated after 1 s, and once more after 2 s (10 % more or less) (P1)."""
    maintenance.plans = failing(2)
    began = maintenance.timer.seconds_since_boot()
    await maintenance.gain(1)
    await maintenance.timer.advance(FOR_EVER)
    first, second, third = [maintainer.started_at for maintainer in maintenance.made]
    assert first == began
    assert 0.9 <= second - first <= 1.1
    assert 1.8 <= third - second <= 2.2
    assert maintenance.made[2].is_up
    assert maintenance.events[-2:] == [("up", term(1)), ("started", term(1))]
    assert maintenance.resigned == []


async def test_p02_exhausted_resigns_once(
    maintenance: FakeMaintenance, log: list[dict[str, object]]
) -> None:
    """If all attempts fail, exactly this term is resigned, once, and nothing more is started. Each
    error is logged with the number of the attempt and the pause before the next one (P2)."""
    maintenance.plans = failing(3)
    await maintenance.gain(1)
    await maintenance.timer.advance(FOR_EVER)
    assert maintenance.resigned == [term(1)]
    assert await maintenance.starts(1) == 3
    assert maintenance.is_clear
    again = lines_of(log, MAINTENANCE_FAILED)
    assert [(entry["log_level"], entry["attempt"], entry["error"]) for entry in again] == [
        ("error", 1, "HookError: start 1"),
        ("error", 2, "HookError: start 2"),
    ]
    assert all(isinstance(entry["seconds"], float) for entry in again)
    (last,) = lines_of(log, MAINTENANCE_FAILED_TOO_OFTEN)
    assert (last["log_level"], last["attempt"], last["error"]) == ("error", 3, "HookError: start 3")


async def test_outage_is_no_fault(
    maintenance: FakeMaintenance, log: list[dict[str, object]]
) -> None:
    """If a start fails because the database does not answer, a warning without a traceback is
    logged."""
    maintenance.plans = [Plan(error=ConnectionError("the server is gone"))]
    await maintenance.gain(1)
    await maintenance.timer.advance(FOR_EVER)
    (again,) = lines_of(log, MAINTENANCE_FAILED)
    assert (again["log_level"], again["error"]) == ("warning", "the server is gone")
    assert "exc_info" not in again
    maintenance.plans = [Plan(error=ConnectionError("the server is gone"))] * 3
    await maintenance.gain(2)
    await maintenance.timer.advance(FOR_EVER)
    (last,) = lines_of(log, MAINTENANCE_FAILED_TOO_OFTEN)
    assert (last["log_level"], last["error"]) == ("warning", "the server is gone")


async def test_p03_failed_start_can_be_repeated(maintenance: FakeMaintenance) -> None:
    """A failed start has ended completely before the next one. The next one runs and can be ended
    (P3)."""
    maintenance.plans = failing(1)
    await maintenance.gain(1)
    assert maintenance.made[0].is_stopped
    await maintenance.timer.advance(FOR_EVER)
    assert [name for name, _ in maintenance.events] == ["start", "stop", "start", "up", "started"]
    assert maintenance.running == [maintenance.made[1]]
    assert await maintenance.lose()
    assert maintenance.running == []


async def test_p04_no_resign_after_the_end(maintenance: FakeMaintenance) -> None:
    """A last attempt that fails after leadership was lost does not resign the term (P4)."""
    gate = asyncio.Event()
    maintenance.plans = [
        *failing(2),
        Plan(error=HookError("start 3"), gate=gate, ignores_cancellation=True),
    ]
    await maintenance.gain(1)
    await maintenance.timer.advance(5)
    assert await maintenance.starts(1) == 3
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(maintenance.lose)
        await settle()
        gate.set()
    await maintenance.timer.advance(FOR_EVER)
    assert maintenance.made[2].is_stopped
    assert maintenance.resigned == []


async def test_term_that_ended_during_retries(
    maintenance: FakeMaintenance, log: list[dict[str, object]]
) -> None:
    """If the last attempt fails after the term has ended, the log line says that it has no
    effect."""
    maintenance.holds_term = False
    maintenance.plans = failing(3)
    await maintenance.gain(1)
    await maintenance.timer.advance(FOR_EVER)
    (last,) = lines_of(log, MAINTENANCE_FAILED_TOO_OFTEN)
    assert last["effect"] == "none: its term had ended"


async def test_p04_no_resign_at_any_turn(maintenance: FakeMaintenance) -> None:
    """If leadership is lost while the last attempt fails, the term is not resigned after that, at
    any turn of the event loop (P4)."""
    seen: set[bool] = set()
    for number in range(1, 21):
        gate = asyncio.Event()
        maintenance.plans = [*failing(2), Plan(error=HookError("start 3"), gate=gate)]
        await maintenance.gain(number)
        await maintenance.timer.advance(5)
        gate.set()
        for _ in range(number - 1):
            await asyncio.sleep(0)
        is_resigned = term(number) in maintenance.resigned
        assert await maintenance.lose()
        await settle()
        assert (term(number) in maintenance.resigned) == is_resigned
        seen.add(is_resigned)
    assert seen == {False, True}


async def test_p05_responsive_between_attempts(maintenance: FakeMaintenance) -> None:
    """If leadership is lost in the pause after a failed start, the term ends at once, and nothing
    more is started (P5)."""
    maintenance.plans = failing(1)
    await maintenance.gain(1)
    assert await maintenance.lose()
    assert maintenance.is_clear
    await maintenance.timer.advance(FOR_EVER)
    assert await maintenance.starts(1) == 1


# -- stop causes, on services and a maintainer of ours


class Terms:
    """One term of a TermServicesRunner with fake services that count their calls."""

    def __init__(self, make_services: Callable[[TermContext, int], list[FakeService]]) -> None:
        """Create the terms. `make_services` creates the services of the n-th attempt, from 0."""
        self.timer = VirtualTimer()
        self.attempts: list[list[FakeService]] = []
        self.resigned = 0
        self._make_services = make_services
        self.engine = LeaseEngine(
            MemoryLeases(timer=self.timer), holder="me", timing=TIMING, timer=self.timer
        )

    def begin(self) -> LeaseTask:
        """Begin the term."""
        lease = lease_of(term(1), self.timer)
        work = partial(self.run_term, lease)
        task = LeaseTask(lease, self.engine, work, loss_cause=StopCause.LEADERSHIP_LOST)
        task.start("a term")
        return task

    async def run_term(self, lease: Lease, scope: StopScope) -> None:
        """The work of the term."""
        runner = TermServicesRunner(
            lease,
            self._make,
            timer=self.timer,
            on_services_started=lambda: None,
            resign=self._resign,
        )
        await runner.run(scope)

    def _make(self, lease: Lease) -> tuple[TermContext, list[FakeService]]:
        context = context_without_database(self.timer, lease)
        self.attempts.append(self._make_services(context, len(self.attempts)))
        return context, self.attempts[-1]

    def _resign(self, _error: BaseException) -> bool:
        self.resigned += 1
        return True


def two_good(context: TermContext, _attempt: int) -> list[FakeService]:
    """Return two services that start."""
    return [FakeService(context, "first"), FakeService(context, "second")]


async def test_p06_cause_of_demotion() -> None:
    """After a lost leadership every service has the stop cause LEADERSHIP_LOST (P6)."""
    terms = Terms(two_good)
    task = terms.begin()
    await terms.timer.advance(5)
    task.lease.end("another client leads", may_be_held=False)
    await settle()
    assert task.lease_released.is_set()
    assert [service.cause for service in terms.attempts[0]] == [StopCause.LEADERSHIP_LOST] * 2


async def test_p06_cause_of_client_stop() -> None:
    """When the client stops, every service has the stop cause CLIENT_STOP (P6)."""
    terms = Terms(two_good)
    task = terms.begin()
    await terms.timer.advance(5)
    assert await task.stop_and_wait(StopCause.CLIENT_STOP)
    assert [service.cause for service in terms.attempts[0]] == [StopCause.CLIENT_STOP] * 2


async def test_p06_cause_of_cancellation() -> None:
    """When the client is cancelled from outside, every service has the stop cause CLIENT_STOP
    (P6)."""
    terms = Terms(two_good)
    store = FakeStore(terms.timer)
    engine = store.engine("a")
    host = asyncio.create_task(host_election(Election(engine, DEFAULT_DOMAIN, terms.run_term)))
    await terms.timer.advance(3)
    assert [service.passes for service in terms.attempts[0]] == [1, 1]
    host.cancel()
    with pytest.raises(asyncio.CancelledError):
        await host
    assert [service.cause for service in terms.attempts[0]] == [StopCause.CLIENT_STOP] * 2
    assert store.holder is None


# -- terms that meet


@pytest.mark.parametrize("fails", ["start", "end"])
async def test_p07_stale_attempt_stops_nothing(maintenance: FakeMaintenance, fails: str) -> None:
    """If a start or an end of an old term fails late, no service of the newer term is stopped
    (P7)."""
    gate, late = asyncio.Event(), HookError("late")
    if fails == "start":
        maintenance.plans = [Plan(error=late, gate=gate, ignores_cancellation=True)]
    else:
        maintenance.plans = [Plan(end_error=late, end_gate=gate)]
    await maintenance.gain(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(maintenance.lose)
        await maintenance.timer.advance(GRACE)
    await maintenance.gain(2)
    gate.set()
    await maintenance.timer.advance(FOR_EVER)
    assert ("stop", term(1)) in maintenance.events
    assert ("stop", term(2)) not in maintenance.events
    assert [maintainer.term for maintainer in maintenance.running] == [term(2)]
    assert maintenance.running[0].is_up
    assert maintenance.resigned == []


async def test_p08_end_and_begin_at_once(maintenance: FakeMaintenance) -> None:
    """If the next term begins while an old one is ending, the end affects only the old one. The
    next term keeps running and can be ended (P8)."""
    gate = asyncio.Event()
    maintenance.plans = [Plan(end_gate=gate)]
    await maintenance.gain(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(maintenance.lose)
        await settle()
        assert not maintenance.made[0].is_stopped
        await maintenance.gain(2)
        gate.set()
    assert [maintainer.term for maintainer in maintenance.running] == [term(2)]
    assert maintenance.running[0].is_up
    assert await maintenance.lose()
    assert maintenance.running == []


async def test_p13_stop_in_backoff(maintenance: FakeMaintenance) -> None:
    """A client that stops between two attempts stops at once and leaves no task (P13)."""
    before = asyncio.all_tasks()
    maintenance.plans = failing(2)
    await maintenance.gain(1)
    await maintenance.timer.advance(1.5)
    assert await maintenance.starts(1) == 2
    assert asyncio.all_tasks() != before
    with anyio.fail_after(10):
        assert await maintenance.close(GRACE)
    await settle()
    assert asyncio.all_tasks() == before
    assert maintenance.timer.sleepers == 0


async def test_p14_stale_start_masks_nothing(maintenance: FakeMaintenance) -> None:
    """If a term ends before its start has begun, the start never happens. Each later attempt has
    its own maintainer (P14)."""
    maintenance.plans = failing(1)
    maintenance.begin(1)  # its task has not begun
    assert await maintenance.lose()
    await maintenance.gain(2)
    await maintenance.timer.advance(5)
    assert await maintenance.starts(1) == 0
    assert [maintainer.term for maintainer in maintenance.made] == [term(2), term(2)]
    assert len(set(maintenance.made)) == 2
    assert maintenance.running == [maintenance.made[1]]


async def test_p14_stop_at_any_turn(maintenance: FakeMaintenance) -> None:
    """If a term ends at any turn of the event loop, a start that has not begun by then never
    happens (P14)."""
    seen: set[int] = set()
    for number in range(1, 21):
        maintenance.begin(number)
        for _ in range(number - 1):
            await asyncio.sleep(0)
        begun = maintenance.events.count(("start", term(number)))
        assert await maintenance.lose()
        assert await maintenance.starts(number) == begun
        seen.add(begun)
    assert seen == {0, 1}


async def test_p19_hook_that_ignores_cancellation(maintenance: FakeMaintenance) -> None:
    """The end of a term waits for a hook that ignores its cancellation, for at most the grace
    period. Then the next term can begin, and the old one cannot write (P19)."""
    gate = asyncio.Event()
    maintenance.plans = [Plan(gate=gate, ignores_cancellation=True)]
    await maintenance.gain(1)
    outcomes: list[bool] = []

    async def lose() -> None:
        outcomes.append(await maintenance.lose())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lose)
        await maintenance.timer.advance(GRACE * 0.99)
        assert outcomes == []
        await maintenance.timer.advance(GRACE * 0.01)
        assert outcomes == [False]
    assert not maintenance.is_clear
    await maintenance.gain(2)
    assert maintenance.made[1].is_up
    context = context_without_database(maintenance.timer, maintenance.tasks[0].lease)
    with pytest.raises(FencedOutError):
        async with context.fence.transaction(context.connection, "a late write"):
            pytest.fail("it began")
    gate.set()
    await settle()
    assert maintenance.running == [maintenance.made[1]]
    assert await maintenance.lose()
    assert maintenance.is_clear


# -- services


async def test_p11_partial_start_is_rolled_back() -> None:
    """If one service cannot start, the started ones are stopped before the next attempt, which
    starts all of them again (P11)."""

    def third_fails_once(context: TermContext, attempt: int) -> list[FakeService]:
        error = HookError("third") if attempt == 0 else None
        return [*two_good(context, attempt), FakeService(context, "third", start_error=error)]

    terms = Terms(third_fails_once)
    task = terms.begin()
    await settle()
    (first,) = terms.attempts
    assert [service.prepared for service in first] == [1, 1, 0]
    assert [service.is_over for service in first] == [True, True, True]
    await terms.timer.advance(3)
    _, second = terms.attempts
    assert [service.prepared for service in second] == [1, 1, 1]
    assert [service.is_over for service in second] == [False, False, False]
    assert await task.stop_and_wait(StopCause.CLIENT_STOP)


async def test_p22_no_pass_before_all_are_up() -> None:
    """No service makes a pass before all have started, so a failed start repeats no first pass
    (P22)."""
    gate = asyncio.Event()

    def second_fails_once(context: TermContext, attempt: int) -> list[FakeService]:
        error = HookError("second") if attempt == 0 else None
        second = FakeService(context, "second", start_gate=gate, start_error=error)
        return [FakeService(context, "first"), second]

    terms = Terms(second_fails_once)
    task = terms.begin()
    await terms.timer.advance(5)
    (first,) = terms.attempts
    assert [service.prepared for service in first] == [1, 0]
    gate.set()
    await terms.timer.advance(3)
    _, second = terms.attempts
    assert [service.passes for service in first] == [0, 0]
    assert [service.passes for service in second] == [1, 1]
    assert await task.stop_and_wait(StopCause.CLIENT_STOP)


async def test_fault_after_the_start(
    maintenance: FakeMaintenance, log: list[dict[str, object]]
) -> None:
    """If a service fails after the start, the error is logged with its traceback, and all services
    are started again. After three failures in a row the term is resigned (LM-04)."""
    await maintenance.gain(1)
    for attempt in (1, 2):
        maintenance.made[-1].fail()
        await maintenance.timer.advance(5)
        assert await maintenance.starts(1) == attempt + 1
    assert isinstance(lines_of(log, MAINTENANCE_FAILED)[0]["exc_info"], HookError)
    assert maintenance.resigned == []
    maintenance.made[-1].fail()
    await maintenance.timer.advance(FOR_EVER)
    assert maintenance.resigned == [term(1)]
    assert await maintenance.starts(1) == 3


async def test_attempts_are_reset_after_a_minute(maintenance: FakeMaintenance) -> None:
    """Maintenance that ran for a minute has all of its attempts again (LM-04)."""
    await maintenance.gain(1)
    for attempt in range(1, 6):
        await maintenance.timer.advance(65)
        maintenance.made[-1].fail()
        await maintenance.timer.advance(1.1)
        assert await maintenance.starts(1) == attempt + 1
    assert maintenance.resigned == []


async def test_bad_end(maintenance: FakeMaintenance, log: list[dict[str, object]]) -> None:
    """If maintenance fails while it is stopped, the error is logged. It does not count as a failed
    attempt."""
    maintenance.plans = [Plan(end_error=HookError("the end failed"))]
    await maintenance.gain(1)
    assert await maintenance.lose()
    await maintenance.timer.advance(FOR_EVER)
    assert await maintenance.starts(1) == 1
    (entry,) = [entry for entry in log if entry["log_level"] == "error"]
    assert entry["event"] == MAINTENANCE_FAILED_WHILE_STOPPING
    assert isinstance(entry["exc_info"], HookError)


async def test_maker_fails() -> None:
    """An error while the services are created counts as a failed start."""

    def fail(_context: TermContext, _attempt: int) -> list[FakeService]:
        raise HookError("no services")

    terms = Terms(fail)
    task = terms.begin()
    await terms.timer.advance(5)
    assert terms.resigned == 1
    assert task.lease_released.is_set()


async def test_close_waits_for_quarantine(maintenance: FakeMaintenance) -> None:
    """A client that stops waits for the work of an earlier term, for at most the given timeout."""
    gate = asyncio.Event()
    maintenance.plans = [Plan(end_gate=gate)]
    await maintenance.gain(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(maintenance.lose)
        await maintenance.timer.advance(GRACE)
    assert not maintenance.is_clear
    outcomes: list[bool] = []

    async def close() -> None:
        outcomes.append(await maintenance.close(5.0))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(close)
        await maintenance.timer.advance(4.9)
        assert outcomes == []
        gate.set()
    assert outcomes == [True]


# -- with an election


class FakeStore(LeaseStore):
    """River's row of leaders for several clients, in virtual time."""

    def __init__(self, timer: VirtualTimer) -> None:
        self.timer = timer
        self.holder: LeaseAcquireResult | None = None
        self.expires_at = 0.0
        self.fails_to_renew = self.fails_to_resign = False
        self.calls: list[tuple[str, str, float]] = []
        """Each call: what, by which client, when."""
        self._terms = 0

    def engine(self, leader_id: str) -> LeaseEngine:
        """Create the engine of a client."""
        return LeaseEngine(self, holder=leader_id, timing=TIMING, timer=self.timer)

    def times_of(self, verb: str, leader_id: str) -> list[float]:
        """Return the times of a client's calls."""
        return [at for call, client, at in self.calls if (call, client) == (verb, leader_id)]

    async def acquire(
        self, name: str, holder: str, ttl: timedelta, *, timeout: float
    ) -> LeaseAcquireResult | None:
        self._note("acquire", holder)
        await asyncio.sleep(0)
        remaining = self.expires_at - self.timer.seconds_since_boot()
        if self.holder is not None and remaining >= 0:
            return self.holder._replace(is_granted=False, seconds_until_expiry=remaining)
        self._terms += 1
        self.holder = term(self._terms, holder)
        self.expires_at = self.timer.seconds_since_boot() + ttl.total_seconds()
        return self.holder

    async def renew(
        self, holder: str, terms: Iterable[tuple[str, int]], *, timeout: float
    ) -> dict[str, bool]:
        ((name, epoch),) = terms
        self._note("renew", holder)
        await asyncio.sleep(0)
        if self.fails_to_renew:
            raise ConnectionResetError("no answer")
        if not self._is_held(epoch) or self.timer.seconds_since_boot() > self.expires_at:
            return {}
        self.expires_at = self.timer.seconds_since_boot() + TIMING.ttl
        return {name: True}

    async def release(self, name: str, epoch: int, holder: str, *, timeout: float) -> bool:
        self._note("release", holder)
        await asyncio.sleep(0)
        if self.fails_to_resign:
            raise ConnectionResetError("no answer")
        if not self._is_held(epoch):
            return False
        self.holder = None
        return True

    async def fence(self, *_args: Any, **_options: Any) -> bool:
        raise NotImplementedError

    def _is_held(self, epoch: int) -> bool:
        return self.holder is not None and self.holder.epoch == epoch

    def _note(self, call: str, client: str) -> None:
        self.calls.append((call, client, self.timer.seconds_since_boot()))


async def host_election(election: Election) -> None:
    """Take part in an election until cancelled."""
    async with ServiceGroup() as group:
        await group.start(election)
        await anyio.sleep_forever()


class Competition:
    """Clients that compete for one row. They poll, because nothing notifies them."""

    def __init__(self) -> None:
        self.timer = VirtualTimer()
        self.store = FakeStore(self.timer)
        self.elections: dict[str, Election] = {}
        self.maintenance: dict[str, FakeMaintenance] = {}
        self._hosts: dict[str, asyncio.Task[None]] = {}

    async def add(self, leader_id: str, plans: list[Plan] | None = None) -> FakeMaintenance:
        """Start one more client."""
        maintenance = FakeMaintenance(timer=self.timer, plans=plans or [])

        async def run_term(lease: Lease, scope: StopScope) -> None:
            def make(_lease: Lease) -> tuple[TermContext, list[FakeMaintainer]]:
                maintainer = maintenance.make(self.store.holder or term(0))
                return context_without_database(self.timer, lease), [maintainer]

            await TermServicesRunner(
                lease,
                make,
                timer=self.timer,
                on_services_started=election.reset_failed_term_count,
                resign=lambda error: election.resign_after_failure(lease, error),
            ).run(scope)

        election = Election(self.store.engine(leader_id), DEFAULT_DOMAIN, run_term)
        self.maintenance[leader_id], self.elections[leader_id] = maintenance, election
        self._hosts[leader_id] = asyncio.create_task(host_election(election))
        await settle()
        return maintenance

    def lease(self, leader_id: str) -> Lease:
        """The lease of the leader."""
        lease = self.elections[leader_id].lease
        assert lease is not None
        return lease

    async def close(self) -> None:
        """Cancel all clients and wait until they have ended."""
        for maintenance in self.maintenance.values():
            maintenance.open_gates()
        for host in self._hosts.values():
            host.cancel()
        await asyncio.gather(*self._hosts.values(), return_exceptions=True)

    @property
    def leader(self) -> str | None:
        """The id of the leader."""
        return self.store.holder.holder if self.store.holder else None


@pytest.fixture
async def clients() -> AsyncGenerator[Competition]:
    """Clients on virtual time. After the test no task is left."""
    before = asyncio.all_tasks()
    clients = Competition()
    yield clients
    await clients.close()
    await settle()
    assert asyncio.all_tasks() - before == {asyncio.current_task()}


async def test_p10_permanent_failure_does_not_spin(clients: Competition) -> None:
    """A single client whose maintenance always fails tries at growing intervals, up to one minute
    (P10)."""
    maintenance = await clients.add("a", failing(1000))
    await clients.timer.advance(600)
    starts = [maintainer.started_at for maintainer in maintenance.made]
    firsts = [at for n, at in enumerate(starts) if n % 3 == 0]
    gaps = [later - earlier for earlier, later in pairwise(firsts)]
    assert len(maintenance.made) <= 3 * len(firsts)
    assert all(gap >= 2.7 + TIMING.attempt_interval for gap in gaps)
    assert all(later >= earlier - 1 for earlier, later in pairwise(gaps))
    assert 60 <= gaps[-1] <= 65
    assert len(gaps) >= 8


async def test_p12_renewals_end_with_the_maintenance(clients: Competition) -> None:
    """If the resignation does not reach the database, the lease is not renewed any more and another
    client becomes leader at its expiry (P12)."""
    await clients.add("a", failing(1000))
    clients.store.fails_to_resign = True
    await clients.add("b")
    first = clients.store.holder
    await clients.timer.advance(4)
    assert clients.store.times_of("release", "a")
    await clients.timer.advance(TIMING.ttl - 4)
    assert clients.store.holder == first
    await clients.timer.advance(0.1)
    assert clients.store.holder != first
    assert clients.store.times_of("renew", "a") == []


async def test_p17_resignation_is_addressed(clients: Competition) -> None:
    """A failed term is resigned by its epoch. A later term of the same client, or a term of another
    client, does not end (P17)."""
    await clients.add("a")
    first = clients.lease("a")
    first.end("a write was refused", may_be_held=False)  # not released: it expires
    await clients.timer.advance(TIMING.ttl + 1)
    second, held = clients.lease("a"), clients.store.holder
    assert second.epoch != first.epoch
    await clients.add("b")
    times_of = len(clients.store.times_of("release", "a"))
    for election in clients.elections.values():
        assert not election.resign_after_failure(first, LookupError())
    await clients.timer.advance(20)
    assert clients.store.holder == held
    assert len(clients.store.times_of("release", "a")) == times_of
    assert clients.elections["a"].resign_after_failure(second, LookupError())
    await settle()
    assert clients.store.holder is None


async def test_p15_term_begins_once(clients: Competition) -> None:
    """Renewals, notifications and reconnects start no services: a term has one start (P15)."""
    maintenance = await clients.add("a")
    for _ in range(5):
        clients.elections["a"]._engine.wake_all_waiting_callers()
        clients.elections["a"]._engine.wake_callers_after_release(DEFAULT_DOMAIN, "b")
        await clients.timer.advance(TIMING.attempt_interval)
    assert len(clients.store.times_of("renew", "a")) == 5
    assert len(maintenance.made) == 1


async def test_p16_stop_without_a_term(clients: Competition) -> None:
    """A client that was never leader stops without creating or stopping any service (P16)."""
    await clients.add("a")
    maintenance = await clients.add("b")
    await clients.timer.advance(1)
    assert await clients.elections["b"].close(0.0)
    await clients.close()
    assert maintenance.made == []
    assert clients.store.times_of("release", "b") == []


async def test_p18_poll_only(clients: Competition) -> None:
    """A failed term is resigned without a notification (P18)."""
    await clients.add("a", failing(3))
    await clients.timer.advance(3.4)
    assert clients.store.times_of("release", "a")
    assert clients.store.holder is None


async def test_p20_services_end_before_the_deadline(clients: Competition) -> None:
    """If renewals fail, the services are stopped one grace period before the local deadline. The
    lease is released after they have ended (P20)."""
    gate = asyncio.Event()
    clients.store.fails_to_renew = True
    began = clients.timer.seconds_since_boot()
    maintenance = await clients.add("a", [Plan(end_gate=gate)])
    limit = TIMING.validity_seconds - TIMING.grace_seconds
    await clients.timer.advance(limit - 0.01)
    assert maintenance.made[0].cause is None
    await clients.timer.advance(0.01)
    assert maintenance.made[0].cause is StopCause.LEADERSHIP_LOST
    assert clients.timer.seconds_since_boot() - began <= limit + 0.001
    assert clients.store.times_of("release", "a") == []
    await clients.timer.advance(1)
    assert clients.store.times_of("release", "a") == []
    gate.set()
    await settle()
    assert maintenance.made[0].is_stopped
    assert clients.store.times_of("release", "a")


async def test_p20_running_services_keep_the_lease(clients: Competition) -> None:
    """If services do not stop, the lease is not released but expires, and this client does not try
    to acquire it before they have ended (P20)."""
    gate = asyncio.Event()
    maintenance = await clients.add("a", [Plan(end_gate=gate)])
    clients.elections["a"].resign_after_failure(clients.lease("a"), LookupError())
    await clients.timer.advance(120)
    assert clients.store.times_of("release", "a") == []
    assert len(clients.store.times_of("acquire", "a")) == 1
    gate.set()
    await clients.timer.advance(1)
    assert len(clients.store.times_of("acquire", "a")) == 2
    assert [maintainer.term for maintainer in maintenance.running] == [clients.store.holder]


async def test_p19_running_hook_is_logged(
    clients: Competition, log: list[dict[str, object]]
) -> None:
    """Maintenance that ignores its cancellation is logged every 10 s after the grace period, until
    it ends. Its client cannot become leader before that (P19)."""
    gate = asyncio.Event()
    maintenance = await clients.add("a", [Plan(gate=gate, ignores_cancellation=True)])
    clients.lease("a").end("a test says so", may_be_held=False)
    await clients.timer.advance(GRACE + 0.1)
    assert len(lines_of(log, WORK_RAN_PAST_ITS_LEASE)) == 1
    await clients.timer.advance(30)
    assert len(lines_of(log, WORK_RAN_PAST_ITS_LEASE)) == 4
    assert len(clients.store.times_of("acquire", "a")) == 1
    gate.set()
    await clients.timer.advance(1)
    assert len(clients.store.times_of("acquire", "a")) == 2
    await clients.timer.advance(30)
    assert len(lines_of(log, WORK_RAN_PAST_ITS_LEASE)) == 4
    assert maintenance.running == [maintenance.made[1]]


async def test_fault_of_a_term(log: list[dict[str, object]]) -> None:
    """An error outside of the services is logged and ends the term. The client waits before it
    takes part again (P12)."""
    timer = VirtualTimer()
    store = FakeStore(timer)

    async def fail(_lease: Lease, _scope: StopScope) -> None:
        raise HookError("a fault")

    host = asyncio.create_task(host_election(Election(store.engine("a"), DEFAULT_DOMAIN, fail)))
    await timer.advance(TIMING.attempt_interval - 0.1)
    assert len(store.times_of("acquire", "a")) == len(store.times_of("release", "a")) == 1
    assert [entry["log_level"] for entry in lines_of(log, LEADER_TERM_FAILED)] == ["error"]
    await timer.advance(0.2)
    assert len(store.times_of("acquire", "a")) == 2
    host.cancel()
    await asyncio.gather(host, return_exceptions=True)


async def test_p21_exhausted_client_sits_out(clients: Competition) -> None:
    """A client that resigned because its maintenance failed makes no attempt for one interval, so
    another client becomes leader (P21)."""
    await clients.add("a", failing(1000))
    await clients.add("b")
    await clients.timer.advance(3.4)
    (resigned_at,) = clients.store.times_of("release", "a")
    await clients.timer.advance(TIMING.attempt_interval * 1.3)
    assert clients.leader == "b"
    later = [at for at in clients.store.times_of("acquire", "a") if at > resigned_at]
    assert all(at - resigned_at >= TIMING.attempt_interval for at in later)
    await clients.timer.advance(60)
    assert clients.leader == "b"
    assert len(clients.maintenance["b"].made) == 1
