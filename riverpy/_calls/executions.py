"""RunOnceMethods: the methods of a client that run a function once, at most once or at least once
for each key. All processes that use the database share the keys."""

from __future__ import annotations

import inspect
import math
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import anyio
import anyio.lowlevel

from riverpy._calls.base import ClientMethods
from riverpy._clock import Backoff
from riverpy._lifecycle import run_despite_cancellation
from riverpy._log import get_logger
from riverpy._log_events import (
    EXECUTION_CLAIM_RELEASE_FAILED,
    EXECUTION_END_NOT_RECORDED,
    EXECUTION_FAILURE_NOT_RECORDED,
)
from riverpy._names import validate_run_once_key
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    LockNotAvailableError,
    QueryCanceledError,
    SerializationError,
    UndefinedTableError,
    describe_error,
    is_asyncpg_connection,
)
from riverpy._postgres.executions import (
    execution_check_transaction,
    execution_claim,
    execution_complete,
    execution_get,
    execution_insert_completed,
    execution_mark_failed,
    execution_release,
)
from riverpy._postgres.schema import RIVERPY_MIGRATION_LINE, make_migrate_command
from riverpy._postgres.transactions import (
    call_async_function,
    flush_session,
    limit_lock_wait,
    run_caller_function,
)
from riverpy._without_loop import move_on_after, sleep
from riverpy.errors import ConfigError, SchemaMissingError
from riverpy.executions import Claim, Execution, ExecutionState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator

    from riverpy._postgres.driver import Connection, PoolConnection, Transaction
    from riverpy._postgres.sessions.protocols import CallerTransaction

KEY_RETENTION_DEFAULT = timedelta(days=30)
"""The default time for which a key is stored."""
KEY_WAIT_TIMEOUT_DEFAULT = timedelta(seconds=10)
"""The default time for which a call waits for another call with the same key."""
CLAIM_EXPIRY_DEFAULT = timedelta(minutes=5)
"""The default time after which a claim expires. A claim is the right of one call of
`run_at_least_once` to run its function."""
CANCEL_MARGIN_SHARE_OF_CLAIM_EXPIRY = 1 / 15
"""A function is cancelled before its claim expires: when this fraction of `expires_after` is left.
The margin is needed because the clocks of client and server may run at different speeds."""
DURATION_ARGUMENT_MAX = timedelta(days=36_500)
"""The maximum value of the arguments `kept`, `wait` and `expires_after`."""
UNREGISTERED_CLAIMANT_LIFETIME = timedelta(minutes=1)
"""How long a client counts as alive after it has claimed a key, if it is open but not running. Such
a client writes no heartbeats."""
UNRECORDED_FAILURES_MAX = 1000
"""The maximum number of failed calls that a client keeps in memory until it can record the failures
in the database. If there are more, the oldest are dropped."""
CLAIM_RELEASE_TIMEOUT = 2.0
"""The timeout for releasing a claim, or for recording that a function failed, in seconds."""
RECORD_COMPLETION_TIMEOUT = 10.0
"""The timeout for recording in the database that a function has completed, in seconds. It includes
all retries."""
_RECORD_RETRY_DELAY_MIN, _RECORD_RETRY_DELAY_MAX = timedelta(milliseconds=100), timedelta(seconds=2)
_LOCKED_KEY_RETRY_DELAY_MIN = timedelta(milliseconds=5)
_LOCKED_KEY_RETRY_DELAY_MAX = timedelta(milliseconds=200)

_log = get_logger()
ResultT = TypeVar("ResultT")
CallerTransactionT = TypeVar("CallerTransactionT", bound="CallerTransaction")
OutcomeT = TypeVar("OutcomeT")


class _KeyLockedError(Exception):
    """Another transaction has locked the key. The same statement may succeed later."""


