"""Lease: one term of a lease that this process has acquired. A term lasts from the acquisition of a
lease to its end."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, overload

from riverpy._lifecycle import StopCause
from riverpy._log import get_logger
from riverpy._log_events import LEASE_CHECK_FAILED
from riverpy._postgres.driver import PostgresError
from riverpy._postgres.transactions import run_at_once_if_blocking
from riverpy._without_loop import fail_after, get_running_loop, is_without_loop
from riverpy.errors import ConfigError, LeaseLostError
from riverpy.stats import LeaseLag

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

    from riverpy._clock import Timer
    from riverpy._leases.memory import MemoryTransaction
    from riverpy._leases.store import LeaseStore
    from riverpy._leases.timing import LeaseTiming
    from riverpy._postgres.leases import LeaseAcquireResult
    from riverpy._postgres.sessions.protocols import BlockingTransaction, CallerTransaction

LEASE_STORE_TIMEOUT = 5.0
"""The timeout of one call of the store, in seconds."""
NOT_RENEWED_REASON = "the lease could not be renewed in time"
RELEASE_REQUESTED_REASON = "another process requested it"
FENCE_REFUSED_REASON = "the database refused its fence"
LAG_COUNT_MAX = 2**63 - 1
LAG_SECONDS_MAX = timedelta.max // timedelta(seconds=1)
"""`LAG_COUNT_MAX` is the largest count, and `LAG_SECONDS_MAX` the largest age in seconds, that
`Lease.report_lag` accepts."""
_SERIALIZATION_FAILURE = "40001"


class Lease:
    """One term of a lease, from its acquisition to its end. The number `epoch` identifies the term
    among all terms of the lease `name`.

    A `LeaseManager` or a client creates this object. Every method that is not a coroutine may be
    called from any thread.
    """

    def __init__(
        self,
        name: str,
        answer: LeaseAcquireResult,
        *,
        attempted_at: float,
        store: LeaseStore,
        timing: LeaseTiming,
        timer: Timer,
    ) -> None:
        """Create the lease from the store's answer to a successful attempt to acquire it. The
        attempt started at `attempted_at` by `Timer.seconds_since_boot`. `name` is the name of the
        lease without the prefix that the store adds in the table."""
        self.name, self.epoch, self.holder = name, answer.epoch, answer.holder
        self.acquired_at = answer.acquired_at
        """The start of the term by the server's clock, exact to the microsecond."""
        self.cause: StopCause | None = None
        """Why the lease ended. None: it has not ended."""
        self.end_reason = NOT_RENEWED_REASON
        """The cause of the end in words, for log lines and errors."""
        self.ended_at = 0.0
        """The time at which the lease ended, by `Timer.seconds_since_boot`."""
        self.may_be_held = True
        """Whether the store may still have this process as the holder of the lease. If so, the
        lease must be released."""
        self.is_used = True
        """Whether work under the lease may still run, even after the end of the lease. Any thread
        may set this."""
        self.waited = 0.0
        """Seconds that this process waited before it acquired the lease."""
        self._reported_lag: tuple[float, int | None, float | None] | None = None
        """The values of the last call of `report_lag`: its time (`Timer.seconds_since_boot`), the
        count, and the age in seconds."""
        self._pid = os.getpid()
        self._store, self._timing, self._timer = store, timing, timer
        self._valid_until = attempted_at + timing.validity_seconds
        self._loop = asyncio.get_running_loop()
        self._end_event = asyncio.Event()
        self._end_callbacks: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        state = "held" if self.is_held else "ended"
        return f"<Lease {self.name!r} epoch={self.epoch} {state}>"

    @property
    def is_held(self) -> bool:
        """Whether this process may act under the lease now: the lease has not ended, and its local
        deadline is not reached. The deadline also comes nearer while the machine is suspended. In
        a forked process, the value is always False."""
        return self.valid_for > 0

    @property
    def valid_for(self) -> float:
        """Seconds until the local deadline; 0 if the lease is not held."""
        if self.cause is not None or self._pid != os.getpid():
            return 0.0
        return max(self._valid_until - self._timer.seconds_since_boot(), 0.0)

    def expect_held(self) -> None:
        """Check that the lease is held, before a step outside a fenced transaction.

        Raises:
            LeaseLostError: the lease is not held.
        """
        if not self.is_held:
            raise self.lost_error()

    async def wait_lost(self) -> None:
        """Wait until the lease is not held any more, for any reason."""
        while (left := self.valid_for) > 0:
            await self._timer.wait_for_event(
                self._end_event, min(left, self._timing.deadline_check_interval)
            )

    def report_lag(self, *, count: int | None = None, age: timedelta | float | None = None) -> None:
        """Report how much work under this lease waits to be done, for example after each batch of
        events. Pass `count`, `age` or both. Each report replaces the one before.

        This call sends no statement. A running client writes the last report with its next
        heartbeat, so that `riverpy lease`, `top` and `doctor` show it. `Client.stats` and
        `/metrics` show it at once. After the end of the lease, no report is shown.

        Args:
            count: the number of items that are not handled yet, 0 or more.
            age: the age of the oldest of these items, as a timedelta or in seconds, 0 or more.

        Raises:
            ConfigError: no value is given, or a value is not allowed.
        """
        seconds = _validate_lag(count, age)
        self._reported_lag = self._timer.seconds_since_boot(), count, seconds

    @property
    def lag(self) -> LeaseLag | None:
        """The lag that the last call of `report_lag` reported. None: it was never called."""
        if self._reported_lag is None:
            return None
        reported_at, count, age = self._reported_lag
        ago = max(self._timer.seconds_since_boot() - reported_at, 0.0)
        return LeaseLag(count=count, age=age, reported_ago=ago)

    @overload
    def fence(self, connection: BlockingTransaction) -> None: ...
    @overload
    def fence(
        self, connection: CallerTransaction | MemoryTransaction
    ) -> Coroutine[object, None, None]: ...
    def fence(
        self, connection: BlockingTransaction | CallerTransaction | MemoryTransaction
    ) -> Coroutine[object, None, None] | None:
        """Bind the transaction that is open on `connection` to this term. If the term has ended,
        the call raises LeaseLostError. Otherwise the next term begins only after the transaction
        has ended.

        Call this method before the transaction writes, and in the outermost transaction: the
        rollback of a savepoint would undo the fence. The server ends a transaction that lasts
        longer than the lease's ttl. Before PostgreSQL 17, the limit applies only to each statement
        and each time between two statements. Any isolation level is allowed, and renewals continue
        during the transaction.

        For a connection or session of async code, write `await lease.fence(session)`. For a
        blocking session, as in a thread, write `lease.fence(session)` without `await`.

        Args:
            connection: your connection or session, in a transaction. For a lease in memory: a
                `MemoryTransaction`.

        Raises:
            LeaseLostError: the lease is not held: roll back.
            TransactionError: `connection` has no open transaction. Or the transaction is in another
                database or schema, or has an open savepoint. `client.run_once(…, tx=…)` runs its
                function in a savepoint, so call `fence` before `run_once`.
            TimeoutError: the database did not answer before the local deadline.
            asyncpg.PostgresError: the transaction has failed.
        """
        return run_at_once_if_blocking(connection, self._fence(connection))

    async def _fence(self, connection: object) -> None:
        self.expect_held()
        ttl = self._timing.ttl_timedelta
        try:
            with fail_after(
                self.valid_for,
                f"the fence of lease {self.name!r} was not set before the local deadline",
            ):
                is_held = await self.try_fence(connection, timeout=ttl, lock_timeout=ttl)
        except PostgresError as error:
            if getattr(error, "sqlstate", None) != _SERIALIZATION_FAILURE:
                raise
            if await self.confirm_held_or_end(FENCE_REFUSED_REASON):
                raise  # the lease is held: only the snapshot is too old
        else:
            if not is_held and await self.confirm_held_or_end(FENCE_REFUSED_REASON):
                raise await self._store.make_wrong_database_error(connection, self.name)
        self.expect_held()

    async def confirm_held_or_end(self, reason: str) -> bool:
        """Ask the server whether this process holds the lease, after a transaction did not find the
        row of the lease. If the server does not confirm it, end the lease for this `reason` and
        return False. Any thread may call this."""
        if not is_without_loop():
            return await self._confirm_held_or_end(reason)
        if get_running_loop() is self._loop:
            # The check needs the event loop of this thread, which cannot run during this blocking
            # call. So end the lease without a check.
            self.end(reason, may_be_held=False)
            return False
        call = asyncio.run_coroutine_threadsafe(self._confirm_held_or_end(reason), self._loop)
        return call.result(2 * LEASE_STORE_TIMEOUT)

    async def _confirm_held_or_end(self, reason: str) -> bool:
        if await self.renew_in_store():
            return True
        self.end(reason, may_be_held=False)
        return False

    @property
    def fence_statement(self) -> str:
        """The SQL statement that binds a transaction to this term (see `fence`), for a blocking
        driver in a thread.

        Execute the statement without parameters in the outermost transaction, before other
        statements write. Roll back unless the result is true. If the statement returns no row, the
        lease has ended. If it returns false, a savepoint is open, which would undo the fence. In a
        repeatable read or serializable transaction, the result may be true after the term has
        ended, if no other process has acquired the lease yet. Then another process can acquire the
        lease only after the transaction has ended.

        Raises:
            LeaseLostError: the lease is not held.
            ConfigError: the lease is kept in memory.
        """
        self.expect_held()
        return self._store.fence_statement(self.name, self.epoch, timeout=self.ttl)

    # -- methods for the engine and for term fences

    @property
    def seconds_until_stop(self) -> float:
        """Seconds until the work must be stopped, so that it ends before the local deadline."""
        return self.valid_for - self._timing.grace_seconds

    @property
    def ttl(self) -> timedelta:
        """The time to live of the lease: how long it lasts without a renewal."""
        return self._timing.ttl_timedelta

    async def try_fence(
        self, transaction: object, *, timeout: timedelta, lock_timeout: timedelta
    ) -> bool:
        """Bind a transaction to this term. The transaction may take `timeout`, and each wait for a
        lock may take `lock_timeout`. Return False if the term has ended, or if the lease is not in
        the transaction's database."""
        return await self._store.fence(
            transaction, self.name, self.epoch, timeout=timeout, lock_timeout=lock_timeout
        )

    async def renew_in_store(self) -> bool:
        """Renew the lease. Return whether the server confirmed that this process holds the lease.
        Without an answer from the server, return False."""
        attempted_at = self._timer.seconds_since_boot()
        try:
            held = await self._store.renew(
                self.holder, [(self.name, self.epoch)], timeout=LEASE_STORE_TIMEOUT
            )
        except Exception as error:  # the caller raises an error that says more
            get_logger().debug(
                LEASE_CHECK_FAILED,
                lease=self.name,
                error_type=type(error).__name__,
            )
            return False
        if held.get(self.name):
            self.extend(attempted_at=attempted_at)
        return self.name in held

    def extend(self, *, attempted_at: float) -> None:
        """Extend the local deadline after a successful renewal, which started at `attempted_at` by
        `Timer.seconds_since_boot`."""
        if self.cause is None:
            self._valid_until = attempted_at + self._timing.validity_seconds

    def end(
        self, reason: str, *, cause: StopCause = StopCause.LEASE_LOST, may_be_held: bool = True
    ) -> bool:
        """End the lease in this process at once. This sends no statement. If the lease had ended
        before, keep the first reason and return False. `may_be_held`: whether the store may still
        have this process as the holder of the lease."""
        if self.cause is not None:
            self.may_be_held = self.may_be_held and may_be_held
            return False
        self.cause, self.may_be_held, self.end_reason = cause, may_be_held, reason
        self.ended_at = self._timer.seconds_since_boot()
        self._end_event.set()
        for callback in self._end_callbacks:
            callback()
        return True

    def call_at_end(self, callback: Callable[[], object]) -> None:
        """Call `callback` in the event loop as soon as the lease ends, or now if it has ended."""
        if self.cause is None:
            self._end_callbacks.append(callback)
        else:
            callback()

    @property
    def is_lost(self) -> bool:
        """Whether the lease ended because it was not renewed in time, or because another process
        may hold it."""
        return self.cause is not None and (
            self.end_reason == NOT_RENEWED_REASON or not self.may_be_held
        )

    def lost_error(self) -> LeaseLostError:
        """Return the error to raise if this lease is used but not held any more."""
        is_fork = self._pid != os.getpid()
        reason = "this process is a fork of its holder" if is_fork else self.end_reason
        return LeaseLostError(
            f"lease {self.name!r} is not held any more (epoch {self.epoch}: {reason}): stop the "
            "work under it, and roll back what is not committed"
        )


