"""Election with a fake row, fake services and virtual time."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy import StopCause
from riverpy._leading.election import Election, receive_leadership_notification
from riverpy._leases.engine import LeaseEngine
from riverpy._leases.store import LeaseStore
from riverpy._leases.timing import LeaseTiming
from riverpy._lifecycle import ServiceGroup
from riverpy._log_events import (
    LEADERSHIP_CALLBACK_FAILED,
    LEADERSHIP_LOST,
    LEASE_ACQUISITION_FAILED,
    LEASE_RELEASE_FAILED,
    LEASE_RENEWAL_FAILED,
    LEASE_RENEWAL_RESTORED,
    PROCESS_PAUSED,
    WORK_RAN_PAST_ITS_LEASE,
)
from riverpy._names import DEFAULT_DOMAIN
from riverpy._postgres.leases import LeaseAcquireResult, epoch_from_acquired_at
from tests._time import VirtualTimer, settle

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from riverpy import LeadershipChange
    from riverpy._leases.lease import Lease
    from riverpy._lifecycle import StopScope

pytestmark = pytest.mark.usefixtures("log")

TIMING = LeaseTiming(ttl=15.0, attempt_interval=5.0)
VALIDITY, GRACE = TIMING.validity_seconds, TIMING.grace_seconds
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class Row(LeaseStore):
    """River's row of leaders in virtual time. Delays and fails the calls as a test configures."""

    is_outage_logged = False
    should_log_terms = False

    def __init__(self, timer: VirtualTimer) -> None:
        self.timer = timer
        self.term: LeaseAcquireResult | None = None
        self.expires_at = 0.0
        self.terms: list[LeaseAcquireResult] = []
        self.calls: list[tuple[str, str, float]] = []
        """Each call: what, by which client, when."""
        self.faults: deque[Exception | float | asyncio.Event] = deque()
        """For the next calls: an error, seconds of delay, or an event before the answer."""
        self.is_down = False

    def times_of(self, verb: str, leader_id: str = "a") -> list[float]:
        """Return the times of a client's calls."""
        return [at for call, client, at in self.calls if (call, client) == (verb, leader_id)]

    def grant(self, leader_id: str, seconds: float) -> LeaseAcquireResult:
        """Let a client be the leader."""
        elected_at = EPOCH + timedelta(seconds=len(self.terms))
        self.term = LeaseAcquireResult(
            True, leader_id, epoch_from_acquired_at(elected_at), elected_at, None
        )
        self.terms.append(self.term)
        self.expires_at = self.timer.seconds_since_boot() + seconds
        return self.term

    async def acquire(
        self, name: str, holder: str, ttl: timedelta, *, timeout: float
    ) -> LeaseAcquireResult | None:
        def decide() -> LeaseAcquireResult:
            left = self.expires_at - self.timer.seconds_since_boot()
            if self.term is not None and left >= 0:
                return self.term._replace(is_granted=False, seconds_until_expiry=left)
            return self.grant(holder, ttl.total_seconds())

        return await self._answer("acquire", holder, timeout, decide)

    async def renew(
        self, holder: str, terms: Iterable[tuple[str, int]], *, timeout: float
    ) -> dict[str, bool]:
        ((name, epoch),) = terms

        def decide() -> dict[str, bool]:
            if not self._is_of(epoch) or self.expires_at < self.timer.seconds_since_boot():
                return {}
            self.expires_at = self.timer.seconds_since_boot() + TIMING.ttl
            return {name: True}

        return await self._answer("renew", holder, timeout, decide)

    async def release(self, name: str, epoch: int, holder: str, *, timeout: float) -> bool:
        def decide() -> bool:
            if not self._is_of(epoch):
                return False
            self.term = None
            return True

        return await self._answer("release", holder, timeout, decide)

    async def fence(self, *_args: Any, **_options: Any) -> bool:
        raise NotImplementedError

    def _is_of(self, epoch: int) -> bool:
        return self.term is not None and self.term.epoch == epoch

    async def _answer(
        self, verb: str, leader_id: str, timeout: float, decide: Callable[[], Any]
    ) -> Any:
        self.calls.append((verb, leader_id, self.timer.seconds_since_boot()))
        assert timeout > 0
        await asyncio.sleep(0)
        fault = self.faults.popleft() if self.faults else None
        if self.is_down or isinstance(fault, Exception):
            raise fault if isinstance(fault, Exception) else ConnectionRefusedError("down")
        answer = decide()
        if isinstance(fault, asyncio.Event) and not await self.timer.wait_for_event(fault, timeout):
            raise TimeoutError(verb)
        if isinstance(fault, float):
            await self.timer.sleep(min(fault, timeout))
            if fault > timeout:
                raise TimeoutError(verb)
        return answer


