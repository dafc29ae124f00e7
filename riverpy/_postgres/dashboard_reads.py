"""The SQL statements with which pages of the dashboard read queues, workers, jobs and periodic
jobs: one typed function per statement in `sql/queries/riverpy_dashboard.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.sql_files import get_query

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from riverpy._postgres.driver import Transaction

_SQL_FILE = "riverpy_dashboard"


class KindCount(NamedTuple):
    """A kind of jobs, and how many jobs of a sample have it."""

    kind: str
    job_count: int


class QueueKindSample(NamedTuple):
    """The most frequent kinds in a sample of a queue's jobs, and how often each kind occurs."""

    kinds: list[KindCount]
    sampled_jobs: int
    """The number of all jobs in the sample. It includes jobs of kinds that `kinds` does not
    list."""


class RunningJob(NamedTuple):
    """A job that a client runs."""

    id: int
    kind: str
    queue: str
    started_at: datetime | None


class RunningJobs(NamedTuple):
    """The jobs that one client runs now."""

    jobs: list[RunningJob]
    """The jobs that have been running for the longest time, at most as many as the `limit` of
    `client_list_running_jobs`. `job_count` is the number of all jobs that were found."""
    job_count: int
    is_partial: bool
    """Whether the result may be incomplete, because only a part of all running jobs was
    searched."""


class StuckJob(NamedTuple):
    """A job that still runs after its cancellation."""

    id: int
    kind: str
    client_id: str


class ConcurrentJob(NamedTuple):
    """A job that ran in the same client and at the same time as a given job."""

    id: int
    kind: str
    queue: str
    state: str
    started_at: datetime | None
    """The start of the job's last attempt."""
    ended_at: datetime | None
    """The end of the job. None: it still runs, or waits for a retry."""


class ConcurrentJobs(NamedTuple):
    """The jobs that ran in the same client and at the same time as a given job."""

    jobs: list[ConcurrentJob]
    """The jobs that started last, at most as many as the `limit` of `job_list_concurrent`.
    `job_count` is the number of all jobs that were found."""
    job_count: int
    is_partial: bool
    """Whether the result may be incomplete, because only a part of the jobs was searched."""


class PeriodicJobDashboardRow(NamedTuple):
    """The row of a periodic job in the table `riverpy_periodic`."""

    id: str
    schedule: str
    next_run_at: datetime | None
    last_run_at: datetime | None
    """The time for which the last job was inserted: a time of the schedule, or the time of a
    request."""
    paused_at: datetime | None
    run_requested_at: datetime | None
    """When a run was requested, by an operator or by `run_on_start`. None: no run was requested, or
    the leader has already inserted the job of the requested run."""
    updated_at: datetime | None
    is_used: bool
    """Whether a leader has used the row in the last two hours."""


class InsertedPeriodicJob(NamedTuple):
    """A job that the leader inserted for a periodic job."""

    job_id: int
    kind: str
    queue: str
    state: str
    run_json: str | None
    """A `PeriodicInsertReason` as JSON: the reason why the job was inserted. None: not
    known."""


async def queue_sample_kinds(
    connection: Transaction,
    schema: str | None,
    *,
    queue: str,
    state: str,
    jobs_max: int,
    kinds_max: int,
) -> QueueKindSample:
    """Read the first `jobs_max` jobs of `queue` in `state`, in the order of claims. Return the
    `kinds_max` most frequent kinds of these jobs."""
    rows = await get_query(_SQL_FILE, "queue_sample_kinds", schema).fetch(
        connection, queue=queue, state=state, limit=jobs_max, kinds=kinds_max
    )
    return QueueKindSample([KindCount(*row[:2]) for row in rows], rows[0][2] if rows else 0)


async def queue_list_kinds_without_worker(
    connection: Transaction,
    schema: str | None,
    *,
    queues: Sequence[str],
    jobs_max: int,
    kinds_max: int,
) -> dict[str, list[str]]:
    """Return, for each queue, the kinds of waiting jobs for which no live client of the queue has a
    worker. Only the first `jobs_max` jobs of each queue are read. At most `kinds_max` kinds are
    returned for all queues together. Queues without a live client are left out. Migration
    CLIENTS_MIGRATION must be applied."""
    rows = await get_query(_SQL_FILE, "queue_kinds_without_worker", schema).fetch(
        connection, queues=queues, limit=jobs_max, kinds=kinds_max
    )
    found: dict[str, list[str]] = {}
    for queue, kind in rows:
        found.setdefault(queue, []).append(kind)
    return found


