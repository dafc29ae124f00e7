"""LeaseEngine: acquires, renews, ends and releases the leases of one process in one store.

Leader elections, user leases and singletons run on it. A lease goes through these steps:

1. `acquire` waits for it: an attempt at an interval, at the holder's expiry, or when the holder
   releases it.
2. It is held. All leases are renewed in one statement. A watch ends a lease that could not be
   renewed early enough for its work to stop before the local deadline.
3. It ends: it was lost, another process asked for it, or its work ended. The work is stopped.
4. `release`, called after the work, frees the row. Until then this process does not try to acquire
   the lease again, and logs work that does not stop.
"""

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
from riverpy._leases.attempt import AcquireAttempt
from riverpy._leases.lease import NOT_RENEWED, STORE_TIMEOUT, Lease
from riverpy._leases.lease_block import CancelAtLeaseEnd
from riverpy._leases.timing import WAKE_JITTER, WATCH_INTERVAL_MIN
from riverpy._lifecycle import StopCause, TestSignal, finish
from riverpy._log import RepeatedFailureLog, get_logger
from riverpy._log_events import (
    LEASE_ACQUIRED,
    LEASE_ACQUIRED_TOO_LATE,
    LEASE_ACQUISITION_FAILED,
    LEASE_ALREADY_LOST,
    LEASE_ENDED,
    LEASE_ENGINE_FAILED,
    LEASE_LOST,
    LEASE_RELEASE_FAILED,
    LEASE_RELEASED,
    LEASE_RENEWAL_FAILED,
    LEASE_RENEWAL_RESTORED,
    LEASE_WORK_STOP_TIMED_OUT,
    PROCESS_PAUSED,
    WORK_RAN_PAST_ITS_LEASE,
)
from riverpy._postgres.driver import DATABASE_ERRORS, describe
from riverpy._postgres.leases import LeaseLockedError
from riverpy._postgres.notifier import decode_message
from riverpy.errors import ClientStateError, TransactionError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from riverpy._clock import Timer
    from riverpy._leases.store import LeaseStore
    from riverpy._leases.timing import LeaseTiming
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.leases import LeaseAnswer

SPREAD_DELAY = 0.02
"""Seconds that an attempt is delayed for each lease that is held here, so that leases spread over
the processes."""
SPREAD_DELAY_MAX = 0.5
CONFLICT_DELAY = 0.25
"""Seconds after which an attempt is repeated that met another one, or an unfinished transaction."""
CLOSE_TIMEOUT = 2.0
"""Seconds that `close` waits for the work under leases."""
RELEASE_TIMEOUT = 2.0
"""Seconds that a release may take. Otherwise the lease expires."""
RENEWAL_TIME_MIN = 0.01  # seconds that must be left for a renewal
STALL_MIN = 1.0
"""Seconds of delay from which a log line says that this process did not run."""
REPORT_INTERVAL = 10.0
"""Seconds between two log lines about work that runs after its lease ended."""
_UNKNOWN = (*DATABASE_ERRORS, TransactionError)
"""The errors after which the result of a statement is unknown."""


