"""The leases of one process: acquire, renew on time, and release."""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Self

import anyio

from riverpy._clock import Backoff
from riverpy._leases.lease import ASK_MOST, Lease
from riverpy._leases.lease_block import Blocks
from riverpy._leases.validity import (
    RELEASE_MOST,
    RENEWAL_LEAST,
    STALL,
    WAKE_JITTER,
    WATCH_LEAST,
)
from riverpy._lifecycle import StopCause, TestSignal, finish
from riverpy._log import RepeatedFailureLog, get_logger
from riverpy._log_events import (
    LEASE_ACQUIRED,
    LEASE_ACQUIRED_TOO_LATE,
    LEASE_ACQUISITION_FAILED,
    LEASE_ALREADY_LOST,
    LEASE_BLOCK_STOP_TIMED_OUT,
    LEASE_ENDED,
    LEASE_LOST,
    LEASE_MANAGER_FAILED,
    LEASE_RELEASE_FAILED,
    LEASE_RELEASED,
    LEASE_RENEWAL_FAILED,
    LEASE_RENEWAL_RESTORED,
    PROCESS_PAUSED,
)
from riverpy._names import USER_PREFIX
from riverpy._postgres.driver import DATABASE_ERRORS, describe
from riverpy._postgres.leases import LeaseLockedError
from riverpy._postgres.notifier import decode_message
from riverpy.errors import ClientStateError, ConfigError, TransactionError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from riverpy._clock import Timer
    from riverpy._leases.store import LeaseStore
    from riverpy._leases.validity import LeaseTiming
    from riverpy._postgres.leases import LeaseBid

BID_DELAY = 0.02
"""Seconds that a bid is put off for each lease that is held here, so that leases spread."""
BID_DELAY_MOST = 0.5
BID_AFTER_CANCEL = 1.0
"""Seconds that a bid may go on after nobody waits for it, so that what it won is given back."""
BID_AGAIN = 0.25
"""Seconds after which a bid is tried again that met another one, or a transaction that goes on."""
CLOSE_MOST = 2.0
"""Seconds that the end of what is done under leases may take when the keeper is closed."""
_UNKNOWN = (*DATABASE_ERRORS, TransactionError)
"""What leaves the answer unknown: the database, or a transaction on the caller's connection."""


def expect_wait(wait: timedelta | None) -> None:
    """How long somebody may stand by.

    Raises:
        ConfigError: it is no time.
    """
    if wait is not None and not isinstance(wait, timedelta):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"wait takes a timedelta, or None, got {type(wait).__name__}")


