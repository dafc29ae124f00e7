"""What an operator reads and changes of domains: one typed function per block of
`sql/queries/riverpy_domain.sql`, and the change of an owner."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from riverpy._names import DEFAULT_DOMAIN, SCHEMA_LEASE, domain_lease
from riverpy._postgres.queue_owners import owner_lock, owner_notify
from riverpy._postgres.sql_files import query

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from riverpy._postgres.driver import Transaction

ORPHANED_AFTER = 600.0
"""Seconds without a sign of life of a domain, after which the leader of `default` keeps its
queues."""

_FILE = "riverpy_domain"


class LeadRow(NamedTuple):
    """Who leads a domain, or holds `@schema`; or did last."""

    domain: str
    holder: str
    epoch: int | None
    """None: the row is River's own, of `default`."""
    elected_at: datetime
    expires_at: datetime | None
    """None: it was released."""
    remaining: float | None
    """Seconds until the lease expires; below zero: it has. None: it was released."""
    is_registered: bool
    """Whether the holder is a client of riverpy's."""
    knows_domains: bool
    """Whether it says that it knows of domains."""

    @property
    def is_over(self) -> bool:
        """Whether nobody holds it now."""
        return self.remaining is None or self.remaining < 0


class OwnerRow(NamedTuple):
    """Whose a queue is."""

    queue: str
    domain: str
    claimed_by: str
    claimed_at: datetime
    last_seen_at: datetime
    silent: float
    """Seconds since a client of the domain gave a sign of life."""

    @property
    def is_orphaned(self) -> bool:
        """Whether the leader of `default` keeps it until its domain is back."""
        return self.silent >= ORPHANED_AFTER


class MemberRow(NamedTuple):
    """A client that has a recent heartbeat, by the server's clock."""

    client_id: str
    domain: str
    queues: list[str]
    kinds: list[str]
    candidate: bool
    """Whether it takes part in leader election, and is not stopping."""
    settings: str | None
    """What tells clients of one domain apart that keep it differently. None: it does not say, as
    one that knows of no domains."""
    running: float
    """Seconds since its start."""
    is_stopping: bool = False


class QueueHolder(NamedTuple):
    """Whose a queue is that is to change hands."""

    domain: str | None
    """None: nobody's, so that the leader of `default` keeps it."""
    living: int
    """How many clients of that domain give signs of life."""
    is_known: bool
    """Whether the queue is known to anybody."""
    is_domain_known: bool
    """Whether a client or a queue is of the domain that it is to go to."""


async def domain_leads(connection: Transaction, schema: str | None) -> list[LeadRow]:
    """Who leads what, and who holds `@schema`, by domain."""
    statement = query(_FILE, "domain_leads", schema)
    rows = await connection.fetch(
        statement.text, *statement.arguments({"schema_lease": SCHEMA_LEASE})
    )
    return [LeadRow(*row) for row in rows]


async def domain_owners(connection: Transaction, schema: str | None) -> list[OwnerRow]:
    """Whose each queue is that is a domain's, by queue."""
    rows = await connection.fetch(query(_FILE, "domain_owners", schema).text)
    return [OwnerRow(*row) for row in rows]


async def domain_members(connection: Transaction, schema: str | None) -> list[MemberRow]:
    """Who gives signs of life, in the order of their starts."""
    rows = await connection.fetch(query(_FILE, "domain_members", schema).text)
    return [MemberRow(*row) for row in rows]


async def domain_lock(
    connection: Transaction, schema: str | None, *, domains: Iterable[str]
) -> None:
    """Wait, in the open transaction, until no leader of these domains writes under its fence; let
    none begin to, and no queue change hands, until its end."""
    others = set(domains)
    if DEFAULT_DOMAIN in others:
        others.remove(DEFAULT_DOMAIN)
        await connection.execute(query(_FILE, "domain_lock_default", schema).text)
    statement = query(_FILE, "domain_lock_leases", schema)
    names = [domain_lease(domain) for domain in others]
    await connection.execute(statement.text, *statement.arguments({"name": names}))
    await owner_lock(connection, schema)


async def domain_queue(
    connection: Transaction, schema: str | None, *, queue: str, domain: str
) -> QueueHolder:
    """Whose a queue is that is to go to `domain`."""
    statement = query(_FILE, "domain_queue", schema)
    values: dict[str, object] = {"queue": queue, "domain": domain}
    (row,) = await connection.fetch(statement.text, *statement.arguments(values))
    return QueueHolder(*row)


async def domain_give(
    connection: Transaction, schema: str | None, *, queue: str, domain: str, by: str
) -> None:
    """Let a queue be a domain's, in the transaction under `domain_lock`, and tell the leaders at
    the commit."""
    if domain == DEFAULT_DOMAIN:
        free = query(_FILE, "domain_free", schema)
        await connection.execute(free.text, *free.arguments({"queue": queue}))
    else:
        own = query(_FILE, "domain_own", schema)
        values: dict[str, object] = {
            "queue": queue,
            "domain": domain,
            "by": by,
            "orphaned_after": timedelta(seconds=ORPHANED_AFTER),
        }
        await connection.execute(own.text, *own.arguments(values))
    await owner_notify(connection, schema)
