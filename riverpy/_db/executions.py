"""One typed function per block of `sql/queries/riverpy_exec.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._sql import query
from riverpy.drivers.asyncpg import is_in_transaction
from riverpy.errors import TransactionError

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from riverpy.drivers.asyncpg import Transaction

_FILE = "riverpy_exec"


class ExecutionRow(NamedTuple):
    """How it stands with a key."""

    claimed_by: str
    claimed_at: datetime
    can_expire: bool
    """Whether the claim may be taken over one day."""
    completed_at: datetime | None


async def exec_insert(
    connection: Transaction,
    schema: str | None,
    *,
    key: str,
    claimed_by: str,
    kept: timedelta | None,
) -> int | None:
    """Note an effect of the transaction that is open; returns the epoch. None: it was done
    before."""
    statement = query(_FILE, "exec_insert", schema)
    values: dict[str, object] = {"key": key, "claimed_by": claimed_by, "kept": kept}
    return await connection.fetchval(statement.text, *statement.arguments(values))


async def exec_claim(
    connection: Transaction,
    schema: str | None,
    *,
    key: str,
    claimed_by: str,
    expires_after: timedelta | None,
    kept: timedelta | None,
) -> int | None:
    """Claim a key; returns the epoch. None: it is done, or claimed."""
    statement = query(_FILE, "exec_claim", schema)
    values: dict[str, object] = {
        "key": key,
        "claimed_by": claimed_by,
        "expires_after": expires_after,
        "kept": kept,
    }
    return await connection.fetchval(statement.text, *statement.arguments(values))


async def exec_complete(
    connection: Transaction, schema: str | None, *, key: str, epoch: int, kept: timedelta | None
) -> bool:
    """Say that it is done, once or again. False: another has taken the claim over."""
    statement = query(_FILE, "exec_complete", schema)
    values: dict[str, object] = {"key": key, "epoch": epoch, "kept": kept}
    return await connection.fetchval(statement.text, *statement.arguments(values)) is not None


async def exec_give_back(
    connection: Transaction, schema: str | None, *, key: str, epoch: int
) -> None:
    """Let anybody claim it at once."""
    statement = query(_FILE, "exec_give_back", schema)
    await connection.execute(statement.text, *statement.arguments({"key": key, "epoch": epoch}))


async def exec_get(connection: Transaction, schema: str | None, *, key: str) -> ExecutionRow | None:
    """How it stands with a key. None: nobody has claimed it."""
    statement = query(_FILE, "exec_get", schema)
    row = await connection.fetchrow(statement.text, *statement.arguments({"key": key}))
    return None if row is None else ExecutionRow(*row)


async def exec_expect_commit(connection: Transaction) -> None:
    """Before the commit after code of the user's: of a transaction that has failed, or is over,
    the server commits nothing and calls that no error.

    Raises:
        TransactionError: it is over.
        Exception: one of DATABASE_ERRORS: it has failed.
    """
    if not is_in_transaction(connection):
        raise TransactionError(
            "the function of run_once has ended the transaction that notes the key: leave it open, "
            "and let the function raise to undo it"
        )
    await connection.execute(query(_FILE, "exec_expect_commit", None).text)


async def exec_is_there(connection: Transaction, schema: str | None) -> bool:
    """Whether the table exists."""
    statement = query(_FILE, "exec_is_there", None)
    return await connection.fetchval(statement.text, *statement.arguments({"schema": schema}))


async def exec_forget(connection: Transaction, schema: str | None, *, limit: int) -> int:
    """Delete rows whose time is over; returns how many."""
    statement = query(_FILE, "exec_forget", schema)
    rows = await connection.fetch(statement.text, *statement.arguments({"limit": limit}))
    return len(rows)
