"""DomainMap: the clients, the queues and the leader of each leader domain, as read at one
moment."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from riverpy._names import DEFAULT_DOMAIN, SCHEMA_LEASE_NAME
from riverpy._postgres.domains import (
    DOMAIN_ORPHANED_AFTER_SECONDS,
    domain_list_leaders,
    domain_list_members,
    domain_list_queue_owners,
)
from riverpy._postgres.driver import DATABASE_ERRORS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from riverpy._postgres.domains import DomainLeader, DomainMember, QueueOwnerStatus
    from riverpy._postgres.driver import Transaction

_ORPHANED_AFTER = timedelta(seconds=DOMAIN_ORPHANED_AFTER_SECONDS)
PRIVILEGE_MISSING_SQLSTATE = "42501"
"""PostgreSQL's code for a missing privilege."""
TABLE_MISSING_SQLSTATE = "42P01"
"""PostgreSQL's code for a missing table."""


@dataclass(frozen=True)
class DomainMap:
    """The leader domains of a schema, including `default`. A leader domain is a group of queues
    that has its own leader."""

    leaders: Sequence[DomainLeader]
    queue_owners: Sequence[QueueOwnerStatus]
    live_members: Sequence[DomainMember]
    """The clients with a recent heartbeat."""

    @property
    def non_default_domains(self) -> list[str]:
        """The domains other than `default` that have a live client, a queue or a leader."""
        current = [lead for lead in self.leaders if not lead.has_lease_ended]
        known = {row.domain for row in (*self.queue_owners, *self.live_members, *current)}
        return sorted(known - {DEFAULT_DOMAIN, SCHEMA_LEASE_NAME})

    @property
    def non_default_client_ids(self) -> set[str]:
        """The ids of the live clients of domains other than `default`."""
        return {member.client_id for member in self.live_members if member.domain != DEFAULT_DOMAIN}

    def last_leader(self, domain: str) -> DomainLeader | None:
        """Return the current leader of a domain, or the last leader if there is none now. Return
        None if no leader is recorded. `@schema` is not a domain, but the name of the schema lease:
        for this name, return the current or last holder of the lease."""
        return next((lead for lead in self.leaders if lead.domain == domain), None)

    def current_leader(self, domain: str) -> DomainLeader | None:
        """Return the current leader of a domain, or None if there is no leader now."""
        lead = self.last_leader(domain)
        return None if lead is None or lead.has_lease_ended else lead

    def has_leader(self, domain: str) -> bool:
        """Return whether the domain has a leader now."""
        return self.current_leader(domain) is not None

    def owned_queues(self, domain: str) -> list[QueueOwnerStatus]:
        """Return the queues that a domain owns. For `default`, which owns no queues, the list is
        empty."""
        return [row for row in self.queue_owners if row.domain == domain]

    def has_had_client(self, domain: str) -> bool:
        """Return whether a domain has ever had a client. Call this only for a domain that owns
        queues.

        An operator can assign a queue to a domain that has no clients. riverpy then stores an
        invented, old heartbeat time with the queue, so that the queue is orphaned at once. This
        method returns False if the queues of the domain have no other heartbeat time.
        """
        owned = self.owned_queues(domain)
        last_seen_at = max(row.last_seen_at for row in owned)
        return all(row.claimed_at - row.last_seen_at != _ORPHANED_AFTER for row in owned) or any(
            row.last_seen_at != last_seen_at for row in owned
        )

    def live_clients(self, domain: str) -> list[DomainMember]:
        """Return the clients of a domain that have a recent heartbeat."""
        return [member for member in self.live_members if member.domain == domain]

    def has_leader_for_orphaned_queues(self) -> bool:
        """Return whether a client maintains the orphaned queues. A queue is orphaned if no client
        of its domain has written a heartbeat for ten minutes. The leader of `default` maintains
        these queues if it is a riverpy client. Otherwise the holder of the lease `@schema`
        maintains them."""
        leader = self.current_leader(DEFAULT_DOMAIN)
        return self.has_leader(SCHEMA_LEASE_NAME) or (
            leader is not None and leader.is_riverpy_client
        )

    def unmaintained_queues_by_domain(self, queues: Iterable[str]) -> dict[str, list[str]]:
        """Return the queues among `queues` that no leader maintains, grouped by the domain whose
        leader is missing."""
        owners = {row.queue: row for row in self.queue_owners}
        found: dict[str, list[str]] = {}
        for queue in queues:
            owner = owners.get(queue)
            domain = DEFAULT_DOMAIN if owner is None else owner.domain
            is_maintained = self.has_leader(domain) or (
                owner is not None and owner.is_orphaned and self.has_leader_for_orphaned_queues()
            )
            if not is_maintained:
                found.setdefault(domain, []).append(queue)
        return found


async def read_domains(connection: Transaction, schema: str | None) -> DomainMap:
    """Read all domains. Migration DOMAINS_MIGRATION of riverpy's own tables must be applied."""
    return DomainMap(
        leaders=await domain_list_leaders(connection, schema),
        queue_owners=await domain_list_queue_owners(connection, schema),
        live_members=await domain_list_members(connection, schema),
    )


async def read_domains_if_permitted(
    connection: Transaction, schema: str | None
) -> DomainMap | None:
    """Read all domains, or return None if the role may not read one of the needed tables. The role
    needs this privilege only if clients belong to domains other than `default`.

    The statements run in a savepoint. So an open transaction of the caller remains usable if the
    server refuses a statement because of a missing privilege.
    """
    try:
        async with connection.transaction():
            return await read_domains(connection, schema)
    except DATABASE_ERRORS as error:
        if getattr(error, "sqlstate", None) != PRIVILEGE_MISSING_SQLSTATE:
            raise
        return None
