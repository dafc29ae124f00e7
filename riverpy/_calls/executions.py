"""Executions: effects that happen once for a key, however many processes try."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.lowlevel

from riverpy._calls.base import ClientCalls
from riverpy._clock import Backoff
from riverpy._lifecycle import finish
from riverpy._log import get_logger
from riverpy._log_events import EXECUTION_CLAIM_RELEASE_FAILED, EXECUTION_END_NOT_RECORDED
from riverpy._names import validate_execution_key
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    LockNotAvailableError,
    QueryCanceledError,
    SerializationError,
    UndefinedTableError,
    describe,
)
from riverpy._postgres.executions import (
    ExecutionRow,
    exec_check_transaction,
    exec_claim,
    exec_complete,
    exec_get,
    exec_insert,
    exec_release,
)
from riverpy._postgres.schema import OWN_LINE, migrate_command
from riverpy.errors import ConfigError, SchemaMissingError
from riverpy.executions import Claim, Execution, ExecutionState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from riverpy._postgres.driver import Transaction

KEPT_DEFAULT = timedelta(days=30)
"""How long a key is known."""
WAIT_DEFAULT = timedelta(seconds=10)
"""How long a call waits for another one with the same key."""
EXPIRES_AFTER_DEFAULT = timedelta(minutes=5)
"""After which a claim at least once may be taken over."""
CLAIM_MARGIN_SHARE = 1 / 15
"""Of a claim's time, how much earlier its code must have ended: clocks run at different rates."""
TIME_MAX = timedelta(days=36_500)
GIVE_BACK_BOUND = 2.0
"""Seconds."""
STORE_BOUND = 10.0
"""Seconds in which an outcome is stored, tried again where the database does not answer."""
_RETRY_FIRST = timedelta(milliseconds=100)
_RETRY_MOST = timedelta(seconds=2)
_BLOCKED_FIRST = timedelta(milliseconds=5)
_BLOCKED_MOST = timedelta(milliseconds=200)

_log = get_logger()
ResultT = TypeVar("ResultT")
AnswerT = TypeVar("AnswerT")


class _BusyError(Exception):
    """Another transaction with the key did not end in time."""


class _BlockedError(Exception):
    """Another transaction with the key was in the way; a new attempt may pass."""


