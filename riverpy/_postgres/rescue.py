"""One typed function per block of `sql/queries/river_job_rescue.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.jobs import ClaimKey
from riverpy._postgres.queue_filter import filtered
from riverpy._postgres.sql_files import query
from riverpy.job import wire_timestamp

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from asyncpg import Record

    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.queue_filter import QueueFilter

_FILE = "river_job_rescue"
RESCUE_ERROR = "Stuck job rescued by JobRescuer"
"""River's text, whatever the reason: River UI and alerts match on it."""


class Claim(NamedTuple):
    """A running attempt, and whose it is."""

    claim_key: ClaimKey
    client_id: str


async def job_running_of(
    connection: Transaction,
    schema: str | None,
    *,
    client_ids: Sequence[str],
    within: QueueFilter | None,
    after: int,
    limit: int,
    skipped: Sequence[int],
) -> list[Claim]:
    """The running attempts of these clients with an id above `after`, lowest first, but for the
    `skipped` jobs."""
    values: dict[str, object] = {
        "after": after,
        "client_id": client_ids,
        "limit": limit,
        "skipped": skipped,
    }
    text, arguments = filtered(_FILE, "job_running_of", schema, within, values)
    rows = await connection.fetch(text, *arguments)
    return [Claim(ClaimKey(row[0], row[1], wire_timestamp(row[2])), row[3]) for row in rows]


async def job_stuck(
    connection: Transaction,
    schema: str | None,
    *,
    age: timedelta,
    within: QueueFilter | None,
    after: int,
    limit: int,
) -> list[int]:
    """The ids above `after` of the jobs that run for longer than `age`, lowest first."""
    values: dict[str, object] = {"after": after, "age": age, "limit": limit}
    text, arguments = filtered(_FILE, "job_stuck", schema, within, values)
    return [row[0] for row in await connection.fetch(text, *arguments)]


async def job_stuck_rows(
    connection: Transaction, schema: str | None, *, ids: Sequence[int], age: timedelta
) -> list[Record]:
    """Those of these jobs that run for longer than `age`, lowest id first. Behind the columns of a
    job stand the seconds that it runs."""
    statement = query(_FILE, "job_stuck_rows", schema)
    values: dict[str, object] = {"id": ids, "age": age}
    return await connection.fetch(statement.text, *statement.arguments(values))


class Rescue(NamedTuple):
    """An attempt to end for its client is gone."""

    claim_key: ClaimKey
    client_id: str | None
    """Whose it was."""
    delay: float = 0.0
    """Seconds until the job is due again, if it can run again."""


async def job_rescue(
    connection: Transaction, schema: str | None, rescues: Sequence[Rescue]
) -> dict[int, str]:
    """End attempts with `RESCUE_ERROR`; returns the state of each job whose attempt was ended."""
    statement = query(_FILE, "job_rescue", schema)
    values: dict[str, object] = {
        "id": [rescue.claim_key.id for rescue in rescues],
        "attempt": [rescue.claim_key.attempt for rescue in rescues],
        "attempted_at": [rescue.claim_key.attempted_at for rescue in rescues],
        "delay": [rescue.delay for rescue in rescues],
        "error": RESCUE_ERROR,
    }
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return {row[0]: row[1] for row in rows}
