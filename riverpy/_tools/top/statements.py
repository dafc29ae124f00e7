"""One typed function for each statement in `sql/queries/top.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from riverpy._postgres.sql_files import get_query

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from riverpy._postgres.driver import Transaction


class TimeAndJobCount(NamedTuple):
    """The server's time, and the approximate number of jobs in the table."""

    read_at: datetime
    estimated_job_count: int | None
    """The number of jobs in the table at the last ANALYZE; None: there was no ANALYZE."""


class KindWithoutWorker(msgspec.Struct, frozen=True):
    """A job kind that has available jobs, but no running riverpy client has a worker for it."""

    kind: str
    jobs: int
    """The number of available jobs of this kind. Only the first 1,000 available jobs of each queue
    are read, in the order in which clients claim them. With many queues, fewer jobs of each queue
    are read."""
    queues: list[str]


class RunningJobCountRow(NamedTuple):
    """The running jobs of one client."""

    job_count: int
    longest_run_seconds: float | None
    """The run time of the longest-running job, in seconds; None: no job runs."""


class QueueJobCountsRow(NamedTuple):
    """The numbers of unfinished jobs of one queue, by state. At most `count_limit` (an argument of
    `read_queue_job_counts`) jobs of each state are counted."""

    name: str
    is_paused: bool
    available: int
    running: int
    scheduled: int
    retryable: int
    late_jobs: int
    """The number of scheduled jobs and retries that did not become available in time."""
    oldest_due_at: datetime | None
    """The time at which the oldest due job became due; None: no job is due."""
    started_attempts: int
    """The number of attempts of unfinished jobs that started after `window_start` (an argument of
    `read_queue_job_counts`). Each of the `failed_attempts` also counts as started."""
    failed_attempts: int
    """The number of attempts of unfinished jobs that failed after `window_start` (an argument of
    `read_queue_job_counts`)."""


class EndedJobCountsRow(NamedTuple):
    """The numbers of jobs of one queue that ended after `window_start`."""

    window_start: datetime
    """The start of the time window in which jobs are counted."""
    window_seconds: float
    """The length of the window from `window_start` to the time of the read, in seconds."""
    queue: str | None
    """The name of the queue; None: no job ended in any queue."""
    completed_jobs: int
    started_attempts: int
    failed_attempts: int
    wait_p95_seconds: float | None
    """The 95th percentile of the wait times, in seconds. A wait time starts when the job is due,
    and ends when its last attempt starts. Only attempts that started in the window count. None:
    there was no such attempt."""


class HeldOrExpiredLeaseRow(NamedTuple):
    """A lease that is held, or has expired recently."""

    name: str
    holder: str
    """The current holder. If the lease has expired, the last holder."""
    epoch: int
    acquired_at: datetime
    held_seconds: float
    """Seconds since the lease was acquired."""
    seconds_until_expiry: float
    """Seconds until the lease expires. Negative if it has expired."""
    is_held: bool


async def set_statement_timeout(connection: Transaction, timeout: timedelta) -> None:
    """Set the statement timeout of the open transaction."""
    await get_query("top", "top_set_timeout", None).execute(
        connection, milliseconds=round(timeout.total_seconds() * 1000)
    )


async def read_time_and_job_count(connection: Transaction, schema: str | None) -> TimeAndJobCount:
    """Return the server's time and the approximate number of jobs in the table."""
    (row,) = await get_query("top", "top_read_time", schema).fetch(connection, schema=schema)
    return TimeAndJobCount(*row)


async def read_kinds_without_worker(
    connection: Transaction,
    schema: str | None,
    *,
    queue_names: Sequence[str],
    jobs_per_queue_max: int,
    kinds_max: int,
) -> list[KindWithoutWorker]:
    """Return up to `kinds_max` kinds of available jobs for which no running client has a worker.
    The statement reads only the first `jobs_per_queue_max` available jobs of each queue."""
    rows = await get_query("top", "top_kinds", schema).fetch(
        connection, names=list(queue_names), limit=jobs_per_queue_max, kinds=kinds_max
    )
    return [KindWithoutWorker(*row) for row in rows]


