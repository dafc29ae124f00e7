"""One typed function per block of `sql/queries/riverpy_queue_owner.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._names import domain_lease
from riverpy._postgres.clients import LeaderLook
from riverpy._postgres.sql_files import query

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    from riverpy._postgres.driver import Transaction

OWNERS_ACTION = "ownership_changed"
"""What is announced on the topic `riverpy_event` when queues have changed hands."""

_FILE = "riverpy_queue_owner"


class OwnerRow(NamedTuple):
    """Which domain has a queue."""

    queue: str
    domain: str
    last_seen: bytes
    """When a client of the domain last said that it is alive, only to be compared."""
    is_old: bool
    """Whether that was long ago by the server's clock, which proves nothing."""


class Holder(NamedTuple):
    """Whose a queue is that somebody wants to claim."""

    queue: str
    domain: str
    client_ids: list[str]
    """Clients of the domain that have a recent heartbeat by the server's clock, ten at most."""
    silent_ids: list[str]
    """Other clients of the domain, ten at most, but for those that are known to be dead."""


class DefaultLead(NamedTuple):
    """Who leads `default`."""

    is_led: bool
    is_registered: bool
    """Whether a client of riverpy's does."""


async def owner_read(
    connection: Transaction, schema: str | None, *, orphaned_after: timedelta
) -> list[OwnerRow]:
    """All queues that domains have, by name."""
    statement = query(_FILE, "owner_read", schema)
    rows = await connection.fetch(
        statement.text, *statement.arguments({"orphaned_after": orphaned_after})
    )
    return [OwnerRow(*row) for row in rows]


async def owner_is_there(connection: Transaction, schema: str | None) -> bool:
    """Whether the table exists."""
    statement = query(_FILE, "owner_is_there", None)
    return await connection.fetchval(statement.text, *statement.arguments({"schema": schema}))


async def owner_is_empty(connection: Transaction, schema: str | None) -> bool:
    """Whether there is nothing in the table, for a role that may not read it. True is certain."""
    statement = query(_FILE, "owner_is_empty", None)
    return await connection.fetchval(statement.text, *statement.arguments({"schema": schema}))


async def owner_lock(connection: Transaction, schema: str | None) -> None:
    """Let nobody else change whose queues are until the end of the open transaction."""
    await connection.execute(query(_FILE, "owner_lock", schema).text)


async def owner_held(
    connection: Transaction,
    schema: str | None,
    *,
    queues: Sequence[str],
    dead: Mapping[str, bytes],
) -> list[Holder]:
    """Which of these queues domains have. `dead` is the last heartbeat of each client that is known
    to be dead."""
    statement = query(_FILE, "owner_held", schema)
    values: dict[str, object] = {
        "queue": queues,
        "client_id": list(dead),
        "heartbeat": list(dead.values()),
    }
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return [Holder(*row) for row in rows]


async def owner_claim(
    connection: Transaction,
    schema: str | None,
    *,
    queues: Sequence[str],
    domain: str,
    client_id: str,
) -> list[str]:
    """Let these queues be the domain's, in a transaction under `owner_lock`; returns which were
    not."""
    statement = query(_FILE, "owner_claim", schema)
    values: dict[str, object] = {"queue": queues, "domain": domain, "client_id": client_id}
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return [row[0] for row in rows]


async def owner_notify(connection: Transaction, schema: str | None) -> None:
    """Tell the leaders, at the commit, that queues have changed hands."""
    statement = query(_FILE, "owner_notify", schema)
    await connection.execute(statement.text, OWNERS_ACTION)


async def member_keep(
    connection: Transaction,
    schema: str | None,
    *,
    client_id: str,
    registered_at: int | None,
    domain: str,
    settings: str,
    queues: Sequence[str],
    interval: timedelta,
) -> Mapping[str, str]:
    """Say whose a client is, and that its domain is alive; returns who has which of `queues`.

    Args:
        connection: any.
        schema: of River's tables.
        client_id: the client's.
        registered_at: its run's.
        domain: the client's.
        settings: tells clients of one domain apart that would keep it differently.
        queues: those that are asked about.
        interval: how often a client of the domain says so.
    """
    statement = query(_FILE, "member_keep", schema)
    values: dict[str, object] = {
        "client_id": client_id,
        "registered_at": registered_at,
        "domain": domain,
        "settings": settings,
        "interval": interval,
        "queue": queues,
    }
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return {row[0]: row[1] for row in rows}


async def member_mark(
    connection: Transaction, schema: str | None, *, client_id: str, registered_at: int
) -> None:
    """Say of a client of `default` that it knows of domains."""
    statement = query(_FILE, "member_mark", schema)
    values: dict[str, object] = {"client_id": client_id, "registered_at": registered_at}
    await connection.execute(statement.text, *statement.arguments(values))


async def domain_look(connection: Transaction, schema: str | None, *, domain: str) -> LeaderLook:
    """Who leads `default`, and whether somebody leads this domain or could."""
    statement = query(_FILE, "domain_look", schema)
    values: dict[str, object] = {"lease": domain_lease(domain), "domain": domain}
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return LeaderLook(*rows[0])


async def default_led(connection: Transaction, schema: str | None) -> DefaultLead:
    """Whether somebody leads `default`, and whether that is a client of ours."""
    rows = await connection.fetch(query(_FILE, "default_led", schema).text)
    return DefaultLead(*rows[0])
