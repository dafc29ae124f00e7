"""Elector: bids for the lead, holds it, and gives it up.

A term ends in this order, whatever ends it: this process believes no more that it leads and says
so, its services end, and only then the lease is released, so that the next leader never works
beside this one's services. A lease that is not known to be free of services is left to lapse.
"""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.lowlevel

from riverpy._clock import Backoff
from riverpy._leases.validity import (
    RELEASE_MOST,
    RENEWAL_LEAST,
    STALL,
    WAKE_JITTER,
    WATCH_LEAST,
    Term,
)
from riverpy._lifecycle import StopCause, TestSignal
from riverpy._log import RepeatedFailureLog, get_logger
from riverpy._log_events import (
    ELECTION_RESULT_ARRIVED_TOO_LATE,
    LEADER_ELECTED,
    LEADER_ELECTION_FAILED,
    LEADER_LEASE_ALREADY_LOST,
    LEADER_LEASE_RELEASE_FAILED,
    LEADER_LEASE_RELEASED,
    LEADER_LEASE_RENEWAL_FAILED,
    LEADER_LEASE_RENEWAL_RESTORED,
    LEADERSHIP_CALLBACK_FAILED,
    LEADERSHIP_ENDED,
    LEADERSHIP_LOST,
    MAINTENANCE_STOP_TIMED_OUT,
    PROCESS_PAUSED,
)
from riverpy._names import DEFAULT_DOMAIN
from riverpy._postgres.driver import DATABASE_ERRORS, describe
from riverpy.events import LeadershipChange

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskStatus

    from riverpy._clock import Timer
    from riverpy._leases.validity import LeaseValidity
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.leaders import Bid

BID_AFTER_STOP = 1.0
"""Seconds that a bid may go on after a stop, so that what it won is not left to lapse."""
SIT_OUT_MOST = 60.0
"""Seconds that a client waits, at most, before it bids again after its maintenance failed."""


class LeaderStore(Protocol):
    """The row of one lead: what an elector and a fence ask the database.

    A call of an elector's takes `bound` seconds at most. Each raises one of DATABASE_ERRORS when
    the answer is not known.
    """

    async def elect(self, leader_id: str, ttl: timedelta, bound: float) -> Bid | None:
        """Bid. None: somebody else has just won."""
        ...

    async def renew(self, term: Term, ttl: timedelta, bound: float) -> bool:
        """Extend a term. False: it is over."""
        ...

    async def resign(self, term: Term, bound: float) -> bool:
        """End a term. False: it was over before."""
        ...

    async def fence(
        self, transaction: Transaction, term: Term, *, bound: timedelta, lock_bound: timedelta
    ) -> bool:
        """Tie a transaction of another connection to a term. False: it is over.

        Args:
            transaction: the connection, with its open transaction.
            term: whose.
            bound: how long the transaction may take.
            lock_bound: how long a statement of it may wait for a lock.
        """
        ...


class TermServices(Protocol):
    """Holds the services of a term."""

    def begin(self, term: Term) -> None:
        """Start the services of a term; the same term once only."""
        ...

    async def end(self, cause: StopCause) -> bool:
        """Stop them and wait for the grace. False: something goes on."""
        ...

    async def wait_clear(self) -> None:
        """Return when nothing of any term runs."""
        ...


class _Tenure:
    """The term that is held, and why it ends."""

    def __init__(self, term: Term) -> None:
        self.term = term
        self.scope = anyio.CancelScope()
        self.is_over = False
        self.cause = StopCause.CLIENT_STOP
        """What ends a term from outside, without `_close`."""
        self.may_hold = True
        """Whether the row may still be this term's."""


