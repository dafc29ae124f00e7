"""Maintenance follows the terms of its process: properties P1 to P22, on virtual time."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING

import anyio
import pytest

from riverpy._leading.elector import Elector
from riverpy._leading.term_runner import TermRunner
from riverpy._leases.validity import LeaseValidity
from riverpy._lifecycle import ServiceGroup, StopCause
from riverpy._log_events import (
    MAINTENANCE_FAILED,
    MAINTENANCE_FAILED_TOO_OFTEN,
    MAINTENANCE_FAILED_WHILE_STOPPING,
    MAINTENANCE_RAN_PAST_ITS_TERM,
    RESIGNATION_FAILED,
)
from riverpy._maintenance.term_services import Maintainer
from riverpy._postgres.leaders import Bid
from riverpy.errors import FencedOutError
from tests._time import VirtualTimer, settle
from tests.maintenance.fakes import (
    GRACE,
    TIMING,
    FakeService,
    HookError,
    House,
    Plan,
    context_without_database,
    term,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from datetime import timedelta

    from riverpy._leases.validity import Term
    from riverpy._maintenance.base import TermContext

pytestmark = pytest.mark.usefixtures("log")
FOR_EVER = 3600.0


@pytest.fixture
async def house() -> AsyncGenerator[House]:
    """A TermRunner of fakes, which leaves no task behind."""
    before = asyncio.all_tasks()
    house = House()
    yield house
    house.open_gates()
    await house.leader.close(0.0)
    await settle()
    assert house.leader.is_clear
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
    assert house.leader.is_clear
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
    assert house.leader.is_clear
    await house.timer.advance(FOR_EVER)
    assert await house.starts(1) == 1


# -- stop causes, on services and a maintainer of ours


class Terms:
    """A TermRunner whose maintainers are real, with services that count."""

    def __init__(self, make_services: Callable[[TermContext, int], list[FakeService]]) -> None:
        """Make it. `make_services` makes those of the n-th attempt, from 0."""
        self.timer = VirtualTimer()
        self.attempts: list[list[FakeService]] = []
        self._make_services = make_services
        self.leader = TermRunner(self._make, grace=GRACE, timer=self.timer)

    def _make(self, term: Term) -> Maintainer:
        context, _ = context_without_database(self.timer, term)
        self.attempts.append(self._make_services(context, len(self.attempts)))
        return Maintainer(context, self.attempts[-1])


def two_good(context: TermContext, _attempt: int) -> list[FakeService]:
    """Two services that start."""
    return [FakeService(context, "first"), FakeService(context, "second")]


async def test_p06_cause_of_demotion() -> None:
    """A lost leadership reaches every service as its stop cause (P6)."""
    terms = Terms(two_good)
    terms.leader.begin(term(1))
    await terms.timer.advance(5)
    assert await terms.leader.end(StopCause.LEADERSHIP_LOST)
    assert [service.cause for service in terms.attempts[0]] == [StopCause.LEADERSHIP_LOST] * 2


async def test_p06_cause_of_client_stop() -> None:
    """A stop of the client reaches every service as its stop cause, also without an elector that
    ends the term (P6)."""
    terms = Terms(two_good)
    terms.leader.begin(term(1))
    await terms.timer.advance(5)
    assert await terms.leader.close(GRACE)
    assert [service.cause for service in terms.attempts[0]] == [StopCause.CLIENT_STOP] * 2


async def test_p06_cause_of_cancellation() -> None:
    """When the client is cancelled from outside every service sees a stop cause, too (P6)."""
    terms = Terms(two_good)
    store = FakeStore(terms.timer)
    elector = store.elector("a", terms.leader)
    host = asyncio.create_task(host_elector(elector))
    await terms.timer.advance(3)
    assert [service.passes for service in terms.attempts[0]] == [1, 1]
    host.cancel()
    with pytest.raises(asyncio.CancelledError):
        await host
    assert [service.cause for service in terms.attempts[0]] == [StopCause.CLIENT_STOP] * 2
    assert store.holder is None
    assert terms.leader.is_clear


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


async def test_p12_failing_resigner(house: House, log: list[dict[str, object]]) -> None:
    """A resignation that fails is logged and ends nothing: later terms begin as ever (P12)."""
    house.plans = failing(3)
    house.resign_error = HookError("the resigner failed")
    await house.gain(1)
    await house.timer.advance(FOR_EVER)
    assert house.resigned == [term(1)]
    assert len(the_log(log, RESIGNATION_FAILED)) == 1
    await house.gain(2)
    assert house.running[0].term == term(2)


async def test_p13_stop_in_backoff(house: House) -> None:
    """A client that stops between two attempts ends at once and leaves no task (P13)."""
    before = asyncio.all_tasks()
    house.plans = failing(2)
    await house.gain(1)
    await house.timer.advance(1.5)
    assert await house.starts(1) == 2
    assert asyncio.all_tasks() != before
    with anyio.fail_after(10):
        assert await house.leader.close(GRACE)
    await settle()
    assert asyncio.all_tasks() == before
    assert house.timer.sleepers == 0


async def test_p14_stale_start_masks_nothing(house: House) -> None:
    """A start that was on its way when its term ended never happens, and each later attempt has a
    maintainer of its own (P14)."""
    house.plans = failing(1)
    house.leader.begin(term(1))  # its task has not begun
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
        house.leader.begin(term(number))
        for _ in range(number - 1):
            await asyncio.sleep(0)
        begun = house.events.count(("start", term(number)))
        assert await house.lose()
        assert await house.starts(number) == begun
        seen.add(begun)
    assert seen == {0, 1}


async def test_p15_same_term_begins_once(house: House) -> None:
    """A term that is announced again begins nothing: neither while it runs nor after its end
    (P15)."""
    house.leader.begin(term(1))
    house.leader.begin(term(1))
    assert await house.starts(1) == 1
    await house.gain(1)
    assert await house.starts(1) == 1
    assert await house.lose()
    assert house.running == []
    await house.gain(1)
    assert await house.starts(1) == 1


async def test_p16_end_without_begin(house: House) -> None:
    """The end of a term that never began is none: nothing is made, stopped or waited for (P16)."""
    assert await house.lose()
    assert house.leader.is_clear
    await house.leader.wait_clear()
    assert house.events == []
    assert house.timer.sleepers == 0


async def test_p19_deaf_hook(house: House, log: list[dict[str, object]]) -> None:
    """A hook that ignores its cancellation is waited for no longer than the grace. It is reported
    every 10 s until it ends, the next term begins meanwhile, and the old one can write nothing
    (P19)."""
    gate = asyncio.Event()
    house.plans = [Plan(gate=gate, is_deaf=True)]
    context, trust = context_without_database(house.timer, term(1))
    await house.gain(1)
    outcomes: list[bool] = []

    async def lose() -> None:
        trust.ended()
        outcomes.append(await house.lose())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lose)
        await house.timer.advance(GRACE * 0.99)
        assert outcomes == []
        await house.timer.advance(GRACE * 0.01)
        assert outcomes == [False]
    assert not house.leader.is_clear
    await house.gain(2)
    assert house.made[1].is_up
    with pytest.raises(FencedOutError):
        async with context.fence.transaction(context.connection, "a late write"):
            pytest.fail("it began")
    assert len(the_log(log, MAINTENANCE_RAN_PAST_ITS_TERM)) == 1
    await house.timer.advance(30)
    assert len(the_log(log, MAINTENANCE_RAN_PAST_ITS_TERM)) == 4
    gate.set()
    await house.timer.advance(30)
    assert len(the_log(log, MAINTENANCE_RAN_PAST_ITS_TERM)) == 4
    assert house.running == [house.made[1]]
    assert await house.lose()
    assert house.leader.is_clear


# -- the whole maintainer


async def test_p11_partial_start_is_rolled_back() -> None:
    """When one service cannot start, those that could are ended before the next attempt, which
    starts all anew (P11)."""

    def third_fails_once(context: TermContext, attempt: int) -> list[FakeService]:
        error = HookError("third") if attempt == 0 else None
        return [*two_good(context, attempt), FakeService(context, "third", start_error=error)]

    terms = Terms(third_fails_once)
    terms.leader.begin(term(1))
    await settle()
    (first,) = terms.attempts
    assert [service.prepared for service in first] == [1, 1, 0]
    assert [service.is_over for service in first] == [True, True, True]
    await terms.timer.advance(3)
    _, second = terms.attempts
    assert [service.prepared for service in second] == [1, 1, 1]
    assert [service.is_over for service in second] == [False, False, False]
    assert await terms.leader.end(StopCause.CLIENT_STOP)


async def test_p22_no_pass_before_all_are_up() -> None:
    """No service makes a pass before all have started, so a start that fails repeats no first pass
    (P22)."""
    gate = asyncio.Event()

    def second_fails_once(context: TermContext, attempt: int) -> list[FakeService]:
        error = HookError("second") if attempt == 0 else None
        second = FakeService(context, "second", start_gate=gate, start_error=error)
        return [FakeService(context, "first"), second]

    terms = Terms(second_fails_once)
    terms.leader.begin(term(1))
    await terms.timer.advance(5)
    (first,) = terms.attempts
    assert [service.prepared for service in first] == [1, 0]
    gate.set()
    await terms.timer.advance(3)
    _, second = terms.attempts
    assert [service.passes for service in first] == [0, 0]
    assert [service.passes for service in second] == [1, 1]
    assert await terms.leader.end(StopCause.CLIENT_STOP)


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


async def test_maker_fails(house: House) -> None:
    """A maintainer that cannot be made counts as one that cannot start."""

    def fail(_term: Term) -> Maintainer:
        raise HookError("no maintainer")

    leader = TermRunner(fail, grace=GRACE, timer=house.timer)
    resigned: list[Term] = []
    leader.resign = resigned.append
    leader.begin(term(1))
    await house.timer.advance(5)
    assert resigned == [term(1)]
    assert leader.is_clear


async def test_cancelled_end_is_repeated(house: House) -> None:
    """An end that was cancelled while it waited has stopped the term, and the next one waits for
    it."""
    gate = asyncio.Event()
    house.plans = [Plan(end_gate=gate)]
    await house.gain(1)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(house.lose)
            await settle()
            scope.cancel()
    outcomes: list[bool] = []

    async def lose() -> None:
        outcomes.append(await house.lose())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lose)
        await settle()
        assert outcomes == []
        gate.set()
    assert outcomes == [True]


async def test_close_waits_for_quarantine(house: House) -> None:
    """A client that stops waits for what an earlier term left, for as long as it is told."""
    gate = asyncio.Event()
    house.plans = [Plan(end_gate=gate)]
    await house.gain(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(house.lose)
        await house.timer.advance(GRACE)
    assert not await house.leader.close(0.0)
    outcomes: list[bool] = []

    async def close() -> None:
        outcomes.append(await house.leader.close(5.0))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(close)
        await house.timer.advance(4.9)
        assert outcomes == []
        gate.set()
    assert outcomes == [True]


# -- with an elector


class FakeStore:
    """The row of leaders, in virtual time, for several electors."""

    def __init__(self, timer: VirtualTimer) -> None:
        self.timer = timer
        self.holder: Term | None = None
        self.expires_at = 0.0
        self.fails_to_renew = self.fails_to_resign = False
        self.calls: list[tuple[str, str, float]] = []
        """What was asked, by whom, when."""
        self._terms = 0

    def elector(self, leader_id: str, leader: TermRunner) -> Elector:
        """An elector of this row, which keeps a TermRunner."""
        trust = LeaseValidity(TIMING, self.timer)
        elector = Elector(
            leader_id=leader_id, trust=trust, store=self, services=leader, timer=self.timer
        )
        leader.resign, leader.is_up = elector.resign, elector.term_is_up
        return elector

    def asked(self, verb: str, leader_id: str) -> list[float]:
        """When somebody asked something."""
        return [at for what, who, at in self.calls if (what, who) == (verb, leader_id)]

    async def elect(self, leader_id: str, ttl: timedelta, bound: float) -> Bid | None:
        self._note("elect", leader_id)
        await asyncio.sleep(0)
        remaining = self.expires_at - self.timer.boottime()
        if self.holder is not None and remaining >= 0:
            return Bid(False, self.holder.leader_id, self.holder.elected_at, remaining)
        self._terms += 1
        self.holder = term(self._terms, leader_id)
        self.expires_at = self.timer.boottime() + ttl.total_seconds()
        return Bid(True, leader_id, self.holder.elected_at, None)

    async def renew(self, term: Term, ttl: timedelta, bound: float) -> bool:
        self._note("renew", term.leader_id)
        await asyncio.sleep(0)
        if self.fails_to_renew:
            raise ConnectionResetError("no answer")
        if self.holder != term or self.timer.boottime() > self.expires_at:
            return False
        self.expires_at = self.timer.boottime() + ttl.total_seconds()
        return True

    async def resign(self, term: Term, bound: float) -> bool:
        self._note("resign", term.leader_id)
        await asyncio.sleep(0)
        if self.fails_to_resign:
            raise ConnectionResetError("no answer")
        if self.holder != term:
            return False
        self.holder = None
        return True

    def _note(self, what: str, who: str) -> None:
        self.calls.append((what, who, self.timer.boottime()))


async def host_elector(elector: Elector) -> None:
    """Run an elector until cancelled."""
    async with ServiceGroup() as group:
        await group.start(elector)
        await anyio.sleep_forever()


class Town:
    """Electors of one row with a house each. No elector hears another: each polls."""

    def __init__(self) -> None:
        self.timer = VirtualTimer()
        self.store = FakeStore(self.timer)
        self.electors: dict[str, Elector] = {}
        self.houses: dict[str, House] = {}
        self._hosts: dict[str, asyncio.Task[None]] = {}

    async def add(self, leader_id: str, plans: list[Plan] | None = None) -> House:
        """One more client, which begins at once."""
        house = House(timer=self.timer, plans=plans or [])
        elector = self.store.elector(leader_id, house.leader)
        self.houses[leader_id], self.electors[leader_id] = house, elector
        self._hosts[leader_id] = asyncio.create_task(host_elector(elector))
        await settle()
        return house

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
        return self.store.holder.leader_id if self.store.holder else None


@pytest.fixture
async def town() -> AsyncGenerator[Town]:
    """Electors on virtual time, which leave no task behind."""
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
    assert town.store.asked("resign", "a")
    await town.timer.advance(TIMING.ttl - 4)
    assert town.store.holder == first
    await town.timer.advance(0.1)
    assert town.store.holder != first
    assert town.store.asked("renew", "a") == []


async def test_p17_resignation_is_addressed(town: Town) -> None:
    """An exhausted term is resigned by its name: neither a later term of the same client nor that
    of another hears it (P17)."""
    await town.add("a")
    first = town.store.holder
    assert first is not None
    town.electors["a"].fenced_out(first)  # not resigned: it lapses
    await town.timer.advance(TIMING.ttl + 1)
    second = town.store.holder
    assert second is not None
    assert second != first
    await town.add("b")
    asked = len(town.store.asked("resign", "a"))
    for elector in town.electors.values():
        elector.resign(first)
    await town.timer.advance(20)
    assert town.store.holder == second
    assert len(town.store.asked("resign", "a")) == asked
    town.electors["b"].resign(second)  # another's is not its own to give up
    await town.timer.advance(20)
    assert town.store.holder == second
    town.electors["a"].resign(second)
    await settle()
    assert town.store.holder is None


async def test_p18_poll_only(town: Town) -> None:
    """An exhausted term is given up without a notification (P18)."""
    await town.add("a", failing(3))
    await town.timer.advance(3.4)
    assert town.store.asked("resign", "a")
    assert town.store.holder is None


async def test_p20_services_end_in_trust(town: Town) -> None:
    """When renewals fail the services are stopped a grace before the trust ends, and the lease is
    resigned only after they are gone (P20)."""
    gate = asyncio.Event()
    town.store.fails_to_renew = True
    began = town.timer.boottime()
    house = await town.add("a", [Plan(end_gate=gate)])
    limit = TIMING.trust - TIMING.grace
    await town.timer.advance(limit - 0.01)
    assert house.made[0].cause is None
    await town.timer.advance(0.01)
    assert house.made[0].cause is StopCause.LEADERSHIP_LOST
    assert town.timer.boottime() - began <= limit + 0.001
    assert town.store.asked("resign", "a") == []
    await town.timer.advance(1)
    assert town.store.asked("resign", "a") == []
    gate.set()
    await settle()
    assert house.made[0].is_stopped
    assert town.store.asked("resign", "a")


async def test_p20_what_goes_on_keeps_the_lease(town: Town) -> None:
    """A lease whose services do not end is not released but lapses, and this client does not bid
    before they have ended (P20)."""
    gate = asyncio.Event()
    house = await town.add("a", [Plan(end_gate=gate)])
    held = town.store.holder
    assert held is not None
    town.electors["a"].resign(held)
    await town.timer.advance(120)
    assert town.store.asked("resign", "a") == []
    assert len(town.store.asked("elect", "a")) == 1
    gate.set()
    await town.timer.advance(1)
    assert len(town.store.asked("elect", "a")) == 2
    assert [maintainer.term for maintainer in house.running] == [town.store.holder]


async def test_p21_exhausted_client_sits_out(town: Town) -> None:
    """A client whose maintenance is exhausted does not bid for an interval, so that another leads
    (P21)."""
    await town.add("a", failing(1000))
    await town.add("b")
    await town.timer.advance(3.4)
    (resigned_at,) = town.store.asked("resign", "a")
    await town.timer.advance(TIMING.interval * 1.3)
    assert town.leader == "b"
    later = [at for at in town.store.asked("elect", "a") if at > resigned_at]
    assert all(at - resigned_at >= TIMING.interval for at in later)
    await town.timer.advance(60)
    assert town.leader == "b"
    assert len(town.houses["b"].made) == 1
