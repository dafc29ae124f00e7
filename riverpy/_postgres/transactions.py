"""What `tx=` may be, and a savepoint in it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from riverpy._lifecycle import finish
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    InFailedTransactionError,
    describe,
    is_closed_for_good,
    is_in_transaction,
    is_transaction,
)
from riverpy._postgres.sql_files import query
from riverpy.errors import TransactionError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy._postgres.driver import Transaction

ROLLBACK_TIMEOUT = 5.0
"""Seconds for a rollback to a savepoint."""
ABORTED = (
    "the transaction given as tx is aborted by an earlier error, so nothing was done: roll it "
    "back, or back to a savepoint from before that error"
)


def expect_transaction(tx: object) -> Transaction:
    """Check what the caller gave as `tx`; costs no round trip.

    Raises:
        TypeError: it is no connection of asyncpg.
        TransactionError: it is closed, or in no transaction.
    """
    if not is_transaction(tx):
        raise TypeError(
            f"tx must be an asyncpg connection, its own or from a pool, got {type(tx).__name__}"
        )
    if is_closed_for_good(tx):
        raise TransactionError(
            "the connection given as tx is closed or back in its pool: nothing was done"
        )
    if not is_in_transaction(tx):
        raise TransactionError(
            "the connection given as tx is in no transaction, so the call would commit by itself: "
            "begin one, as with `async with connection.transaction():`, or leave tx out"
        )
    return tx


@asynccontextmanager
async def savepoint(connection: Transaction) -> AsyncGenerator[None]:
    """Run a block in a savepoint of an open transaction, which an error of the block leaves usable,
    and without what the block wrote. The transaction may have been begun without asyncpg's
    knowledge, so its own savepoints cannot be used.

    Raises:
        TransactionError: the transaction was aborted before, or the block has ended it.
        Exception: what the block raised.
    """
    try:
        await connection.execute(_text("session_savepoint"))
    except InFailedTransactionError as error:
        raise TransactionError(ABORTED) from error
    try:
        yield
        await connection.execute(_text("session_savepoint_release"))
    except BaseException as error:
        failure = await finish(lambda: _roll_back(connection))
        if failure is not None and isinstance(error, Exception):
            raise TransactionError(
                "the transaction given as tx is over, or aborted: its savepoint is lost "
                f"({describe(failure)}). Roll it back, and do all of it again"
            ) from error
        raise


async def _roll_back(connection: Transaction) -> Exception | None:
    """Roll back to the savepoint; returns why that failed."""
    try:
        with anyio.fail_after(ROLLBACK_TIMEOUT):
            await connection.execute(_text("session_savepoint_rollback"))
            await connection.execute(_text("session_savepoint_release"))
    except DATABASE_ERRORS as error:
        return error
    return None


def _text(name: str) -> str:
    return query("session", name, None).text
