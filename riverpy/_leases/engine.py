"""LeaseEngine: acquires, renews, ends and releases the leases of one process in one store.

Leader elections, user leases and singletons use the engine. A lease goes through four steps:

1. `acquire` waits for the lease. The engine tries to acquire it at an interval, and also when
   another holder's lease expires or is released.
2. The engine holds the lease. One statement renews all leases of the engine. If a lease is not
   renewed in time, the engine ends it early, so that the work can stop before the local deadline.
3. The lease ends, because it was lost, another process requested it, or the work under it ended.
   The work is stopped.
4. When the work has stopped, `release` lets other processes acquire the lease. Until then, this
   process does not try to acquire it again. The engine logs work that does not stop.
"""

from __future__ import annotations

import asyncio
import math
import random
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Self

import anyio

from riverpy._leases.held_leases import (
    UNKNOWN_RESULT_ERRORS,
    LeaseRenewer,
    attempt_interval_max,
    make_retry_backoff,
)
from riverpy._leases.lease import (
    LEASE_STORE_TIMEOUT,
    RELEASE_REQUESTED_REASON,
    CancelAtLeaseEnd,
    Lease,
)
from riverpy._leases.lease_events import LeaseEventPublisher
from riverpy._leases.timing import ACQUIRE_JITTER_MAX
from riverpy._lifecycle import StopCause, TestSignal, run_despite_cancellation
from riverpy._log import get_logger
from riverpy._log_events import (
    LEASE_ACQUIRED_TOO_LATE,
    LEASE_ACQUISITION_FAILED,
    LEASE_ALREADY_LOST,
    LEASE_RELEASE_FAILED,
    LEASE_RELEASED,
    LEASE_WORK_STOP_TIMED_OUT,
)
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy._postgres.lease_reports import ReportedLag
from riverpy._postgres.notifier import decode_notification
from riverpy.config import ELECT_JITTER_FRACTION
from riverpy.errors import ClientStateError
from riverpy.events import LeaseUse

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
    from datetime import timedelta

    from riverpy._clock import Backoff, Timer
    from riverpy._leases.store import LeaseStore
    from riverpy._leases.timing import LeaseTiming
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.leases import LeaseAcquireResult
    from riverpy.events import Event

ACQUIRE_DELAY_PER_HELD_LEASE, ACQUIRE_DELAY_MAX = 0.02, 0.5
"""Before an attempt to acquire a lease, the engine waits `ACQUIRE_DELAY_PER_HELD_LEASE` seconds for
each lease that this process holds or is trying to acquire, but at most `ACQUIRE_DELAY_MAX` seconds.
So each process gets some of the leases."""
SPREADING_ACQUIRE_DELAY_PER_HELD_LEASE, SPREADING_ACQUIRE_DELAY_MAX = 0.1, 1.0
"""With `Config.spread_leases`, these values are used instead of `ACQUIRE_DELAY_PER_HELD_LEASE` and
`ACQUIRE_DELAY_MAX`. They are longer than the random delay `ACQUIRE_JITTER_MAX`. So if a lease is
handed over, the process that holds the fewest leases acquires it."""
BUSY_LEASE_RETRY_DELAY = 0.25
"""Seconds until the next attempt to acquire a lease, if another attempt or a fenced transaction was
in progress."""
CANCELLED_ACQUIRE_TIMEOUT = 1.0
"""The timeout of an attempt to acquire a lease after its caller was cancelled, in seconds."""
ENGINE_CLOSE_TIMEOUT = 2.0
"""The maximum number of seconds that `close` waits until the work under leases has stopped."""
LEASE_RELEASE_TIMEOUT = 2.0
"""The timeout of a release, in seconds. A lease that is not released expires."""


