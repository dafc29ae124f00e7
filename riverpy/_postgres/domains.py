"""The SQL statements for domains and the owners of queues: one typed function per statement in
`sql/queries/riverpy_domain.sql`. A domain is a group of clients with one leader. The leader
maintains the queues that the domain owns."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from riverpy._names import DEFAULT_DOMAIN, SCHEMA_LEASE_NAME, domain_lease_name
from riverpy._postgres.clients import ElectionStatus
from riverpy._postgres.sql_files import get_query

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from riverpy._postgres.driver import Transaction

OWNERSHIP_CHANGED_ACTION = "ownership_changed"
"""The `action` of a notification that announces new owners of queues. Its topic is
`riverpy_event`."""
DOMAIN_ORPHANED_AFTER_SECONDS = 600.0
"""If no client of a domain has written a heartbeat for this number of seconds, the leader of
`default` maintains the domain's queues."""

_SQL_FILE = "riverpy_domain"


class OwnedQueue(NamedTuple):
    """A queue that a domain owns."""

    queue: str
    domain: str
    last_heartbeat: bytes
    """The domain's last heartbeat, as bytes that are only compared with other heartbeats."""
    is_heartbeat_old: bool
    """Whether the last heartbeat is too old by the server's clock; see `owner_list_queues`. If that
    clock was changed, the domain may still have running clients."""


class QueueOwnershipConflict(NamedTuple):
    """A queue that a client wants to claim for its domain, although a domain already owns the
    queue."""

    queue: str
    owner_domain: str
    client_ids: list[str]
    """The ids of at most ten clients of `owner_domain` that have a recent heartbeat by the server's
    clock."""
    maybe_dead_client_ids: list[str]
    """The ids of at most ten clients of `owner_domain` that have no recent heartbeat, but may be
    alive."""


class DefaultLeaderStatus(NamedTuple):
    """The status of the leader of domain `default`."""

    has_leader: bool
    """Whether there is a leader."""
    is_leader_riverpy: bool
    """Whether the leader is a riverpy client."""


class DomainLeader(NamedTuple):
    """The client that holds, or was the last to hold, the lease of a domain or the lease `@schema`.
    The holder of a domain's lease is the domain's leader."""

    domain: str
    holder: str
    epoch: int | None
    """The number of the term, i.e. of the time for which the holder has the lease. None for
    `default`, because River stores no number."""
    elected_at: datetime
    expires_at: datetime | None
    """When the lease expires. None: the lease was released."""
    seconds_until_expiry: float | None
    """Seconds until the lease expires. Negative: it has expired. None: it was released."""
    is_riverpy_client: bool
    """Whether the holder is a riverpy client."""
    supports_domains: bool
    """Whether the holder has a riverpy version that supports domains."""

    @property
    def has_lease_ended(self) -> bool:
        """Whether the lease expired or was released."""
        return self.seconds_until_expiry is None or self.seconds_until_expiry < 0


class QueueOwnerStatus(NamedTuple):
    """The owner of a queue, as shown to an operator."""

    queue: str
    domain: str
    claimed_by: str
    claimed_at: datetime
    last_seen_at: datetime
    seconds_since_heartbeat: float
    """Seconds since the last heartbeat of a client of the domain."""

    @property
    def is_orphaned(self) -> bool:
        """Whether no client of the domain has written a heartbeat for ten minutes, so that the
        leader of `default` maintains the queue."""
        return self.seconds_since_heartbeat >= DOMAIN_ORPHANED_AFTER_SECONDS


class DomainMember(NamedTuple):
    """A client with a recent heartbeat, and the client's domain. A heartbeat is recent if it is not
    older than the client's `dead_after`, by the server's clock."""

    client_id: str
    domain: str
    queues: list[str]
    kinds: list[str]
    is_candidate: bool
    """Whether the client takes part in leader election and is not stopping."""
    settings_digest: str | None
    """A digest of the client's maintenance settings. Clients of one domain with different digests
    have different settings. None: the client's riverpy version does not support domains."""
    uptime: float
    """Seconds since the start of the client."""
    is_stopping: bool = False