class Services:
    """Services of a term. They stop at once, or when a test lets them."""

    def __init__(self, timer: VirtualTimer) -> None:
        self._timer = timer
        self.events: list[tuple[float, str, Lease | StopCause | None]] = []
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def run_term(self, lease: Lease, scope: StopScope) -> None:
        self.events.append((self._timer.seconds_since_boot(), "begin", lease))
        try:
            await anyio.sleep_forever()
        finally:
            self.events.append((self._timer.seconds_since_boot(), "end", scope.cause))
            with anyio.CancelScope(shield=True):
                await self.may_end.wait()
            self.events.append((self._timer.seconds_since_boot(), "ended", scope.cause))

    def times(self, what: str) -> list[float]:
        """Return the times of an event."""
        return [at for at, event, _ in self.events if event == what]


class Candidate:
    """One client that takes part in the election, in its own service group."""

    def __init__(self, row: Row, leader_id: str = "a", *, timing: LeaseTiming = TIMING) -> None:
        self.row, self.timer = row, row.timer
        self.services = Services(row.timer)
        self.changes: list[tuple[float, LeadershipChange]] = []
        self.engine = LeaseEngine(row, holder=leader_id, timing=timing, timer=row.timer)
        self.election = Election(
            self.engine,
            DEFAULT_DOMAIN,
            self.services.run_term,
            on_leadership_change=lambda change: self.changes.append(
                (self.timer.seconds_since_boot(), change)
            ),
        )
        self._stopping = asyncio.Event()
        self._host: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._host = asyncio.create_task(self._run())
        await settle()

    async def _run(self) -> None:
        async with ServiceGroup() as group:
            await group.start(self.election)
            await self._stopping.wait()

    async def stop(self) -> None:
        """Stop as a client stops."""
        self._stopping.set()
        await settle()

    async def cancel(self) -> None:
        """Cancel the task from outside."""
        assert self._host is not None
        self._host.cancel()
        await settle()

    @property
    def is_over(self) -> bool:
        return self._host is None or self._host.done()

    async def announce(self, action: str, leader_id: str = "") -> None:
        self.receive(json.dumps({"action": action, "leader_id": leader_id}))
        await settle()

    def receive(self, payload: str) -> None:
        receive_leadership_notification(self.engine, payload)

    @property
    def leads(self) -> bool:
        return self.election.lease is not None

    @property
    def lease(self) -> Lease:
        assert self.election.lease is not None
        return self.election.lease


@pytest.fixture
def timer() -> VirtualTimer:
    return VirtualTimer()


@pytest.fixture
def row(timer: VirtualTimer) -> Row:
    return Row(timer)


@pytest.fixture
async def a(row: Row) -> AsyncGenerator[Candidate]:
    """A candidate that is not started yet."""
    candidate = Candidate(row)
    yield candidate
    candidate.services.may_end.set()
    await candidate.stop()
    while not candidate.is_over:
        await row.timer.advance(1)


@pytest.fixture
async def leader(a: Candidate) -> Candidate:
    """A candidate that is the leader."""
    await a.start()
    assert a.leads
    return a


# -- following


