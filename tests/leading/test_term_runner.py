"""Maintenance follows the terms of its process: properties P1 to P22, on virtual time."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy._leading.election import Election
from riverpy._leading.term_runner import TermRunner
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
    FakeService,
    HookError,
    House,
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
    from riverpy._postgres.leases import LeaseAnswer

pytestmark = pytest.mark.usefixtures("log")
FOR_EVER = 3600.0


@pytest.fixture
async def house() -> AsyncGenerator[House]:
    """A TermRunner of fakes, which leaves no task behind."""
    before = asyncio.all_tasks()
    house = House()
    yield house
    house.open_gates()
    await house.close(0.0)
    await settle()
    assert house.is_clear
    assert asyncio.all_tasks() - before == {asyncio.current_task()}


def failing(count: int) -> list[Plan]:
    """So many starts that fail."""
    return [Plan(error=HookError(f"start {number}")) for number in range(1, count + 1)]


def the_log(log: list[dict[str, object]], event: str) -> list[dict[str, object]]:
    """The entries of one event."""
    return [entry for entry in log if entry["event"] == event]


# -- starting


async def test_p01_three_attempts(house: House) -> None:
    """A start that fails is repeated after 1 s, and once more after 2 s (10 % either way) (P1)."""
    house.plans = failing(2)
    began = house.timer.boottime()
    await house.gain(1)
    await house.timer.advance(FOR_EVER)
    first, second, third = [maintainer.started_at for maintainer in house.made]
    assert first == began
    assert 0.9 <= second - first <= 1.1
    assert 1.8 <= third - second <= 2.2
    assert house.made[2].is_up
    assert house.events[-2:] == [("up", term(1)), ("told up", term(1))]
    assert house.resigned == []


async def test_p02_exhausted_resigns_once(house: House, log: list[dict[str, object]]) -> None:
    """When all attempts fail, exactly this term is resigned, once, and nothing is started any more;
    each error is logged with its attempt's number and the delay before the next (P2)."""
    house.plans = failing(3)
    await house.gain(1)
    await house.timer.advance(FOR_EVER)
    assert house.resigned == [term(1)]
    assert await house.starts(1) == 3
    assert house.is_clear
    again = the_log(log, MAINTENANCE_FAILED)
    assert [(entry["log_level"], entry["attempt"], entry["error"]) for entry in again] == [
        ("error", 1, "HookError: start 1"),
        ("error", 2, "HookError: start 2"),
    ]
    assert all(isinstance(entry["seconds"], float) for entry in again)
    (last,) = the_log(log, MAINTENANCE_FAILED_TOO_OFTEN)
    assert (last["log_level"], last["attempt"], last["error"]) == ("error", 3, "HookError: start 3")


async def test_outage_is_no_fault(house: House, log: list[dict[str, object]]) -> None:
    """A start that fails for a database that does not answer is warned of, without a traceback:
    nothing of ours is broken."""
    house.plans = [Plan(error=ConnectionError("the server is gone"))]
    await house.gain(1)
    await house.timer.advance(FOR_EVER)
    (again,) = the_log(log, MAINTENANCE_FAILED)
    assert (again["log_level"], again["error"]) == ("warning", "the server is gone")
    assert "exc_info" not in again
    house.plans = [Plan(error=ConnectionError("the server is gone"))] * 3
    await house.gain(2)
    await house.timer.advance(FOR_EVER)
    (last,) = the_log(log, MAINTENANCE_FAILED_TOO_OFTEN)
    assert (last["log_level"], last["error"]) == ("warning", "the server is gone")


async def test_p03_failed_start_can_be_repeated(house: House) -> None:
    """A start that failed has ended wholly before the next, which truly runs, and which can be
    ended (P3)."""
    house.plans = failing(1)
    await house.gain(1)
    assert house.made[0].is_stopped
    await house.timer.advance(FOR_EVER)
    assert [name for name, _ in house.events] == ["start", "stop", "start", "up", "told up"]
    assert house.running == [house.made[1]]
    assert await house.lose()
    assert house.running == []


async def test_p04_no_resign_after_the_end(house: House) -> None:
    """An attempt that fails for the last time after the leadership was lost resigns nothing
    (P4)."""
    gate = asyncio.Event()
    house.plans = [*failing(2), Plan(error=HookError("start 3"), gate=gate, is_deaf=True)]
    await house.gain(1)
    await house.timer.advance(5)
    assert await house.starts(1) == 3
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(house.lose)
        await settle()
        gate.set()
    await house.timer.advance(FOR_EVER)
    assert house.made[2].is_stopped
    assert house.resigned == []