class QueueMovePreview(NamedTuple):
    """What an operator must know before moving a queue to another domain."""

    owner_domain: str | None
    """The domain that owns the queue. None: no domain owns it, so the leader of `default` maintains
    the queue."""
    live_client_count: int
    """The number of clients of `owner_domain` that have a recent heartbeat."""
    is_queue_known: bool
    """Whether the queue exists: a domain owns it, it has a row in `river_queue`, the row of a
    client lists it, or it has an available job."""
    is_domain_known: bool
    """Whether the new domain exists: it is `default`, or a client or a queue belongs to it."""


async def owner_list_queues(
    connection: Transaction, schema: str | None, *, domain_orphaned_after: timedelta
) -> list[OwnedQueue]:
    """Return all queues that domains own, sorted by name. `is_heartbeat_old` is True if the
    domain's last heartbeat is older than `domain_orphaned_after`."""
    rows = await get_query(_SQL_FILE, "owner_read", schema).fetch(
        connection, orphaned_after=domain_orphaned_after
    )
    return [OwnedQueue(*row) for row in rows]


async def owner_table_exists(connection: Transaction, schema: str | None) -> bool:
    """Return whether the table of queue owners exists."""
    return await get_query(_SQL_FILE, "owner_exists", None).fetchval(connection, schema=schema)


async def owner_table_is_empty(connection: Transaction, schema: str | None) -> bool:
    """Return whether the table of queue owners is certainly empty: its size is 0. A role without
    the right to read the table can also call this. The result may be False for an empty table,
    because deleted rows take space until a vacuum."""
    return await get_query(_SQL_FILE, "owner_is_empty", None).fetchval(connection, schema=schema)


async def owner_lock_all(connection: Transaction, schema: str | None) -> None:
    """Lock the owners of all queues until the open transaction ends. Other sessions wait before
    they claim or move a queue."""
    await get_query(_SQL_FILE, "owner_lock", schema).execute(connection)


async def owner_find_conflicts(
    connection: Transaction,
    schema: str | None,
    *,
    queues: Sequence[str],
    dead_client_heartbeats: Mapping[str, bytes],
) -> list[QueueOwnershipConflict]:
    """Return those of `queues` that a domain owns, each with the ids of some clients of this
    domain. `dead_client_heartbeats` maps the ids of dead clients to their last heartbeats. A client
    that still has this last heartbeat is left out of `maybe_dead_client_ids`."""
    rows = await get_query(_SQL_FILE, "owner_conflicts", schema).fetch(
        connection,
        queue=queues,
        client_id=list(dead_client_heartbeats),
        heartbeat=list(dead_client_heartbeats.values()),
    )
    return [QueueOwnershipConflict(*row) for row in rows]


async def owner_claim_queues(
    connection: Transaction,
    schema: str | None,
    *,
    queues: Sequence[str],
    domain: str,
    client_id: str,
) -> list[str]:
    """Make the domain the owner of the queues. Call `owner_lock_all` before, in the same
    transaction. Return the queues whose owner has changed."""
    rows = await get_query(_SQL_FILE, "owner_claim", schema).fetch(
        connection, queue=queues, domain=domain, client_id=client_id
    )
    return [row[0] for row in rows]


async def owner_notify_changed(connection: Transaction, schema: str | None) -> None:
    """Notify the leaders that queues have new owners. PostgreSQL sends the notification at the
    commit."""
    await get_query(_SQL_FILE, "owner_notify", schema).execute(
        connection, action=OWNERSHIP_CHANGED_ACTION
    )


async def member_write_heartbeat(
    connection: Transaction,
    schema: str | None,
    *,
    client_id: str,
    registered_at: int | None,
    domain: str,
    settings_digest: str,
    queues: Sequence[str],
    heartbeat_interval: timedelta,
) -> Mapping[str, str]:
    """Store a client's domain, and write a heartbeat of the domain. Return the owners of
    `queues`, by queue. Queues without an owner are left out.

    Args:
        connection: any connection.
        schema: the schema of River's tables.
        client_id: the client's id.
        registered_at: when the client registered, in microseconds since 2000.
        domain: the client's domain.
        settings_digest: a digest of the client's maintenance settings.
        queues: the queues whose owners to return.
        heartbeat_interval: the interval at which each client of the domain calls this function.
    """
    rows = await get_query(_SQL_FILE, "member_update", schema).fetch(
        connection,
        client_id=client_id,
        registered_at=registered_at,
        domain=domain,
        settings=settings_digest,
        interval=heartbeat_interval,
        queue=queues,
    )
    return {row[0]: row[1] for row in rows}