async def test_attempt_at_start(leader: Candidate) -> None:
    """The first attempt needs no notification and no wait. A success is reported and starts the
    maintenance of exactly this term (EL1, EL11)."""
    ((at, change),) = leader.changes
    assert at == leader.row.calls[0][2]
    assert (change.is_leader, change.leader_id, change.cause) == (True, "a", None)
    assert change.elected_at == leader.lease.acquired_at
    assert leader.services.events == [(at, "begin", leader.lease)]


async def test_attempt_at_the_expiry(a: Candidate, row: Row, timer: VirtualTimer) -> None:
    """A denied attempt is repeated after an interval plus at most 20 %, or when the other lease
    expires, whichever is earlier (EL18)."""
    row.grant("b", 7.0)
    await a.start()
    await timer.advance(6.0)
    first, second = row.times_of("acquire")
    assert 5.0 <= second - first <= 6.0
    await timer.advance(1.06)
    third = row.times_of("acquire")[2]
    assert 7.0 <= third - first <= 7.05
    assert a.leads


async def test_lost_race_is_a_denial(a: Candidate, row: Row, timer: VirtualTimer) -> None:
    """An attempt that met another one is repeated soon."""

    async def beaten(*_args: object, **_options: object) -> None:
        row.calls.append(("acquire", "a", timer.seconds_since_boot()))

    row.acquire = beaten  # type: ignore[method-assign]
    await a.start()
    await timer.advance(0.31)
    assert len(row.times_of("acquire")) == 2
    assert not a.leads


async def test_resignation_of_another_wakes(a: Candidate, row: Row, timer: VirtualTimer) -> None:
    """A follower tries within 50 ms after another client resigned, once for any number of
    notifications. Its own resignations and invalid notifications cause no attempt (EL2, EL7)."""
    row.grant("b", 100.0)
    await a.start()
    for action, leader_id in (("resigned", "a"), ("request_resign", ""), ("what", "b"), ("", "b")):
        await a.announce(action, leader_id)
    for payload in ("", "no json", "[]", '{"action": 5}', "{" * 100_000):
        a.receive(payload)
    await timer.advance(1)
    assert len(row.times_of("acquire")) == 1
    row.term = None
    for _ in range(20):
        await a.announce("resigned", "b")
    await timer.advance(0.05)
    assert len(row.times_of("acquire")) == 2
    assert a.leads


async def test_resignation_during_an_attempt(a: Candidate, row: Row, timer: VirtualTimer) -> None:
    """A resignation that is announced during an attempt is not missed (EL7)."""
    row.grant("b", 100.0)
    held = asyncio.Event()
    row.faults.append(held)
    await a.start()
    row.term = None
    await a.announce("resigned", "b")
    held.set()
    await timer.advance(0.05)
    assert a.leads


async def test_back_off_after_errors(
    a: Candidate, row: Row, timer: VirtualTimer, log: list[Any]
) -> None:
    """If the database is down, a follower tries again after 1, 2, 4, then every 5 s (10 % more or
    less), with one warning. A reconnect ends the pause."""
    row.is_down = True
    await a.start()
    await timer.advance(60)
    times_of = row.times_of("acquire")
    gaps = [after - before for before, after in pairwise(times_of)]
    for gap, expected in zip(gaps, [1, 2, 4, 5, 5, 5], strict=False):
        assert expected * 0.9 <= gap <= expected * 1.1
    assert [entry["log_level"] for entry in log].count("warning") == 1
    row.is_down = False
    before = len(times_of)
    a.engine.wake_all_waiting_callers()
    await timer.advance(0.05)
    assert len(row.times_of("acquire")) == before + 1
    assert a.leads


async def test_follower_in_a_logged_outage(
    a: Candidate, row: Row, timer: VirtualTimer, log: list[Any]
) -> None:
    """While an outage is already logged, a follower logs failed attempts at debug. If attempts
    still fail after the outage, it logs one warning."""
    row.is_down = row.is_outage_logged = True
    await a.start()
    await timer.advance(20)
    assert {(entry["event"], entry["log_level"]) for entry in log} == {
        (LEASE_ACQUISITION_FAILED, "debug")
    }
    row.is_outage_logged = False
    await timer.advance(20)
    assert [entry["log_level"] for entry in log].count("warning") == 1


