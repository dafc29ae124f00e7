"""One typed function per block of `sql/queries/river_leader.sql`, and the store that an elector
asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.sql_files import query

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from riverpy._leases.validity import Term
    from riverpy._postgres.connection import DedicatedConnection, InjectedConnection
    from riverpy._postgres.driver import Transaction


class Bid(NamedTuple):
    """What the server answers to a bid."""

    elected: bool
    leader_id: str
    """Who leads now."""
    elected_at: datetime
    remaining: float | None
    """Seconds until the lease of another expires; None if the bid won, or if they are not known."""
    epoch: int = 0
    """Of the term that was won; 0 in River's table of leaders, which has none."""


class LeaderRow(NamedTuple):
    """Who leads, or led last."""

    leader_id: str
    elected_at: datetime
    expires_at: datetime
    remaining: float
    """Seconds until the lease expires; below zero: it has."""


async def leader_elect(
    connection: Transaction, schema: str | None, *, leader_id: str, ttl: timedelta
) -> Bid | None:
    """Bid for the leadership. None: somebody else has just won, who is not known yet."""
    statement = query("river_leader", "leader_elect", schema)
    row = await connection.fetchrow(
        statement.text, *statement.arguments({"leader_id": leader_id, "ttl": ttl})
    )
    return None if row is None else Bid(*row)


async def leader_renew(
    connection: Transaction,
    schema: str | None,
    *,
    leader_id: str,
    elected_at: datetime,
    ttl: timedelta,
) -> bool:
    """Extend a term. False: it is over."""
    statement = query("river_leader", "leader_renew", schema)
    values: dict[str, object] = {"leader_id": leader_id, "elected_at": elected_at, "ttl": ttl}
    return await connection.fetchval(statement.text, *statement.arguments(values)) is not None


async def leader_resign(
    connection: Transaction, schema: str | None, *, leader_id: str, elected_at: datetime
) -> bool:
    """End a term. False: it was over before."""
    statement = query("river_leader", "leader_resign", schema)
    values: dict[str, object] = {"leader_id": leader_id, "elected_at": elected_at}
    return await connection.fetchrow(statement.text, *statement.arguments(values)) is not None


async def leader_fence(
    connection: Transaction,
    schema: str | None,
    *,
    leader_id: str,
    elected_at: datetime,
    bound: timedelta,
    lock_bound: timedelta,
) -> bool:
    """Tie the transaction that is open on `connection` to a term. The server ends it after `bound`,
    and a wait for a lock in it, the fence's own too, after `lock_bound`. False: the term is
    over."""
    statement = query("river_leader", "leader_fence", schema)
    values: dict[str, object] = {
        "leader_id": leader_id,
        "elected_at": elected_at.isoformat(),  # the caller's connection may have codecs
        "milliseconds": round(bound.total_seconds() * 1000),
        "lock_milliseconds": round(lock_bound.total_seconds() * 1000),
    }
    return await connection.fetchrow(statement.text, *statement.arguments(values)) is not None


async def leader_get(connection: Transaction, schema: str | None) -> LeaderRow | None:
    """Who leads, or led last."""
    row = await connection.fetchrow(query("river_leader", "leader_get", schema).text)
    return None if row is None else LeaderRow(*row)


async def leader_request_resign(connection: Transaction, schema: str | None) -> None:
    """Ask whoever leads to resign, at the commit."""
    await connection.execute(query("river_leader", "leader_request_resign", schema).text)


class LeaderTable:
    """What an elector asks, each in a statement of its own, over one connection.

    An error (one of DATABASE_ERRORS) means that the answer is not known.
    """

    def __init__(
        self, connection: DedicatedConnection | InjectedConnection, schema: str | None
    ) -> None:
        """Make it.

        Args:
            connection: what it asks over.
            schema: the schema of River's tables.
        """
        self._connection, self._schema = connection, schema

    async def elect(self, leader_id: str, ttl: timedelta, bound: float) -> Bid | None:
        """Bid, for at most `bound` seconds. None: somebody else has just won."""
        async with self._connection.use("bidding for the lead", bound) as connection:
            return await leader_elect(connection, self._schema, leader_id=leader_id, ttl=ttl)

    async def renew(self, term: Term, ttl: timedelta, bound: float) -> bool:
        """Extend a term, in at most `bound` seconds. False: it is over."""
        async with self._connection.use("renewing the lease", bound) as connection:
            return await leader_renew(
                connection,
                self._schema,
                leader_id=term.leader_id,
                elected_at=term.elected_at,
                ttl=ttl,
            )

    async def resign(self, term: Term, bound: float) -> bool:
        """End a term, in at most `bound` seconds. False: it was over before."""
        async with self._connection.use("releasing the lease", bound) as connection:
            return await leader_resign(
                connection, self._schema, leader_id=term.leader_id, elected_at=term.elected_at
            )

    async def fence(
        self, transaction: Transaction, term: Term, *, bound: timedelta, lock_bound: timedelta
    ) -> bool:
        """Tie the transaction to a term, as `leader_fence`."""
        return await leader_fence(
            transaction,
            self._schema,
            leader_id=term.leader_id,
            elected_at=term.elected_at,
            bound=bound,
            lock_bound=lock_bound,
        )
