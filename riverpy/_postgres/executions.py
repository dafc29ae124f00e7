"""The statements of `run_once`, `run_at_most_once` and `run_at_least_once`, which run a function
for a key (once, at most once or at least once): one typed function per SQL statement in
`sql/queries/riverpy_exec.sql`.

The table has one row for each key. `run_once` inserts the row and runs the function in one
transaction. The row is marked as completed from the start. `run_at_most_once` and
`run_at_least_once` first claim the key. When the function has returned, they mark the row as
completed. Each claim has a number, its epoch. The statements pass integers as text, because a
connection of the caller may have its own codec for integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.driver import is_in_transaction
from riverpy._postgres.sql_files import get_query
from riverpy._timestamps import decode_timestamp
from riverpy.errors import TransactionError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from riverpy._postgres.driver import Transaction

_SQL_FILE = "riverpy_exec"


class RunOnceKeyRow(NamedTuple):
    """The stored state of a key of `run_once`, `run_at_most_once` or `run_at_least_once`."""

    claimed_by: str
    claimed_at: datetime | None
    """The time of the claim. None: the time is outside of Python's range."""
    can_expire: bool
    """Whether the claim expires, so that another caller may claim the key."""
    is_completed: bool
    is_claimant_alive: bool
    """Whether the claim never expires, the client that made the claim is alive, and the function
    has not failed."""


class ExpiredRunOnceKey(NamedTuple):
    """A key whose retention has ended. A list of expired keys may start after such a key."""

    retention_end_text: str
    """When the retention of the key ended, as text from the server."""
    key: str


async def execution_insert_completed(
    connection: Transaction,
    schema: str | None,
    *,
    key: str,
    claimed_by: str,
    retention: timedelta | None,
) -> str | None:
    """Insert a key, marked as completed, in the open transaction. Return the transaction's id, or
    None if the key exists already."""
    return await get_query(_SQL_FILE, "exec_insert", schema).fetchval(
        connection, key=key, claimed_by=claimed_by, kept=_format_interval(retention)
    )


async def execution_claim(
    connection: Transaction,
    schema: str | None,
    *,
    key: str,
    claimed_by: str,
    expires_after: timedelta | None,
    retention: timedelta | None,
) -> int | None:
    """Claim a key. Return the epoch of the claim. None: the key is completed or claimed."""
    epoch = await get_query(_SQL_FILE, "exec_claim", schema).fetchval(
        connection,
        key=key,
        claimed_by=claimed_by,
        expires_after=_format_interval(expires_after),
        kept=_format_interval(retention),
    )
    return None if epoch is None else int(epoch)


async def execution_complete(
    connection: Transaction,
    schema: str | None,
    *,
    key: str,
    epoch: int,
    retention: timedelta | None,
) -> bool:
    """Mark a claimed key as completed. A repeated call is harmless. Return False if another caller
    has claimed the key."""
    done = await get_query(_SQL_FILE, "exec_complete", schema).fetchval(
        connection, key=key, epoch=str(epoch), kept=_format_interval(retention)
    )
    return done is not None


async def execution_release(
    connection: Transaction, schema: str | None, *, key: str, epoch: int
) -> None:
    """Release a claimed key, so that any caller can claim it at once."""
    await get_query(_SQL_FILE, "exec_release", schema).execute(
        connection, key=key, epoch=str(epoch)
    )


async def execution_mark_failed(
    connection: Transaction, schema: str | None, *, key: str, epoch: int
) -> None:
    """Mark a claim as failed if the claim never expires. Other claims and completed keys do not
    change. A repeated call is harmless."""
    await get_query(_SQL_FILE, "exec_end", schema).execute(connection, key=key, epoch=str(epoch))


async def execution_get(
    connection: Transaction, schema: str | None, *, key: str, alive_unregistered: timedelta
) -> RunOnceKeyRow | None:
    """Return the stored state of a key, or None if the key was never claimed.

    Args:
        alive_unregistered: if the client was not registered when it claimed the key, it writes no
            heartbeats, and counts as alive for at most this time after the claim.
    """
    row = await get_query(_SQL_FILE, "exec_get", schema).fetchrow(
        connection, key=key, unregistered_for=_format_interval(alive_unregistered)
    )
    if row is None:
        return None
    claimed_by, digits, *flags = row
    claimed_at = None if digits is None else decode_timestamp(bytes.fromhex(digits))
    return RunOnceKeyRow(claimed_by, claimed_at, *(flag == "t" for flag in flags))


async def execution_check_transaction(connection: Transaction, transaction_id: str) -> None:
    """Check before the commit that the caller's code has not ended the transaction. The server
    itself reports no error when COMMIT is sent for a failed or ended transaction.

    Raises:
        TransactionError: the transaction has ended, even if another transaction is open now.
    """
    statement = get_query(_SQL_FILE, "exec_check_transaction", None)
    is_same = is_in_transaction(connection) and transaction_id == await statement.fetchval(
        connection
    )
    if not is_same:
        raise TransactionError(
            "the function of run_once has ended the transaction that stores the key: leave it "
            "open, and let the function raise to undo it"
        )


async def execution_table_exists(connection: Transaction, schema: str | None) -> bool:
    """Whether the table of `run_once` keys exists."""
    return await get_query(_SQL_FILE, "exec_exists", None).fetchval(connection, schema=schema)


async def execution_list_expired(
    connection: Transaction,
    schema: str | None,
    *,
    after_cursor: ExpiredRunOnceKey | None,
    limit: int,
) -> list[ExpiredRunOnceKey]:
    """Return up to `limit` keys whose retention has ended, oldest first. The list starts after
    `after_cursor`."""
    rows = await get_query(_SQL_FILE, "exec_expired", schema).fetch(
        connection,
        after_time=after_cursor and after_cursor.retention_end_text,
        after_key=after_cursor and after_cursor.key,
        limit=limit,
    )
    return [ExpiredRunOnceKey(row[1], row[0]) for row in rows]


async def execution_delete_expired(
    connection: Transaction, schema: str | None, *, keys: Sequence[str]
) -> set[str]:
    """Delete those of `keys` whose retention has ended. Keys that another session has locked are
    left out. Return the deleted keys."""
    rows = await get_query(_SQL_FILE, "exec_delete_expired", schema).fetch(connection, keys=keys)
    return {row[0] for row in rows}


def _format_interval(value: timedelta | None) -> str | None:
    if value is None:
        return None
    return f"{value.days} days {value.seconds} seconds {value.microseconds} microseconds"