async def test_term_that_ended_during_retries(house: House, log: list[dict[str, object]]) -> None:
    """Maintenance that fails for the last time after its term has ended says so, and not that its
    client resigns."""
    house.holds_term = False
    house.plans = failing(3)
    await house.gain(1)
    await house.timer.advance(FOR_EVER)
    (last,) = the_log(log, MAINTENANCE_FAILED_TOO_OFTEN)
    assert last["effect"] == "none: its term had ended"


async def test_p04_no_resign_at_any_turn(house: House) -> None:
    """At whichever turn of the loop the leadership is lost while the last attempt fails, what is
    not resigned by then never is (P4)."""
    seen: set[bool] = set()
    for number in range(1, 21):
        gate = asyncio.Event()
        house.plans = [*failing(2), Plan(error=HookError("start 3"), gate=gate)]
        await house.gain(number)
        await house.timer.advance(5)
        gate.set()
        for _ in range(number - 1):
            await asyncio.sleep(0)
        is_resigned = term(number) in house.resigned
        assert await house.lose()
        await settle()
        assert (term(number) in house.resigned) == is_resigned
        seen.add(is_resigned)
    assert seen == {False, True}


async def test_p05_responsive_between_attempts(house: House) -> None:
    """The leadership that is lost in the pause after a failed start is lost at once: time does not
    have to pass, and nothing is started when it does (P5)."""
    house.plans = failing(1)
    await house.gain(1)
    assert await house.lose()
    assert house.is_clear
    await house.timer.advance(FOR_EVER)
    assert await house.starts(1) == 1


# -- stop causes, on services and a maintainer of ours


class Terms:
    """One term of a TermRunner with services that count."""

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
        task = LeaseTask(lease, self.engine, work, lost=StopCause.LEADERSHIP_LOST)
        task.start("a term")
        return task

    async def run_term(self, lease: Lease, scope: StopScope) -> None:
        """The work of the term."""
        runner = TermRunner(
            lease, self._make, timer=self.timer, started=lambda: None, resign=self._resign
        )
        await runner.run(scope)

    def _make(self, lease: Lease) -> tuple[TermContext, list[FakeService]]:
        context = context_without_database(self.timer, lease)
        self.attempts.append(self._make_services(context, len(self.attempts)))
        return context, self.attempts[-1]

    def _resign(self) -> bool:
        self.resigned += 1
        return True


def two_good(context: TermContext, _attempt: int) -> list[FakeService]:
    """Two services that start."""
    return [FakeService(context, "first"), FakeService(context, "second")]


async def test_p06_cause_of_demotion() -> None:
    """A lost leadership reaches every service as its stop cause. (P6)"""
    terms = Terms(two_good)
    task = terms.begin()
    await terms.timer.advance(5)
    task.lease.end("another client leads", may_be_held=False)
    await settle()
    assert task.released.is_set()
    assert [service.cause for service in terms.attempts[0]] == [StopCause.LEADERSHIP_LOST] * 2


async def test_p06_cause_of_client_stop() -> None:
    """A stop of the client reaches every service as its stop cause. (P6)"""
    terms = Terms(two_good)
    task = terms.begin()
    await terms.timer.advance(5)
    assert await task.stop(StopCause.CLIENT_STOP)
    assert [service.cause for service in terms.attempts[0]] == [StopCause.CLIENT_STOP] * 2


