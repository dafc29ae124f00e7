"""The statements of the job cleaner, scheduler and rescuer: one typed function per SQL statement in
`sql/queries/river_job_maintenance.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.jobs import ClaimKey
from riverpy._postgres.sql_files import fetch_filtered, milliseconds, query, values_by_field
from riverpy._timestamps import wire_timestamp

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    from asyncpg import Record

    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.sql_files import QueueFilter

DUE_ACTION = "due"
"""The `action` of notifications that announce when jobs become due."""
RESCUE_ERROR = "Stuck job rescued by JobRescuer"
"""River's error text for every rescue. River UI and users' alerts match on this text."""

_FILE = "river_job_maintenance"


class JobScope(NamedTuple):
    """The jobs of some queues and kinds. If `is_queue_allow_list` is False, these are all queues
    except `queues`. `is_kind_allow_list` has the same effect on `kinds`."""

    queues: tuple[str, ...] = ()
    is_queue_allow_list: bool = False
    kinds: tuple[str, ...] = ()
    is_kind_allow_list: bool = False


class EndedCursor(NamedTuple):
    """A position in the order in which the finished jobs of one state are read."""

    ended_at: str
    """When the job ended, as the text of the server."""
    id: int


class EndedJob(NamedTuple):
    """A finished job that is old enough to be deleted."""

    cursor: EndedCursor
    is_in_scope: bool


class Scheduled(NamedTuple):
    """The result of scheduling due jobs."""

    available: int
    discarded: int
    """Jobs discarded because another job has their unique key."""
    unchanged: list[int]
    """The ids of jobs that are locked or no longer due, or whose unique key another job keeps."""


class RunningClaim(NamedTuple):
    """A running attempt at a job, and the client that claimed the job."""

    claim_key: ClaimKey
    client_id: str


class Rescue(NamedTuple):
    """An attempt at a job that `job_rescue` must end with an error."""

    claim_key: ClaimKey
    client_id: str | None
    delay: float = 0.0
    """Seconds until the job is due again, if it has attempts left."""


async def job_states_to_clean(
    connection: Transaction, schema: str | None, retentions: Mapping[str, timedelta]
) -> set[str]:
    """Return the states in which a job ended longer ago than the retention of its state."""
    statement = query(_FILE, "job_states_to_clean", schema)
    rows = await statement.fetch(
        connection, states=list(retentions), retentions=list(retentions.values())
    )
    return {row[0] for row in rows}


async def job_ended(
    connection: Transaction,
    schema: str | None,
    *,
    state: str,
    retention: timedelta,
    scope: JobScope,
    after: EndedCursor | None,
    limit: int,
) -> list[EndedJob]:
    """Starting after the cursor, read up to `limit` jobs that ended longer ago than the
    retention."""
    rows = await query(_FILE, "job_ended", schema).fetch(
        connection,
        state=state,
        retention=retention,
        **scope._asdict(),
        after_time=after and after.ended_at,
        after_id=after and after.id,
        limit=limit,
    )
    return [EndedJob(EndedCursor(row[1], row[0]), row[2]) for row in rows]


async def job_delete_ended(
    connection: Transaction,
    schema: str | None,
    *,
    ids: Sequence[int],
    state: str,
    retention: timedelta,
) -> set[int]:
    """Delete the given jobs, except jobs that are locked or ended within the retention. Return the
    deleted ids."""
    statement = query(_FILE, "job_delete_ended", schema)
    rows = await statement.fetch(connection, ids=ids, state=state, retention=retention)
    return {row[0] for row in rows}


async def job_due(
    connection: Transaction,
    schema: str | None,
    *,
    within: QueueFilter | None,
    ahead: timedelta,
    skipped: Sequence[int],
    limit: int,
) -> list[int]:
    """Return the ids of scheduled and retryable jobs that are due within `ahead`, in the order in
    which they should run. Jobs in `skipped` are left out."""
    rows = await fetch_filtered(
        connection, _FILE, "job_due", schema, within, ahead=ahead, skipped=skipped, limit=limit
    )
    return [row[0] for row in rows]


async def job_schedule(
    connection: Transaction, schema: str | None, *, ids: Sequence[int], ahead: timedelta
) -> Scheduled:
    """Make jobs that are due within `ahead` available, and notify the clients of their queues."""
    row = await query(_FILE, "job_schedule", schema).fetchrow(connection, ids=ids, ahead=ahead)
    return Scheduled(0, 0, list(ids)) if row is None else Scheduled(*row)


async def job_lock_limit(connection: Transaction, limit: timedelta) -> None:
    """Set `lock_timeout` for the open transaction."""
    statement = query(_FILE, "job_lock_limit", None)
    await statement.execute(connection, milliseconds=milliseconds(limit))


async def job_running_of(
    connection: Transaction,
    schema: str | None,
    *,
    client_ids: Sequence[str],
    within: QueueFilter | None,
    after: int,
    limit: int,
    skipped: Sequence[int],
) -> list[RunningClaim]:
    """Return running attempts of these clients with a job id above `after`, lowest id first. Jobs
    in `skipped` are left out."""
    rows = await fetch_filtered(
        connection,
        _FILE,
        "job_running_of",
        schema,
        within,
        after=after,
        client_id=client_ids,
        limit=limit,
        skipped=skipped,
    )
    return [RunningClaim(ClaimKey(row[0], row[1], wire_timestamp(row[2])), row[3]) for row in rows]


async def job_stuck(
    connection: Transaction,
    schema: str | None,
    *,
    age: timedelta,
    within: QueueFilter | None,
    after: int,
    limit: int,
) -> list[int]:
    """Return ids above `after` of jobs that have been running for longer than `age`, lowest
    first."""
    rows = await fetch_filtered(
        connection, _FILE, "job_stuck", schema, within, after=after, age=age, limit=limit
    )
    return [row[0] for row in rows]


async def job_stuck_rows(
    connection: Transaction, schema: str | None, *, ids: Sequence[int], age: timedelta
) -> list[Record]:
    """Return the given jobs that have been running for longer than `age`, lowest id first. The last
    column is the running time in seconds."""
    return await query(_FILE, "job_stuck_rows", schema).fetch(connection, id=ids, age=age)


async def job_rescue(
    connection: Transaction, schema: str | None, rescues: Sequence[Rescue]
) -> dict[int, str]:
    """End attempts with `RESCUE_ERROR`. Return the new state of each job whose attempt ended."""
    rows = await query(_FILE, "job_rescue", schema).fetch(
        connection,
        **values_by_field([rescue.claim_key for rescue in rescues]),
        delay=[rescue.delay for rescue in rescues],
        error=RESCUE_ERROR,
    )
    return {row[0]: row[1] for row in rows}