class _Question:
    """A bid that is on its way, and its answer."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope(shield=True)
        self.answered = asyncio.Event()
        self.bid: LeaseBid | None = None
        self.error: Exception | None = None

    def hurry(self) -> None:
        """Nobody waits for the answer any more, or not for long."""
        self.scope.deadline = anyio.current_time() + BID_AFTER_CANCEL


class LeaseManagerService:
    """The leases of one process in one store. Used in one event loop, as `async with keeper:`."""

    def __init__(
        self,
        store: LeaseStore,
        *,
        holder: str,
        timing: LeaseTiming,
        timer: Timer,
        max_held: int | None = None,
        left: Iterable[Lease] = (),
    ) -> None:
        """Make it.

        Args:
            store: where the leases are.
            holder: who holds them.
            timing: how long a lease lasts, and how often it is renewed.
            timer: by which it measures and waits.
            max_held: how many it keeps at most; None: any number.
            left: what an earlier keeper has left: what is used still is not bid for.
        """
        self._left = list(left)
        self._store, self._holder, self._timing = store, holder, timing
        self._timer, self._max_held = timer, max_held
        self._bid_most = min(ASK_MOST, timing.trust - timing.grace)
        """Seconds that a bid may take: the answer to a longer one comes too late."""
        self._kept: dict[str, Lease] = {}
        self._standing: dict[str, set[asyncio.Event]] = {}
        """What wakes those who stand by, by name."""
        self._sits_out: dict[str, float] = {}
        """Until when a name is not bid for, by boottime: somebody asked for the lease."""
        self._bidding = 0
        self._questions: set[_Question] = set()
        self._failing: set[str] = set()
        """Names whose last bid had no answer: said when there is a first one, and again only after
        all of them had an answer."""
        self._changed = asyncio.Event()
        """Set, and replaced, whenever a lease is kept or kept no more, nobody stands by for one any
        more, or the store has answered."""
        self._due = 0.0
        """When leases are renewed next, by boottime."""
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self.renewals = self.renewal_failures = 0
        self.renewal_seconds = 0.0
        """How long the last renewal took."""
        self._log = get_logger(holder=holder)
        self._blocks = Blocks(timing.grace, timer, self._log)
        self.denied = TestSignal("LeaseManagerService.denied")
        self.renewed = TestSignal("LeaseManagerService.renewed")

    @property
    def left(self) -> list[Lease]:
        """The leases of closed keepers under which something is done still."""
        self._left = [lease for lease in self._left if lease.is_used]
        return self._left

    @property
    def kept(self) -> list[Lease]:
        """The leases that are held, and those that are over and still in use."""
        return list(self._kept.values())

    async def __aenter__(self) -> Self:
        """Open the store.

        Raises:
            SchemaMissingError: line `riverpy` is not migrated.
            ConfigError, DatabaseError, or one of DATABASE_ERRORS: the database cannot be used.
        """
        try:
            await self._store.open()
        except BaseException:
            await self._store.close()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every lease, wait within a bound for what is done under them, and let go of the
        store. Those who stand by get a ClientStateError."""
        self._is_closed = True
        self._wake_all()
        for lease in self.kept:
            lease.end("the keeper of leases is closed", cause=StopCause.CLIENT_STOP)
        for question in self._questions:
            question.hurry()
        await finish(self._close)

    async def _close(self) -> None:
        with anyio.move_on_after(CLOSE_MOST):
            while self._kept or self._standing or self._questions:
                await self._changed.wait()
        for lease in self.kept:
            self._log.error(
                LEASE_BLOCK_STOP_TIMED_OUT,
                effect="the lease is not released but expires",
                lease=lease.name,
                epoch=lease.epoch,
            )
            lease.may_be_held = False  # the store is closed: nobody gives it back any more
        self._left += self.kept
        self._kept.clear()
        if self._task is not None:
            self._task.cancel()  # it may be in the middle of a renewal
            await asyncio.wait([self._task], timeout=CLOSE_MOST)
        await self._store.close()

    # -- what others tell it

    def heard(self, payload: str) -> None:
        """A notification on the topic `riverpy_lease`."""
        message = decode_message(payload)
        if message is None or not message.lease.startswith(USER_PREFIX):
            return
        name = message.lease.removeprefix(USER_PREFIX)
        match message.action:
            case "released" if message.holder != self._holder:
                self._wake(name)
            case "resign_requested":
                lease = self._kept.get(name)
                if lease is not None and lease.epoch == message.epoch:
                    self._sits_out[name] = self._timer.boottime() + self._timing.interval
                    lease.end("somebody asked for it")
            case _:
                pass

    def resync(self) -> None:
        """A connection was lost and made again: what was announced meanwhile was not heard."""
        self._wake_all()

    def _wake_all(self) -> None:
        for name in self._standing:
            self._wake(name)

    def _wake(self, name: str) -> None:
        for event in self._standing.get(name, ()):
            event.set()

    # -- standing by

    @asynccontextmanager
    async def hold(self, name: str, *, wait: timedelta | None = None) -> AsyncGenerator[Lease]:
        """Stand by for a lease, then run the block under it. The block is cancelled when the lease
        is lost.

        Raises:
            LeaseLostError: it was lost before the block had ended.
            TimeoutError: it was not free within `wait`.
            ClientStateError: the keeper is closed.
        """
        lease = await self.acquire(name, wait=wait)
        try:
            with self._blocks.running(lease):
                yield lease
        finally:
            await self.release(lease)

    async def acquire(self, name: str, *, wait: timedelta | None = None) -> Lease:
        """Stand by for a lease. It is renewed from then on, until it is released, or over.

        Args:
            name: the user's name of it.
            wait: how long to stand by, with one bid at least; None: for ever.

        Raises:
            TimeoutError: it was not free within `wait`.
            ClientStateError: the keeper is closed.
        """
        began = self._timer.boottime()
        until = math.inf if wait is None else began + wait.total_seconds()
        wake = asyncio.Event()
        self._standing.setdefault(name, set()).add(wake)
        try:
            lease = await self._stand(name, wake, until)
        finally:
            self._standing[name].discard(wake)
            if not self._standing[name]:
                del self._standing[name]
                self._failing.discard(name)
                self._change()
        lease.waited = self._timer.boottime() - began
        return lease

    async def _stand(self, name: str, wake: asyncio.Event, until: float) -> Lease:
        interval = timedelta(seconds=self._timing.interval)
        backoff = Backoff(interval / 5, interval)
        while True:
            self._expect_open()
            wake.clear()
            pause = self._pause(name)
            if pause <= 0:
                try:
                    lease, pause = await self._bid_in_turn(name)
                except DATABASE_ERRORS as error:
                    if self._is_closed:
                        continue
                    if self._store.is_gone:
                        raise ClientStateError(
                            "the pool or connection that was given for the leases is closed: keep "
                            "it open for as long as the manager or client is"
                        ) from error
                    say = self._log.debug if self._failing else self._log.warning
                    say(LEASE_ACQUISITION_FAILED, lease=name, error=describe(error))
                    self._failing.add(name)
                    pause = backoff.next()
                else:
                    self._failing.discard(name)
                    if lease is not None and not self._is_closed:
                        self._keep(lease)
                        return lease
                    if lease is not None:
                        await self.release(lease)
                        continue
                    backoff.reset()
                self.denied.emit()
            left = until - self._timer.boottime()
            if left <= 0:
                raise TimeoutError(f"lease {name!r} was not free in the time to wait for it")
            if await self._timer.wait(wake, min(pause, left)):
                await self._timer.sleep(random.uniform(0, WAKE_JITTER))  # noqa: S311 (no secret)

    def _expect_open(self) -> None:
        if self._is_closed:
            raise ClientStateError(
                "the keeper of leases is closed: stand by for a lease while its client or manager "
                "is open"
            )

    def _pause(self, name: str) -> float:
        """Seconds until a name may be bid for here."""
        if name in self._kept:
            return math.inf
        if any(lease.name == name for lease in self.left):
            return self._timing.interval
        if self._max_held is not None and len(self._kept) + self._bidding >= self._max_held:
            return self._timing.interval
        return self._sits_out.get(name, 0.0) - self._timer.boottime()

    async def _bid_in_turn(self, name: str) -> tuple[Lease | None, float]:
        """Bid, the later the more is held here, or bid for just now: of many names that are free at
        once each process has its first ones."""
        before = len(self._kept) + self._bidding
        self._bidding += 1
        try:
            if before:
                await self._timer.sleep(min(BID_DELAY * before, BID_DELAY_MOST))
            return await self.bid(name)
        finally:
            self._bidding -= 1

    async def bid(self, name: str) -> tuple[Lease | None, float]:
        """Bid once. Returns the lease, which nobody renews yet; or None, and the seconds after
        which to bid again. What is won after the caller was cancelled is given back.

        Raises:
            ClientStateError: the keeper is closed.
            Exception: one of DATABASE_ERRORS; it is not known who has the lease.
        """
        self._expect_open()
        asked_at, question = self._timer.boottime(), _Question()
        self._questions.add(question)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._ask, name, question)
                try:
                    await question.answered.wait()
                finally:
                    question.hurry()
        except BaseException:
            if (lease := self._won(name, question, asked_at)) is not None:
                await self.release(lease)
            raise
        if question.error is not None:
            raise question.error
        lease = self._won(name, question, asked_at)
        if lease is not None and self._time_left(lease) <= 0:
            self._log.warning(LEASE_ACQUIRED_TOO_LATE, lease=name)
            await self.release(lease)
            lease = None
        return lease, self._until_next_bid(question.bid)

    async def _ask(self, name: str, question: _Question) -> None:
        with question.scope:
            try:
                question.bid = await self._store.acquire(
                    name, self._holder, self._timing.ttl_delta, bound=self._bid_most
                )
            except Exception as error:  # its asker raises it
                question.error = error
        if question.scope.cancelled_caught:
            question.error = TimeoutError("the keeper of leases was closed before the answer came")
        self._questions.discard(question)
        self._change()
        question.answered.set()

    def _won(self, name: str, question: _Question, asked_at: float) -> Lease | None:
        bid = question.bid
        if bid is None or not bid.is_granted:
            return None
        return Lease(
            name,
            self._holder,
            bid,
            asked_at=asked_at,
            store=self._store,
            timing=self._timing,
            timer=self._timer,
        )

    def _until_next_bid(self, bid: LeaseBid | None) -> float:
        if bid is None:
            return BID_AGAIN + random.uniform(0, WAKE_JITTER)  # noqa: S311 (no secret)
        return self._timing.until_next_bid(bid.remaining)

    # -- holding

    def _keep(self, lease: Lease) -> None:
        if not self._held:
            asked_before = self._timing.trust - lease.trust_left
            self._due = self._timer.boottime() + self._timing.interval - asked_before
        self._kept[lease.name] = lease
        lease.when_over(lambda: self._tell_end(lease))
        self._log.info(LEASE_ACQUIRED, lease=lease.name, epoch=lease.epoch)
        self._change()
        if self._task is None or self._task.done():
            # It is no part of the task that happens to begin it.
            loop, context = asyncio.get_running_loop(), contextvars.Context()
            self._task = loop.create_task(self._tend(), context=context)

    async def renew(self, lease: Lease) -> bool:
        """Extend a lease that its user renews. False: it is over.

        Raises:
            Exception: one of DATABASE_ERRORS; it is not known whether it goes on.
        """
        if not lease.is_held:  # the user was told to stop
            lease.end("it could not be renewed in time")
            return False
        try:
            await self._renew([lease], bound=min(ASK_MOST, lease.trust_left))
        finally:
            self._change()
        return lease.is_held

    async def release(self, lease: Lease) -> bool:
        """Give a lease up when nothing is done under it any more. Returns whether this freed it;
        False: it was over before, or that is not known and it lapses, with a warning."""
        lease.end("it was released", cause=StopCause.CLIENT_STOP)
        is_freed = False
        try:
            is_freed = lease.may_be_held and await finish(lambda: self._give_back(lease))
        finally:
            lease.is_used = False
            if self._kept.get(lease.name) is lease:
                del self._kept[lease.name]
            self._change()
            self._wake_all() if self._max_held is not None else self._wake(lease.name)
        self._log.debug(
            LEASE_RELEASED if is_freed else LEASE_ALREADY_LOST, lease=lease.name, epoch=lease.epoch
        )
        return is_freed

    async def _give_back(self, lease: Lease) -> bool:
        try:
            return await self._store.release(
                lease.name, lease.epoch, lease.holder, bound=RELEASE_MOST
            )
        except _UNKNOWN as error:
            self._log.warning(
                LEASE_RELEASE_FAILED,
                lease=lease.name,
                epoch=lease.epoch,
                error=describe(error),
            )
            return False

    def _change(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()
        self._store.rest(bids=not self._standing, renewals=not self._kept)

    def _tell_end(self, lease: Lease) -> None:
        if lease.cause is StopCause.CLIENT_STOP:
            self._log.info(LEASE_ENDED, lease=lease.name, epoch=lease.epoch, reason=lease.why)
        else:
            self._log.warning(LEASE_LOST, lease=lease.name, epoch=lease.epoch, reason=lease.why)

    @property
    def _held(self) -> list[Lease]:
        return [lease for lease in self._kept.values() if lease.cause is None]

    def _time_left(self, lease: Lease) -> float:
        """Seconds until what is done under it must be told to end, so that it ends in trust."""
        return lease.trust_left - self._timing.grace

    async def _tend(self) -> None:
        """Watch and renew what is held, as long as anything is kept."""
        try:
            while self._kept:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._watch)
                    await self._renew_on_time()
                    tasks.cancel_scope.cancel()
        except Exception:
            self._log.exception(LEASE_MANAGER_FAILED, effect="all leases of this process end")
        finally:
            for lease in self._held:  # only after a failure
                lease.end("nobody renews it any more")
            self._change()

    async def _watch(self) -> None:
        """End leases while what is done under them has the time to end in trust."""
        while True:
            for lease in self._held:
                if self._time_left(lease) <= 0:
                    lease.end("it could not be renewed in time")
            self._blocks.tell()
            left = min(map(self._time_left, self._held), default=math.inf)
            planned = max(min(self._timing.watch_step, left), WATCH_LEAST)
            before = self._timer.boottime()
            await self._timer.sleep(planned)
            late = self._timer.boottime() - before - planned
            if late > STALL and self._held:
                self._log.warning(
                    PROCESS_PAUSED,
                    seconds=round(late, 1),
                )

    async def _renew_on_time(self) -> None:
        """Renew until nothing is kept, all leases in one statement."""
        interval = timedelta(seconds=self._timing.interval)
        backoff, failures = Backoff(interval / 5, interval), RepeatedFailureLog(self._log)
        locked = frozenset[str]()
        while self._kept:
            held = [lease for lease in self._held if self._time_left(lease) >= RENEWAL_LEAST]
            early = self._due - self._timer.boottime()
            if early > 0 or not held:
                step = self._timing.watch_step
                await self._timer.wait(self._changed, min(early, step) if early > 0 else step)
                continue
            due = self._timer.boottime() + self._timing.interval
            try:
                # A renewal that is not answered leaves the time for another one. One whose row is
                # locked comes to its end alone.
                free = [lease for lease in held if lease.name not in locked]
                left = min(map(self._time_left, free or held))
                await self._renew(held, bound=min(ASK_MOST, left / 2))
            except _UNKNOWN as error:
                if isinstance(error, LeaseLockedError):
                    locked = error.names
                failures.failed(LEASE_RENEWAL_FAILED, error=describe(error))
                self.renewal_failures += 1
                left = min(map(self._time_left, self._held), default=math.inf)
                self._due = self._timer.boottime() + min(backoff.next(), max(left, 0.0) / 2)
            else:
                failures.recovered(LEASE_RENEWAL_RESTORED)
                locked = frozenset[str]()
                backoff.reset()
                self._due = due

    async def _renew(self, held: list[Lease], *, bound: float) -> None:
        asked_at = self._timer.boottime()
        terms = [(lease.name, lease.epoch) for lease in held]
        answers = await self._store.renew(self._holder, terms, bound=bound)
        for lease in held:
            if lease.name not in answers:
                lease.end("it is no longer its own", may_be_held=False)
            elif answers[lease.name]:
                lease.granted(asked_at=asked_at)
        self.renewals += 1
        self.renewal_seconds = self._timer.boottime() - asked_at
        self.renewed.emit()
        if locked := [name for name, is_renewed in answers.items() if not is_renewed]:
            raise LeaseLockedError(locked)