async def test_p06_cause_of_cancellation() -> None:
    """When the client is cancelled from outside every service sees a stop cause, too. (P6)"""
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
async def test_p07_stale_attempt_stops_nothing(house: House, fails: str) -> None:
    """An attempt of an old term whose start or end fails late stops nothing of the newer (P7)."""
    gate, late = asyncio.Event(), HookError("late")
    if fails == "start":
        house.plans = [Plan(error=late, gate=gate, is_deaf=True)]
    else:
        house.plans = [Plan(end_error=late, end_gate=gate)]
    await house.gain(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(house.lose)
        await house.timer.advance(GRACE)
    await house.gain(2)
    gate.set()
    await house.timer.advance(FOR_EVER)
    assert ("stop", term(1)) in house.events
    assert ("stop", term(2)) not in house.events
    assert [maintainer.term for maintainer in house.running] == [term(2)]
    assert house.running[0].is_up
    assert house.resigned == []


async def test_p08_end_and_begin_at_once(house: House) -> None:
    """An end that is still waited for when the next term begins stops and forgets only its own: the
    next term goes on, and can be ended (P8)."""
    gate = asyncio.Event()
    house.plans = [Plan(end_gate=gate)]
    await house.gain(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(house.lose)
        await settle()
        assert not house.made[0].is_stopped
        await house.gain(2)
        gate.set()
    assert [maintainer.term for maintainer in house.running] == [term(2)]
    assert house.running[0].is_up
    assert await house.lose()
    assert house.running == []


async def test_p13_stop_in_backoff(house: House) -> None:
    """A client that stops between two attempts ends at once and leaves no task (P13)."""
    before = asyncio.all_tasks()
    house.plans = failing(2)
    await house.gain(1)
    await house.timer.advance(1.5)
    assert await house.starts(1) == 2
    assert asyncio.all_tasks() != before
    with anyio.fail_after(10):
        assert await house.close(GRACE)
    await settle()
    assert asyncio.all_tasks() == before
    assert house.timer.sleepers == 0


async def test_p14_stale_start_masks_nothing(house: House) -> None:
    """A start that was on its way when its term ended never happens, and each later attempt has a
    maintainer of its own (P14)."""
    house.plans = failing(1)
    house.begin(1)  # its task has not begun
    assert await house.lose()
    await house.gain(2)
    await house.timer.advance(5)
    assert await house.starts(1) == 0
    assert [maintainer.term for maintainer in house.made] == [term(2), term(2)]
    assert len(set(house.made)) == 2
    assert house.running == [house.made[1]]


async def test_p14_stop_at_any_turn(house: House) -> None:
    """At whichever turn of the loop a term ends, what has not begun by then never does (P14)."""
    seen: set[int] = set()
    for number in range(1, 21):
        house.begin(number)
        for _ in range(number - 1):
            await asyncio.sleep(0)
        begun = house.events.count(("start", term(number)))
        assert await house.lose()
        assert await house.starts(number) == begun
        seen.add(begun)
    assert seen == {0, 1}


async def test_p19_deaf_hook(house: House) -> None:
    """A hook that ignores its cancellation is waited for no longer than the grace. The next term
    begins meanwhile, and the old one can write nothing. (P19)"""
    gate = asyncio.Event()
    house.plans = [Plan(gate=gate, is_deaf=True)]
    await house.gain(1)
    outcomes: list[bool] = []

    async def lose() -> None:
        outcomes.append(await house.lose())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lose)
        await house.timer.advance(GRACE * 0.99)
        assert outcomes == []
        await house.timer.advance(GRACE * 0.01)
        assert outcomes == [False]
    assert not house.is_clear
    await house.gain(2)
    assert house.made[1].is_up
    context = context_without_database(house.timer, house.tasks[0].lease)
    with pytest.raises(FencedOutError):
        async with context.fence.transaction(context.connection, "a late write"):
            pytest.fail("it began")
    gate.set()
    await settle()
    assert house.running == [house.made[1]]
    assert await house.lose()
    assert house.is_clear


# -- the whole maintainer


async def test_p11_partial_start_is_rolled_back() -> None:
    """When one service cannot start, those that could are ended before the next attempt, which
    starts all anew (P11)."""

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
    assert await task.stop(StopCause.CLIENT_STOP)


async def test_p22_no_pass_before_all_are_up() -> None:
    """No service makes a pass before all have started, so a start that fails repeats no first pass
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
    assert await task.stop(StopCause.CLIENT_STOP)


async def test_fault_after_the_start(house: House, log: list[dict[str, object]]) -> None:
    """A service that fails after the start is logged with its traceback and started anew with all
    others; failing so three times in a row gives the term up (LM-04)."""
    await house.gain(1)
    for attempt in (1, 2):
        house.made[-1].fail()
        await house.timer.advance(5)
        assert await house.starts(1) == attempt + 1
    assert isinstance(the_log(log, MAINTENANCE_FAILED)[0]["exc_info"], HookError)
    assert house.resigned == []
    house.made[-1].fail()
    await house.timer.advance(FOR_EVER)
    assert house.resigned == [term(1)]
    assert await house.starts(1) == 3


async def test_steady_maintenance_is_forgiven(house: House) -> None:
    """Maintenance that was up for a minute has all its attempts again (LM-04)."""
    await house.gain(1)
    for attempt in range(1, 6):
        await house.timer.advance(65)
        house.made[-1].fail()
        await house.timer.advance(1.1)
        assert await house.starts(1) == attempt + 1
    assert house.resigned == []


async def test_bad_end(house: House, log: list[dict[str, object]]) -> None:
    """Maintenance that fails while it is stopped has ended: that is logged, and is no failed
    attempt."""
    house.plans = [Plan(end_error=HookError("the end failed"))]
    await house.gain(1)
    assert await house.lose()
    await house.timer.advance(FOR_EVER)
    assert await house.starts(1) == 1
    (entry,) = [entry for entry in log if entry["log_level"] == "error"]
    assert entry["event"] == MAINTENANCE_FAILED_WHILE_STOPPING
    assert isinstance(entry["exc_info"], HookError)


async def test_maker_fails() -> None:
    """Services that cannot be made count as ones that cannot start."""

    def fail(_context: TermContext, _attempt: int) -> list[FakeService]:
        raise HookError("no services")

    terms = Terms(fail)
    task = terms.begin()
    await terms.timer.advance(5)
    assert terms.resigned == 1
    assert task.released.is_set()


async def test_close_waits_for_quarantine(house: House) -> None:
    """A client that stops waits for what an earlier term left, for as long as it is told."""
    gate = asyncio.Event()
    house.plans = [Plan(end_gate=gate)]
    await house.gain(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(house.lose)
        await house.timer.advance(GRACE)
    assert not house.is_clear
    outcomes: list[bool] = []

    async def close() -> None:
        outcomes.append(await house.close(5.0))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(close)
        await house.timer.advance(4.9)
        assert outcomes == []
        gate.set()
    assert outcomes == [True]


# -- with an elector


class FakeStore(LeaseStore):
    """The row of leaders, in virtual time, for several clients."""

    def __init__(self, timer: VirtualTimer) -> None:
        self.timer = timer
        self.holder: LeaseAnswer | None = None
        self.expires_at = 0.0
        self.fails_to_renew = self.fails_to_resign = False
        self.calls: list[tuple[str, str, float]] = []
        """What was asked, by which client, when."""
        self._terms = 0

    def engine(self, leader_id: str) -> LeaseEngine:
        """The engine of a client."""
        return LeaseEngine(self, holder=leader_id, timing=TIMING, timer=self.timer)

    def asked(self, verb: str, leader_id: str) -> list[float]:
        """When a client asked something."""
        return [at for what, who, at in self.calls if (what, who) == (verb, leader_id)]

    async def acquire(
        self, name: str, holder: str, ttl: timedelta, *, timeout: float
    ) -> LeaseAnswer | None:
        self._note("acquire", holder)
        await asyncio.sleep(0)
        remaining = self.expires_at - self.timer.boottime()
        if self.holder is not None and remaining >= 0:
            return self.holder._replace(is_granted=False, remaining=remaining)
        self._terms += 1
        self.holder = term(self._terms, holder)
        self.expires_at = self.timer.boottime() + ttl.total_seconds()
        return self.holder

    async def renew(
        self, holder: str, terms: Iterable[tuple[str, int]], *, timeout: float
    ) -> dict[str, bool]:
        ((name, epoch),) = terms
        self._note("renew", holder)
        await asyncio.sleep(0)
        if self.fails_to_renew:
            raise ConnectionResetError("no answer")
        if not self._is_held(epoch) or self.timer.boottime() > self.expires_at:
            return {}
        self.expires_at = self.timer.boottime() + TIMING.ttl
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

    def _note(self, what: str, who: str) -> None:
        self.calls.append((what, who, self.timer.boottime()))


async def host_election(election: Election) -> None:
    """Take part in an election until cancelled."""
    async with ServiceGroup() as group:
        await group.start(election)
        await anyio.sleep_forever()


class Town:
    """Clients that compete for one row, with a house each. None is notified: each polls."""

    def __init__(self) -> None:
        self.timer = VirtualTimer()
        self.store = FakeStore(self.timer)
        self.elections: dict[str, Election] = {}
        self.houses: dict[str, House] = {}
        self._hosts: dict[str, asyncio.Task[None]] = {}

    async def add(self, leader_id: str, plans: list[Plan] | None = None) -> House:
        """One more client, which begins at once."""
        house = House(timer=self.timer, plans=plans or [])

        async def run_term(lease: Lease, scope: StopScope) -> None:
            def make(_lease: Lease) -> tuple[TermContext, list[FakeMaintainer]]:
                maintainer = house.make(self.store.holder or term(0))
                return context_without_database(self.timer, lease), [maintainer]

            await TermRunner(
                lease,
                make,
                timer=self.timer,
                started=election.maintenance_started,
                resign=lambda: election.maintenance_failed(lease),
            ).run(scope)

        election = Election(self.store.engine(leader_id), DEFAULT_DOMAIN, run_term)
        self.houses[leader_id], self.elections[leader_id] = house, election
        self._hosts[leader_id] = asyncio.create_task(host_election(election))
        await settle()
        return house

    def lease(self, leader_id: str) -> Lease:
        """The lease of the leader."""
        lease = self.elections[leader_id].lease
        assert lease is not None
        return lease

    async def close(self) -> None:
        """Cancel them all, and let them end."""
        for house in self.houses.values():
            house.open_gates()
        for host in self._hosts.values():
            host.cancel()
        await asyncio.gather(*self._hosts.values(), return_exceptions=True)

    @property
    def leader(self) -> str | None:
        """Whose the row is."""
        return self.store.holder.holder if self.store.holder else None


@pytest.fixture
async def town() -> AsyncGenerator[Town]:
    """Clients on virtual time, which leave no task behind."""
    before = asyncio.all_tasks()
    town = Town()
    yield town
    await town.close()
    await settle()
    assert asyncio.all_tasks() - before == {asyncio.current_task()}


async def test_p10_permanent_failure_does_not_spin(town: Town) -> None:
    """A client alone whose maintenance always fails tries ever more rarely, at most once a minute
    in the end (P10)."""
    house = await town.add("a", failing(1000))
    await town.timer.advance(600)
    starts = [maintainer.started_at for maintainer in house.made]
    firsts = [at for n, at in enumerate(starts) if n % 3 == 0]
    gaps = [later - earlier for earlier, later in pairwise(firsts)]
    assert len(house.made) <= 3 * len(firsts)
    assert all(gap >= 2.7 + TIMING.interval for gap in gaps)
    assert all(later >= earlier - 1 for earlier, later in pairwise(gaps))
    assert 60 <= gaps[-1] <= 65
    assert len(gaps) >= 8


async def test_p12_renewals_end_with_the_maintenance(town: Town) -> None:
    """When the resignation does not reach the database the lease lapses: it is not renewed any
    more, and passes on at its expiry (P12)."""
    await town.add("a", failing(1000))
    town.store.fails_to_resign = True
    await town.add("b")
    first = town.store.holder
    await town.timer.advance(4)
    assert town.store.asked("release", "a")
    await town.timer.advance(TIMING.ttl - 4)
    assert town.store.holder == first
    await town.timer.advance(0.1)
    assert town.store.holder != first
    assert town.store.asked("renew", "a") == []


async def test_p17_resignation_is_addressed(town: Town) -> None:
    """An exhausted term is resigned by its epoch: neither a later term of the same client nor that
    of another ends. (P17)"""
    await town.add("a")
    first = town.lease("a")
    first.end("a write was refused", may_be_held=False)  # not released: it expires
    await town.timer.advance(TIMING.ttl + 1)
    second, held = town.lease("a"), town.store.holder
    assert second.epoch != first.epoch
    await town.add("b")
    asked = len(town.store.asked("release", "a"))
    for election in town.elections.values():
        assert not election.maintenance_failed(first)
    await town.timer.advance(20)
    assert town.store.holder == held
    assert len(town.store.asked("release", "a")) == asked
    assert town.elections["a"].maintenance_failed(second)
    await settle()
    assert town.store.holder is None


async def test_p15_term_begins_once(town: Town) -> None:
    """Renewals, notifications and reconnects begin nothing: a term has one start. (P15)"""
    house = await town.add("a")
    for _ in range(5):
        town.elections["a"]._engine.wake_all()
        town.elections["a"]._engine.lease_released(DEFAULT_DOMAIN, "b")
        await town.timer.advance(TIMING.interval)
    assert len(town.store.asked("renew", "a")) == 5
    assert len(house.made) == 1


async def test_p16_stop_without_a_term(town: Town) -> None:
    """A client that never led stops without having made or stopped any service. (P16)"""
    await town.add("a")
    house = await town.add("b")
    await town.timer.advance(1)
    assert await town.elections["b"].close(0.0)
    await town.close()
    assert house.made == []
    assert town.store.asked("release", "b") == []


async def test_p18_poll_only(town: Town) -> None:
    """An exhausted term is given up without a notification (P18)."""
    await town.add("a", failing(3))
    await town.timer.advance(3.4)
    assert town.store.asked("release", "a")
    assert town.store.holder is None


async def test_p20_services_end_in_trust(town: Town) -> None:
    """When renewals fail the services are stopped a grace before the trust ends, and the lease is
    resigned only after they are gone (P20)."""
    gate = asyncio.Event()
    town.store.fails_to_renew = True
    began = town.timer.boottime()
    house = await town.add("a", [Plan(end_gate=gate)])
    limit = TIMING.validity - TIMING.grace
    await town.timer.advance(limit - 0.01)
    assert house.made[0].cause is None
    await town.timer.advance(0.01)
    assert house.made[0].cause is StopCause.LEADERSHIP_LOST
    assert town.timer.boottime() - began <= limit + 0.001
    assert town.store.asked("release", "a") == []
    await town.timer.advance(1)
    assert town.store.asked("release", "a") == []
    gate.set()
    await settle()
    assert house.made[0].is_stopped
    assert town.store.asked("release", "a")


async def test_p20_what_goes_on_keeps_the_lease(town: Town) -> None:
    """A lease whose services do not end is not released but lapses, and this client does not bid
    before they have ended (P20)."""
    gate = asyncio.Event()
    house = await town.add("a", [Plan(end_gate=gate)])
    town.elections["a"].maintenance_failed(town.lease("a"))
    await town.timer.advance(120)
    assert town.store.asked("release", "a") == []
    assert len(town.store.asked("acquire", "a")) == 1
    gate.set()
    await town.timer.advance(1)
    assert len(town.store.asked("acquire", "a")) == 2
    assert [maintainer.term for maintainer in house.running] == [town.store.holder]


async def test_p19_deaf_hook_is_reported(town: Town, log: list[dict[str, object]]) -> None:
    """Maintenance that ignores its cancellation is logged every 10 s until it ends, after the
    grace, and its client does not lead before. (P19)"""
    gate = asyncio.Event()
    house = await town.add("a", [Plan(gate=gate, is_deaf=True)])
    town.lease("a").end("a test says so", may_be_held=False)
    await town.timer.advance(GRACE + 0.1)
    assert len(the_log(log, WORK_RAN_PAST_ITS_LEASE)) == 1
    await town.timer.advance(30)
    assert len(the_log(log, WORK_RAN_PAST_ITS_LEASE)) == 4
    assert len(town.store.asked("acquire", "a")) == 1
    gate.set()
    await town.timer.advance(1)
    assert len(town.store.asked("acquire", "a")) == 2
    await town.timer.advance(30)
    assert len(the_log(log, WORK_RAN_PAST_ITS_LEASE)) == 4
    assert house.running == [house.made[1]]


async def test_fault_of_a_term(log: list[dict[str, object]]) -> None:
    """A fault outside of the services is logged, and ends the term; the client waits before it
    takes part again. (P12)"""
    timer = VirtualTimer()
    store = FakeStore(timer)

    async def fail(_lease: Lease, _scope: StopScope) -> None:
        raise HookError("a fault")

    host = asyncio.create_task(host_election(Election(store.engine("a"), DEFAULT_DOMAIN, fail)))
    await timer.advance(TIMING.interval - 0.1)
    assert len(store.asked("acquire", "a")) == len(store.asked("release", "a")) == 1
    assert [entry["log_level"] for entry in the_log(log, LEADER_TERM_FAILED)] == ["error"]
    await timer.advance(0.2)
    assert len(store.asked("acquire", "a")) == 2
    host.cancel()
    await asyncio.gather(host, return_exceptions=True)


async def test_p21_exhausted_client_sits_out(town: Town) -> None:
    """A client whose maintenance is exhausted does not bid for an interval, so that another leads
    (P21)."""
    await town.add("a", failing(1000))
    await town.add("b")
    await town.timer.advance(3.4)
    (resigned_at,) = town.store.asked("release", "a")
    await town.timer.advance(TIMING.interval * 1.3)
    assert town.leader == "b"
    later = [at for at in town.store.asked("acquire", "a") if at > resigned_at]
    assert all(at - resigned_at >= TIMING.interval for at in later)
    await town.timer.advance(60)
    assert town.leader == "b"
    assert len(town.houses["b"].made) == 1
