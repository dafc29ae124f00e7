"""Checks and savepoints for the transactions of callers. A caller passes a transaction as `tx=` to
a method of riverpy, or passes it to a method `fence`. A fence lets a transaction commit only while
the process holds a lease."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from riverpy._lifecycle import run_despite_cancellation
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    InFailedTransactionError,
    describe_error,
    is_asyncpg_connection,
    is_closed_for_good,
    is_in_transaction,
)
from riverpy._postgres.sessions.adapter import (
    ASYNC_TX_TYPES_TEXT,
    BLOCKING_TX_TYPES_TEXT,
    adapt_session,
    describe_wrong_type,
)
from riverpy._postgres.sessions.session import (
    CallerSession,
    CallerTransactionState,
    make_no_transaction_error,
)
from riverpy._postgres.sql_files import get_query
from riverpy._without_loop import fail_after, is_without_loop, run_without_loop
from riverpy.errors import ConfigError, InsertError, TransactionError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
    from datetime import datetime

    from riverpy._postgres.driver import Transaction

ResultT = TypeVar("ResultT")

SAVEPOINT_ROLLBACK_TIMEOUT = 5.0
"""The timeout for a rollback to a savepoint, in seconds."""
TRANSACTION_CHECK_TIMEOUT = 5.0
"""The timeout for one statement that checks a transaction, in seconds."""
TRANSACTION_ABORTED_ERROR_TEXT = (
    "the transaction given as tx is aborted by an earlier error, so nothing was done: roll it "
    "back, or back to a savepoint from before that error"
)


def validate_and_adapt_tx(tx: object) -> Transaction:
    """Check a caller's argument `tx`, without a round trip. Return a connection of asyncpg
    unchanged. For another library, return an adapter with the same methods for statements (see
    `CallerSession`).

    Raises:
        TypeError: riverpy does not know the type of `tx`, or `tx` is blocking in an async client,
            or async in a blocking client.
        TransactionError: the connection is closed, or its transaction is aborted, or no transaction
            is open. (Django allows statements without a transaction.)
    """
    connection = _adapt_if_needed(tx)
    if connection is None:
        raise TypeError(f"tx must be {_describe_accepted_types()}, got {describe_wrong_type(tx)}")
    _validate_async_or_blocking(connection, tx)
    if is_closed_for_good(connection):
        raise TransactionError(
            "the connection given as tx is closed or back in its pool: nothing was done"
        )
    if not is_in_transaction(connection) and not (
        isinstance(connection, CallerSession) and connection.commits_by_itself
    ):
        raise make_no_transaction_error(is_blocking=is_without_loop())
    if (
        isinstance(connection, CallerSession)
        and connection.get_state() is CallerTransactionState.ABORTED
    ):
        raise TransactionError(TRANSACTION_ABORTED_ERROR_TEXT)
    return connection


def _adapt_if_needed(tx: object) -> Transaction | None:
    """Return a connection of asyncpg unchanged, or the adapter of another library's connection.
    Return None if riverpy does not know the type of `tx`."""
    if is_asyncpg_connection(tx):
        return tx
    # An adapter is not a connection of asyncpg, but has the same methods for statements.
    return cast("Transaction | None", adapt_session(tx))


def _describe_accepted_types() -> str:
    return BLOCKING_TX_TYPES_TEXT if is_without_loop() else ASYNC_TX_TYPES_TEXT


def _validate_async_or_blocking(connection: Transaction, tx: object) -> None:
    """Raise TypeError for an async connection in a call without an event loop. Raise TypeError also
    for a blocking connection in any other call, because it would block the event loop."""
    is_blocking = isinstance(connection, CallerSession) and connection.is_blocking
    if is_blocking == is_without_loop():
        return
    name = type(tx).__name__
    if is_blocking:
        raise TypeError(
            f"tx must be {ASYNC_TX_TYPES_TEXT}, got {name}, which blocks the event loop: use "
            "riverpy.sync.Client for it"
        )
    raise TypeError(
        f"tx must be {BLOCKING_TX_TYPES_TEXT}, got {name}, which is async: use riverpy.Client for "
        "it, or pass the blocking session that `AsyncSession.run_sync` gives to its function"
    )


def is_blocking_transaction(tx: object) -> bool:
    """Whether `tx` is a connection or session for blocking code. A str counts as one: it is an
    alias of Django's DATABASES."""
    if isinstance(tx, str):
        return True
    session = None if is_asyncpg_connection(tx) else adapt_session(tx)
    return session is not None and session.is_blocking