async def member_mark_supports_domains(
    connection: Transaction, schema: str | None, *, client_id: str, registered_at: int
) -> None:
    """Store that this client of `default` has a riverpy version that supports domains."""
    await get_query(_SQL_FILE, "member_mark_supports_domains", schema).execute(
        connection, client_id=client_id, registered_at=registered_at
    )


async def domain_get_election_status(
    connection: Transaction, schema: str | None, *, domain: str
) -> ElectionStatus:
    """Return which client is the leader of `default`, and whether `domain` has a leader or a client
    that can become its leader."""
    rows = await get_query(_SQL_FILE, "domain_election_status", schema).fetch(
        connection, lease=domain_lease_name(domain), domain=domain
    )
    return ElectionStatus(*rows[0])


async def default_leader_get_status(
    connection: Transaction, schema: str | None
) -> DefaultLeaderStatus:
    """Return whether domain `default` has a leader, and whether the leader is a riverpy client."""
    rows = await get_query(_SQL_FILE, "default_leader", schema).fetch(connection)
    return DefaultLeaderStatus(*rows[0])


async def domain_list_leaders(connection: Transaction, schema: str | None) -> list[DomainLeader]:
    """Return the leader of each domain and the holder of `@schema`, sorted by domain."""
    rows = await get_query(_SQL_FILE, "domain_leaders", schema).fetch(
        connection, schema_lease=SCHEMA_LEASE_NAME
    )
    return [DomainLeader(*row) for row in rows]


async def domain_list_queue_owners(
    connection: Transaction, schema: str | None
) -> list[QueueOwnerStatus]:
    """Return the owner of each queue that a domain owns, sorted by queue."""
    rows = await get_query(_SQL_FILE, "domain_owners", schema).fetch(connection)
    return [QueueOwnerStatus(*row) for row in rows]


async def domain_list_members(connection: Transaction, schema: str | None) -> list[DomainMember]:
    """Return the clients with a recent heartbeat. The client that started first comes first."""
    rows = await get_query(_SQL_FILE, "domain_members", schema).fetch(connection)
    return [DomainMember(*row) for row in rows]


async def domain_lock_maintenance(
    connection: Transaction, schema: str | None, *, domains: Iterable[str]
) -> None:
    """Lock the maintenance of these domains until the current transaction ends. First wait until
    their leaders have no open maintenance transaction. Then these leaders cannot write, and no
    queue can get another owner."""
    others = set(domains)
    if DEFAULT_DOMAIN in others:
        others.remove(DEFAULT_DOMAIN)
        await get_query(_SQL_FILE, "domain_lock_default", schema).execute(connection)
    names = [domain_lease_name(domain) for domain in others]
    await get_query(_SQL_FILE, "domain_lock_leases", schema).execute(connection, name=names)
    await owner_lock_all(connection, schema)


async def domain_preview_queue_move(
    connection: Transaction, schema: str | None, *, queue: str, new_domain: str
) -> QueueMovePreview:
    """Return the owner of a queue, and whether the queue and `new_domain` exist. This changes
    nothing."""
    (row,) = await get_query(_SQL_FILE, "domain_queue_ownership", schema).fetch(
        connection, queue=queue, domain=new_domain
    )
    return QueueMovePreview(*row)


async def domain_assign_queue(
    connection: Transaction, schema: str | None, *, queue: str, domain: str, assigned_by: str
) -> None:
    """Make a domain the owner of a queue. Call `domain_lock_maintenance` before, in the same
    transaction. PostgreSQL notifies the leaders at the commit."""
    if domain == DEFAULT_DOMAIN:
        await get_query(_SQL_FILE, "domain_free", schema).execute(connection, queue=queue)
    else:
        await get_query(_SQL_FILE, "domain_own", schema).execute(
            connection,
            queue=queue,
            domain=domain,
            by=assigned_by,
            orphaned_after=timedelta(seconds=DOMAIN_ORPHANED_AFTER_SECONDS),
        )
    await owner_notify_changed(connection, schema)
