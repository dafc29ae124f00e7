"""The statements of the job cleaner, scheduler and rescuer: one typed function per SQL statement in
`sql/queries/river_job_maintenance.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.jobs import ClaimKey
from riverpy._postgres.sql_files import (
    fetch_with_queue_filter,
    get_query,
    lists_by_field,
    to_milliseconds,
)
from riverpy._timestamps import decode_wire_microseconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    from asyncpg import Record

    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.sql_files import QueueFilter

JOBS_DUE_ACTION = "due"
"""The `action` of notifications that announce when jobs become due."""
RESCUE_ERROR_TEXT = "Stuck job rescued by JobRescuer"
"""River's error text for every rescue. River UI and users' alerts match on this text."""
EXPIRED_JOB_ERROR_TEXT = "JobCancelError: expired"
"""The error text of a job that was cancelled because it has expired. A client that claims an
expired job stores the same text."""

_SQL_FILE = "river_job_maintenance"


class JobFilter(NamedTuple):
    """Selects jobs by queue and kind. If `is_queue_allow_list` is True, it selects the jobs of
    `queues`, otherwise the jobs of all other queues. `is_kind_allow_list` has the same effect on
    `kinds`."""

    queues: tuple[str, ...] = ()
    is_queue_allow_list: bool = False
    kinds: tuple[str, ...] = ()
    is_kind_allow_list: bool = False


class EndedJobCursor(NamedTuple):
    """A position in a list of finished jobs of one state. The list is sorted by the time when the
    jobs ended, then by id."""

    ended_at: str
    """When the job ended, as text from the server."""
    job_id: int


class DeletableJob(NamedTuple):
    """A finished job that is old enough to be deleted."""

    cursor: EndedJobCursor
    matches_filter: bool


class ScheduleJobsResult(NamedTuple):
    """The result of scheduling due jobs."""

    available_count: int
    discarded_count: int
    """The number of jobs that were discarded because another job has their unique key."""
    unchanged_job_ids: list[int]
    """The ids of jobs that were not changed: the job is locked or no longer due, or another job has
    its unique key and the key would also apply if the job were discarded."""


class RunningAttempt(NamedTuple):
    """A running attempt at a job, and the client that claimed the job."""

    claim_key: ClaimKey
    client_id: str


class JobRescue(NamedTuple):
    """An attempt at a job that `job_rescue` ends with an error."""

    claim_key: ClaimKey
    client_id: str | None
    retry_delay_seconds: float = 0.0
    """Seconds until the job is due again, if it has attempts left."""


async def job_list_states_to_clean(
    connection: Transaction, schema: str | None, retentions: Mapping[str, timedelta]
) -> set[str]:
    """Return the states that have a job to delete, i.e. a job that ended longer ago than the
    retention of its state."""
    statement = get_query(_SQL_FILE, "job_states_to_clean", schema)
    rows = await statement.fetch(
        connection, states=list(retentions), retentions=list(retentions.values())
    )
    return {row[0] for row in rows}


async def job_list_ended(
    connection: Transaction,
    schema: str | None,
    *,
    state: str,
    retention: timedelta,
    job_filter: JobFilter,
    after_cursor: EndedJobCursor | None,
    limit: int,
) -> list[DeletableJob]:
    """Return up to `limit` jobs of a state that ended longer ago than `retention`, sorted by the
    time when they ended, oldest first. The list starts after `after_cursor`. Jobs that `job_filter`
    does not select are also returned, with `matches_filter` False."""
    rows = await get_query(_SQL_FILE, "job_ended", schema).fetch(
        connection,
        state=state,
        retention=retention,
        **job_filter._asdict(),
        after_time=after_cursor and after_cursor.ended_at,
        after_id=after_cursor and after_cursor.job_id,
        limit=limit,
    )
    return [DeletableJob(EndedJobCursor(row[1], row[0]), row[2]) for row in rows]


async def job_delete_ended(
    connection: Transaction,
    schema: str | None,
    *,
    ids: Sequence[int],
    state: str,
    retention: timedelta,
) -> set[int]:
    """Delete the jobs with these ids that ended in `state` longer ago than `retention`. Locked jobs
    are left out. Return the deleted ids."""
    statement = get_query(_SQL_FILE, "job_delete_ended", schema)
    rows = await statement.fetch(connection, ids=ids, state=state, retention=retention)
    return {row[0] for row in rows}


async def job_list_due(
    connection: Transaction,
    schema: str | None,
    *,
    queue_filter: QueueFilter | None,
    lookahead: timedelta,
    skipped_ids: Sequence[int],
    limit: int,
) -> list[int]:
    """Return the ids of scheduled and retryable jobs that are due within `lookahead`, in the order
    in which they should run. Jobs in `skipped_ids` are left out."""
    rows = await fetch_with_queue_filter(
        connection,
        _SQL_FILE,
        "job_due",
        schema,
        queue_filter,
        ahead=lookahead,
        skipped=skipped_ids,
        limit=limit,
    )
    return [row[0] for row in rows]


async def job_schedule(
    connection: Transaction, schema: str | None, *, ids: Sequence[int], lookahead: timedelta
) -> ScheduleJobsResult:
    """Make the jobs with these ids available if they are due within `lookahead`, and notify the
    clients of their queues."""
    row = await get_query(_SQL_FILE, "job_schedule", schema).fetchrow(
        connection, ids=ids, ahead=lookahead
    )
    return ScheduleJobsResult(0, 0, list(ids)) if row is None else ScheduleJobsResult(*row)


async def job_set_lock_timeout(connection: Transaction, timeout: timedelta) -> None:
    """Set `lock_timeout` for the open transaction."""
    statement = get_query(_SQL_FILE, "job_lock_limit", None)
    await statement.execute(connection, milliseconds=to_milliseconds(timeout))


async def job_list_running_of_clients(
    connection: Transaction,
    schema: str | None,
    *,
    client_ids: Sequence[str],
    queue_filter: QueueFilter | None,
    after_id: int,
    limit: int,
    skipped_ids: Sequence[int],
) -> list[RunningAttempt]:
    """Return up to `limit` running attempts of these clients, lowest job id first. Only job ids
    above `after_id` are returned. Jobs in `skipped_ids` are left out."""
    rows = await fetch_with_queue_filter(
        connection,
        _SQL_FILE,
        "job_running_of",
        schema,
        queue_filter,
        after=after_id,
        client_id=client_ids,
        limit=limit,
        skipped=skipped_ids,
    )
    return [
        RunningAttempt(ClaimKey(row[0], row[1], decode_wire_microseconds(row[2])), row[3])
        for row in rows
    ]


async def job_list_stuck_ids(
    connection: Transaction,
    schema: str | None,
    *,
    running_longer_than: timedelta,
    queue_filter: QueueFilter | None,
    after_id: int,
    limit: int,
) -> list[int]:
    """Return the ids of up to `limit` jobs that have been running for longer than
    `running_longer_than`, lowest first. Only ids above `after_id` are returned."""
    rows = await fetch_with_queue_filter(
        connection,
        _SQL_FILE,
        "job_stuck",
        schema,
        queue_filter,
        after=after_id,
        age=running_longer_than,
        limit=limit,
    )
    return [row[0] for row in rows]


async def job_get_stuck(
    connection: Transaction,
    schema: str | None,
    *,
    ids: Sequence[int],
    running_longer_than: timedelta,
) -> list[Record]:
    """Return the jobs with these ids that have been running for longer than `running_longer_than`,
    lowest id first. The last column is the running time in seconds."""
    return await get_query(_SQL_FILE, "job_stuck_rows", schema).fetch(
        connection, id=ids, age=running_longer_than
    )


async def job_rescue(
    connection: Transaction, schema: str | None, rescues: Sequence[JobRescue]
) -> dict[int, str]:
    """End the attempts in `rescues`, and add the error `RESCUE_ERROR_TEXT` to their jobs. Return
    the new state of each job whose attempt was ended, by job id."""
    rows = await get_query(_SQL_FILE, "job_rescue", schema).fetch(
        connection,
        **lists_by_field([rescue.claim_key for rescue in rescues]),
        delay=[rescue.retry_delay_seconds for rescue in rescues],
        error=RESCUE_ERROR_TEXT,
    )
    return {row[0]: row[1] for row in rows}


async def job_list_expired(
    connection: Transaction,
    schema: str | None,
    *,
    queue_filter: QueueFilter | None,
    skipped_ids: Sequence[int],
    limit: int,
) -> list[int]:
    """Return the ids of waiting jobs that have expired, lowest first. Jobs in `skipped_ids` are
    left out."""
    rows = await fetch_with_queue_filter(
        connection,
        _SQL_FILE,
        "job_expired",
        schema,
        queue_filter,
        skipped=skipped_ids,
        limit=limit,
    )
    return [row[0] for row in rows]


async def job_cancel_expired(
    connection: Transaction, schema: str | None, ids: Sequence[int]
) -> set[int]:
    """Cancel the jobs with these ids if they still wait and have expired. Store
    `EXPIRED_JOB_ERROR_TEXT` as their error. Return the ids of the cancelled jobs."""
    rows = await get_query(_SQL_FILE, "job_cancel_expired", schema).fetch(
        connection, ids=ids, error=EXPIRED_JOB_ERROR_TEXT
    )
    return {row[0] for row in rows}
