"""LeaseRenewer: renews the leases that one process holds, and ends those that it could not renew in
time.

One task renews all leases in one statement. If a lease is not renewed in time, a second task ends
it early, so that the work has time to stop before the local deadline (see `LeaseTiming`). The
second task also logs work that does not stop. When the work has stopped, the code that uses the
lease calls `remove_lease`.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from datetime import timedelta
from typing import TYPE_CHECKING

import anyio

from riverpy._clock import Backoff
from riverpy._leases.lease import LEASE_STORE_TIMEOUT, NOT_RENEWED_REASON
from riverpy._leases.timing import DEADLINE_CHECK_INTERVAL_MIN
from riverpy._lifecycle import TestSignal
from riverpy._log import RepeatedFailureLog, get_logger
from riverpy._log_events import (
    LEASE_ACQUIRED,
    LEASE_ENDED,
    LEASE_ENGINE_FAILED,
    LEASE_LOST,
    LEASE_RENEWAL_FAILED,
    LEASE_RENEWAL_RESTORED,
    PROCESS_PAUSED,
    WORK_RAN_PAST_ITS_LEASE,
)
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy._postgres.leases import LeaseLockedError
from riverpy.errors import TransactionError
from riverpy.stats import LeaseStats

if TYPE_CHECKING:
    from riverpy._clock import Timer
    from riverpy._leases.lease import Lease
    from riverpy._leases.store import LeaseStore
    from riverpy._leases.timing import LeaseTiming
    from riverpy._lifecycle import StopScope

TIME_LEFT_FOR_RENEWAL_MIN = 0.01
"""If the work under a lease must stop within this number of seconds, the lease is not renewed any
more."""
LOGGED_PROCESS_PAUSE_MIN = 1.0
"""If a sleep takes this number of seconds longer than planned, a pause of this process is
logged."""
UNFINISHED_WORK_LOG_INTERVAL = 10.0
"""Seconds between two log lines about work that runs after its lease ended."""
UNKNOWN_RESULT_ERRORS = (*DATABASE_ERRORS, TransactionError)
"""The errors after which the result of a statement is unknown."""


class LeaseRenewer:
    """Renews the leases of one process in one store. The renewer keeps each lease until
    `remove_lease` is called."""

    def __init__(
        self, store: LeaseStore, *, holder: str, timing: LeaseTiming, timer: Timer
    ) -> None:
        """Create a renewer without leases. `LeaseEngine` describes the arguments."""
        self._store, self._holder = store, holder
        self._timing, self._timer = timing, timer
        self._leases: dict[str, Lease] = {}
        self._scope_by_lease: dict[Lease, StopScope] = {}  # scopes of the services that hold leases
        self._work_log_due_at: dict[Lease, float] = {}
        """For each ended lease, the time (by `Timer.seconds_since_boot`) at which its work is
        logged if it still runs."""
        self._lease_change_event = asyncio.Event()
        """An event that is set and replaced when a lease is added, renewed by `renew_lease`, or
        removed."""
        self._next_renewal_at = 0.0  # the time of the next renewal, by `Timer.seconds_since_boot`
        self._renewal_task: asyncio.Task[None] | None = None
        """The task that renews and watches the leases. It runs while there are leases."""
        self.renewal_count = self.renewal_failure_count = 0
        self.last_renewal_seconds = 0.0
        """The duration of the last renewal, in seconds."""
        self._log = get_logger(holder=holder)
        self._log_lease_term = self._log.info if store.should_log_terms else self._log.debug
        self.leases_renewed = TestSignal("LeaseRenewer.renewed")

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def leases(self) -> list[Lease]:
        """All leases of this process, also those that have ended but are not released yet."""
        return list(self._leases.values())

    @property
    def stats(self) -> LeaseStats:
        """The counts of held leases and of renewals, and the duration of the last renewal."""
        held = [lease for lease in self._leases.values() if lease.is_held]
        return LeaseStats(
            len(held),
            self.renewal_count,
            self.renewal_failure_count,
            self.last_renewal_seconds,
            {lease.name: lag for lease in held if (lag := lease.lag) is not None},
        )

    def get_lease(self, name: str) -> Lease | None:
        return self._leases.get(name)

    def add_lease(self, lease: Lease, scope: StopScope | None) -> None:
        """Add a newly acquired lease, and renew it until it ends. `scope` is the `StopScope` of the
        service that holds the lease."""
        if not self._active_leases:
            since = self._timing.validity_seconds - lease.valid_for
            self._next_renewal_at = (
                self._timer.seconds_since_boot() + self._timing.attempt_interval - since
            )
        self._leases[lease.name] = lease
        if scope is not None:
            self._scope_by_lease[lease] = scope
        lease.call_at_end(lambda: self._record_and_log_lease_end(lease))
        self._log_lease_term(LEASE_ACQUIRED, lease=lease.name, epoch=lease.epoch)
        self._signal_lease_change()
        if self._renewal_task is None or self._renewal_task.done():
            # The new task must not inherit the context variables of this caller.
            loop, context = asyncio.get_running_loop(), contextvars.Context()
            self._renewal_task = loop.create_task(self._watch_and_renew_leases(), context=context)

    def remove_lease(self, lease: Lease) -> None:
        """Remove a lease whose work has stopped. It is no error if the renewer does not have the
        lease."""
        self._work_log_due_at.pop(lease, None)
        if self._leases.get(lease.name) is lease:
            del self._leases[lease.name]
        self._signal_lease_change()

    async def renew_lease(self, lease: Lease) -> bool:
        """Renew one lease now, for code that renews its leases itself. Return False if the lease
        has ended.

        Raises:
            Exception: one of DATABASE_ERRORS; the result is unknown.
        """
        if not lease.is_held:
            lease.end(NOT_RENEWED_REASON)
            return False
        try:
            await self._renew_leases([lease], timeout=min(LEASE_STORE_TIMEOUT, lease.valid_for))
        finally:
            self._signal_lease_change()
        return lease.is_held

    async def close(self, timeout: float) -> None:
        """Remove all leases, and stop renewals. The caller must have ended the leases before. Wait
        for at most `timeout` seconds until a running renewal has stopped."""
        self._leases.clear()
        if self._renewal_task is not None:
            self._renewal_task.cancel()
            await asyncio.wait([self._renewal_task], timeout=timeout)

    def _signal_lease_change(self) -> None:
        event, self._lease_change_event = self._lease_change_event, asyncio.Event()
        event.set()
        if not self._leases:
            self._store.mark_connections_idle(renewing=True)

    def _record_and_log_lease_end(self, lease: Lease) -> None:
        self._work_log_due_at[lease] = lease.ended_at + self._timing.grace_seconds
        if (scope := self._scope_by_lease.pop(lease, None)) is not None:
            scope.clear_progress_deadline()  # the time that the work needs to stop has no limit
        keys = {"lease": lease.name, "epoch": lease.epoch, "reason": lease.end_reason}
        if lease.is_lost and self._store.should_log_terms:
            self._log.warning(LEASE_LOST, **keys)
        else:
            self._log_lease_term(LEASE_ENDED, **keys)

    @property
    def _active_leases(self) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.cause is None]

    @property
    def _seconds_until_first_work_stop(self) -> float:
        """The shortest time until work under a held lease must stop, in seconds. Infinity: no lease
        is held."""
        return min((lease.seconds_until_stop for lease in self._active_leases), default=math.inf)

    async def _watch_and_renew_leases(self) -> None:
        """Renew the leases, and end those that were not renewed in time, until no lease is left.
        After a fault, end all leases."""
        try:
            while self._leases:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._end_unrenewed_leases)
                    await self._renew_leases_at_interval()
                    tasks.cancel_scope.cancel()
        except Exception:
            self._log.exception(LEASE_ENGINE_FAILED, effect="all leases of this process end")
        finally:
            for lease in self._active_leases:  # only an error in this task leaves active leases
                lease.end("a fault ended the renewal of leases")
            self._signal_lease_change()

    async def _end_unrenewed_leases(self) -> None:
        """End leases that were not renewed, early enough for their work to stop before the local
        deadline."""
        while True:
            for lease in self._active_leases:
                if lease.seconds_until_stop <= 0:
                    lease.end(NOT_RENEWED_REASON)
            self._log_unfinished_work()
            planned = min(self._timing.deadline_check_interval, self._seconds_until_first_work_stop)
            planned = max(planned, DEADLINE_CHECK_INTERVAL_MIN)
            before = self._timer.seconds_since_boot()
            await self._timer.sleep(planned)
            late = self._timer.seconds_since_boot() - before - planned
            if late > LOGGED_PROCESS_PAUSE_MIN and self._active_leases:
                self._log.warning(PROCESS_PAUSED, seconds=round(late, 1))

    def _log_unfinished_work(self) -> None:
        """Log work that has not stopped in time after its lease ended."""
        now = self._timer.seconds_since_boot()
        for lease, log_at in self._work_log_due_at.items():
            if now >= log_at and self._leases.get(lease.name) is lease:
                self._work_log_due_at[lease] = now + UNFINISHED_WORK_LOG_INTERVAL
                self._log.warning(
                    WORK_RAN_PAST_ITS_LEASE,
                    lease=lease.name,
                    epoch=lease.epoch,
                    seconds=round(now - lease.ended_at, 1),
                    effect="its fenced transactions fail, and this process does not acquire the "
                    "lease until the work ends",
                )

    async def _renew_leases_at_interval(self) -> None:
        """Renew all leases at a fixed interval, in one statement."""
        backoff, failures = make_retry_backoff(self._timing), RepeatedFailureLog(self._log)
        locked = frozenset[str]()
        while self._leases:
            held = [
                lease
                for lease in self._active_leases
                if lease.seconds_until_stop >= TIME_LEFT_FOR_RENEWAL_MIN
            ]
            for scope in [
                self._scope_by_lease[lease] for lease in held if lease in self._scope_by_lease
            ]:
                scope.set_progress_deadline(within=attempt_interval_max(self._timing))
            early = self._next_renewal_at - self._timer.seconds_since_boot()
            if early > 0 or not held:
                step = self._timing.deadline_check_interval
                await self._timer.wait_for_event(
                    self._lease_change_event, min(early, step) if early > 0 else step
                )
                continue
            due = self._timer.seconds_since_boot() + self._timing.attempt_interval
            try:
                await self._renew_leases(held, timeout=self._renewal_timeout(held, locked))
            except UNKNOWN_RESULT_ERRORS as error:
                if isinstance(error, LeaseLockedError):
                    locked = error.lease_names
                failures.log_failure(
                    LEASE_RENEWAL_FAILED,
                    is_cause_logged=self._store.is_outage_logged,
                    error=describe_error(error),
                )
                self.renewal_failure_count += 1
                left = max(self._seconds_until_first_work_stop, 0.0)
                self._next_renewal_at = self._timer.seconds_since_boot() + min(
                    backoff.next_delay(), left / 2
                )
            else:
                failures.log_recovery(LEASE_RENEWAL_RESTORED)
                locked = frozenset[str]()
                backoff.reset()
                self._next_renewal_at = due

    def _renewal_timeout(self, leases: list[Lease], locked_names: frozenset[str]) -> float:
        """Return the timeout of a renewal, in seconds: at most half of the time until work under
        one of the leases must stop, so that there is time for a second renewal. Leases whose rows
        were locked at the last renewal (`locked_names`) count only if no other lease is left."""
        free = [lease for lease in leases if lease.name not in locked_names]
        return min(
            LEASE_STORE_TIMEOUT, min(lease.seconds_until_stop for lease in free or leases) / 2
        )

    async def _renew_leases(self, leases: list[Lease], *, timeout: float) -> None:
        attempted_at = self._timer.seconds_since_boot()
        terms = [(lease.name, lease.epoch) for lease in leases]
        answers = await self._store.renew(self._holder, terms, timeout=timeout)
        for lease in leases:
            if lease.name not in answers:
                lease.end("another process may hold the lease", may_be_held=False)
            elif answers[lease.name]:
                lease.extend(attempted_at=attempted_at)
        self.renewal_count += 1
        self.last_renewal_seconds = self._timer.seconds_since_boot() - attempted_at
        self.leases_renewed.emit()
        if locked := [name for name, is_renewed in answers.items() if not is_renewed]:
            raise LeaseLockedError(locked)


def attempt_interval_max(timing: LeaseTiming) -> float:
    """Return the longest time between two attempts to acquire a lease, or between two renewals, in
    seconds."""
    return 3 * timing.attempt_interval + LEASE_STORE_TIMEOUT


def make_retry_backoff(timing: LeaseTiming) -> Backoff:
    """Return the delays before retries of a failed attempt or renewal: by default 1, 2, 4 and then
    always 5 seconds."""
    interval = timedelta(seconds=timing.attempt_interval)
    return Backoff(interval / 5, interval)