class RunOnceMethods(ClientMethods):
    """The methods of a client that run a function once for each key."""

    @cached_property
    def _unrecorded_failures(self) -> dict[str, Claim]:
        """The claims of failed calls whose failure is not yet recorded in the database, by key.
        Until the failure of a `run_at_most_once` call is recorded, other calls with its key return
        IN_PROGRESS as long as this client is alive."""
        return {}

    @overload
    async def run_once(
        self,
        key: str,
        fn: Callable[[PoolConnection], Awaitable[ResultT]]
        | Callable[[Connection], Awaitable[ResultT]],
        *,
        kept: timedelta | None = ...,
        wait: timedelta = ...,
        tx: None = None,
    ) -> Execution[ResultT]: ...

    @overload
    async def run_once(
        self,
        key: str,
        fn: Callable[[CallerTransactionT], Awaitable[ResultT]],
        *,
        kept: timedelta | None = ...,
        wait: timedelta = ...,
        tx: CallerTransactionT,
    ) -> Execution[ResultT]: ...

    async def run_once(
        self,
        key: str,
        fn: Callable[[Any], Awaitable[ResultT]],
        *,
        kept: timedelta | None = KEY_RETENTION_DEFAULT,
        wait: timedelta = KEY_WAIT_TIMEOUT_DEFAULT,
        tx: CallerTransaction | None = None,
    ) -> Execution[ResultT]:
        """Run a function once for this key. The function writes to the database. Its writes and the
        record of the key are stored in one transaction.

        `await fn(connection)` runs the function. If `fn` raises, nothing is stored, and a later
        call runs `fn` again. If several calls run at the same time, one call runs `fn` and the
        others wait for its outcome.

        Args:
            key: identifies the effect of `fn`: 1 to 255 characters.
            fn: receives your `tx`. If `tx` is None, it receives the connection of the transaction.
                It must write only over this connection.
            kept: how long the key is stored. After that, a call runs `fn` again. Default 30 days.
                None: forever.
            wait: how long to wait for another call with this key. Default 10 seconds.
            tx: your connection, in a transaction. The effect is complete when you commit the
                transaction. The transaction stays usable if `fn` raises. `fn` runs in a savepoint
                of the transaction, so `Lease.fence` raises TransactionError in `fn`. To bind the
                transaction to a lease, call `fence` before `run_once`. Default None: a transaction
                on the client's pool, with the role's default isolation level and a timeout of 30
                seconds.

        Returns:
            An Execution in state RAN or DONE_BEFORE. The state is IN_PROGRESS if another call runs
                longer than `wait`. If a `run_at_most_once` or `run_at_least_once` with the key is
                running, IN_PROGRESS is returned without waiting. The state is UNKNOWN if a call of
                `run_at_most_once` claimed the key and then failed or died.

        Raises:
            ConfigError: the key or a duration is not allowed, or `fn` does not take one argument or
                is not async.
            SchemaMissingError: the migration line `riverpy` is not applied. The error text contains
                the command that applies it.
            ClientStateError: the client is not open, and there is no `tx`.
            TransactionError: `fn` has ended the transaction, or `tx` is closed, aborted or not in a
                transaction.
            Exception: the exception of `fn`, or a database error. If `fn` suppresses an error of a
                statement, `run_once` raises that error, because the transaction cannot commit.
                asyncpg.SerializationError: another call stored this key after `tx` took its
                snapshot.
        """
        _validate_arguments(key, fn, kept=kept, wait=wait)
        if tx is None:
            await self._record_unrecorded_failures()
        attempt = partial(self._try_to_run_once, key, fn, kept, tx)
        return await _retry_while_key_locked(wait, attempt)

    async def _try_to_run_once(
        self,
        key: str,
        fn: Callable[[Any], Awaitable[ResultT]],
        kept: timedelta | None,
        tx: CallerTransaction | None,
        wait: float,
    ) -> Execution[ResultT]:
        schema = self._config.schema
        await flush_session(tx)
        async with self._transaction(tx, isolation=None) as connection:
            async with self._limit_key_wait(connection, wait, can_retry_conflicts=tx is None):
                transaction_id = await execution_insert_completed(
                    connection, schema, key=key, claimed_by=self.id, retention=kept
                )
            if transaction_id is None:
                return await self._read_existing_execution(connection, key)
            value = await run_caller_function(connection, fn, tx)
            # Check that `fn` has not ended the transaction. With `tx`, the release of the savepoint
            # fails in this case.
            if tx is None:
                await execution_check_transaction(connection, transaction_id)
        return Execution(ExecutionState.RAN, value, self.id)

    async def run_at_most_once(
        self,
        key: str,
        fn: Callable[[Claim], Awaitable[ResultT]],
        *,
        kept: timedelta | None = KEY_RETENTION_DEFAULT,
    ) -> Execution[ResultT]:
        """Run a function at most once for this key. The function has an effect outside the
        database, such as sending a mail. After a crash or an error, the effect may or may not have
        happened, and `fn` does not run again.

        The call claims the key, runs `await fn(claim)`, and records that the effect is complete. If
        `fn` raises, the key stays claimed and the caller receives the exception. Another call with
        the key returns IN_PROGRESS while this client is alive. It returns UNKNOWN after `fn` has
        failed or the client has died. A client is dead if it has written no heartbeat for its
        `Config.dead_after`. A client writes heartbeats only while it runs. If it is only open, it
        counts as dead one minute after the claim.

        Args:
            key: identifies the effect of `fn`: 1 to 255 characters.
            fn: receives the claim.
            kept: how long the key is stored. After that, a call runs `fn` again. Default 30 days.
                None: forever.

        Returns:
            An Execution in state RAN, DONE_BEFORE, IN_PROGRESS or UNKNOWN.

        Raises:
            ConfigError, SchemaMissingError, ClientStateError: as `run_once`.
            Exception: the exception of `fn`, or a database error. A database error before `fn`
                means that `fn` did not run. If the connection was lost, the claim may be stored,
                and later calls return UNKNOWN. A database error after `fn` means that completion
                could not be recorded within 10 seconds.
        """
        _validate_arguments(key, fn, kept=kept)
        await self._record_unrecorded_failures()
        attempt = partial(self._try_to_claim_key, key, None, kept)
        claim = await _retry_while_key_locked(KEY_WAIT_TIMEOUT_DEFAULT, attempt)
        if not isinstance(claim, Claim):
            return claim
        try:
            value = await call_async_function(fn, claim)
        except BaseException:
            await run_despite_cancellation(lambda: self._try_to_record_failure(claim))
            raise
        return await self._complete_execution(claim, value, kept)

    async def run_at_least_once(
        self,
        key: str,
        fn: Callable[[Claim], Awaitable[ResultT]],
        *,
        expires_after: timedelta = CLAIM_EXPIRY_DEFAULT,
        kept: timedelta | None = KEY_RETENTION_DEFAULT,
    ) -> Execution[ResultT]:
        """Run a function until it succeeds once for this key. The function has an effect outside
        the database. After a crash or an error, another call runs `fn` again, so the effect may
        happen twice.

        The call claims the key for the time `expires_after`, runs `await fn(claim)`, and records
        that the effect is complete. If `fn` raises, the claim is released and the caller receives
        the exception.

        Args:
            key: identifies the effect of `fn`: 1 to 255 characters.
            fn: receives the claim. `fn` is cancelled shortly before the claim expires.
            expires_after: how long `fn` may run. If the process crashes, other calls return
                IN_PROGRESS until this time has passed. Default 5 minutes.
            kept: how long the key is stored, at least `expires_after`. After that, a call runs `fn`
                again. Default 30 days. None: forever.

        Returns:
            An Execution in state RAN, DONE_BEFORE, IN_PROGRESS, UNKNOWN or OVERTAKEN. UNKNOWN: a
                call of `run_at_most_once` claimed the key and failed or died. OVERTAKEN: the claim
                expired before completion was recorded, and another call claimed the key.

        Raises:
            ConfigError, SchemaMissingError, ClientStateError: as `run_once`.
            TimeoutError: `fn` took too long and was cancelled.
            Exception: the exception of `fn`, or a database error. A database error before `fn`
                means that `fn` did not run. If the connection was lost, the claim may be stored
                until it expires. A database error after `fn` means that completion could not be
                recorded within 10 seconds.
        """
        _validate_arguments(key, fn, kept=kept, expires_after=expires_after)
        await self._record_unrecorded_failures()
        if kept is not None and kept < expires_after:
            raise ConfigError(
                f"kept ({kept}) must be at least expires_after ({expires_after}): otherwise the "
                "key is deleted before its claim expires"
            )
        seconds = expires_after.total_seconds() * (1 - CANCEL_MARGIN_SHARE_OF_CLAIM_EXPIRY)
        reason = f"run_at_least_once({key!r}) took longer than its claim lasts"
        deadline = anyio.current_time() + seconds
        attempt = partial(self._try_to_claim_key, key, expires_after, kept)
        claim = await _retry_while_key_locked(KEY_WAIT_TIMEOUT_DEFAULT, attempt)
        if not isinstance(claim, Claim):
            return claim
        try:
            with anyio.fail_after(deadline - anyio.current_time(), reason=reason):
                # If the deadline has passed before `fn` starts, raise here and do not call `fn`.
                await anyio.lowlevel.checkpoint_if_cancelled()
                value = await call_async_function(fn, claim)
        except BaseException:
            await run_despite_cancellation(lambda: self._release_claim(claim))
            raise
        return await self._complete_execution(claim, value, kept)

    async def _try_to_claim_key(
        self, key: str, expires_after: timedelta | None, kept: timedelta | None, wait: float
    ) -> Claim | Execution[Any]:
        """Try to claim the key. Return the claim, or the Execution of the call that has already
        claimed the key. If this call is cancelled, release the claim, because it may be stored."""
        schema = self._config.schema
        claim: Claim | None = None
        try:
            async with self._transaction(None) as connection:
                async with self._limit_key_wait(connection, wait, can_retry_conflicts=True):
                    epoch = await execution_claim(
                        connection,
                        schema,
                        key=key,
                        claimed_by=self.id,
                        expires_after=expires_after,
                        retention=kept,
                    )
                if epoch is None:
                    return await self._read_existing_execution(connection, key)
                claim = Claim(key, epoch)
        except DATABASE_ERRORS:
            if claim is not None:  # the commit failed, but may have stored the claim
                self._add_unrecorded_failure(claim)
            raise
        except anyio.get_cancelled_exc_class():
            if claim is not None:
                await run_despite_cancellation(partial(self._release_claim, claim))
            raise
        return claim

    async def _complete_execution(
        self, claim: Claim, value: ResultT, kept: timedelta | None
    ) -> Execution[ResultT]:
        """Record that the effect is complete, and return the Execution. Database errors are
        retried. A cancellation does not interrupt this method, because no other process knows that
        the effect happened."""
        is_ours = await run_despite_cancellation(
            lambda: self._record_completion_with_retries(claim, kept)
        )
        state = ExecutionState.RAN if is_ours else ExecutionState.OVERTAKEN
        return Execution(state, value, self.id)

    async def _record_completion_with_retries(self, claim: Claim, kept: timedelta | None) -> bool:
        backoff = Backoff(_RECORD_RETRY_DELAY_MIN, _RECORD_RETRY_DELAY_MAX)
        deadline = anyio.current_time() + RECORD_COMPLETION_TIMEOUT
        while True:
            try:
                with anyio.fail_after(deadline - anyio.current_time()):
                    async with self._transaction(None) as connection:
                        return await execution_complete(
                            connection, self._config.schema, **claim._asdict(), retention=kept
                        )
            except DATABASE_ERRORS as error:
                delay = backoff.next_delay()
                if anyio.current_time() + delay > deadline:
                    self._add_unrecorded_failure(claim)
                    # Log the error here, because a cancelled caller does not receive it.
                    _log.error(
                        EXECUTION_END_NOT_RECORDED, key=claim.key, error=describe_error(error)
                    )
                    raise
                await anyio.sleep(delay)

    async def _release_claim(self, claim: Claim) -> None:
        """Release a claim, so that another call can run the function. If the release fails, the
        claim stays until it expires. A claim of `run_at_most_once` never expires."""
        try:
            with anyio.fail_after(CLAIM_RELEASE_TIMEOUT):
                async with self._transaction(None) as connection:
                    await execution_release(connection, self._config.schema, **claim._asdict())
        except DATABASE_ERRORS as error:
            _log.warning(EXECUTION_CLAIM_RELEASE_FAILED, error=describe_error(error))

    async def _try_to_record_failure(self, claim: Claim) -> None:
        """Record that the function of a `run_at_most_once` call failed. If the database cannot be
        reached, a later call of this client records it."""
        try:
            with anyio.fail_after(CLAIM_RELEASE_TIMEOUT):
                await self._record_failure(claim)
        except DATABASE_ERRORS as error:
            self._add_unrecorded_failure(claim)
            _log.warning(EXECUTION_FAILURE_NOT_RECORDED, key=claim.key, error=describe_error(error))

    async def _record_failure(self, claim: Claim) -> None:
        async with self._transaction(None) as connection:
            await execution_mark_failed(connection, self._config.schema, **claim._asdict())

    def _add_unrecorded_failure(self, claim: Claim) -> None:
        claims = self._unrecorded_failures
        claims[claim.key] = claim
        if len(claims) > UNRECORDED_FAILURES_MAX:
            del claims[next(iter(claims))]

    async def _record_unrecorded_failures(self) -> None:
        """Record in the database the failures that could not be recorded before. Ignore database
        errors: the caller's next statement raises them."""
        if not self._unrecorded_failures:
            return
        with suppress(*DATABASE_ERRORS), anyio.move_on_after(CLAIM_RELEASE_TIMEOUT):
            for claim in [*self._unrecorded_failures.values()]:
                await self._record_failure(claim)
                if self._unrecorded_failures.get(claim.key) == claim:
                    del self._unrecorded_failures[claim.key]

    async def _read_existing_execution(self, connection: Transaction, key: str) -> Execution[Any]:
        """Return the Execution for a key that another call has claimed."""
        row = await execution_get(
            connection,
            self._config.schema,
            key=key,
            alive_unregistered=UNREGISTERED_CLAIMANT_LIFETIME,
        )
        if row is None:  # the row was deleted after this call failed to claim the key
            return Execution(ExecutionState.IN_PROGRESS)
        if row.is_completed:
            state = ExecutionState.DONE_BEFORE
        elif row.can_expire or row.is_claimant_alive:
            state = ExecutionState.IN_PROGRESS
        else:
            state = ExecutionState.UNKNOWN
        return Execution(state, None, row.claimed_by, row.claimed_at)

    @asynccontextmanager
    async def _limit_key_wait(
        self, connection: Transaction, wait: float, *, can_retry_conflicts: bool
    ) -> AsyncGenerator[None]:
        """Limit how long a statement in the block waits for another transaction that has locked the
        same key. The limit is `wait` seconds.

        Raises:
            _KeyLockedError: the statement waited for `wait` seconds, or a timeout of the session
                ended it earlier. With `can_retry_conflicts`, this error is also raised if another
                transaction stored the key after this transaction took its snapshot.
            SchemaMissingError: the migration line `riverpy` is not applied.
        """
        try:
            cancel_after = wait if is_asyncpg_connection(connection) else math.inf
            with self._translate_missing_table_error(), move_on_after(cancel_after) as scope:
                async with limit_lock_wait(connection, wait):
                    yield
        except (LockNotAvailableError, QueryCanceledError) as error:
            raise _KeyLockedError from error
        except SerializationError as error:
            if not can_retry_conflicts:
                raise
            raise _KeyLockedError from error
        if scope.cancelled_caught:
            raise _KeyLockedError

    @contextmanager
    def _translate_missing_table_error(self) -> Generator[None]:
        try:
            yield
        except UndefinedTableError:
            command = make_migrate_command(
                f"riverpy migrate up --line {RIVERPY_MIGRATION_LINE}",
                self._config.schema,
                self.database_url,
            )
            raise SchemaMissingError(
                f"the table `riverpy_exec` is missing: run `{command}`"
            ) from None


