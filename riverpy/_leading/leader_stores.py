"""Stores of leader leases: for the leader of the domain `default` (in River's table
`river_leader`), for the leaders of other domains, and for the schema lease."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._leases.store import LeaseStore, LeaseTable
from riverpy._postgres.domains import default_leader_get_status
from riverpy._postgres.driver import LockNotAvailableError
from riverpy._postgres.leaders import (
    leader_elect,
    leader_fence_transaction,
    leader_renew,
    leader_resign,
)
from riverpy._postgres.leases import LeaseAcquireResult, acquired_at_from_epoch
from riverpy._postgres.transactions import validate_and_adapt_fence_connection

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import timedelta

    from riverpy._postgres.connection import DedicatedConnection


class LeaderRowStore(LeaseStore):
    """Keeps the lease of the leader of the domain `default` in River's table `river_leader`, which
    has only one row.

    The table has no column for an epoch, the number of a term (a client's time as leader).
    `elected_at` in microseconds serves as the epoch, because River identifies a term by the
    leader's id and `elected_at`.
    """

    should_log_terms = False

    def __init__(
        self,
        connection: DedicatedConnection,
        schema: str | None,
        *,
        leader_id: str,
        ttl: timedelta,
    ) -> None:
        """Create the store of one client. `leader_id` is the client's id in the row. After each
        renewal, the lease lasts for `ttl`."""
        self._connection, self._schema = connection, schema
        self._leader_id, self._ttl = leader_id, ttl
        self.outage_tracker = connection.outage_tracker

    async def acquire(
        self, name: str, holder: str, ttl: timedelta, *, timeout: float
    ) -> LeaseAcquireResult | None:
        async with self._connection.acquire("electing a leader", timeout) as connection:
            return await leader_elect(connection, self._schema, leader_id=holder, ttl=ttl)

    async def renew(
        self, holder: str, terms: Iterable[tuple[str, int]], *, timeout: float
    ) -> dict[str, bool]:
        ((name, epoch),) = terms  # the table has one row, so there is one term
        async with self._connection.acquire("renewing the leader lease", timeout) as connection:
            is_held = await leader_renew(
                connection,
                self._schema,
                leader_id=holder,
                elected_at=acquired_at_from_epoch(epoch),
                ttl=self._ttl,
            )
        return {name: True} if is_held else {}

    async def release(self, name: str, epoch: int, holder: str, *, timeout: float) -> bool:
        async with self._connection.acquire("releasing the leader lease", timeout) as connection:
            return await leader_resign(
                connection, self._schema, leader_id=holder, elected_at=acquired_at_from_epoch(epoch)
            )

    async def fence(
        self,
        transaction: object,
        name: str,
        epoch: int,
        *,
        timeout: timedelta,
        lock_timeout: timedelta,
    ) -> bool:
        return await leader_fence_transaction(
            validate_and_adapt_fence_connection(transaction),
            self._schema,
            leader_id=self._leader_id,
            elected_at=acquired_at_from_epoch(epoch),
            transaction_timeout=timeout,
            lock_timeout=lock_timeout,
        )


class DomainLeaseStore(LeaseTable):
    """Keeps the leases of domain leaders in the table `riverpy_lease`. All statements use the
    connection that a client reserves for leader leases."""

    should_log_terms = False

    def __init__(self, connection: DedicatedConnection, schema: str | None) -> None:
        super().__init__(connection, connection, schema)
        self.outage_tracker = connection.outage_tracker


class SchemaLeaseStore(DomainLeaseStore):
    """Keeps the schema lease `@schema` in the table `riverpy_lease`. While no riverpy client is the
    leader of the domain `default`, the holder of the schema lease maintains orphaned queues (queues
    of a domain without heartbeats), and does the maintenance that is done once for the whole
    schema.

    A riverpy leader of the domain `default` does this work itself, so no client acquires the lease
    while there is such a leader. A leader that runs River in Go does only a part of the work.
    """

    has_non_riverpy_leader = False
    """Whether a client without riverpy, such as River in Go, was the leader of the domain `default`
    at the last attempt to acquire this lease."""

    async def acquire(
        self, name: str, holder: str, ttl: timedelta, *, timeout: float
    ) -> LeaseAcquireResult | None:
        """Try to acquire the lease. If a riverpy client is the leader of the domain `default`, do
        not try, and return a result whose `is_granted` is False."""
        async with self._request_connection.acquire(
            "acquiring the schema lease", timeout
        ) as connection:
            lead = await default_leader_get_status(connection, self._schema)
            if lead.is_leader_riverpy:
                return _DENIED_ANSWER
            self.has_non_riverpy_leader = lead.has_leader
            try:
                return await self._send_acquire_statement(connection, name, holder, ttl)
            except LockNotAvailableError:
                return None


_DENIED_ANSWER = LeaseAcquireResult(False, "", 0, acquired_at_from_epoch(0), None)
