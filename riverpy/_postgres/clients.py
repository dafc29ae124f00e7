"""One typed function per block of `sql/queries/riverpy_client.sql`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.sql_files import query
from riverpy.job import wire_timestamp

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime, timedelta

    from riverpy._postgres.driver import Transaction


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
    """Whether a client of riverpy's takes part in leader election and has a recent heartbeat."""
    knows_domains: bool = True
    """Whether the leader of `default` says that it knows of domains."""


class LastHeartbeat(NamedTuple):
    """The last heartbeat of a client, or of what else writes heartbeats."""

    name: str
    value: bytes
    """Its time by the server's clock: only to be compared with what was read before."""
    limit: float
    """For how many seconds it may at least stay the same."""


class IdHolder(NamedTuple):
    """The run that is registered under an id."""

    registered_at: int
    heartbeat: LastHeartbeat
    since: str
    """When it was registered, in RFC 3339."""
    process: str | None
    """The process in which it runs. None: not known."""
    is_recent: bool
    """Whether its heartbeat is recent by the server's clock, which proves nothing."""
    server_start: bytes


class SetAsideRow(NamedTuple):
    """A row that a client has set aside, because it fails alone."""

    what: str
    """What is done with it: `result`, `claim`, or the purpose of a pass of maintenance."""
    name: str
    """The id of the job, or the key of another row."""
    error: str
    tries: int
    since: float
    """When it failed alone first, in monotonic seconds of the client."""


class Candidate(NamedTuple):
    """A client that stands for election."""

    client_id: str
    version: str
    started_at: datetime
    heartbeat_at: datetime


async def client_register(
    connection: Transaction, schema: str | None, registration: Registration
) -> int | None:
    """Register a run. Returns when, raw, as the `attempted_at` of a claim key; None: another run is
    registered under its id."""
    statement = query("riverpy_client", "client_register", schema)
    values: dict[str, object] = registration._asdict()
    raw = await connection.fetchval(statement.text, *statement.arguments(values))
    return None if raw is None else wire_timestamp(raw)


async def client_holder(
    connection: Transaction, schema: str | None, *, client_id: str
) -> IdHolder | None:
    """The run that is registered under an id. None: there is none."""
    statement = query("riverpy_client", "client_holder", schema)
    row = await connection.fetchrow(statement.text, *statement.arguments({"client_id": client_id}))
    if row is None:
        return None
    heartbeat = LastHeartbeat(client_id, row[1], row[2])
    return IdHolder(wire_timestamp(row[0]), heartbeat, *row[3:])


async def client_displace(
    connection: Transaction, schema: str | None, *, client_id: str, heartbeat: bytes
) -> None:
    """Delete the row of a run that is gone, if this is still its last heartbeat."""
    statement = query("riverpy_client", "client_displace", schema)
    values: dict[str, object] = {"client_id": client_id, "heartbeat": heartbeat}
    await connection.execute(statement.text, *statement.arguments(values))


async def client_beat(
    connection: Transaction,
    schema: str | None,
    registration: Registration,
    *,
    registered_at: int,
) -> bool:
    """Write a heartbeat of the run that was registered at that time. Returns whether it still has
    its id; if not, another run has registered under it."""
    statement = query("riverpy_client", "client_beat", schema)
    values: dict[str, object] = {**registration._asdict(), "registered_at": registered_at}
    return bool(await connection.fetchval(statement.text, *statement.arguments(values)))


async def client_is_current(
    connection: Transaction, schema: str | None, *, client_id: str, registered_at: int
) -> bool:
    """Whether the run that was registered at that time still has its id."""
    statement = query("riverpy_client", "client_is_current", schema)
    values: dict[str, object] = {"client_id": client_id, "registered_at": registered_at}
    return await connection.fetchval(statement.text, *statement.arguments(values))


async def client_disclose(
    connection: Transaction,
    schema: str | None,
    *,
    client_id: str,
    registered_at: int,
    slots: Sequence[int],
    stuck: Sequence[int],
) -> None:
    """Say how many slots the client has, in the order of its registered queues, and the ids of its
    stuck jobs."""
    statement = query("riverpy_client", "client_disclose", schema)
    values: dict[str, object] = {
        "client_id": client_id,
        "registered_at": registered_at,
        "slots": slots,
        "stuck": stuck,
    }
    await connection.execute(statement.text, *statement.arguments(values))


async def client_set_state(
    connection: Transaction,
    schema: str | None,
    *,
    client_id: str,
    registered_at: int,
    state: str,
    process: str | None,
    aside: Sequence[SetAsideRow] = (),
    aside_count: int = 0,
) -> None:
    """Write whether the client is `working` or `stopping`, in which process it runs, how many rows
    it has set aside, and some of them."""
    statement = query("riverpy_client", "client_set_state", schema)
    now = time.monotonic()
    values: dict[str, object] = {
        "client_id": client_id,
        "registered_at": registered_at,
        "state": state,
        "process": process,
        "aside_count": aside_count,
        "what": [row.what for row in aside],
        "name": [row.name for row in aside],
        "error": [row.error for row in aside],
        "tries": [row.tries for row in aside],
        "age": [now - row.since for row in aside],
    }
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
    """The clients that take part in the leader election of a domain and have a recent heartbeat, in
    the order of their starts."""
    statement = query("riverpy_client", "client_candidates", schema)
    rows = await connection.fetch(statement.text, *statement.arguments({"domain": domain}))
    return [Candidate(*row) for row in rows]


async def client_living(connection: Transaction, schema: str | None) -> int:
    """How many clients have a recent heartbeat, by the server's clock."""
    return await connection.fetchval(query("riverpy_client", "client_living", schema).text)


async def client_heartbeats(
    connection: Transaction, schema: str | None
) -> tuple[list[LastHeartbeat], bytes]:
    """The last heartbeat of each client, and when the server was started, to be compared."""
    rows = await connection.fetch(query("riverpy_client", "client_heartbeats", schema).text)
    start = rows[0][3] if rows else b""
    return [LastHeartbeat(row[0], row[1], row[2]) for row in rows], start


async def client_lock_dead(
    connection: Transaction,
    schema: str | None,
    heartbeats: Mapping[str, bytes],
    *,
    server_start: bytes,
) -> set[str]:
    """Which clients stay dead until the end of the transaction: those that have written no other
    heartbeat.

    Args:
        connection: with its open transaction.
        schema: of River's tables.
        heartbeats: the last heartbeat of each client in question.
        server_start: as it was read with them.
    """
    statement = query("riverpy_client", "client_lock_dead", schema)
    values: dict[str, object] = {
        "client_id": list(heartbeats),
        "heartbeat": list(heartbeats.values()),
        "server_start": server_start,
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
    connection: Transaction, schema: str | None, heartbeats: Mapping[str, bytes]
) -> list[str]:
    """Forget those of these clients that have written no other heartbeat and have no running job;
    returns their ids."""
    statement = query("riverpy_client", "client_reap", schema)
    values: dict[str, object] = {
        "client_id": list(heartbeats),
        "heartbeat": list(heartbeats.values()),
    }
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return [row[0] for row in rows]