async def _retry_while_key_locked(
    wait: timedelta, attempt: Callable[[float], Awaitable[OutcomeT]]
) -> OutcomeT | Execution[Any]:
    """Call `attempt(remaining_seconds)` again while it raises _KeyLockedError. After `wait`, return
    an Execution in state IN_PROGRESS. A retry is needed because a short lock timeout or an old
    snapshot can end an attempt too early."""
    deadline = time.monotonic() + wait.total_seconds()
    backoff = Backoff(_LOCKED_KEY_RETRY_DELAY_MIN, _LOCKED_KEY_RETRY_DELAY_MAX)
    while True:
        try:
            return await attempt(deadline - time.monotonic())
        except _KeyLockedError:
            if time.monotonic() >= deadline:
                return Execution(ExecutionState.IN_PROGRESS)
            await sleep(backoff.next_delay())


def _validate_arguments(key: str, fn: object, **durations: timedelta | None) -> None:
    validate_run_once_key(key)
    _validate_takes_one_argument(fn)
    for name, duration in durations.items():
        if duration is None and name == "kept":
            continue
        if not isinstance(duration, timedelta):
            raise ConfigError(f"{name} takes a timedelta, got {type(duration).__name__}")
        if not timedelta(0) < duration <= DURATION_ARGUMENT_MAX:
            days = DURATION_ARGUMENT_MAX.days
            raise ConfigError(f"{name} must be above zero and at most {days} days, got {duration}")


def _validate_takes_one_argument(fn: object) -> None:
    """Raise ConfigError if `fn` cannot be called with one argument. Without this check, the key
    would be claimed before the call fails."""
    if not callable(fn):
        raise ConfigError(f"fn must be a function with one parameter, got {type(fn).__name__}")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a callable written in C may have no signature
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigError(
            f"fn must take one argument, but its parameters are {signature}: {error}"
        ) from None
