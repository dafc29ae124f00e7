"""Fences of the user's: which transactions they may stand in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from riverpy._postgres.driver import is_in_transaction, is_transaction
from riverpy._postgres.sql_files import query
from riverpy.errors import TransactionError

if TYPE_CHECKING:
    from riverpy._postgres.driver import Transaction

ASK_MOST = 5.0
"""Seconds that a question about a transaction may take."""


def expect_fenceable(connection: object) -> Transaction:
    """The connection, if a fence may stand there.

    Raises:
        TransactionError: that is no connection of asyncpg, or it is in no transaction.
    """
    if not is_transaction(connection):
        raise TransactionError(
            "a fence takes a connection of asyncpg that is in a transaction, got "
            f"{type(connection).__name__}"
        )
    if not is_in_transaction(connection):
        raise TransactionError(
            "a fence outside a transaction guards nothing: call it inside `async with "
            "connection.transaction():`, before the first write"
        )
    return connection


def savepoint_error() -> TransactionError:
    """What to raise if a fence was called in a savepoint."""
    return TransactionError(
        "a fence in a savepoint ends if that is rolled back, and the transaction would go on "
        "without it: call it in the outermost transaction, before any `connection.transaction()` "
        "inside of that, for asyncpg leaves it open when it fails, and before run_once(tx=…), "
        "which runs its function in one"
    )


async def expect_outermost(connection: Transaction) -> None:
    """After a fence of River's table of leaders: see that it was not called in a savepoint.

    Raises:
        TransactionError: one is open in which the fence, or something else, has locked a row.
        Exception: one of DATABASE_ERRORS.
    """
    with anyio.fail_after(ASK_MOST, reason="asking for the savepoints of a transaction took long"):
        if await connection.fetchval(query("session", "session_in_savepoint", None).text):
            raise savepoint_error()


async def elsewhere_error(connection: Transaction, what: str) -> TransactionError:
    """What to raise if a lease or lead is held that the transaction's database does not know."""
    with anyio.fail_after(ASK_MOST, reason="asking for the database of a transaction took long"):
        place = await connection.fetchval(query("session", "session_database", None).text)
    return TransactionError(
        f"the table that this transaction sees, in {place}, does not have the term of {what}, "
        "which is held: a fence takes a connection to the database and schema of its manager or "
        "client, and no snapshot from before the term"
    )


async def expect_read_committed(connection: Transaction) -> None:
    """The fence of River's table of leaders reads the time of the lease as the transaction sees it:
    in a snapshot one that was renewed since has expired, and who leads would seem not to.

    Raises:
        TransactionError: the transaction has a snapshot.
        Exception: one of DATABASE_ERRORS.
    """
    with anyio.fail_after(ASK_MOST, reason="asking for the isolation of a transaction took long"):
        isolation = await connection.fetchval(query("session", "session_isolation", None).text)
    if isolation != "read committed":
        raise TransactionError(
            f"the fence of who leads `default` takes a transaction that is read committed, this is "
            f"{isolation}: begin it with `connection.transaction(isolation='read_committed')`"
        )