class LeaseEngine:
    """The leases of one process in one store. It is used in one event loop. `async with engine:`
    opens and closes the store; an engine whose store needs neither can be used without it."""

    def __init__(
        self,
        store: LeaseStore,
        *,
        holder: str,
        timing: LeaseTiming,
        timer: Timer,
        max_held: int | None = None,
        unfinished: Iterable[Lease] = (),
    ) -> None:
        """Create the lease engine.

        Args:
            store: where the leases are kept.
            holder: identifies this process in the store.
            timing: how long a lease lasts, and how often it is renewed.
            timer: measures time, and waits.
            max_held: the number of leases that it holds at most; None: no limit.
            unfinished: leases of an earlier engine whose work may still run. No attempt is made for
                these.
        """
        self._unfinished = list(unfinished)
        self._store, self.holder, self._max_held = store, holder, max_held
        self.timing, self.timer = timing, timer
        self._attempt_timeout = min(STORE_TIMEOUT, timing.validity - timing.grace)
        """Seconds that an attempt may take: the answer to a longer one would be too late."""
        self._turn_max = 3 * timing.interval + STORE_TIMEOUT  # from one attempt or renewal to next
        self._leases: dict[str, Lease] = {}  # held, or ended and not released
        self._waiting: dict[str, set[asyncio.Event]] = {}  # wakes the callers that wait, by name
        self._scopes: dict[str, StopScope] = {}  # of services that wait for a lease or hold it
        self._paused_until: dict[str, float] = {}  # no attempts for a name until then, by boottime
        self._report_at: dict[Lease, float] = {}  # when to log that work still runs, by boottime
        self._attempting = 0
        self._attempts: set[AcquireAttempt] = set()
        self._failing: set[str] = set()
        """The names whose last attempt failed. Only the first failure of all names is a warning."""
        self._changed = asyncio.Event()
        """Set and replaced when a lease is added or removed, a caller stops waiting, or the store
        has answered."""
        self._renewal_due = 0.0  # by boottime
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self.renewals = self.renewal_failures = 0
        self.renewal_seconds = 0.0
        """How long the last renewal took."""
        self._log = get_logger(holder=holder)
        self._say_term = self._log.info if store.logs_terms else self._log.debug
        self.denied = TestSignal("LeaseEngine.denied")
        self.renewed = TestSignal("LeaseEngine.renewed")

    @property
    def unfinished(self) -> list[Lease]:
        """The leases of closed engines whose work still runs."""
        return [lease for lease in self._unfinished if lease.is_used]

    @property
    def leases(self) -> list[Lease]:
        """The leases that are held, or ended and not released."""
        return list(self._leases.values())

    async def __aenter__(self) -> Self:
        """Open the store. Raises what `LeaseStore.open` raises."""
        try:
            await self._store.open()
        except BaseException:
            await self._store.close()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every lease, wait for a limited time for the work under them, and close the store.
        Callers that wait for a lease get a ClientStateError."""
        self._is_closed = True
        self.wake_all()
        for lease in self.leases:
            lease.end("the leases of this process are closed", cause=StopCause.CLIENT_STOP)
        for attempt in self._attempts:
            attempt.hurry()
        await finish(self._close)

    async def _close(self) -> None:
        with anyio.move_on_after(CLOSE_TIMEOUT):
            while self._leases or self._waiting or self._attempts:
                await self._changed.wait()
        for lease in self.leases:
            self._log.error(
                LEASE_WORK_STOP_TIMED_OUT,
                lease=lease.name,
                epoch=lease.epoch,
                effect="the lease is not released but expires",
            )
            lease.may_be_held = False  # the store is closed, so no later release frees it
        self._unfinished += self.leases
        self._leases.clear()
        if self._task is not None:
            self._task.cancel()  # a renewal may be in progress
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT)
        await self._store.close()

    # -- notifications

    def receive(self, payload: str) -> None:
        """Handle a notification on the topic `riverpy_lease`."""
        message = decode_message(payload)
        prefix = self._store.prefix
        if message is None or not message.lease.startswith(prefix):
            return
        name = message.lease.removeprefix(prefix)
        if message.action == "released":
            self.lease_released(name, message.holder)
        elif message.action == "resign_requested":
            self.release_requested(name, epoch=message.epoch)

    def lease_released(self, name: str, holder: str) -> None:
        """Wake the callers that wait for a lease which another process has released."""
        if holder != self.holder:
            self._wake(name)

    def release_requested(self, name: str, *, epoch: int | None = None) -> None:
        """End a lease that another process asked for. None: whatever its epoch is."""
        lease = self._leases.get(name)
        if lease is not None and epoch in {None, lease.epoch}:
            self.resign(lease, "another process asked for it", pause=self.timing.interval)

    def wake_all(self) -> None:
        """Try to acquire each lease that is waited for. Notifications may have been missed."""
        for name in self._waiting:
            self._wake(name)

    def _wake(self, name: str) -> None:
        for event in self._waiting.get(name, ()):
            event.set()

    # -- waiting

    @asynccontextmanager
    async def hold(self, name: str, *, wait: timedelta | None = None) -> AsyncGenerator[Lease]:
        """Wait for a lease, then run the block under it. The block is cancelled when the lease
        ends.

        Raises:
            LeaseLostError: the lease ended before the block.
            TimeoutError: the lease was not free within `wait`.
            ClientStateError: the engine is closed.
        """
        lease = await self.acquire(name, wait=wait)
        try:
            with CancelAtLeaseEnd(lease):
                yield lease
        finally:
            await self.release(lease)

    async def acquire(
        self, name: str, *, wait: timedelta | None = None, scope: StopScope | None = None
    ) -> Lease:
        """Wait for a lease. It is then renewed until it is released, or ends.

        Args:
            name: of the lease, without the prefix of the store.
            wait: how long to wait, with at least one attempt; None: without limit.
            scope: of the service that waits. It is told when to expect the next attempt or renewal,
                until the lease ends.

        Raises:
            TimeoutError: the lease was not free within `wait`.
            ClientStateError: the engine is closed.
        """
        began = self.timer.boottime()
        until = began + (math.inf if wait is None else wait.total_seconds())
        wake = asyncio.Event()
        self._waiting.setdefault(name, set()).add(wake)
        if scope is not None:
            self._scopes[name] = scope
        try:
            lease = await self._acquire(name, wake, until)
        finally:
            self._waiting[name].discard(wake)
            if not self._waiting[name]:
                del self._waiting[name]
                self._failing.discard(name)
                self._change()
        lease.waited = self.timer.boottime() - began
        return lease

    async def _acquire(self, name: str, wake: asyncio.Event, until: float) -> Lease:
        backoff = self._new_backoff()
        while True:
            self._expect_open()
            wake.clear()
            pause = self._pause(name)
            if pause <= 0:
                lease, pause = await self._attempt_in_turn(name, backoff)
                if lease is not None:
                    self._add(lease)
                    return lease
                self._expect_open()
                self.denied.emit()
            left = until - self.timer.boottime()
            if left <= 0:
                raise TimeoutError(f"lease {name!r} was not free in the time to wait for it")
            self._turn(name, pause)
            if await self.timer.wait(wake, min(pause, left)):
                await self.timer.sleep(random.uniform(0, WAKE_JITTER))  # noqa: S311 (no secret)

    def _expect_open(self) -> None:
        if self._is_closed:
            raise ClientStateError("wait for a lease while its client or manager is open")

    def _pause(self, name: str) -> float:
        """Seconds until an attempt for a name is allowed here."""
        if name in self._leases:
            return math.inf
        if any(lease.name == name for lease in self.unfinished):
            return self.timing.interval
        if self._max_held is not None and len(self._leases) + self._attempting >= self._max_held:
            return self.timing.interval
        return self._paused_until.get(name, 0.0) - self.timer.boottime()

    async def _attempt_in_turn(self, name: str, backoff: Backoff) -> tuple[Lease | None, float]:
        """Try once to acquire a lease. The attempt is delayed the more, the more leases are held or
        attempted here: if many are free at once, each process gets some. Returns the lease, or
        None and the seconds until the next attempt."""
        self._turn(name)
        before = len(self._leases) + self._attempting
        self._attempting += 1
        try:
            if before:
                await self.timer.sleep(min(SPREAD_DELAY * before, SPREAD_DELAY_MAX))
            lease, pause = await self.try_acquire(name)
        except DATABASE_ERRORS as error:
            return None, self._attempt_failed(name, error, backoff)
        finally:
            self._attempting -= 1
        self._failing.discard(name)
        backoff.reset()
        if lease is not None and self._is_closed:
            await self.release(lease)
            return None, 0.0
        return lease, pause

    def _attempt_failed(self, name: str, error: Exception, backoff: Backoff) -> float:
        """Log it. Returns the seconds until the next attempt."""
        if self._is_closed:
            return 0.0
        if self._store.is_gone:
            raise ClientStateError(
                "the pool or connection that was given for the leases is closed: keep it open "
                "while the manager or client is open"
            ) from error
        is_known = self._failing or self._store.is_outage_logged
        say = self._log.debug if is_known else self._log.warning
        say(LEASE_ACQUISITION_FAILED, lease=name, error=describe(error))
        if not self._store.is_outage_logged:
            self._failing.add(name)
        return backoff.next()

    async def try_acquire(self, name: str) -> tuple[Lease | None, float]:
        """Try once to acquire a lease. Returns the lease, which is not renewed by the engine; or
        None, and the seconds until the next attempt. A lease that is acquired after the caller was
        cancelled is released.

        Raises:
            ClientStateError: the engine is closed.
            Exception: one of DATABASE_ERRORS; the result is unknown.
        """
        self._expect_open()
        attempted_at = self.timer.boottime()
        attempt = AcquireAttempt(
            lambda: self._store.acquire(
                name, self.holder, self.timing.ttl_delta, timeout=self._attempt_timeout
            )
        )
        self._attempts.add(attempt)
        try:
            await attempt.run()
        except BaseException:
            if attempt.granted is not None:
                await self.release(self._make_lease(name, attempt.granted, attempted_at))
            raise
        finally:
            self._attempts.discard(attempt)
            self._change()
        if attempt.answer is None:
            return None, CONFLICT_DELAY + random.uniform(0, WAKE_JITTER)  # noqa: S311 (no secret)
        pause = self.timing.until_next_attempt(attempt.answer.remaining)
        if attempt.granted is None:
            return None, pause
        lease = self._make_lease(name, attempt.granted, attempted_at)
        if self._time_left(lease) <= 0:
            self._log.warning(LEASE_ACQUIRED_TOO_LATE, lease=name)
            await self.release(lease)
            return None, pause
        return lease, 0.0

    def _make_lease(self, name: str, answer: LeaseAnswer, attempted_at: float) -> Lease:
        return Lease(
            name,
            answer,
            attempted_at=attempted_at,
            store=self._store,
            timing=self.timing,
            timer=self.timer,
        )

    # -- holding

    def _add(self, lease: Lease) -> None:
        if not self._held:
            since = self.timing.validity - lease.valid_for
            self._renewal_due = self.timer.boottime() + self.timing.interval - since
        self._leases[lease.name] = lease
        lease.when_ended(lambda: self._lease_ended(lease))
        self._say_term(LEASE_ACQUIRED, lease=lease.name, epoch=lease.epoch)
        self._change()
        if self._task is None or self._task.done():
            # Without the context variables of the task that happens to start it.
            loop, context = asyncio.get_running_loop(), contextvars.Context()
            self._task = loop.create_task(self._tend(), context=context)

    def resign(self, lease: Lease, why: str, *, pause: float) -> bool:
        """End a lease so that another process can acquire it. This process makes no attempt for
        `pause` seconds. Returns False if the lease had ended."""
        if lease.cause is not None:
            return False
        self._paused_until[lease.name] = self.timer.boottime() + pause
        return lease.end(why)

    async def renew(self, lease: Lease) -> bool:
        """Extend a lease that its user renews. Returns False if it has ended.

        Raises:
            Exception: one of DATABASE_ERRORS; the result is unknown.
        """
        if not lease.is_held:
            lease.end(NOT_RENEWED)
            return False
        try:
            await self._renew([lease], timeout=min(STORE_TIMEOUT, lease.valid_for))
        finally:
            self._change()
        return lease.is_held

    async def release(self, lease: Lease) -> bool:
        """Release a lease after the work under it. Returns whether this freed it. False: it had
        ended before; or the result is unknown and the lease expires, with a warning."""
        lease.end("it was released", cause=StopCause.CLIENT_STOP)
        is_freed = False
        try:
            is_freed = lease.may_be_held and await finish(lambda: self._free(lease))
        finally:
            lease.is_used = False
            self._report_at.pop(lease, None)
            if self._leases.get(lease.name) is lease:
                del self._leases[lease.name]
            self._change()
            self.wake_all() if self._max_held is not None else self._wake(lease.name)
        self._log.debug(
            LEASE_RELEASED if is_freed else LEASE_ALREADY_LOST, lease=lease.name, epoch=lease.epoch
        )
        return is_freed

    async def _free(self, lease: Lease) -> bool:
        try:
            return await self._store.release(
                lease.name,
                lease.epoch,
                lease.holder,
                timeout=RELEASE_TIMEOUT,
            )
        except _UNKNOWN as error:
            say = self._log.debug if self._store.is_outage_logged else self._log.warning
            say(
                LEASE_RELEASE_FAILED,
                lease=lease.name,
                epoch=lease.epoch,
                error=describe(error),
            )
            return False

    def _change(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()
        self._store.mark_idle(acquiring=not self._waiting, renewing=not self._leases)

    def _lease_ended(self, lease: Lease) -> None:
        self._report_at[lease] = lease.ended_at + self.timing.grace
        if (scope := self._scopes.pop(lease.name, None)) is not None:
            scope.expect_no_progress()  # the work may take any time to stop
        keys = {"lease": lease.name, "epoch": lease.epoch, "reason": lease.why}
        if lease.is_lost and self._store.logs_terms:
            self._log.warning(LEASE_LOST, **keys)
        else:
            self._say_term(LEASE_ENDED, **keys)

    def _turn(self, name: str, pause: float = 0.0) -> None:
        if (scope := self._scopes.get(name)) is not None:
            scope.expect_progress(within=pause + self._turn_max)

    @property
    def _held(self) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.cause is None]

    def _time_left(self, lease: Lease) -> float:
        """Seconds until the work must be stopped, to end before the local deadline."""
        return lease.valid_for - self.timing.grace

    async def _tend(self) -> None:
        """Watch and renew leases, while there are any."""
        try:
            while self._leases:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._watch)
                    await self._renew_on_time()
                    tasks.cancel_scope.cancel()
        except Exception:
            self._log.exception(LEASE_ENGINE_FAILED, effect="all leases of this process end")
        finally:
            for lease in self._held:  # only after a failure
                lease.end("a fault has ended its renewal")
            self._change()

    async def _watch(self) -> None:
        """End leases while their work has the time to stop before the local deadline."""
        while True:
            for lease in self._held:
                if self._time_left(lease) <= 0:
                    lease.end(NOT_RENEWED)
            self._report_unfinished()
            left = min(map(self._time_left, self._held), default=math.inf)
            planned = max(min(self.timing.watch_interval, left), WATCH_INTERVAL_MIN)
            before = self.timer.boottime()
            await self.timer.sleep(planned)
            late = self.timer.boottime() - before - planned
            if late > STALL_MIN and self._held:
                self._log.warning(
                    PROCESS_PAUSED,
                    seconds=round(late, 1),
                )

    def _report_unfinished(self) -> None:
        """Log work that has not stopped in time after its lease ended."""
        now = self.timer.boottime()
        for lease, report_at in self._report_at.items():
            if now >= report_at and self._leases.get(lease.name) is lease:
                self._report_at[lease] = now + REPORT_INTERVAL
                self._log.warning(
                    WORK_RAN_PAST_ITS_LEASE,
                    lease=lease.name,
                    epoch=lease.epoch,
                    seconds=round(now - lease.ended_at, 1),
                    effect="its fenced transactions fail, and this process does not acquire the "
                    "lease until the work ends",
                )

    async def _renew_on_time(self) -> None:
        """Renew all leases in one statement, at an interval that nothing puts off."""
        backoff, failures = self._new_backoff(), RepeatedFailureLog(self._log)
        locked = frozenset[str]()
        while self._leases:
            held = [lease for lease in self._held if self._time_left(lease) >= RENEWAL_TIME_MIN]
            for lease in held:
                self._turn(lease.name)
            early = self._renewal_due - self.timer.boottime()
            if early > 0 or not held:
                step = self.timing.watch_interval
                await self.timer.wait(self._changed, min(early, step) if early > 0 else step)
                continue
            due = self.timer.boottime() + self.timing.interval
            try:
                await self._renew(held, timeout=self._renewal_timeout(held, locked))
            except _UNKNOWN as error:
                if isinstance(error, LeaseLockedError):
                    locked = error.names
                failures.failed(
                    LEASE_RENEWAL_FAILED,
                    is_known=self._store.is_outage_logged,
                    error=describe(error),
                )
                self.renewal_failures += 1
                left = min(map(self._time_left, self._held), default=math.inf)
                self._renewal_due = self.timer.boottime() + min(backoff.next(), max(left, 0.0) / 2)
            else:
                failures.recovered(LEASE_RENEWAL_RESTORED)
                locked = frozenset[str]()
                backoff.reset()
                self._renewal_due = due

    def _renewal_timeout(self, held: list[Lease], locked: frozenset[str]) -> float:
        """A renewal without an answer leaves the time for another one. A lease whose row is locked
        does not shorten the time of the others."""
        free = [lease for lease in held if lease.name not in locked]
        return min(STORE_TIMEOUT, min(map(self._time_left, free or held)) / 2)

    async def _renew(self, held: list[Lease], *, timeout: float) -> None:
        attempted_at = self.timer.boottime()
        terms = [(lease.name, lease.epoch) for lease in held]
        answers = await self._store.renew(self.holder, terms, timeout=timeout)
        for lease in held:
            if lease.name not in answers:
                lease.end("another process may hold it", may_be_held=False)
            elif answers[lease.name]:
                lease.renewed(attempted_at=attempted_at)
        self.renewals += 1
        self.renewal_seconds = self.timer.boottime() - attempted_at
        self.renewed.emit()
        if locked := [name for name, is_renewed in answers.items() if not is_renewed]:
            raise LeaseLockedError(locked)

    def _new_backoff(self) -> Backoff:
        """At the default interval 1, 2, 4, then 5 seconds."""
        interval = timedelta(seconds=self.timing.interval)
        return Backoff(interval / 5, interval)