async def read_running_job_counts(
    connection: Transaction, schema: str | None, *, count_limit: int, damaged_job_ids: Sequence[int]
) -> dict[str, RunningJobCountRow]:
    """Return how many jobs each client runs and the run time of its longest-running job, by client
    id. Jobs whose client is not known have the client id "".

    The statement reads at most `count_limit` running jobs. It does not read the column
    `attempted_by` of the jobs in `damaged_job_ids`.
    """
    rows = await get_query("top", "top_running", schema).fetch(
        connection, cap=count_limit, skipped=damaged_job_ids
    )
    return {row[0]: RunningJobCountRow(row[1], row[2]) for row in rows}


async def read_queue_names(connection: Transaction, schema: str | None, *, limit: int) -> list[str]:
    """Return the names of up to `limit` queues in `river_queue`, and of up to `limit` queues that
    have unfinished jobs."""
    rows = await get_query("top", "top_queue_names", schema).fetch(connection, limit=limit)
    return [row[0] for row in rows]


async def read_queue_job_counts(
    connection: Transaction,
    schema: str | None,
    *,
    queue_names: Sequence[str],
    window_start: datetime,
    late_after: timedelta,
    count_limit: int,
    read_limit: int,
    damaged_job_ids: Sequence[int],
) -> list[QueueJobCountsRow]:
    """Return the numbers of unfinished jobs of each queue.

    A job counts as late if it should have become available more than `late_after` ago. Started and
    failed attempts are counted only among the first `read_limit` jobs of each state. The statement
    does not read the column `errors` of the jobs in `damaged_job_ids`.
    """
    rows = await get_query("top", "top_queues", schema).fetch(
        connection,
        name=queue_names,
        since=window_start,
        since_text=window_start.isoformat()[:19],
        late=late_after.total_seconds(),
        cap=count_limit,
        read=read_limit,
        skipped=damaged_job_ids,
    )
    return [QueueJobCountsRow(*row) for row in rows]


async def read_ended_job_counts(
    connection: Transaction,
    schema: str | None,
    *,
    window: timedelta,
    count_limit: int,
    damaged_job_ids: Sequence[int],
) -> list[EndedJobCountsRow]:
    """Return for each queue how many jobs ended within the last `window`. If no job ended, there is
    one row without a queue.

    If more than `count_limit` jobs of a state ended, only the newest of them are read. All rows
    then cover only the time since the oldest of these jobs ended. The statement does not read the
    column `errors` of the jobs in `damaged_job_ids`.
    """
    rows = await get_query("top", "top_ended_jobs", schema).fetch(
        connection, window=window.total_seconds(), cap=count_limit, skipped=damaged_job_ids
    )
    return [EndedJobCountsRow(*row) for row in rows]


async def count_pending_and_finished_jobs(
    connection: Transaction, schema: str | None, *, count_limit: int
) -> dict[str, int]:
    """Return the numbers of pending, cancelled, completed and discarded jobs, by state. Each number
    is at most `count_limit`."""
    rows = await get_query("top", "top_totals", schema).fetch(connection, cap=count_limit)
    return {row[0]: row[1] for row in rows}


async def read_leases(
    connection: Transaction, schema: str | None, *, name_prefix: str, limit: int
) -> tuple[list[HeldOrExpiredLeaseRow], bool]:
    """Return the leases whose names start with `name_prefix`, if they are held or have expired
    within the last day. Also return whether there may be more leases.

    The statement reads only the first `limit` leases with this prefix, by name.
    """
    rows = await get_query("top", "top_leases", schema).fetch(
        connection, prefix=name_prefix, limit=limit
    )
    leases = [HeldOrExpiredLeaseRow(*row[1:]) for row in rows if row[1] is not None]
    return leases, rows[0][0] >= limit
