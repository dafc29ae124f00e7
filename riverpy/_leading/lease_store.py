"""LeadLease: a lead that is held by a lease, as that of a domain is. A store that an elector
asks."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from riverpy._names import SCHEMA_LEASE
from riverpy._postgres.domains import default_leader
from riverpy._postgres.driver import LockNotAvailableError
from riverpy._postgres.leaders import Bid
from riverpy._postgres.leases import (
    LeaseLockedError,
    lease_acquire,
    lease_fence,
    lease_release,
    lease_renew,
)

if TYPE_CHECKING:
    from riverpy._leases.validity import Term
    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._postgres.driver import Transaction


BID_LOCK_SHARE = 0.8
"""Of the time that a bid may take: the server gives up before the bidder does, so that nothing is
granted to nobody."""
SCHEMA_BID_LOCK_LIMIT = timedelta(milliseconds=500)
"""How long a bid for the schema's lead waits for a fenced transaction of the last term: renewals of
the domain's lead go over the same connection."""


class LeadLease:
    """What an elector asks, each in a statement of its own, over one connection.

    An error (one of DATABASE_ERRORS) means that the answer is not known.
    """

    def __init__(self, connection: DedicatedConnection, schema: str | None, name: str) -> None:
        """Make it.

        Args:
            connection: what it asks over.
            schema: the schema of River's tables.
            name: the lease.
        """
        self._connection, self._schema = connection, schema
        self.name = name

    async def elect(self, leader_id: str, ttl: timedelta, bound: float) -> Bid | None:
        """Bid, for at most `bound` seconds; for `BID_LOCK_SHARE` of them it waits for a transaction
        of the last term, and then fails. None: somebody else has just won."""
        async with self._connection.use("bidding for the lead", bound) as connection:
            return await self._bid(
                connection, leader_id, ttl, timedelta(seconds=bound) * BID_LOCK_SHARE
            )

    async def renew(self, term: Term, ttl: timedelta, bound: float) -> bool:
        """Extend a term by the time that it was given for, in at most `bound` seconds. False: it
        is over.

        Raises:
            LeaseLockedError: somebody else keeps the row locked.
        """
        async with self._connection.use("renewing the lease", bound) as connection:
            held = await lease_renew(
                connection, self._schema, holder=term.leader_id, terms=[(self.name, term.epoch)]
            )
        is_renewed = held.get(self.name)
        if is_renewed is False:
            raise LeaseLockedError([self.name])
        return is_renewed is not None

    async def resign(self, term: Term, bound: float) -> bool:
        """End a term, in at most `bound` seconds. False: it was over before."""
        async with self._connection.use("releasing the lease", bound) as connection:
            return await lease_release(
                connection, self._schema, name=self.name, epoch=term.epoch, holder=term.leader_id
            )

    async def fence(
        self, transaction: Transaction, term: Term, *, bound: timedelta, lock_bound: timedelta
    ) -> bool:
        """Tie the transaction to a term, as `lease_fence`."""
        return await lease_fence(
            transaction,
            self._schema,
            name=self.name,
            epoch=term.epoch,
            bound=bound,
            lock_bound=lock_bound,
        )

    async def _bid(
        self,
        connection: Transaction,
        leader_id: str,
        ttl: timedelta,
        lock_bound: timedelta,
    ) -> Bid | None:
        bid = await lease_acquire(
            connection,
            self._schema,
            name=self.name,
            holder=leader_id,
            ttl=ttl,
            lock_bound=lock_bound,
        )
        if bid is None:
            return None
        return Bid(bid.is_granted, bid.holder, bid.acquired_at, bid.remaining, bid.epoch)


class SchemaLease(LeadLease):
    """The lead of the work that a schema has one of. Who leads `default` does it, so that nobody
    bids while a client of ours does; River's in Go do a part of it."""

    def __init__(self, connection: DedicatedConnection, schema: str | None) -> None:
        super().__init__(connection, schema, SCHEMA_LEASE)
        self.is_foreign_led = False
        """Whether a client that is not riverpy's led `default` when the last bid was made."""

    async def _bid(
        self,
        connection: Transaction,
        leader_id: str,
        ttl: timedelta,
        lock_bound: timedelta,
    ) -> Bid | None:
        """None: also if somebody leads `default`, or a transaction of the last term goes on."""
        lead = await default_leader(connection, self._schema)
        if lead.is_registered:
            return None
        self.is_foreign_led = lead.is_led
        try:
            return await super()._bid(connection, leader_id, ttl, SCHEMA_BID_LOCK_LIMIT)
        except LockNotAvailableError:
            return None
