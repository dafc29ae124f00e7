"""The statements for events of the fleet (all clients of a schema) and for watched jobs: one typed
function per SQL statement in `sql/queries/riverpy_fleet.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.sql_files import get_query

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from riverpy._postgres.driver import Transaction

FOLLOW_TOPIC = "riverpy_follow"
"""The notification topic on which clients announce which events they follow, i.e. want to
receive."""
FLEET_TOPIC = "riverpy_fleet"
"""The notification topic on which workers send events to the clients that follow them."""
PAYLOAD_BYTES_MAX = 7_999
"""The maximum size of a notification's payload, in bytes."""

_SQL_FILE = "riverpy_fleet"


class ChangedJob(NamedTuple):
    """A watched job whose row has changed."""

    id: int
    version: str
    """A text that changes with each change of the row. Empty: the row does not exist."""
    row: Sequence[Any] | None
    """The values of the row, in the order of `JobColumn`. None: the row does not exist."""


class EndedJob(NamedTuple):
    """A job that the leader has rescued, or has cancelled because the job expired. The fields have
    the values for the event that the leader sends about this job. Times are bytes in PostgreSQL's
    wire format."""

    id: int
    kind: str
    queue: str
    priority: int
    attempt: int
    max_attempts: int
    created_at: bytes
    scheduled_at: bytes
    attempted_at: bytes | None
    finalized_at: bytes | None
    error: str | None
    """The newest entry of the column `errors`, as JSON text."""


async def fleet_notify(
    connection: Transaction, schema: str | None, topic: str, payloads: Sequence[str]
) -> bool:
    """Send one notification on this topic for each payload. Return False if none was sent, because
    the server's queue of notifications is nearly full."""
    query = get_query(_SQL_FILE, "fleet_notify", schema)
    return bool(await query.fetch(connection, topic=topic, payload=list(payloads)))


async def fleet_read_changed_jobs(
    connection: Transaction, schema: str | None, version_by_id: Mapping[int, str]
) -> list[ChangedJob]:
    """Return the watched jobs that no longer have the version in `version_by_id`, and those that do
    not exist."""
    rows = await get_query(_SQL_FILE, "fleet_changed_jobs", schema).fetch(
        connection, id=list(version_by_id), version=list(version_by_id.values())
    )
    return [
        ChangedJob(row[0], row[1] or "", None if row[1] is None else tuple(row)[2:]) for row in rows
    ]


async def fleet_read_ended_jobs(
    connection: Transaction, schema: str | None, ids: Sequence[int]
) -> list[EndedJob]:
    """Return the jobs with these ids, for events about jobs that a leader has ended. The state of
    the jobs is not checked. Jobs that do not exist are left out."""
    rows = await get_query(_SQL_FILE, "fleet_ended_jobs", schema).fetch(connection, id=list(ids))
    return [EndedJob(*row) for row in rows]
