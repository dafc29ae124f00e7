"""The SQL statements for clients and their heartbeats: one typed function per statement in
`sql/queries/riverpy_client.sql`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.sql_files import get_query, get_query_with_conditional_parts
from riverpy._timestamps import decode_wire_microseconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime, timedelta

    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.lease_reports import LeaseReport
    from riverpy._postgres.skipped_rows import SkippedRowReport

_SQL_FILE = "riverpy_client"


class ClientRegistration(NamedTuple):
    """The values that a client stores about itself in its row."""

    client_id: str
    queues: list[str]
    """The queues from which the client takes jobs now. The list changes when a queue is added or
    removed."""
    kinds: list[str]
    is_candidate: bool
    poll_only: bool
    version: str
    dead_after: timedelta


class ElectionStatus(NamedTuple):
    """The leader of the domain `default`, and whether one domain (`default` or another) has a
    client that can become its leader."""

    leader_id: str | None
    """The id of the client that is the leader of `default`. None: there is no leader."""
    elected_at: str | None
    """When the leader of `default` was elected, in RFC 3339."""
    is_leader_riverpy: bool
    """Whether the leader of `default` is a riverpy client."""
    has_riverpy_candidate: bool
    """Whether a riverpy client with a recent heartbeat takes part in the leader election of the one
    domain. It is also True if that domain is not `default` and has a leader."""
    leader_supports_domains: bool = True
    """Whether the leader of `default` has a riverpy version that supports domains."""


class LastHeartbeat(NamedTuple):
    """The last heartbeat of a client or a domain."""

    client_or_domain: str
    raw_timestamp: bytes
    """The server's time of the heartbeat, as bytes. It is only compared with other heartbeats."""
    dead_after_seconds: float
    """If the heartbeat does not change for this number of seconds, the client or domain counts as
    dead."""


class RegisteredClientRun(NamedTuple):
    """A registered run of a client. A run lasts from the client's start to its stop. Only one run
    at a time can be registered under a client id."""

    registered_at: int
    last_heartbeat: LastHeartbeat
    registered_at_text: str
    """The time of the registration, in RFC 3339."""
    process_name: str | None
    """The name of the run's process. None: unknown."""
    is_heartbeat_recent: bool
    """Whether the heartbeat is recent by the server's clock. If that clock was changed, a dead
    client may have a recent heartbeat."""
    raw_server_start_time: bytes


class LeaderCandidate(NamedTuple):
    """A client that takes part in leader election."""

    client_id: str
    version: str
    started_at: datetime
    heartbeat_at: datetime


async def client_register(
    connection: Transaction, schema: str | None, registration: ClientRegistration
) -> int | None:
    """Register a run. Return the time of the registration in microseconds since 2000, or None if
    another run is registered under the same client id."""
    statement = get_query(_SQL_FILE, "client_register", schema)
    raw = await statement.fetchval(connection, **registration._asdict())
    return None if raw is None else decode_wire_microseconds(raw)


async def client_get_registered_run(
    connection: Transaction, schema: str | None, *, client_id: str
) -> RegisteredClientRun | None:
    """Return the run that is registered under a client id, or None if there is none."""
    statement = get_query(_SQL_FILE, "client_registered_run", schema)
    row = await statement.fetchrow(connection, client_id=client_id)
    if row is None:
        return None
    heartbeat = LastHeartbeat(client_id, row[1], row[2])
    return RegisteredClientRun(decode_wire_microseconds(row[0]), heartbeat, *row[3:])


async def client_delete_dead(
    connection: Transaction, schema: str | None, *, client_id: str, last_heartbeat: bytes
) -> None:
    """Delete the row of a dead client. If the client has written another heartbeat after
    `last_heartbeat`, the row is kept."""
    await get_query(_SQL_FILE, "client_delete_dead", schema).execute(
        connection, client_id=client_id, heartbeat=last_heartbeat
    )


async def client_write_heartbeat(
    connection: Transaction,
    schema: str | None,
    registration: ClientRegistration,
    *,
    registered_at: int,
    lease_report: LeaseReport | None = None,
) -> bool:
    """Write a heartbeat of the run that registered at `registered_at` (microseconds since 2000).
    Return False if another run has the client id now. If the client's row was deleted, insert it
    again.

    Args:
        lease_report: the leases for which the client waits, and the lag of each lease that it
            holds. The lag is the amount of work that is still to be done under the lease. None:
            write no report, because the table of clients has no column for reports.
    """
    values = {**registration._asdict(), "registered_at": registered_at}
    parts = frozenset[str]()
    if lease_report is not None:
        values["leases"] = lease_report.json_text
        parts = frozenset({"leases"})
    statement = get_query_with_conditional_parts(_SQL_FILE, "client_heartbeat", schema, parts)
    return bool(await statement.fetchval(connection, **values))


async def client_is_run_registered(
    connection: Transaction, schema: str | None, *, client_id: str, registered_at: int
) -> bool:
    """Return whether the run that registered at `registered_at` is still registered under its
    client id."""
    return await get_query(_SQL_FILE, "client_is_run_registered", schema).fetchval(
        connection, client_id=client_id, registered_at=registered_at
    )


