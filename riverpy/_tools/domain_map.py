"""Domain map: which domain has which clients, queues and leader, as it was at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from riverpy._names import DEFAULT_DOMAIN, SCHEMA_LEASE
from riverpy._postgres.domains import domain_leaders, domain_members, domain_owners

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from riverpy._postgres.domains import DomainLeader, DomainMember, QueueOwner
    from riverpy._postgres.driver import Transaction


@dataclass(frozen=True)
class DomainMap:
    """The domains of a schema, `default` among them."""

    leads: Sequence[DomainLeader]
    owners: Sequence[QueueOwner]
    members: Sequence[DomainMember]
    """Clients that give signs of life."""

    @property
    def others(self) -> list[str]:
        """The domains other than `default` that have a living client, a queue, or a leader."""
        led = {one.domain for one in self.leads if not one.is_over}
        known = {one.domain for one in (*self.owners, *self.members)} | led
        return sorted(known - {DEFAULT_DOMAIN, SCHEMA_LEASE})

    @property
    def strangers(self) -> set[str]:
        """The living clients of domains other than `default`."""
        return {one.client_id for one in self.members if one.domain != DEFAULT_DOMAIN}

    def lead(self, domain: str) -> DomainLeader | None:
        """Who leads a domain, or led it last; of `@schema` who holds it."""
        return next((one for one in self.leads if one.domain == domain), None)

    def is_led(self, domain: str) -> bool:
        """Whether somebody leads it now."""
        lead = self.lead(domain)
        return lead is not None and not lead.is_over

    def has_foreign_default(self) -> bool:
        """Whether whoever leads `default` is no client of riverpy's, as one of River's in Go."""
        lead = self.lead(DEFAULT_DOMAIN)
        return lead is not None and not lead.is_over and not lead.is_registered

    def is_default_old(self) -> bool:
        """Whether a client of riverpy's leads `default` that does not say that it knows of
        domains."""
        lead = self.lead(DEFAULT_DOMAIN)
        return (
            lead is not None and not lead.is_over and lead.is_registered and not lead.knows_domains
        )

    def owned(self, domain: str) -> list[QueueOwner]:
        """The queues of a domain other than `default`."""
        return [one for one in self.owners if one.domain == domain]

    def living(self, domain: str) -> list[DomainMember]:
        """The clients of a domain that give signs of life."""
        return [one for one in self.members if one.domain == domain]

    def keeps_orphans(self) -> bool:
        """Whether somebody keeps the queues of domains that give no sign of life: a leader of
        `default` that is riverpy's, or who holds `@schema` while there is none."""
        return self.is_led(SCHEMA_LEASE) or (
            self.is_led(DEFAULT_DOMAIN) and not self.has_foreign_default()
        )

    def unkept(self, queues: Iterable[str]) -> dict[str, list[str]]:
        """Those of the queues that nobody keeps, by the domain whose leader should."""
        owners = {one.queue: one for one in self.owners}
        found: dict[str, list[str]] = {}
        for queue in queues:
            owner = owners.get(queue)
            domain = DEFAULT_DOMAIN if owner is None else owner.domain
            is_kept = self.is_led(domain) or (
                owner is not None and owner.is_orphaned and self.keeps_orphans()
            )
            if not is_kept:
                found.setdefault(domain, []).append(queue)
        return found


async def read_domains(connection: Transaction, schema: str | None) -> DomainMap:
    """Look at all domains; the tables are there from DOMAINS_VERSION on.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    return DomainMap(
        leads=await domain_leaders(connection, schema),
        owners=await domain_owners(connection, schema),
        members=await domain_members(connection, schema),
    )