def run_at_once_if_blocking(
    tx: object, call: Coroutine[object, None, ResultT]
) -> ResultT | Coroutine[object, None, ResultT]:
    """If `tx` is blocking, run the coroutine `call` at once and return its result. Otherwise return
    the coroutine itself, so that the caller awaits it."""
    return run_without_loop(call) if is_blocking_transaction(tx) else call


def get_pooler_remedy(connection: Transaction) -> str:
    """Return the advice for error texts: what the caller must change if the connection goes through
    a pooler in transaction mode."""
    if isinstance(connection, CallerSession):
        return connection.pooler_remedy
    return "make the connection given as tx with statement_cache_size=0"


def require_copy_support(connection: Transaction) -> None:
    """Raise InsertError if the caller's connection does not support COPY."""
    if isinstance(connection, CallerSession) and not connection.has_copy:
        raise InsertError(
            f"insert_many_fast uses COPY, which {connection.library} does not have: use "
            "insert_many, or pass a connection of asyncpg or psycopg as tx"
        )


@asynccontextmanager
async def savepoint(connection: Transaction) -> AsyncGenerator[None]:
    """Run an `async with` block in a savepoint of an open transaction. If the block raises an
    error, roll back to the savepoint, so that the transaction is still usable. (asyncpg's own
    savepoints need a transaction that was begun through asyncpg.)

    Raises:
        TransactionError: the transaction was aborted before the block, or ended in the block.
    """
    if isinstance(connection, CallerSession) and connection.has_transaction_blocks:
        async with connection.transaction():
            yield
        return
    try:
        await _run_statement(connection, "session_savepoint")
    except InFailedTransactionError as error:
        raise TransactionError(TRANSACTION_ABORTED_ERROR_TEXT) from error
    try:
        yield
        await _run_statement(connection, "session_savepoint_release")
    except BaseException as error:
        failure = await run_despite_cancellation(lambda: _roll_back_to_savepoint(connection))
        if failure is not None and isinstance(error, Exception):
            raise TransactionError(
                "the transaction given as tx has ended or is aborted: its savepoint is lost "
                f"({describe_error(failure)}). Roll it back, and do all of it again"
            ) from error
        raise


@asynccontextmanager
async def limit_lock_wait(connection: Transaction, wait_seconds: float) -> AsyncGenerator[None]:
    """Limit each wait for a lock in the `async with` block to `wait_seconds`. For a connection of
    asyncpg, do nothing: the caller can cancel the statement instead. A connection of another
    library may close if a statement is cancelled. If the block fails, the caller must roll back to
    a savepoint that was set before the block.

    Raises:
        LockNotAvailableError: a statement waited for a lock for `wait_seconds`.
    """
    if not isinstance(connection, CallerSession):
        yield
        return
    before = await _set_lock_timeout(connection, f"{max(1, math.ceil(wait_seconds * 1000))}ms")
    yield
    await _set_lock_timeout(connection, before)


async def _set_lock_timeout(connection: Transaction, lock_timeout: str) -> str:
    """Set the lock timeout of the transaction. Return the previous one."""
    statement = get_query("session", "session_set_lock_timeout", None)
    return await statement.fetchval(connection, lock_timeout=lock_timeout)


async def flush_session(tx: object) -> None:
    """Write the changed objects of a SQLAlchemy session to the database. Call this before riverpy
    sets a savepoint without SQLAlchemy. Otherwise the session may write the objects after the
    savepoint. A rollback would then undo these writes, but the session would not notice."""
    if isinstance(session := _adapt_if_needed(tx), CallerSession):
        await session.flush()


async def run_caller_function(
    connection: Transaction, function: Callable[[Any], Awaitable[ResultT]], tx: object
) -> ResultT:
    """Call the caller's function, await it and return the result. The function receives `tx`. If
    `tx` is None, it receives `connection`, or the `native_session` of an adapter. If `connection`
    is an adapter, the function runs in the block of `CallerSession.savepoint`."""
    if isinstance(connection, CallerSession):
        async with connection.savepoint():
            return await call_async_function(
                function, connection.native_session if tx is None else tx
            )
    return await call_async_function(function, connection)