class ExecutionCalls(ClientCalls):
    """The calls that run an effect once for a key."""

    async def run_once(
        self,
        key: str,
        fn: Callable[[Transaction], Awaitable[ResultT]],
        *,
        kept: timedelta | None = KEPT_DEFAULT,
        wait: timedelta = WAIT_DEFAULT,
        tx: Transaction | None = None,
    ) -> Execution[ResultT]:
        """Run an effect on the database once for this key: `await fn(connection)` and the note that
        it was done are one transaction.

        What fails never happened: the error passes, and a later call runs it. Calls at the same
        time: one runs, the others wait for its outcome.

        Args:
            key: names the effect: 1 to 255 characters.
            fn: gets the connection of the transaction, and writes over that alone.
            kept: how long the key is known after; then it is forgotten, and would run again.
                Default 30 days. None: for ever.
            wait: how long to wait for another call with this key. Default 10 seconds.
            tx: a connection of yours, in a transaction: it is done when that commits, and that
                stays usable when `fn` fails. A fence is called before, for `fn` runs in a savepoint
                of it. Default: a transaction of the client's own, of the isolation that the role
                has as its default, which has 30 seconds.

        Returns:
            RAN, DONE_BEFORE or, after `wait`, IN_PROGRESS.

        Raises:
            ConfigError: the key or a time is not allowed; nothing was stored.
            SchemaMissingError: line `riverpy` is not migrated; the text has the command.
            ClientStateError: no `tx`, and the client is not open.
            TransactionError: `fn` has ended the transaction itself, or replaced it by another; a
                `tx` is over then. Or `tx` is in no transaction, aborted or closed.
            Exception: what `fn` raised, or one of DATABASE_ERRORS: so where `fn` has hidden one of
                a statement, after which the server commits nothing; or, where `tx` has a snapshot,
                asyncpg.SerializationError: the effect was done after that was taken.
        """
        _check(key, kept=kept, wait=wait)
        return await _while_blocked(wait, partial(self._run_once, key, fn, kept, tx))

    async def _run_once(
        self,
        key: str,
        fn: Callable[[Transaction], Awaitable[ResultT]],
        kept: timedelta | None,
        tx: Transaction | None,
        wait: float,
    ) -> Execution[ResultT]:
        schema = self._config.schema
        async with self._transaction(tx, isolation=None) as connection:
            with self._waiting_for_key(wait, can_retry_conflicts=tx is None):
                transaction_id = await exec_insert(
                    connection, schema, key=key, claimed_by=self.id, kept=kept
                )
            if transaction_id is None:
                return _answer(await exec_get(connection, schema, key=key))
            value = await fn(connection)
            if tx is None:  # else the savepoint is lost with the transaction
                await exec_check_transaction(connection, transaction_id)
        return Execution(ExecutionState.RAN, value, self.id)

    async def run_at_most_once(
        self,
        key: str,
        fn: Callable[[Claim], Awaitable[ResultT]],
        *,
        kept: timedelta | None = KEPT_DEFAULT,
    ) -> Execution[ResultT]:
        """Run an effect outside of the database, such as a mail, never twice for this key; after a
        crash or an error it may have happened or not, and does not run again.

        The key is claimed, `await fn(claim)` runs, and its end is noted. What `fn` raises passes,
        and the claim stays.

        Args:
            key: names the effect: 1 to 255 characters.
            fn: gets the claim.
            kept: how long the key is known; then it is forgotten, and would run again. Default 30
                days. None: for ever.

        Returns:
            RAN, DONE_BEFORE or UNKNOWN.

        Raises:
            ConfigError, SchemaMissingError, ClientStateError: as `run_once`.
            Exception: what `fn` raised; or one of DATABASE_ERRORS: before `fn`, when nothing ran,
                but where the answer was lost the claim may be stored, and later calls are UNKNOWN;
                or after, when its end could not be noted within 10 seconds.
        """
        _check(key, kept=kept)
        claim = await self._claim(key, None, kept)
        if not isinstance(claim, Claim):
            return claim
        return await self._complete(claim, await fn(claim), kept)

    async def run_at_least_once(
        self,
        key: str,
        fn: Callable[[Claim], Awaitable[ResultT]],
        *,
        expires_after: timedelta = EXPIRES_AFTER_DEFAULT,
        kept: timedelta | None = KEPT_DEFAULT,
    ) -> Execution[ResultT]:
        """Run an effect outside of the database until it has ended well once for this key; after a
        crash or an error another call runs it again, so that it may happen twice.

        The key is claimed for a time, `await fn(claim)` runs, and its end is noted. What `fn`
        raises passes, and the claim is given back.

        Args:
            key: names the effect: 1 to 255 characters.
            fn: gets the claim; cancelled shortly before the claim expires.
            expires_after: how long the claim of a process that has crashed keeps others waiting,
                and how long `fn` may take. Default 5 minutes.
            kept: how long the key is known after; then it is forgotten, and would run again.
                Default 30 days, at least `expires_after`. None: for ever.

        Returns:
            RAN, DONE_BEFORE, IN_PROGRESS, UNKNOWN where the key was claimed at most once, or
            OVERTAKEN.

        Raises:
            ConfigError, SchemaMissingError, ClientStateError: as `run_once`.
            TimeoutError: `fn` took too long, and was cancelled.
            Exception: what `fn` raised; or one of DATABASE_ERRORS: before `fn`, when nothing ran,
                but where the answer was lost the claim may be stored until it expires; or after,
                when its end could not be noted within 10 seconds.
        """
        _check(key, kept=kept, expires_after=expires_after)
        if kept is not None and kept < expires_after:
            raise ConfigError(
                f"kept ({kept}) is shorter than expires_after ({expires_after}): a claim would be "
                "forgotten while it holds"
            )
        seconds = expires_after.total_seconds() * (1 - CLAIM_MARGIN_SHARE)
        reason = f"run_at_least_once({key!r}) took longer than its claim lasts"
        deadline = anyio.current_time() + seconds
        claim = await self._claim(key, expires_after, kept)
        if not isinstance(claim, Claim):
            return claim
        try:
            with anyio.fail_after(deadline - anyio.current_time(), reason=reason):
                await anyio.lowlevel.checkpoint_if_cancelled()  # the claim took all of the time
                value = await fn(claim)
        except BaseException:
            await finish(lambda: self._give_back(claim))
            raise
        return await self._complete(claim, value, kept)

    async def _claim(
        self, key: str, expires_after: timedelta | None, kept: timedelta | None
    ) -> Claim | Execution[Any]:
        """The claim; or, if there is none to be had, the answer."""
        return await _while_blocked(
            WAIT_DEFAULT, partial(self._claim_once, key, expires_after, kept)
        )

    async def _claim_once(
        self, key: str, expires_after: timedelta | None, kept: timedelta | None, wait: float
    ) -> Claim | Execution[Any]:
        """A claim that may be stored when the caller is cancelled is given back."""
        schema = self._config.schema
        claim: Claim | None = None
        try:
            async with self._transaction(None) as connection:
                with self._waiting_for_key(wait, can_retry_conflicts=True):
                    epoch = await exec_claim(
                        connection,
                        schema,
                        key=key,
                        claimed_by=self.id,
                        expires_after=expires_after,
                        kept=kept,
                    )
                if epoch is None:
                    return _answer(await exec_get(connection, schema, key=key))
                claim = Claim(key, epoch)
        except anyio.get_cancelled_exc_class():
            if claim is not None:
                await finish(partial(self._give_back, claim))
            raise
        return claim

    async def _complete(
        self, claim: Claim, value: ResultT, kept: timedelta | None
    ) -> Execution[ResultT]:
        """Note the end, again while the database does not answer and in spite of a cancellation:
        what has happened is known here alone."""
        is_ours = await finish(lambda: self._note_end(claim, kept))
        state = ExecutionState.RAN if is_ours else ExecutionState.OVERTAKEN
        return Execution(state, value, self.id)

    async def _note_end(self, claim: Claim, kept: timedelta | None) -> bool:
        backoff = Backoff(_RETRY_FIRST, _RETRY_MOST)
        deadline = anyio.current_time() + STORE_BOUND
        while True:
            try:
                with anyio.fail_after(deadline - anyio.current_time()):
                    async with self._transaction(None) as connection:
                        return await exec_complete(
                            connection, self._config.schema, **claim._asdict(), kept=kept
                        )
            except DATABASE_ERRORS as error:
                delay = backoff.next()
                if anyio.current_time() + delay > deadline:
                    # Said here: a caller that is cancelled meanwhile does not hear of it.
                    _log.error(EXECUTION_END_NOT_RECORDED, key=claim.key, error=describe(error))
                    raise
                await anyio.sleep(delay)

    async def _give_back(self, claim: Claim) -> None:
        """If it cannot be, the claim expires by itself."""
        try:
            with anyio.fail_after(GIVE_BACK_BOUND):
                async with self._transaction(None) as connection:
                    await exec_release(connection, self._config.schema, **claim._asdict())
        except DATABASE_ERRORS as error:
            _log.warning(EXECUTION_CLAIM_RELEASE_FAILED, error=describe(error))

    @contextmanager
    def _waiting_for_key(self, wait: float, *, can_retry_conflicts: bool) -> Generator[None]:
        """Around the statement that waits for another transaction with its key: `wait` seconds. A
        server that does not answer does not roll back after them either, which is an error.

        Raises:
            _BusyError: the time is over.
            _BlockedError: the session's limits ended the wait before; or, if the caller
                `can_retry_conflicts`, its snapshot does not see who had the key.
            SchemaMissingError: line `riverpy` is not migrated.
        """
        try:
            with self._expecting_table(), anyio.move_on_after(wait) as scope:
                yield
        except (LockNotAvailableError, QueryCanceledError) as error:
            raise _BlockedError from error
        except SerializationError as error:
            if not can_retry_conflicts:
                raise
            raise _BlockedError from error
        if scope.cancelled_caught:
            raise _BusyError

    @contextmanager
    def _expecting_table(self) -> Generator[None]:
        try:
            yield
        except UndefinedTableError:
            command = migrate_command(
                f"riverpy migrate up --line {OWN_LINE}", self._config.schema, self.database_url
            )
            raise SchemaMissingError(
                f"the database lacks the table of what is done once: run `{command}`"
            ) from None