async def client_set_slot_counts(
    connection: Transaction,
    schema: str | None,
    *,
    client_id: str,
    registered_at: int,
    queues: Sequence[str],
    slot_counts: Sequence[int],
    stuck_job_ids: Sequence[int],
) -> None:
    """Store the client's queues, its number of slots for each queue, and the ids of its stuck jobs.
    The number of slots is the maximum number of the queue's jobs that the client runs at a time."""
    await get_query(_SQL_FILE, "client_set_slots", schema).execute(
        connection,
        client_id=client_id,
        registered_at=registered_at,
        queues=queues,
        slots=slot_counts,
        stuck=stuck_job_ids,
    )


async def client_set_state(
    connection: Transaction,
    schema: str | None,
    *,
    client_id: str,
    registered_at: int,
    state: str,
    process_name: str | None,
    skipped_rows: Sequence[SkippedRowReport] = (),
    skipped_row_count: int = 0,
) -> None:
    """Store the client's state (`working` or `stopping`), the name of its process, and reports on
    the rows that the client skips for a while, because statements with these rows have failed.
    `skipped_row_count` is the number of all skipped rows, but `skipped_rows` may have reports on
    only some of these rows."""
    now = time.monotonic()
    await get_query(_SQL_FILE, "client_set_state", schema).execute(
        connection,
        client_id=client_id,
        registered_at=registered_at,
        state=state,
        process=process_name,
        aside_count=skipped_row_count,
        what=[row.statement_purpose for row in skipped_rows],
        name=[row.row_name for row in skipped_rows],
        error=[row.error for row in skipped_rows],
        tries=[row.failure_count for row in skipped_rows],
        age=[now - row.first_failed_at for row in skipped_rows],
    )


async def client_unregister(
    connection: Transaction, schema: str | None, *, client_id: str, registered_at: int
) -> None:
    """Delete the row of a client, unless this client still holds the lease in River's table
    `river_leader`."""
    await get_query(_SQL_FILE, "client_unregister", schema).execute(
        connection, client_id=client_id, registered_at=registered_at
    )


async def client_list_candidates(
    connection: Transaction, schema: str | None, *, domain: str
) -> list[LeaderCandidate]:
    """Return the clients of a domain that have a recent heartbeat and take part in leader election.
    The client that started first comes first."""
    rows = await get_query(_SQL_FILE, "client_candidates", schema).fetch(connection, domain=domain)
    return [LeaderCandidate(*row) for row in rows]


async def client_count_live(connection: Transaction, schema: str | None) -> int:
    """Return how many clients have a recent heartbeat by the server's clock."""
    return await get_query(_SQL_FILE, "client_count", schema).fetchval(connection)


async def client_list_heartbeats(
    connection: Transaction, schema: str | None
) -> tuple[list[LastHeartbeat], bytes]:
    """Return the last heartbeat of each client, and the start time of the server."""
    rows = await get_query(_SQL_FILE, "client_heartbeats", schema).fetch(connection)
    start = rows[0][3] if rows else b""
    return [LastHeartbeat(row[0], row[1], row[2]) for row in rows], start


async def client_lock_dead(
    connection: Transaction,
    schema: str | None,
    last_heartbeats: Mapping[str, bytes],
    *,
    raw_server_start_time: bytes,
) -> set[str]:
    """Lock the rows of dead clients until the end of the open transaction, so that these clients
    cannot write a heartbeat. Return the ids of the locked clients. `last_heartbeats` maps the id of
    each dead client to its last heartbeat. A client that has written another heartbeat, or is
    writing one, is not locked. If the server was restarted after `raw_server_start_time`, no client
    is locked."""
    rows = await get_query(_SQL_FILE, "client_lock_dead", schema).fetch(
        connection,
        client_id=list(last_heartbeats),
        heartbeat=list(last_heartbeats.values()),
        server_start=raw_server_start_time,
    )
    return {row[0] for row in rows}


async def client_find_registered(
    connection: Transaction, schema: str | None, *, client_ids: Sequence[str]
) -> set[str]:
    """Return those of `client_ids` that are registered. The clients may be alive or dead."""
    rows = await get_query(_SQL_FILE, "client_registered", schema).fetch(
        connection, client_id=client_ids
    )
    return {row[0] for row in rows}


async def client_delete_dead_without_jobs(
    connection: Transaction, schema: str | None, last_heartbeats: Mapping[str, bytes]
) -> list[str]:
    """Delete the rows of dead clients. Return the ids of the deleted clients. `last_heartbeats`
    maps the id of each dead client to its last heartbeat. A client that has written another
    heartbeat, or that has a running job, is kept."""
    rows = await get_query(_SQL_FILE, "client_delete_idle", schema).fetch(
        connection, client_id=list(last_heartbeats), heartbeat=list(last_heartbeats.values())
    )
    return [row[0] for row in rows]


async def default_domain_get_election_status(
    connection: Transaction, schema: str | None
) -> ElectionStatus:
    """Return which client is the leader of `default`, and whether a riverpy client of
    `default` takes part in leader election."""
    row = await get_query(_SQL_FILE, "election_status", schema).fetchrow(connection)
    assert row is not None  # noqa: S101 (the statement always returns a row)
    return ElectionStatus(*row)