async def test_stop_of_a_follower(a: Candidate, row: Row, timer: VirtualTimer) -> None:
    """A follower stops at once, and leaves nothing (EL13)."""
    row.grant("b", 100.0)
    await a.start()
    await a.stop()
    assert a.is_over
    assert timer.sleepers == 0
    assert row.times_of("release") == []


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_stop_during_an_attempt(a: Candidate, row: Row, how: str) -> None:
    """An attempt in progress at a stop is finished. A term that it acquired is resigned before any
    service starts."""
    held = asyncio.Event()
    row.faults.append(held)
    await a.start()
    await getattr(a, how)()
    assert not a.is_over
    held.set()
    await settle()
    assert a.is_over
    assert row.terms
    assert row.term is None
    assert a.changes == []
    assert a.services.times("begin") == []


# -- leading


async def test_renews_each_interval(leader: Candidate, row: Row, timer: VirtualTimer) -> None:
    """An undisturbed leader renews every 5 s, sends no other statement, and keeps its term
    (EL14)."""
    term = leader.lease
    await timer.advance(60.5)
    began = row.times_of("acquire")[0]
    assert row.times_of("renew") == pytest.approx([began + 5.0 * n for n in range(1, 13)])
    assert leader.lease == term
    assert len(row.calls) == 13


async def test_notifications_delay_no_renewal(
    leader: Candidate, row: Row, timer: VirtualTimer
) -> None:
    """Announced resignations every 2 s delay no renewal and cause no statement (EL15)."""
    began = row.times_of("acquire")[0]
    for _ in range(30):
        await timer.advance(2)
        await leader.announce("resigned", "b")
    assert row.times_of("renew") == pytest.approx([began + 5.0 * n for n in range(1, 13)])
    assert len(row.calls) == 13


async def test_slow_renewals(leader: Candidate, row: Row, timer: VirtualTimer) -> None:
    """If every answer takes 200 ms for a minute, the leader stays leader (LM-02)."""
    for _ in range(60):
        row.faults.extend([0.2] * (5 - len(row.faults)))
        await timer.advance(1)
    assert len(leader.changes) == 1
    assert 11 <= len(row.times_of("renew")) <= 12


async def test_slow_answer_does_not_extend_validity(
    a: Candidate, row: Row, timer: VirtualTimer
) -> None:
    """The lease is valid from the start of the attempt, however late its answer comes (EL4,
    EL5)."""
    row.faults.append(4.0)
    await a.start()
    await timer.advance(4.0)
    assert a.leads
    assert a.lease.valid_for == pytest.approx(VALIDITY - 4.0)
    row.faults.append(2.0)
    await timer.advance(1.0 + 2.0)
    assert len(row.times_of("renew")) == 1
    assert a.lease.valid_for == pytest.approx(VALIDITY - 2.0)


@pytest.mark.parametrize("ttl", [15.0, 12.0])
async def test_renewal_fails_once(
    row: Row, timer: VirtualTimer, log: list[Any], ttl: float
) -> None:
    """A renewal without an answer leaves time for another one, also with the shortest allowed
    lease. The term stays held. One line logs the failure, and one its end."""
    leader = Candidate(row, timing=LeaseTiming(ttl=ttl, attempt_interval=5.0))
    await leader.start()
    row.faults.append(asyncio.Event())
    await timer.advance(ttl)
    assert len(leader.changes) == 1
    assert leader.leads
    await leader.stop()
    events = [entry["event"] for entry in log if "renewal" in entry["event"]]
    assert events == [LEASE_RENEWAL_FAILED, LEASE_RENEWAL_RESTORED]


