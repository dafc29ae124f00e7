"""One typed function per block of `sql/queries/riverpy_exec.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.driver import is_in_transaction
from riverpy._postgres.sql_files import query
from riverpy.errors import TransactionError
from riverpy.job import timestamp

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from riverpy._postgres.driver import Transaction

_FILE = "riverpy_exec"


class ExecutionRow(NamedTuple):
    """How it stands with a key."""

    claimed_by: str
    claimed_at: datetime | None
    """None: a time outside of Python's range."""
    can_expire: bool
    """Whether the claim may be taken over one day."""
    is_completed: bool


async def exec_insert(
    connection: Transaction,
    schema: str | None,
    *,
    key: str,
    claimed_by: str,
    kept: timedelta | None,
) -> str | None:
    """Note an effect of the transaction that is open; returns the transaction's id. None: it was
    done before."""
    statement = query(_FILE, "exec_insert", schema)
    values: dict[str, object] = {"key": key, "claimed_by": claimed_by, "kept": _interval(kept)}
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
        "expires_after": _interval(expires_after),
        "kept": _interval(kept),
    }
    epoch = await connection.fetchval(statement.text, *statement.arguments(values))
    return None if epoch is None else int(epoch)


async def exec_complete(
    connection: Transaction, schema: str | None, *, key: str, epoch: int, kept: timedelta | None
) -> bool:
    """Say that it is done, once or again. False: another has taken the claim over."""
    statement = query(_FILE, "exec_complete", schema)
    values: dict[str, object] = {"key": key, "epoch": str(epoch), "kept": _interval(kept)}
    return await connection.fetchval(statement.text, *statement.arguments(values)) is not None


async def exec_give_back(
    connection: Transaction, schema: str | None, *, key: str, epoch: int
) -> None:
    """Let anybody claim it at once."""
    statement = query(_FILE, "exec_give_back", schema)
    values: dict[str, object] = {"key": key, "epoch": str(epoch)}
    await connection.execute(statement.text, *statement.arguments(values))


async def exec_get(connection: Transaction, schema: str | None, *, key: str) -> ExecutionRow | None:
    """How it stands with a key. None: nobody has claimed it."""
    statement = query(_FILE, "exec_get", schema)
    row = await connection.fetchrow(statement.text, *statement.arguments({"key": key}))
    if row is None:
        return None
    claimed_by, digits, can_expire, is_completed = row
    claimed_at = None if digits is None else timestamp(bytes.fromhex(digits))
    return ExecutionRow(claimed_by, claimed_at, can_expire == "t", is_completed == "t")


async def exec_expect_commit(connection: Transaction, transaction_id: str) -> None:
    """Check, before the commit, that code of the user's has left the transaction as it was: of one
    that has failed, or is over, the server commits nothing and calls that no error.

    Raises:
        TransactionError: it is over; another one may have been begun.
        Exception: one of DATABASE_ERRORS: it has failed.
    """
    is_the_same = is_in_transaction(connection) and transaction_id == await connection.fetchval(
        query(_FILE, "exec_expect_commit", None).text
    )
    if not is_the_same:
        raise TransactionError(
            "the function of run_once has ended the transaction that notes the key: leave it open, "
            "and let the function raise to undo it"
        )


async def exec_is_there(connection: Transaction, schema: str | None) -> bool:
    """Whether the table exists."""
    statement = query(_FILE, "exec_is_there", None)
    return await connection.fetchval(statement.text, *statement.arguments({"schema": schema}))


class ExpiredMark(NamedTuple):
    """The place of a key among those whose time is over."""

    kept_until: str
    """As the server wrote it."""
    key: str


async def exec_expired(
    connection: Transaction, schema: str | None, *, after: ExpiredMark | None, limit: int
) -> list[ExpiredMark]:
    """Up to `limit` keys whose time is over, from behind the mark on."""
    statement = query(_FILE, "exec_expired", schema)
    values: dict[str, object] = {
        "after_time": after and after.kept_until,
        "after_key": after and after.key,
        "limit": limit,
    }
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return [ExpiredMark(row[1], row[0]) for row in rows]


async def exec_forget(
    connection: Transaction, schema: str | None, *, keys: Sequence[str]
) -> set[str]:
    """Delete those of the rows whose time is over and that are not locked; return their keys."""
    statement = query(_FILE, "exec_forget", schema)
    rows = await connection.fetch(statement.text, *statement.arguments({"keys": keys}))
    return {row[0] for row in rows}


def _interval(value: timedelta | None) -> str | None:
    if value is None:
        return None
    return f"{value.days} days {value.seconds} seconds {value.microseconds} microseconds"
