"""Fences of the user's: which transactions they may stand in."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import anyio

from riverpy._sql import query
from riverpy.drivers.asyncpg import is_in_transaction, is_transaction
from riverpy.errors import TransactionError

if TYPE_CHECKING:
    from collections.abc import Generator

    from riverpy.drivers.asyncpg import Transaction

ASK_MOST = 5.0
"""Seconds that a question about a transaction may take."""
_in_savepoint: ContextVar[tuple[object, ...]] = ContextVar("riverpy_in_savepoint", default=())
"""Connections on which code of the user's runs in a savepoint of ours."""


@contextmanager
def within_savepoint(connection: Transaction) -> Generator[None]:
    """Code of the user's runs in a savepoint, which may be rolled back without the transaction:
    the lock of a fence would go with it."""
    token = _in_savepoint.set((*_in_savepoint.get(), connection))
    try:
        yield
    finally:
        _in_savepoint.reset(token)


def expect_fenceable(connection: object) -> Transaction:
    """The connection, if a fence may stand there.

    Raises:
        TransactionError: that is no connection of asyncpg, it is in no transaction, or in a
            savepoint of ours.
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
    if any(connection is other for other in _in_savepoint.get()):
        raise TransactionError(
            "run_once(tx=…) runs its function in a savepoint, and a fence there ends if that is "
            "rolled back: call the fence in the outermost transaction, before run_once"
        )
    return connection


async def elsewhere_error(connection: Transaction, lease: str) -> TransactionError:
    """What to raise if a lease is held, and the transaction's database does not know of it."""
    with anyio.fail_after(ASK_MOST, reason="asking for the database of a transaction took long"):
        place = await connection.fetchval(query("session", "session_database", None).text)
    return TransactionError(
        f"the table of leases that this transaction sees, in {place}, does not have the term of "
        f"lease {lease!r}, which is held: a fence takes a connection to the database and schema of "
        "its manager or client, and no snapshot from before the term"
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