async def call_async_function(
    function: Callable[[Any], Awaitable[ResultT]], argument: object
) -> ResultT:
    """Call a function of the user and await what it returns.

    Raises:
        ConfigError: the function returned an object that cannot be awaited.
    """
    returned: object = function(argument)
    if not isawaitable(returned):
        raise ConfigError(
            "fn must be an async function, or return what can be awaited; it returned "
            f"{type(returned).__name__} (riverpy.sync.Client takes plain functions)"
        )
    return await returned


async def _roll_back_to_savepoint(connection: Transaction) -> Exception | None:
    """Roll back to the savepoint that `savepoint` has set, and release it. Return the error if that
    fails."""
    try:
        with fail_after(SAVEPOINT_ROLLBACK_TIMEOUT):
            await _run_statement(connection, "session_savepoint_rollback")
            await _run_statement(connection, "session_savepoint_release")
    except (TransactionError, *DATABASE_ERRORS) as error:
        return error
    return None


async def _run_statement(connection: Transaction, statement_name: str) -> None:
    await get_query("session", statement_name, None).execute(connection)


def validate_and_adapt_fence_connection(connection: object) -> Transaction:
    """Check a connection that a caller passes to a method `fence`, without a round trip. Return a
    connection of asyncpg unchanged, or the adapter of another library's connection.

    Raises:
        TypeError: the connection is blocking in an async client, or async in a blocking client.
        TransactionError: riverpy does not know its type, or no transaction is open.
    """
    adapted = _adapt_if_needed(connection)
    if adapted is None:
        raise TransactionError(
            f"a fence takes a transaction: {_describe_accepted_types()}, got "
            f"{describe_wrong_type(connection)}"
        )
    _validate_async_or_blocking(adapted, connection)
    if not is_in_transaction(adapted):
        raise TransactionError(
            "a fence outside a transaction guards nothing: call it inside `async with "
            "connection.transaction():`, before the first write"
        )
    return adapted


def make_fence_in_savepoint_error() -> TransactionError:
    """Return the error for a call of `fence` while a savepoint is open."""
    return TransactionError(
        "a fence in a savepoint ends if the savepoint is rolled back, and the transaction would go "
        "on without it: call it in the outermost transaction, before any nested "
        "`connection.transaction()` (when that fails, asyncpg leaves it open), and before "
        "run_once(tx=…), which runs its function in a savepoint"
    )


async def require_no_savepoint(connection: Transaction) -> None:
    """Raise TransactionError if a savepoint is open in which a row was locked or written. In the
    domain `default`, `LeaderTerm.fence` calls this at its end, because a rollback to the savepoint
    would undo the fence."""
    if await _fetch_value(connection, "session_in_savepoint"):
        raise make_fence_in_savepoint_error()


async def make_wrong_database_error(connection: Transaction, lease: str) -> TransactionError:
    """Return the error for a call of `fence` whose transaction does not find the row of the lease,
    although this process holds the lease. The transaction is in another database or schema, or its
    snapshot is older than the term of the lease."""
    place = await _fetch_value(connection, "session_database")
    return TransactionError(
        f"the table that this transaction sees, in {place}, does not have the term of {lease}, "
        "which is held: a fence takes a connection to the database and schema of its manager or "
        "client, and no snapshot from before the term"
    )


async def require_read_committed(connection: Transaction) -> None:
    """Raise TransactionError if the isolation level is not READ COMMITTED. In the domain `default`,
    `LeaderTerm.fence` calls this at its start. At a higher level, the snapshot of the transaction
    may be too old to show that the leader has renewed its lease."""
    isolation = await _fetch_value(connection, "session_isolation")
    if isolation != "read committed":
        raise TransactionError(
            "the fence of the leader of `default` takes a transaction that is read committed, this "
            f"is {isolation}: begin it with `connection.transaction(isolation='read_committed')`"
        )


async def _fetch_value(connection: Transaction, statement_name: str) -> Any:
    reason = f"checking the transaction of a fence took longer than {TRANSACTION_CHECK_TIMEOUT:g} s"
    with fail_after(TRANSACTION_CHECK_TIMEOUT, reason):
        return await get_query("session", statement_name, None).fetchval(connection)


async def read_server_time(connection: Transaction) -> datetime:
    """Return the server's time."""
    return await get_query("session", "session_now", None).fetchval(connection)