async def test_leader_in_a_logged_outage(
    leader: Candidate, row: Row, timer: VirtualTimer, log: list[Any]
) -> None:
    """While an outage is already logged, a leader logs failed renewals at debug, and does not log
    their end. Outside of an outage it logs a failure once, and its end."""
    row.is_outage_logged = row.is_down = True
    await timer.advance(7)
    row.is_down = False
    await timer.advance(3)
    failed = [entry["log_level"] for entry in log if entry["event"] == LEASE_RENEWAL_FAILED]
    assert failed
    assert set(failed) == {"debug"}
    assert LEASE_RENEWAL_RESTORED not in [entry["event"] for entry in log]
    row.is_outage_logged = False
    log.clear()
    row.is_down = True
    await timer.advance(7)
    row.is_down = False
    await timer.advance(3)
    failed = [entry["log_level"] for entry in log if entry["event"] == LEASE_RENEWAL_FAILED]
    assert failed.count("warning") == 1
    assert [entry["event"] for entry in log].count(LEASE_RENEWAL_RESTORED) == 1
    assert len(leader.changes) == 1


@pytest.mark.parametrize("fault", ["error", "silence"])
async def test_renewals_fail(
    leader: Candidate, row: Row, timer: VirtualTimer, log: list[Any], fault: str
) -> None:
    """While renewals fail, the term ends one grace period before the local deadline: first the
    change is reported, then the services stop, then exactly this term is resigned (EL3, EL16)."""
    began, term = row.times_of("acquire")[0], leader.lease
    if fault == "error":
        row.is_down = True
    else:
        row.faults.extend(asyncio.Event() for _ in range(100))
    leader.services.may_end.clear()
    await timer.advance(VALIDITY - GRACE - 0.1)
    assert leader.leads
    await timer.advance(0.1)
    assert not leader.leads
    (_, (told_at, change)) = leader.changes
    (end_at,) = leader.services.times("end")
    assert told_at == end_at == pytest.approx(began + VALIDITY - GRACE, abs=0.002)
    assert (change.is_leader, change.cause) == (False, StopCause.LEADERSHIP_LOST)
    assert len(row.times_of("renew")) >= 2
    assert row.times_of("release") == []
    row.is_down, row.faults = False, deque()
    leader.services.may_end.set()
    await settle()
    assert len(row.times_of("release")) == 1
    assert row.terms[0].epoch == term.epoch
    assert [entry["log_level"] for entry in log if entry["event"] == LEADERSHIP_LOST] == ["warning"]


async def test_no_renewal_after_the_deadline(
    leader: Candidate, row: Row, timer: VirtualTimer
) -> None:
    """A renewal with an unknown result is repeated only until the local deadline."""
    began = row.times_of("acquire")[0]
    row.is_down = True
    await timer.advance(30)
    assert max(row.times_of("renew")) < began + VALIDITY - GRACE


async def test_taken_over(leader: Candidate, row: Row, timer: VirtualTimer, log: list[Any]) -> None:
    """If the row belongs to another client, or to a later term of the same client, the term ends
    without a resignation. The next attempt is denied (EL10)."""
    row.grant("a", 15.0)
    await timer.advance(5)
    assert not leader.leads
    assert row.times_of("release") == []
    assert row.term == row.terms[1]
    assert len(row.times_of("acquire")) == 2
    assert leader.changes[-1][1].cause is StopCause.LEADERSHIP_LOST
    assert [entry["log_level"] for entry in log if entry["event"] == LEADERSHIP_LOST] == ["warning"]


async def test_fenced_out(leader: Candidate, row: Row) -> None:
    """A refused write ends its term at once, without a resignation. A refused write of an old term
    ends nothing."""
    old = leader.lease
    row.term = None
    old.end("a write was refused", may_be_held=False)
    assert not leader.leads
    await settle()
    assert row.times_of("release") == []
    assert leader.leads
    assert leader.lease != old
    old.end("a write was refused", may_be_held=False)
    assert not leader.election.resign_after_failure(old, LookupError())
    await settle()
    assert leader.leads


