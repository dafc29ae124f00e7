"""One typed function per block of `sql/queries/riverpy_client.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._sql import query
from riverpy.job import wire_timestamp

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from riverpy.drivers.asyncpg import Transaction


class Registration(NamedTuple):
    """What a client says of itself."""

    client_id: str
    queues: list[str]
    kinds: list[str]
    candidate: bool
    poll_only: bool
    version: str
    dead_after: timedelta


class LeaderLook(NamedTuple):
    """Who leads, and who else could."""

    leader_id: str | None
    """None: nobody."""
    elected_at: str | None
    """In RFC 3339."""
    is_registered: bool
    """Whether the leader is a client of riverpy's."""
    has_candidate: bool
    """Whether a client of riverpy's stands for election and gives signs of life."""
    knows_domains: bool = True
    """Whether the leader of `default` says that it knows of domains."""


class Silence(NamedTuple):
    """Who gives no signs of life."""

    client_ids: list[str]
    next_in: float | None
    """Seconds until the next of the others is one of them, if it gives none; None: there are no
    others."""


class Candidate(NamedTuple):
    """A client that stands for election."""

    client_id: str
    version: str
    started_at: datetime
    heartbeat_at: datetime


async def client_beat(
    connection: Transaction,
    schema: str | None,
    registration: Registration,
    *,
    registered_at: int | None,
) -> int:
    """Give a sign of life. `registered_at` is None at the first of a run.

    Returns:
        When this run was registered: raw, as the `attempted_at` of a stamp.
    """
    statement = query("riverpy_client", "client_beat", schema)
    values: dict[str, object] = {**registration._asdict(), "registered_at": registered_at}
    return wire_timestamp(await connection.fetchval(statement.text, *statement.arguments(values)))


async def client_disclose(
    connection: Transaction,
    schema: str | None,
    *,
    client_id: str,
    slots: Sequence[int],
    stuck: Sequence[int],
) -> None:
    """Say how many slots the client has, in the order of its registered queues, and the ids of its
    stuck jobs."""
    statement = query("riverpy_client", "client_disclose", schema)
    values: dict[str, object] = {"client_id": client_id, "slots": slots, "stuck": stuck}
    await connection.execute(statement.text, *statement.arguments(values))


async def leader_look(connection: Transaction, schema: str | None) -> LeaderLook:
    """Who leads, as far as a client wants to know."""
    row = await connection.fetchrow(query("riverpy_client", "leader_look", schema).text)
    assert row is not None  # noqa: S101 (there is always one)
    return LeaderLook(*row)


async def client_leave(
    connection: Transaction, schema: str | None, *, client_id: str, registered_at: int
) -> None:
    """Take the registration of a run back, if it holds the lease no more."""
    statement = query("riverpy_client", "client_leave", schema)
    values: dict[str, object] = {"client_id": client_id, "registered_at": registered_at}
    await connection.execute(statement.text, *statement.arguments(values))


async def client_candidates(
    connection: Transaction, schema: str | None, *, domain: str
) -> list[Candidate]:
    """Who stands for election in a domain and gives signs of life, in the order of their starts."""
    statement = query("riverpy_client", "client_candidates", schema)
    rows = await connection.fetch(statement.text, *statement.arguments({"domain": domain}))
    return [Candidate(*row) for row in rows]


async def client_living(connection: Transaction, schema: str | None) -> int:
    """How many clients give signs of life."""
    return await connection.fetchval(query("riverpy_client", "client_living", schema).text)


async def client_silent(
    connection: Transaction, schema: str | None, *, dead_after: timedelta
) -> Silence:
    """Who gives no signs of life. Whether they are dead is for `client_lock_dead` to say."""
    statement = query("riverpy_client", "client_silent", schema)
    row = await connection.fetchrow(
        statement.text, *statement.arguments({"dead_after": dead_after})
    )
    return Silence([], None) if row is None else Silence(*row)


async def client_lock_dead(
    connection: Transaction,
    schema: str | None,
    *,
    client_ids: Sequence[str],
    dead_after: timedelta,
    contact: float,
) -> set[str]:
    """Which of them are dead, and stay so until the end of the transaction.

    Args:
        connection: with its open transaction.
        schema: of River's tables.
        client_ids: who is asked about.
        dead_after: the leader's setting.
        contact: seconds that the leader has been in contact with the server.
    """
    statement = query("riverpy_client", "client_lock_dead", schema)
    values: dict[str, object] = {
        "client_id": client_ids,
        "dead_after": dead_after,
        "contact": contact,
    }
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return {row[0] for row in rows}


async def client_registered(
    connection: Transaction, schema: str | None, *, client_ids: Sequence[str]
) -> set[str]:
    """Which of them are registered, alive or dead."""
    statement = query("riverpy_client", "client_registered", schema)
    rows = await connection.fetch(statement.text, *statement.arguments({"client_id": client_ids}))
    return {row[0] for row in rows}


async def client_reap(
    connection: Transaction, schema: str | None, *, dead_after: timedelta, kept: timedelta
) -> list[str]:
    """Forget those that are dead for `kept` and have no running job; returns whom."""
    statement = query("riverpy_client", "client_reap", schema)
    values: dict[str, object] = {"dead_after": dead_after, "kept": kept}
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return [row[0] for row in rows]
