"""The statements on River's row of the leader: one typed function per block of
`sql/queries/river_leader.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.leases import LeaseAnswer, epoch_of
from riverpy._postgres.sql_files import query

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from riverpy._postgres.driver import Transaction


class LeaderRow(NamedTuple):
    """The row of the current leader of `default`, or of the last one."""

    leader_id: str
    elected_at: datetime
    expires_at: datetime
    remaining: float
    """Seconds until the lease expires; negative after the expiry."""


async def leader_elect(
    connection: Transaction, schema: str | None, *, leader_id: str, ttl: timedelta
) -> LeaseAnswer | None:
    """Try to become leader. Returns None if another session became leader during the statement."""
    statement = query("river_leader", "leader_elect", schema)
    row = await connection.fetchrow(
        statement.text, *statement.arguments({"leader_id": leader_id, "ttl": ttl})
    )
    if row is None:
        return None
    is_elected, by, elected_at, remaining = row
    return LeaseAnswer(is_elected, by, epoch_of(elected_at), elected_at, remaining)


async def leader_renew(
    connection: Transaction,
    schema: str | None,
    *,
    leader_id: str,
    elected_at: datetime,
    ttl: timedelta,
) -> bool:
    """Extend a term. Returns False if it has ended."""
    statement = query("river_leader", "leader_renew", schema)
    values: dict[str, object] = {"leader_id": leader_id, "elected_at": elected_at, "ttl": ttl}
    return await connection.fetchval(statement.text, *statement.arguments(values)) is not None


async def leader_resign(
    connection: Transaction, schema: str | None, *, leader_id: str, elected_at: datetime
) -> bool:
    """End a term. Returns False if it had ended before."""
    statement = query("river_leader", "leader_resign", schema)
    values: dict[str, object] = {"leader_id": leader_id, "elected_at": elected_at}
    return await connection.fetchrow(statement.text, *statement.arguments(values)) is not None


async def leader_fence(
    connection: Transaction,
    schema: str | None,
    *,
    leader_id: str,
    elected_at: datetime,
    timeout: timedelta,
    lock_timeout: timedelta,
) -> bool:
    """Bind the transaction that is open on `connection` to a term. The server ends the transaction
    after `timeout`. It ends each wait for a lock after `lock_timeout`, also the wait of the fence.
    Returns False if the term has ended."""
    statement = query("river_leader", "leader_fence", schema)
    values: dict[str, object] = {
        "leader_id": leader_id,
        "elected_at": elected_at.isoformat(),  # the caller's connection may have codecs
        "milliseconds": round(timeout.total_seconds() * 1000),
        "lock_milliseconds": round(lock_timeout.total_seconds() * 1000),
    }
    return await connection.fetchrow(statement.text, *statement.arguments(values)) is not None


async def leader_get(connection: Transaction, schema: str | None) -> LeaderRow | None:
    """Return the row of the current leader of `default`, or of the last one."""
    row = await connection.fetchrow(query("river_leader", "leader_get", schema).text)
    return None if row is None else LeaderRow(*row)


async def leader_request_resign(connection: Transaction, schema: str | None) -> None:
    """Request that the leader resigns. The notification is sent at the commit."""
    await connection.execute(query("river_leader", "leader_request_resign", schema).text)