async def client_list_running_jobs(
    connection: Transaction,
    schema: str | None,
    *,
    client_id: str,
    searched_jobs_max: int,
    limit: int,
    damaged_job_ids: Sequence[int],
) -> RunningJobs:
    """Return up to `limit` jobs that a client runs. Only the first `searched_jobs_max` running jobs
    of all clients are searched. If `client_id` is empty, return the jobs whose client is unknown.
    The client of the jobs in `damaged_job_ids` is unknown, because the server cannot read it."""
    rows = await get_query(_SQL_FILE, "client_running_jobs", schema).fetch(
        connection,
        client_id=client_id,
        searched=searched_jobs_max,
        limit=limit,
        skipped=damaged_job_ids,
    )
    searched_count, job_count = rows[0][:2]
    jobs = [RunningJob(*row[2:]) for row in rows if row[2] is not None]
    return RunningJobs(jobs, job_count, searched_count >= searched_jobs_max)


async def client_list_stuck_jobs(
    connection: Transaction, schema: str | None, *, limit: int
) -> list[StuckJob]:
    """Return up to `limit` running jobs that clients report as stuck."""
    rows = await get_query(_SQL_FILE, "client_stuck_jobs", schema).fetch(connection, limit=limit)
    return [StuckJob(*row) for row in rows]


async def job_list_concurrent(
    connection: Transaction,
    schema: str | None,
    *,
    job_id: int,
    client_id: str,
    since: datetime,
    until: datetime,
    searched_jobs_max: int,
    limit: int,
    damaged_job_ids: Sequence[int],
) -> ConcurrentJobs:
    """Return up to `limit` jobs whose last attempt ran in the client `client_id` at some time from
    `since` to `until`. The job `job_id` is left out. At most `searched_jobs_max` jobs of each state
    are searched. The jobs in `damaged_job_ids` are also left out, because the server cannot read
    which client ran them."""
    rows = await get_query(_SQL_FILE, "job_neighbors", schema).fetch(
        connection,
        id=job_id,
        client_id=client_id,
        since=since,
        until=until,
        searched=searched_jobs_max,
        limit=limit,
        skipped=damaged_job_ids,
    )
    job_count, read_count = rows[0][:2]
    jobs = [ConcurrentJob(*row[2:]) for row in rows if row[2] is not None]
    return ConcurrentJobs(jobs, job_count, read_count >= searched_jobs_max)


async def periodic_list_entries(
    connection: Transaction, schema: str | None, *, limit: int, job_id: str | None = None
) -> list[PeriodicJobDashboardRow]:
    """Return up to `limit` periodic jobs, sorted by id. With `job_id`, return only the periodic job
    with this id."""
    rows = await get_query(_SQL_FILE, "periodic_rows", schema).fetch(
        connection, id=job_id, limit=limit
    )
    return [PeriodicJobDashboardRow(*row) for row in rows]


async def periodic_find_newest_jobs(
    connection: Transaction,
    schema: str | None,
    *,
    periodic_job_ids: Sequence[str],
    searched_jobs_max: int,
) -> dict[str, list[InsertedPeriodicJob]]:
    """Return, for each periodic job and each `RunCause` (such as the schedule or a request), the
    newest inserted job. The jobs of a periodic job are sorted, the newest first. Only the newest
    `searched_jobs_max` jobs of the table are searched. `periodic_job_ids` must not have the suffix
    `@DOMAIN`, which the row of a periodic job has if its domain is not `default`."""
    rows = await get_query(_SQL_FILE, "periodic_newest_jobs", schema).fetch(
        connection, periodic_job_ids=periodic_job_ids, searched=searched_jobs_max
    )
    found: dict[str, list[InsertedPeriodicJob]] = {}
    for row in sorted(rows, key=lambda row: -row[1]):
        found.setdefault(row[0], []).append(InsertedPeriodicJob(*row[1:]))
    return found


async def periodic_find_job_of_due_time(
    connection: Transaction,
    schema: str | None,
    *,
    periodic_job_id: str,
    due_at: datetime,
    queues: Sequence[str],
) -> InsertedPeriodicJob | None:
    """Return the job that was inserted for one due time of a periodic job. Only
    `queues` are searched. None: the job was not found, for example because it was deleted, or
    because a retry has changed its `scheduled_at`, which the search uses. `periodic_job_id` must
    not have the suffix `@DOMAIN`."""
    row = await get_query(_SQL_FILE, "periodic_job_of_due_time", schema).fetchrow(
        connection, periodic_job_id=periodic_job_id, due_at=due_at, queues=queues
    )
    return None if row is None else InsertedPeriodicJob(*row)
