"""The statements on `river_leader`, River's table of the leader: one typed function per SQL
statement in `sql/queries/river_leader.sql`. A term is the time for which one client is the
leader."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.leases import LeaseAcquireResult, epoch_from_acquired_at
from riverpy._postgres.sql_files import get_query, to_milliseconds

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from riverpy._postgres.driver import Transaction


class LeaderRow(NamedTuple):
    """The row of the current or last leader of domain `default`."""

    leader_id: str
    elected_at: datetime
    expires_at: datetime
    seconds_until_expiry: float
    """Seconds until the lease expires. Negative: it has expired."""


async def leader_elect(
    connection: Transaction, schema: str | None, *, leader_id: str, ttl: timedelta
) -> LeaseAcquireResult | None:
    """Try to become leader of domain `default`. The result says whether `leader_id` was elected,
    and which client is the leader now. Return None if another session became leader during the
    statement."""
    statement = get_query("river_leader", "leader_elect", schema)
    row = await statement.fetchrow(connection, leader_id=leader_id, ttl=ttl)
    if row is None:
        return None
    is_elected, by, elected_at, remaining = row
    return LeaseAcquireResult(
        is_elected, by, epoch_from_acquired_at(elected_at), elected_at, remaining
    )


async def leader_renew(
    connection: Transaction,
    schema: str | None,
    *,
    leader_id: str,
    elected_at: datetime,
    ttl: timedelta,
) -> bool:
    """Extend the leader's term that began at `elected_at`. Return False if the term has ended."""
    statement = get_query("river_leader", "leader_renew", schema)
    values = {"leader_id": leader_id, "elected_at": elected_at, "ttl": ttl}
    return await statement.fetchval(connection, **values) is not None


async def leader_resign(
    connection: Transaction, schema: str | None, *, leader_id: str, elected_at: datetime
) -> bool:
    """End the term that began at `elected_at`. Return False if the term ended before."""
    statement = get_query("river_leader", "leader_resign", schema)
    row = await statement.fetchrow(connection, leader_id=leader_id, elected_at=elected_at)
    return row is not None


async def leader_fence_transaction(
    connection: Transaction,
    schema: str | None,
    *,
    leader_id: str,
    elected_at: datetime,
    transaction_timeout: timedelta,
    lock_timeout: timedelta,
) -> bool:
    """Let the open transaction commit only during the term that began at `elected_at`: no other
    term can begin before the transaction ends. The server ends the transaction after
    `transaction_timeout`. A statement fails if it waits for a lock for longer than `lock_timeout`.
    Return False if the term has ended."""
    row = await get_query("river_leader", "leader_fence", schema).fetchrow(
        connection,
        leader_id=leader_id,
        elected_at=elected_at.isoformat(),  # text, since the connection may have codecs for times
        milliseconds=to_milliseconds(transaction_timeout),
        lock_milliseconds=to_milliseconds(lock_timeout),
    )
    return row is not None


async def leader_get(connection: Transaction, schema: str | None) -> LeaderRow | None:
    """Return the row of the current or last leader of domain `default`, or None if there is no
    row."""
    row = await get_query("river_leader", "leader_get", schema).fetchrow(connection)
    return None if row is None else LeaderRow(*row)


async def leader_request_resign(connection: Transaction, schema: str | None) -> None:
    """Request that the leader resigns. The leader is notified when the transaction commits."""
    await get_query("river_leader", "leader_request_resign", schema).execute(connection)