async def test_stall_longer_than_the_lease(
    leader: Candidate, row: Row, timer: VirtualTimer, log: list[Any]
) -> None:
    """After a stall of twice the lease a process ends its term, logs the length of the stall, and
    sends no renewal. It becomes leader again only in a new term (LM-14)."""
    old = leader.lease
    row.grant("b", 100.0)
    began_before = leader.services.times("begin")
    await timer.stall(2 * TIMING.ttl)
    assert not leader.leads
    assert row.times_of("renew") == []
    assert leader.services.times("begin") == began_before
    (stall,) = [entry for entry in log if entry["event"] == PROCESS_PAUSED]
    assert stall["log_level"] == "warning"
    assert stall["seconds"] == pytest.approx(2 * TIMING.ttl, abs=1.1)
    await timer.advance(100)
    assert leader.leads
    assert leader.lease.acquired_at > old.acquired_at


async def test_suspension(leader: Candidate, row: Row, timer: VirtualTimer) -> None:
    """The time of a suspension counts, although sleeps do not count it. The term ends within a
    second after it (EL17)."""
    row.is_down = True
    await timer.suspend(VALIDITY + 1)
    assert not leader.leads
    await timer.advance(1)
    assert len(leader.services.times("end")) == 1


async def test_short_suspension(leader: Candidate, row: Row, timer: VirtualTimer) -> None:
    """A renewal that became due in a short suspension is sent within a second after it."""
    began = row.times_of("acquire")[0]
    await timer.advance(1)
    await timer.suspend(7)
    await timer.advance(1)
    assert leader.leads
    (renewed,) = row.times_of("renew")
    assert 8 <= renewed - began <= 9


async def test_answer_that_never_comes_while_suspended(
    leader: Candidate, row: Row, timer: VirtualTimer
) -> None:
    """A renewal in progress does not keep the watch from ending the term."""
    row.faults.append(asyncio.Event())
    await timer.advance(5.1)
    await timer.suspend(VALIDITY)
    thawed = timer.seconds_since_boot()
    await timer.advance(1.01)
    assert leader.changes[1][1].cause is StopCause.LEADERSHIP_LOST
    (end_at,) = leader.services.times("end")
    assert end_at - thawed <= 1


# -- resigning


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_stop_of_a_leader(leader: Candidate, row: Row, timer: VirtualTimer, how: str) -> None:
    """A leader that stops or is cancelled reports that it is not the leader any more, stops its
    services with a cause, then resigns. The table is empty, and no task is left (EL13, EL16)."""
    leader.services.may_end.clear()
    await getattr(leader, how)()
    assert leader.changes[-1][1].is_leader is False
    assert leader.changes[-1][1].cause is StopCause.CLIENT_STOP
    assert row.times_of("release") == []
    leader.services.may_end.set()
    await settle()
    assert leader.is_over
    assert row.term is None
    assert timer.sleepers == 0


async def test_stop_with_a_dead_database(leader: Candidate, row: Row, timer: VirtualTimer) -> None:
    """A stop takes at most the grace period and 2 s more. Then the lease expires."""
    row.faults.append(asyncio.Event())
    leader.services.may_end.clear()
    await leader.stop()
    await timer.advance(1)
    leader.services.may_end.set()
    await timer.advance(2)
    assert leader.is_over
    assert len(row.times_of("release")) == 1


async def test_request_to_resign(leader: Candidate, row: Row, timer: VirtualTimer) -> None:
    """A request makes the leader resign and wait for one interval, so that another client becomes
    leader. Several requests at once count as one. Followers ignore them (EL12)."""
    for _ in range(50):
        leader.receive('{"action":"request_resign","leader_id":""}')
    await settle()
    assert not leader.leads
    assert len(row.times_of("release")) == 1
    await leader.announce("request_resign")
    await leader.announce("resigned", "b")
    await timer.advance(4.99)
    assert len(row.times_of("acquire")) == 1
    await timer.advance(0.1)
    assert leader.leads


async def test_request_right_after_the_election(a: Candidate, row: Row) -> None:
    """A request that arrives at the moment of the election makes the new leader resign (EL12)."""
    a.election._on_leadership_change = lambda change: (
        change.is_leader and a.receive('{"action":"request_resign"}')
    )
    await a.start()
    assert not a.leads
    assert len(row.times_of("release")) == 1