class Elector:
    """Stands for election for one client, until stopped."""

    name = "elector"

    def __init__(
        self,
        *,
        leader_id: str,
        trust: LeaseValidity,
        store: LeaderStore,
        services: TermServices,
        timer: Timer,
        domain: str = DEFAULT_DOMAIN,
        is_outage_told: Callable[[], bool] = bool,
        changed: Callable[[LeadershipChange], None] | None = None,
    ) -> None:
        """Make it.

        Args:
            leader_id: the client's id.
            trust: where it keeps what this process may believe.
            store: the row of the lead.
            services: holds the services of a term.
            timer: by which it measures and waits.
            domain: whose lead that is.
            is_outage_told: whether it is known that the database is out of reach, so that a failure
                need not be told.
            changed: told of each transition, at once.
        """
        self._leader_id = leader_id
        self._trust, self._timing = trust, trust.timing
        self._store, self._services, self._timer = store, services, timer
        self._domain = domain
        self._is_outage_told, self._changed = is_outage_told, changed
        self._tenure: _Tenure | None = None
        self._wake = asyncio.Event()
        self._may_bid_at = timer.boottime()
        self._exhausted = 0
        self._turn_most = 3 * self._timing.interval + BID_AFTER_STOP
        """Seconds from one bid or renewal to the next, with the time for its answer."""
        self.renewals = self.renewal_failures = 0
        self._log = get_logger(client_id=leader_id)
        if domain != DEFAULT_DOMAIN:
            self._log = self._log.bind(domain=domain)
        self.elected = TestSignal("Elector.elected")
        self.denied = TestSignal("Elector.denied")
        self.ended = TestSignal("Elector.ended")

    # -- what others tell it

    def vacated(self, leader_id: str) -> None:
        """Who led has given the lead up."""
        if leader_id != self._leader_id:
            self._wake.set()

    def give_way(self, why: str, *, epoch: int | None = None) -> None:
        """End the term, and let another have it. Does nothing if there is none, or if it is not the
        one of `epoch`."""
        tenure = self._tenure
        if tenure is not None and epoch in {None, tenure.term.epoch}:
            self._sit_out(self._timing.interval)
            self._close(tenure, why)

    def resync(self) -> None:
        """A connection was lost and made again: what was announced meanwhile was not heard."""
        self._wake.set()

    def resign(self, term: Term) -> bool:
        """Resign a term whose maintenance failed, so that another client can try. Returns whether
        it was resigned; False: it had ended before."""
        if (tenure := self._held(term)) is None:
            return False
        most = max(SIT_OUT_MOST, self._timing.interval)
        self._sit_out(min(self._timing.interval * 2.0 ** min(self._exhausted, 30), most))
        self._exhausted += 1
        self._close(tenure, "its maintenance failed")
        return True

    def term_is_up(self, term: Term) -> None:
        """The maintenance of a term is up: an earlier failure is forgiven."""
        if self._held(term) is not None:
            self._exhausted = 0

    def fenced_out(self, term: Term) -> None:
        """The server refused a write of this term: it is over."""
        if (tenure := self._held(term)) is not None:
            self._close(
                tenure,
                "the database says that the term is over",
                may_hold=False,
                is_expected=False,
            )

    def _held(self, term: Term) -> _Tenure | None:
        tenure = self._tenure
        return tenure if tenure is not None and tenure.term == term else None

    def _sit_out(self, seconds: float) -> None:
        self._may_bid_at = self._timer.boottime() + seconds

    # -- following

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Bid and lead in turn, until stopped."""
        task_status.started()
        while True:
            scope.expect_no_progress()  # what is left of a term may go on for long
            await self._sleep_until(self._may_bid_at)
            await self._services.wait_clear()
            term, asked_at = await self._stand(scope)
            await self._lead(scope, term, asked_at)

    async def _stand(self, scope: StopScope) -> tuple[Term, float]:
        """Bid until elected. Returns the term, and when its bid began."""
        backoff, failures = self._new_backoff(), RepeatedFailureLog(self._log)
        while True:
            self._wake.clear()
            scope.expect_progress(within=self._turn_most)
            asked_at = self._timer.boottime()
            try:
                bid = await self._bid(scope)
            except DATABASE_ERRORS as error:
                failures.failed(
                    LEADER_ELECTION_FAILED,
                    is_known=self._is_outage_told(),
                    error=describe(error),
                )
                wait = backoff.next()
            else:
                if bid is not None and bid.elected:
                    return Term(self._leader_id, bid.elected_at, bid.epoch), asked_at
                failures.recovered()
                backoff.reset()
                wait = self._timing.until_next_bid(None if bid is None else bid.remaining)
                self.denied.emit()
            if await self._timer.wait(self._wake, wait):
                await self._timer.sleep(random.uniform(0, WAKE_JITTER))  # noqa: S311 (no secret)

    async def _bid(self, scope: StopScope) -> Bid | None:
        """One bid, finished in spite of a stop: a term won unawares would be nobody's until
        it lapses."""
        bound = self._timing.interval
        with scope.shielded(bound + BID_AFTER_STOP, after_stop=BID_AFTER_STOP):
            return await self._store.elect(self._leader_id, self._timing.ttl_delta, bound)

    # -- leading

    async def _lead(self, scope: StopScope, term: Term, asked_at: float) -> None:
        tenure = _Tenure(term)
        try:
            await anyio.lowlevel.checkpoint_if_cancelled()  # by a stop that came during the bid
            if self._timer.boottime() >= asked_at + self._timing.trust - self._timing.grace:
                self._log.warning(ELECTION_RESULT_ARRIVED_TOO_LATE)
                return
            self._begin(tenure, asked_at)
            with tenure.scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._watch, tenure)
                    await self._renew_on_time(scope, tenure, asked_at)
        finally:
            with anyio.CancelScope(shield=True):  # each step has a bound of its own
                await self._end(tenure)

    def _begin(self, tenure: _Tenure, asked_at: float) -> None:
        self._tenure = tenure
        self._trust.granted(tenure.term, asked_at=asked_at)
        self._log.info(LEADER_ELECTED, elected_at=tenure.term.elected_at.isoformat())
        self._tell(tenure, None)
        self._services.begin(tenure.term)
        self.elected.emit()

    async def _watch(self, tenure: _Tenure) -> None:
        """End the term while its services still have the time to end in trust. It looks often, for
        a sleep does not count the time of a machine that is suspended."""
        step = self._timing.watch_step
        while (left := self._time_left) > 0:
            planned = max(min(step, left), WATCH_LEAST)
            before = self._timer.boottime()
            await self._timer.sleep(planned)
            late = self._timer.boottime() - before - planned
            if late > STALL:
                self._log.warning(
                    PROCESS_PAUSED,
                    seconds=round(late, 1),
                )
        self._close(tenure, "the lease could not be renewed in time", is_expected=False)

    async def _renew_on_time(self, scope: StopScope, tenure: _Tenure, asked_at: float) -> None:
        """Renew until the term is closed. The next renewal has a moment of its own, which nothing
        that is heard meanwhile puts off."""
        due = asked_at + self._timing.interval
        backoff, failures = self._new_backoff(), RepeatedFailureLog(self._log)
        while True:
            scope.expect_progress(within=self._turn_most)
            await self._sleep_until(due)
            left = self._time_left
            if left < RENEWAL_LEAST:  # the watch ends the term
                await anyio.sleep_forever()
            asked_at = self._timer.boottime()
            # A renewal that is not answered leaves the time for another one.
            bound = min(self._timing.interval, left / 2)
            try:
                is_held = await self._store.renew(tenure.term, self._timing.ttl_delta, bound)
            except DATABASE_ERRORS as error:
                left = self._time_left
                failures.failed(
                    LEADER_LEASE_RENEWAL_FAILED,
                    is_known=self._is_outage_told(),
                    seconds_left=round(left, 1),
                    error=describe(error),
                )
                self.renewal_failures += 1
                due = self._timer.boottime() + min(backoff.next(), left / 2)
                continue
            if not is_held:
                self._close(
                    tenure, "the lease is no longer its own", may_hold=False, is_expected=False
                )
            if tenure.is_over:  # its scope is cancelled, which shows at the next wait
                await anyio.sleep_forever()
            self._trust.granted(tenure.term, asked_at=asked_at)
            self.renewals += 1
            backoff.reset()
            failures.recovered(LEADER_LEASE_RENEWAL_RESTORED)
            due = asked_at + self._timing.interval

    def _close(
        self, tenure: _Tenure, why: str, *, may_hold: bool = True, is_expected: bool = True
    ) -> None:
        """This process leads no more, at once; `_end` does the rest. The first reason counts."""
        if tenure.is_over:
            return
        tenure.cause, tenure.may_hold = StopCause.LEADERSHIP_LOST, may_hold
        tenure.scope.cancel(reason=why)
        self._disbelieve(tenure, why, is_expected=is_expected)

    def _disbelieve(self, tenure: _Tenure, why: str, *, is_expected: bool) -> None:
        tenure.is_over = True
        self._tenure = None
        self._trust.ended()
        elected_at = tenure.term.elected_at.isoformat()
        if is_expected:
            self._log.info(LEADERSHIP_ENDED, reason=why, elected_at=elected_at)
        else:
            self._log.warning(LEADERSHIP_LOST, reason=why, elected_at=elected_at)
        self._tell(tenure, tenure.cause)

    async def _end(self, tenure: _Tenure) -> None:
        """Let the services end, then release the lease if it may be held."""
        if self._tenure is tenure:
            self._disbelieve(tenure, "the client stops", is_expected=True)
        if not await self._services.end(tenure.cause):
            self._log.error(
                MAINTENANCE_STOP_TIMED_OUT,
                effect="the lease is not released but expires; this client takes part in no "
                "election until maintenance has stopped",
            )
        elif tenure.may_hold:
            await self._release(tenure.term)
        self.ended.emit()

    async def _release(self, term: Term) -> None:
        try:
            is_released = await self._store.resign(term, min(RELEASE_MOST, self._timing.interval))
        except DATABASE_ERRORS as error:
            say = self._log.debug if self._is_outage_told() else self._log.warning
            say(LEADER_LEASE_RELEASE_FAILED, error=describe(error))
            return
        if is_released:
            self._log.info(LEADER_LEASE_RELEASED)
        else:
            self._log.debug(LEADER_LEASE_ALREADY_LOST)

    def _tell(self, tenure: _Tenure, cause: StopCause | None) -> None:
        if self._changed is None:
            return
        term = tenure.term
        try:
            self._changed(
                LeadershipChange(
                    cause is None,
                    term.leader_id,
                    term.elected_at,
                    cause,
                    domain=self._domain,
                    epoch=term.epoch or None,
                )
            )
        except Exception:  # what it does is no reason to lead on, or not to
            self._log.exception(LEADERSHIP_CALLBACK_FAILED)

    # -- time

    @property
    def _time_left(self) -> float:
        """Seconds until the services must be told to end, so that they end in trust."""
        return self._trust.left - self._timing.grace

    async def _sleep_until(self, due: float) -> None:
        """In steps, for a sleep does not count the time of a machine that is suspended."""
        while (left := due - self._timer.boottime()) > 0:
            await self._timer.sleep(max(min(left, self._timing.watch_step), WATCH_LEAST))

    def _new_backoff(self) -> Backoff:
        """A second, then two, then four, up to the interval, at the default one."""
        interval = timedelta(seconds=self._timing.interval)
        return Backoff(interval / 5, interval)