def _validate_lag(count: object, age: object) -> float | None:
    """Check the arguments of `Lease.report_lag`. Return `age` in seconds.

    Raises:
        ConfigError: no value is given, or a value is not allowed.
    """
    if count is None and age is None:
        raise ConfigError("report_lag takes count, age or both, got neither")
    if count is not None and (type(count) is not int or not 0 <= count <= LAG_COUNT_MAX):
        raise ConfigError(
            f"count is the number of items, from 0 to {LAG_COUNT_MAX:,}, got {count!r}"
        )
    if age is None:
        return None
    seconds = age.total_seconds() if isinstance(age, timedelta) else age
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ConfigError(f"age takes a timedelta or seconds, got {type(age).__name__}")
    if not 0 <= seconds <= LAG_SECONDS_MAX:
        raise ConfigError(f"age is from 0 to {LAG_SECONDS_MAX:,} seconds, got {seconds!r}")
    return float(seconds)


class CancelAtLeaseEnd:
    """A context manager that cancels the task in its `with` block when a lease ends.

    The task is cancelled only once, so that the block can still await its cleanup, such as the end
    of a transaction. A cancel scope of anyio would also cancel each await of the cleanup.

    Raises:
        LeaseLostError: the lease ended before the block ended.
    """

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._task: asyncio.Task[Any] | None = None
        self._earlier_cancel_count = 0
        self._is_cancel_sent = False

    def __enter__(self) -> None:
        self._task = task = asyncio.current_task()
        self._earlier_cancel_count = 0 if task is None else task.cancelling()
        loop = asyncio.get_running_loop()
        # Cancel a moment later: a block that ends the lease itself may exit before that. Then no
        # cancellation is needed.
        self._lease.call_at_end(lambda: loop.call_soon(self._cancel_task))

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._is_cancel_sent = True
            self._task.cancel(f"lease {self._lease.name!r} has ended")

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if task is not None and self._is_cancel_sent:
            # `is_ours` is False if other code has also cancelled the task.
            is_ours = task.uncancel() <= self._earlier_cancel_count
            if is_ours and isinstance(exc, asyncio.CancelledError):
                raise self._lease.lost_error() from exc
        if exc is None and self._lease.cause is not None:
            raise self._lease.lost_error()