async def test_exhaustion(leader: Candidate, row: Row, timer: VirtualTimer) -> None:
    """If maintenance fails, the term is resigned, and the client waits 5, 10, 20, 40 and then 60 s
    before the next attempt. Maintenance that starts resets the pause."""
    waits: list[float] = []
    for _ in range(6):
        leader.election.resign_after_failure(leader.lease, LookupError())
        resigned = timer.seconds_since_boot()
        await settle()
        while not leader.leads:
            await timer.advance(0.5)
        waits.append(row.times_of("acquire")[-1] - resigned)
    assert waits == pytest.approx([5, 10, 20, 40, 60, 60], abs=0.51)
    leader.election.reset_failed_term_count()
    leader.election.resign_after_failure(leader.lease, LookupError())
    resigned = timer.seconds_since_boot()
    await timer.advance(5.5)
    assert row.times_of("acquire")[-1] - resigned == pytest.approx(5, abs=0.51)


async def test_services_that_do_not_end(
    leader: Candidate, row: Row, timer: VirtualTimer, log: list[Any]
) -> None:
    """If services do not stop within the grace period, the lease is not released but expires. This
    client makes no attempt until they have ended, also after a notification or a reconnect."""
    leader.services.may_end.clear()
    await leader.announce("request_resign")
    await timer.advance(GRACE + 1)
    assert [entry["event"] for entry in log].count(WORK_RAN_PAST_ITS_LEASE) == 1
    leader.engine.wake_all_waiting_callers()
    await leader.announce("resigned", "b")
    await timer.advance(60)
    assert row.times_of("release") == []
    assert len(row.times_of("acquire")) == 1
    leader.services.may_end.set()
    await settle()
    assert leader.leads


async def test_release_fails(
    leader: Candidate, row: Row, timer: VirtualTimer, log: list[Any]
) -> None:
    """A failed release is logged and not repeated. The lease expires, and the client keeps trying
    to acquire it."""
    row.faults.append(ConnectionResetError("gone"))
    await leader.announce("request_resign")
    assert [entry["event"] for entry in log if entry["log_level"] == "warning"] == [
        LEASE_RELEASE_FAILED
    ]
    await timer.advance(TIMING.ttl + 0.1)
    assert leader.leads
    assert len(row.terms) == 2


# -- several


async def test_two(leader: Candidate, row: Row, timer: VirtualTimer) -> None:
    """While the first client is leader, the second is denied. It becomes leader when the first has
    stopped (EL8)."""
    other = Candidate(row, "b")
    await other.start()
    await timer.advance(30)
    assert not other.leads
    await leader.stop()
    await other.announce("resigned", "a")
    await timer.advance(0.05)
    assert other.leads
    await other.stop()
    assert other.is_over


async def test_many_starts_and_stops(row: Row, timer: VirtualTimer) -> None:
    """Many starts and stops leave an empty table and no task (EL13)."""
    before = len(asyncio.all_tasks())
    for number in range(30):
        candidate = Candidate(row, f"c{number}")
        await candidate.start()
        assert candidate.leads
        await (candidate.stop() if number % 2 else candidate.cancel())
        assert candidate.is_over
    assert row.term is None
    assert len(asyncio.all_tasks()) == before
    with anyio.fail_after(30):
        await settle()


@pytest.mark.parametrize("end", ["resign", "lost", "stop"])
async def test_listener_that_fails(
    leader: Candidate, row: Row, timer: VirtualTimer, log: list[Any], end: str
) -> None:
    """A callback that raises is logged. It prevents neither the end of a term nor the next term."""

    def fail(change: LeadershipChange) -> None:
        raise LookupError(change)

    leader.election._on_leadership_change = fail
    if end == "stop":
        await leader.stop()
    elif end == "resign":
        await leader.announce("request_resign")
    else:
        row.grant("b", 1.0)
    await timer.advance(20.0)
    assert [event for _, event, _ in leader.services.events][:3] == ["begin", "end", "ended"]
    assert leader.leads is (end != "stop")
    lines = [entry for entry in log if entry["event"] == LEADERSHIP_CALLBACK_FAILED]
    assert len(lines) == (1 if end == "stop" else 2)