async def _while_blocked(
    wait: timedelta, attempt: Callable[[float], Awaitable[AnswerT]]
) -> AnswerT | Execution[Any]:
    """The answer of an attempt, which gets the seconds that are left; repeated until `wait` is
    over, for a session may limit the wait for a lock, or see a snapshot."""
    deadline = anyio.current_time() + wait.total_seconds()
    backoff = Backoff(_BLOCKED_FIRST, _BLOCKED_MOST)
    while True:
        try:
            return await attempt(deadline - anyio.current_time())
        except _BusyError:
            return Execution(ExecutionState.IN_PROGRESS)
        except _BlockedError:
            await anyio.sleep(backoff.next())


def _answer(row: ExecutionRow | None) -> Execution[Any]:
    """What is known of another call."""
    if row is None:  # deleted just now
        return Execution(ExecutionState.IN_PROGRESS)
    if row.is_completed:
        state = ExecutionState.DONE_BEFORE
    else:
        state = ExecutionState.IN_PROGRESS if row.can_expire else ExecutionState.UNKNOWN
    return Execution(state, None, row.claimed_by, row.claimed_at)


def _check(key: str, **times: timedelta | None) -> None:
    validate_execution_key(key)
    for name, time in times.items():
        if time is None and name == "kept":
            continue
        if not isinstance(time, timedelta):
            raise ConfigError(f"{name} takes a timedelta, got {type(time).__name__}")
        if not timedelta(0) < time <= TIME_MAX:
            raise ConfigError(f"{name} is above zero and at most {TIME_MAX.days} days, got {time}")