class LeaseEngine:
    """Acquires, renews and releases the leases of one process in one store. `async with engine:`
    opens and closes the store. A store that opens no connection does not need this. Use an engine
    in only one event loop."""

    def __init__(
        self,
        store: LeaseStore,
        *,
        holder: str,
        timing: LeaseTiming,
        timer: Timer,
        max_held: int | None = None,
        leases_with_running_work: Iterable[Lease] = (),
        publish_event: Callable[[Event], None] | None = None,
        should_spread: bool = False,
    ) -> None:
        """Create the engine.

        Args:
            store: keeps the leases.
            holder: the name of this process in the store.
            timing: the time to live of the leases, and the interval of their renewals.
            timer: the clock of this process.
            max_held: the maximum number of leases that the engine holds. None: no limit.
            leases_with_running_work: leases that an earlier engine of this client held. They have
                ended, but their work may still run. Until the work has ended, the new engine does
                not acquire leases of the same names.
            publish_event: sends the events of leases to subscribers, without waiting for them.
            should_spread: whether the longer delays of `Config.spread_leases` apply.
        """
        self._leases_with_running_work = list(leases_with_running_work)
        self._store, self.holder, self._max_held = store, holder, max_held
        self.timing, self.timer = timing, timer
        self._acquire_timeout = min(
            LEASE_STORE_TIMEOUT, timing.validity_seconds - timing.grace_seconds
        )
        """The timeout of an attempt to acquire a lease, in seconds. After a longer
        attempt, work under the lease might have to stop at once."""
        self.renewer = LeaseRenewer(store, holder=holder, timing=timing, timer=timer)
        self.events = LeaseEventPublisher(publish_event)
        self._should_spread = should_spread
        self._wake_events: dict[str, set[asyncio.Event]] = {}
        """The events that wake callers waiting for a lease, by lease name."""
        self._acquire_paused_until: dict[str, float] = {}
        """For each lease name, the time (by `Timer.seconds_since_boot`) before which this engine
        does not try to acquire it."""
        self._current_attempt_count = 0
        """The number of attempts to acquire a lease that are in their delay or in progress."""
        self._acquire_attempts: set[AcquireAttempt] = set()
        self._failing_lease_names: set[str] = set()
        """The names of the leases whose last attempt ended with an error. While the set is not
        empty, further errors are logged only at level debug."""
        self._state_change_event = asyncio.Event()
        """An event that is set and replaced when a lease is released, when a caller stops waiting,
        and when an attempt ends."""
        self._is_closed = False
        self._log = get_logger(holder=holder)
        self.lease_denied = TestSignal("LeaseEngine.denied")

    @property
    def leases_with_running_work(self) -> list[Lease]:
        """The ended leases whose work still runs. They were held by an earlier engine of this
        client, or by this engine until `close`."""
        return [lease for lease in self._leases_with_running_work if lease.is_used]

    def is_standby_for(self, name: str) -> bool:
        """Return whether a caller waits for the lease, and this process could soon try to acquire
        the lease."""
        if name not in self._wake_events or self.renewer.get_lease(name) is not None:
            return False
        if self._max_held is not None and len(self.renewer) >= self._max_held:
            return False
        if any(lease.name == name for lease in self.leases_with_running_work):
            return False
        pause = self._acquire_paused_until.get(name, 0.0) - self.timer.seconds_since_boot()
        return pause < self.timing.attempt_interval

    @property
    def standby_lease_names(self) -> list[str]:
        """The names of the leases for which this process stands by (see `is_standby_for`). The
        names have the prefix of the store, as in the table."""
        prefix = self._store.lease_name_prefix
        return [prefix + name for name in self._wake_events if self.is_standby_for(name)]

    @property
    def reported_lags(self) -> dict[str, ReportedLag]:
        """The last report of `Lease.report_lag` for each held lease. The keys are the names of the
        leases as in the table: with the prefix of the store."""
        prefix = self._store.lease_name_prefix
        return {
            prefix + lease.name: ReportedLag(lease.epoch, lag.count, lag.age, lag.reported_ago)
            for lease in self.renewer.leases
            if lease.is_held and (lag := lease.lag) is not None
        }

    async def __aenter__(self) -> Self:
        """Open the store. The errors are those of `LeaseStore.open`."""
        try:
            await self._store.open()
        except BaseException:
            await self._store.close()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every lease, wait for at most `ENGINE_CLOSE_TIMEOUT` seconds until the work under the
        leases has stopped, and close the store. If work still runs after this time, its lease is
        not released but expires later. Callers that wait for a lease get a ClientStateError."""
        self._is_closed = True
        self.wake_all_waiting_callers()
        for lease in self.renewer.leases:
            lease.end("the leases of this process are closed", cause=StopCause.CLIENT_STOP)
        for attempt in self._acquire_attempts:
            attempt.cancel_statement_after_timeout()
        await run_despite_cancellation(self._wait_for_work_and_close)

    async def _wait_for_work_and_close(self) -> None:
        with anyio.move_on_after(ENGINE_CLOSE_TIMEOUT):
            while self.renewer or self._wake_events or self._acquire_attempts:
                await self._state_change_event.wait()
        for lease in self.renewer.leases:
            self._log.error(
                LEASE_WORK_STOP_TIMED_OUT,
                lease=lease.name,
                epoch=lease.epoch,
                effect="the lease is not released but expires",
            )
            lease.may_be_held = False  # the store closes now, so the lease is not released
            self.events.publish_end(lease, is_released=False)
        self._leases_with_running_work += self.renewer.leases
        await self.renewer.close(ENGINE_CLOSE_TIMEOUT)
        await self._store.close()

    # -- notifications

    def receive_notification(self, payload: str) -> None:
        """Handle a notification on the topic `riverpy_lease`."""
        message = decode_notification(payload)
        prefix = self._store.lease_name_prefix
        if message is None or not message.lease.startswith(prefix):
            return
        name = message.lease.removeprefix(prefix)
        if message.action == "released":
            self.wake_callers_after_release(name, message.holder)
        elif message.action == "resign_requested":
            self.resign_on_request(name, epoch=message.epoch)

    def wake_callers_after_release(self, name: str, holder: str) -> None:
        """Wake the callers that wait for this lease, because another process has released it."""
        if holder != self.holder:
            self._wake_callers(name)

    def resign_on_request(self, name: str, *, epoch: int | None = None) -> None:
        """End a lease because another process requested its release. If `epoch` (the number of a
        term) is not None, end the lease only if it has this epoch."""
        lease = self.renewer.get_lease(name)
        if lease is not None and epoch in {None, lease.epoch}:
            self.resign(lease, RELEASE_REQUESTED_REASON, pause=self.timing.attempt_interval)

    def wake_all_waiting_callers(self) -> None:
        """Try now to acquire each lease that a caller waits for, because notifications may have
        been lost."""
        for name in self._wake_events:
            self._wake_callers(name)

    def _wake_callers(self, name: str) -> None:
        for event in self._wake_events.get(name, ()):
            event.set()

    # -- waiting for leases

    @asynccontextmanager
    async def hold(self, name: str, *, wait: timedelta | None = None) -> AsyncGenerator[Lease]:
        """Wait for a lease, then run the `async with` block while the lease is held. The block is
        cancelled when the lease ends.

        Raises:
            LeaseLostError: the lease ended before the block ended.
            TimeoutError: the lease was not free within `wait`.
            ClientStateError: the engine is closed.
        """
        lease = await self.acquire(name, wait=wait)
        try:
            with CancelAtLeaseEnd(lease):
                yield lease
        except Exception as error:
            self.events.publish_work_failure(lease, error)
            raise
        finally:
            await self.release(lease)

    async def acquire(
        self,
        name: str,
        *,
        wait: timedelta | None = None,
        scope: StopScope | None = None,
        use: LeaseUse = LeaseUse.LEASE,
    ) -> Lease:
        """Wait until this process has acquired a lease. Then the engine renews the lease until it
        ends or is released.

        Args:
            name: the name of the lease, without the prefix of the store.
            wait: the maximum time to wait. None: no limit. The engine tries at least once to
                acquire the lease.
            scope: the `StopScope` of the service that waits. Until the lease ends, the engine sets
                a new progress deadline in this scope for each attempt and renewal. If the next one
                is too late, the service counts as stuck. None: no progress deadline is set.
            use: what the lease is used for. The events of the lease contain this value.

        Raises:
            TimeoutError: the lease was not free within `wait`.
            ClientStateError: the engine is closed.
        """
        began = self.timer.seconds_since_boot()
        until = began + (math.inf if wait is None else wait.total_seconds())
        wake = asyncio.Event()
        self._wake_events.setdefault(name, set()).add(wake)
        try:
            lease = await self._acquire_before_deadline(name, wake, until, scope)
        finally:
            self._wake_events[name].discard(wake)
            if not self._wake_events[name]:
                del self._wake_events[name]
                self._failing_lease_names.discard(name)
                self._signal_state_change()
        lease.waited = self.timer.seconds_since_boot() - began
        self.events.publish_acquired(lease, use)
        return lease

    async def _acquire_before_deadline(
        self, name: str, wake_event: asyncio.Event, deadline: float, scope: StopScope | None
    ) -> Lease:
        backoff = make_retry_backoff(self.timing)
        while True:
            self._require_open()
            wake_event.clear()
            pause = self._seconds_until_next_attempt(name)
            if pause <= 0:
                self._set_progress_deadline(scope)
                lease, pause = await self._try_acquire_after_delay(name, backoff)
                if lease is not None:
                    self.renewer.add_lease(lease, scope)
                    return lease
                self._require_open()
                self.lease_denied.emit()
            left = deadline - self.timer.seconds_since_boot()
            if left <= 0:
                raise TimeoutError(f"lease {name!r} was not free in the time to wait for it")
            self._set_progress_deadline(scope, pause)
            if await self.timer.wait_for_event(wake_event, min(pause, left)):
                await self.timer.sleep(random.uniform(0, ACQUIRE_JITTER_MAX))  # noqa: S311 (no secret)

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClientStateError("wait for a lease while its client or manager is open")

    def _seconds_until_next_attempt(self, name: str) -> float:
        """Return the seconds until this process may try to acquire a lease. Infinity: this process
        holds the lease."""
        if self.renewer.get_lease(name) is not None:
            return math.inf
        if any(lease.name == name for lease in self.leases_with_running_work):
            return self.timing.attempt_interval
        if (
            self._max_held is not None
            and len(self.renewer) + self._current_attempt_count >= self._max_held
        ):
            return self.timing.attempt_interval
        return self._acquire_paused_until.get(name, 0.0) - self.timer.seconds_since_boot()

    async def _try_acquire_after_delay(
        self, name: str, backoff: Backoff
    ) -> tuple[Lease | None, float]:
        """Try once to acquire a lease, after a delay. The delay grows with the number of leases
        that this process holds or is trying to acquire. So if many leases are free at once, each
        process gets some. Return the lease, or None and the seconds until the next attempt."""
        before = len(self.renewer) + self._current_attempt_count
        self._current_attempt_count += 1
        try:
            if before:
                await self.timer.sleep(self._compute_acquire_delay(before))
            lease, pause = await self.try_acquire(name)
        except DATABASE_ERRORS as error:
            return None, self._log_failed_attempt_and_get_delay(name, error, backoff)
        finally:
            self._current_attempt_count -= 1
        self._failing_lease_names.discard(name)
        backoff.reset()
        if lease is not None and self._is_closed:
            await self.release(lease)
            return None, 0.0
        return lease, pause

    def _compute_acquire_delay(self, held_or_attempted_count: int) -> float:
        """Return the seconds by which an attempt to acquire a lease is delayed."""
        if self._should_spread:
            delay = SPREADING_ACQUIRE_DELAY_PER_HELD_LEASE * held_or_attempted_count
            return min(delay, SPREADING_ACQUIRE_DELAY_MAX)
        return min(ACQUIRE_DELAY_PER_HELD_LEASE * held_or_attempted_count, ACQUIRE_DELAY_MAX)

    def _log_failed_attempt_and_get_delay(
        self, name: str, error: Exception, backoff: Backoff
    ) -> float:
        """Log a failed attempt to acquire a lease. Return the seconds until the next attempt."""
        if self._is_closed:
            return 0.0
        if self._store.is_caller_database_closed:
            raise ClientStateError(
                "the pool or connection that was given for the leases is closed: keep it open "
                "while the manager or client is open"
            ) from error
        is_known = self._failing_lease_names or self._store.is_outage_logged
        log = self._log.debug if is_known else self._log.warning
        log(LEASE_ACQUISITION_FAILED, lease=name, error=describe_error(error))
        if not self._store.is_outage_logged:
            self._failing_lease_names.add(name)
        return backoff.next_delay()

    async def try_acquire(self, name: str) -> tuple[Lease | None, float]:
        """Try once to acquire a lease. Return the lease, or None and the seconds until the next
        attempt. The engine does not renew this lease. If the caller is cancelled, the lease is
        released.

        Raises:
            ClientStateError: the engine is closed.
            Exception: one of DATABASE_ERRORS; the result is unknown.
        """
        self._require_open()
        attempted_at = self.timer.seconds_since_boot()
        ttl, timeout = self.timing.ttl_timedelta, self._acquire_timeout
        attempt = AcquireAttempt(
            partial(self._store.acquire, name, self.holder, ttl, timeout=timeout)
        )
        self._acquire_attempts.add(attempt)
        try:
            await attempt.execute_statement()
        except BaseException:
            if attempt.answer is not None and attempt.answer.is_granted:
                await self.release(self._make_lease(name, attempt.answer, attempted_at))
            raise
        finally:
            self._acquire_attempts.discard(attempt)
            self._signal_state_change()
        if attempt.answer is None:
            return None, BUSY_LEASE_RETRY_DELAY + random.uniform(0, ACQUIRE_JITTER_MAX)  # noqa: S311 (no secret)
        pause = self.timing.seconds_until_next_attempt(attempt.answer.seconds_until_expiry)
        if not attempt.answer.is_granted:
            return None, pause
        lease = self._make_lease(name, attempt.answer, attempted_at)
        if lease.seconds_until_stop <= 0:
            self._log.warning(LEASE_ACQUIRED_TOO_LATE, lease=name)
            await self.release(lease)
            return None, pause
        return lease, 0.0

    def _make_lease(self, name: str, answer: LeaseAcquireResult, attempted_at: float) -> Lease:
        return Lease(
            name,
            answer,
            attempted_at=attempted_at,
            store=self._store,
            timing=self.timing,
            timer=self.timer,
        )

    # -- held leases

    def resign(self, lease: Lease, reason: str, *, pause: float) -> bool:
        """End a lease so that another process can acquire it. This process does not try to acquire
        it for `pause` seconds. Return False if the lease had already ended."""
        if lease.cause is not None:
            return False
        self._acquire_paused_until[lease.name] = self.timer.seconds_since_boot() + pause
        return lease.end(reason)

    def hand_over(self, lease: Lease, reason: str) -> bool:
        """End a lease so that another process can acquire it. After the release, this process does
        not try to acquire it again for `hand_over_pause` seconds. Return False if the lease had
        already ended."""
        return lease.end(reason, cause=StopCause.LEASE_HANDED_OVER)

    @property
    def hand_over_pause(self) -> float:
        """Seconds after a hand-over during which this process does not try to acquire the lease
        again. In this time, every process that waits for the lease tries at least once, even
        without notifications."""
        polled = self.timing.attempt_interval * (1 + ELECT_JITTER_FRACTION)
        return polled + SPREADING_ACQUIRE_DELAY_MAX

    async def release(self, lease: Lease) -> bool:
        """Release a lease when the work under it has ended. Return False if the lease was lost
        before, or if the result is unknown. An unknown result is logged, and the lease expires."""
        has_work_ended = lease.end("the lease was released", cause=StopCause.CLIENT_STOP)
        is_freed = False
        try:
            is_freed = lease.may_be_held and await run_despite_cancellation(
                lambda: self._release_in_store(lease)
            )
        finally:
            lease.is_used = False
            if lease.cause is StopCause.LEASE_HANDED_OVER:
                paused_until = self.timer.seconds_since_boot() + self.hand_over_pause
                self._acquire_paused_until[lease.name] = paused_until
            self.renewer.remove_lease(lease)
            self.events.publish_end(lease, is_released=is_freed, has_work_ended=has_work_ended)
            self._signal_state_change()
            self.wake_all_waiting_callers() if self._max_held is not None else self._wake_callers(
                lease.name
            )
        self._log.debug(
            LEASE_RELEASED if is_freed else LEASE_ALREADY_LOST, lease=lease.name, epoch=lease.epoch
        )
        return is_freed

    async def _release_in_store(self, lease: Lease) -> bool:
        try:
            return await self._store.release(
                lease.name, lease.epoch, lease.holder, timeout=LEASE_RELEASE_TIMEOUT
            )
        except UNKNOWN_RESULT_ERRORS as error:
            log = self._log.debug if self._store.is_outage_logged else self._log.warning
            log(
                LEASE_RELEASE_FAILED,
                lease=lease.name,
                epoch=lease.epoch,
                error=describe_error(error),
            )
            return False

    def _signal_state_change(self) -> None:
        """Wake tasks that wait for a state change. If no caller waits for a lease, mark the
        connection for attempts as idle."""
        event, self._state_change_event = self._state_change_event, asyncio.Event()
        event.set()
        if not self._wake_events:
            self._store.mark_connections_idle(acquiring=True)

    def _set_progress_deadline(self, scope: StopScope | None, pause: float = 0.0) -> None:
        if scope is not None:
            scope.set_progress_deadline(within=pause + attempt_interval_max(self.timing))


class AcquireAttempt:
    """One attempt to acquire a lease. If the caller is cancelled, the statement still runs for a
    short time, because it may already have acquired the lease on the server. With the answer, the
    engine can release the lease again."""

    def __init__(self, statement: Callable[[], Awaitable[LeaseAcquireResult | None]]) -> None:
        self.answer: LeaseAcquireResult | None = None
        """The answer to the attempt. None: no answer yet, or another attempt or a fenced
        transaction was in progress."""
        self._statement = statement
        self._error: Exception | None = None
        self._cancel_scope = anyio.CancelScope(shield=True)
        self._end_event = asyncio.Event()

    async def execute_statement(self) -> None:
        """Execute the statement, and wait for its end. After a cancellation or a call of
        `cancel_statement_after_timeout`, wait for at most `CANCELLED_ACQUIRE_TIMEOUT` seconds.

        Raises:
            Exception: one of DATABASE_ERRORS; the result is unknown.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._execute_statement_shielded)
            try:
                await self._end_event.wait()
            finally:
                self.cancel_statement_after_timeout()
        if self._error is not None:
            raise self._error

    def cancel_statement_after_timeout(self) -> None:
        """Cancel the statement after `CANCELLED_ACQUIRE_TIMEOUT` seconds, because no caller waits
        for it any more."""
        self._cancel_scope.deadline = anyio.current_time() + CANCELLED_ACQUIRE_TIMEOUT

    async def _execute_statement_shielded(self) -> None:
        with self._cancel_scope:
            try:
                self.answer = await self._statement()
            except Exception as error:  # `execute_statement` raises this error later
                self._error = error
        if self._cancel_scope.cancelled_caught:
            self._error = TimeoutError("the leases were closed before the answer came")
        self._end_event.set()
