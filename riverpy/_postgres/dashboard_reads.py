"""What pages of the dashboard read about queues, workers, jobs and periodic jobs: one typed
function for each of their statements in `sql/queries/riverpy_dashboard.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.sql_files import get_query

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from riverpy._postgres.driver import Transaction

_SQL_FILE = "riverpy_dashboard"


class KindCount(NamedTuple):
    """The jobs of one kind in a sample."""

    kind: str
    job_count: int


class KindSample(NamedTuple):
    """The kinds among the first jobs of a queue."""

    kinds: list[KindCount]
    sampled_jobs: int
    """The number of jobs in the sample, also of kinds that are left out."""


class RunningJob(NamedTuple):
    """A job that a client runs."""

    id: int
    kind: str
    queue: str
    started_at: datetime | None


class RunningJobs(NamedTuple):
    """The jobs that a client runs."""

    jobs: list[RunningJob]
    """The jobs that have run longest."""
    job_count: int
    is_partial: bool
    """Whether there are more running jobs of all clients than were searched."""


class StuckJob(NamedTuple):
    """A job that still runs after its cancellation."""

    id: int
    kind: str
    client_id: str


class NeighborJob(NamedTuple):
    """A job that ran in the same client at the same time as another one."""

    id: int
    kind: str
    queue: str
    state: str
    started_at: datetime | None
    """The start of its last attempt."""
    ended_at: datetime | None
    """The end of the job. None: it runs, or is tried again."""


class NeighborJobs(NamedTuple):
    """The jobs that ran in the same client at the same time as another one."""

    jobs: list[NeighborJob]
    """Those that started last."""
    job_count: int
    is_partial: bool
    """Whether a state has more jobs than were searched."""


class PeriodicJobEntry(NamedTuple):
    """The row of a periodic job."""

    id: str
    schedule: str
    next_run_at: datetime | None
    last_run_at: datetime | None
    """The time (slot) of the last inserted job."""
    paused_at: datetime | None
    run_requested_at: datetime | None
    """When a run was requested for which no leader has inserted a job yet."""
    updated_at: datetime | None
    is_used: bool
    """Whether a leader has used the row lately."""


class InsertedPeriodicJob(NamedTuple):
    """A job that the leader inserted for a periodic job."""

    job_id: int
    kind: str
    queue: str
    state: str
    run_json: str | None
    """A `PeriodicRun` as JSON: why it was inserted. None: not known."""


async def queue_sample_kinds(
    connection: Transaction,
    schema: str | None,
    *,
    queue: str,
    state: str,
    jobs_max: int,
    kinds_max: int,
) -> KindSample:
    """Return up to `kinds_max` kinds of the first `jobs_max` jobs of a queue in a state."""
    rows = await get_query(_SQL_FILE, "queue_sample_kinds", schema).fetch(
        connection, queue=queue, state=state, limit=jobs_max, kinds=kinds_max
    )
    return KindSample([KindCount(*row[:2]) for row in rows], rows[0][2] if rows else 0)


async def queue_list_kinds_without_worker(
    connection: Transaction,
    schema: str | None,
    *,
    queues: Sequence[str],
    jobs_max: int,
    kinds_max: int,
) -> dict[str, list[str]]:
    """Return the kinds of waiting jobs that no live client of their queue has, by queue. The first
    `jobs_max` jobs of each queue are read. Queues without a live client are left out. Migration
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
    """Return up to `limit` jobs that a client runs, among the first `searched_jobs_max` running
    jobs of all clients. The clients of `damaged_job_ids` are not read."""
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


async def job_list_neighbors(
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
) -> NeighborJobs:
    """Return up to `limit` other jobs whose last attempt ran in a client between two times, among
    `searched_jobs_max` jobs of each state. The clients of `damaged_job_ids` are not read."""
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
    jobs = [NeighborJob(*row[2:]) for row in rows if row[2] is not None]
    return NeighborJobs(jobs, job_count, read_count >= searched_jobs_max)


async def periodic_list_entries(
    connection: Transaction, schema: str | None, *, limit: int, job_id: str | None = None
) -> list[PeriodicJobEntry]:
    """Return up to `limit` periodic jobs by id, or only the one with the id `job_id`."""
    rows = await get_query(_SQL_FILE, "periodic_rows", schema).fetch(
        connection, id=job_id, limit=limit
    )
    return [PeriodicJobEntry(*row) for row in rows]


async def periodic_find_newest_jobs(
    connection: Transaction,
    schema: str | None,
    *,
    periodic_job_ids: Sequence[str],
    searched_jobs_max: int,
) -> dict[str, list[InsertedPeriodicJob]]:
    """Return the newest job of each cause of each periodic job, newest first, among the newest
    `searched_jobs_max` jobs. The ids have no domain."""
    rows = await get_query(_SQL_FILE, "periodic_newest_jobs", schema).fetch(
        connection, periodic_job_ids=periodic_job_ids, searched=searched_jobs_max
    )
    found: dict[str, list[InsertedPeriodicJob]] = {}
    for row in sorted(rows, key=lambda row: -row[1]):
        found.setdefault(row[0], []).append(InsertedPeriodicJob(*row[1:]))
    return found


async def periodic_find_job_of_slot(
    connection: Transaction,
    schema: str | None,
    *,
    periodic_job_id: str,
    slot: datetime,
    queues: Sequence[str],
) -> InsertedPeriodicJob | None:
    """Return the job that was inserted for a slot of a periodic job in one of the queues. None: it
    is not known, for example because the job was deleted or has failed. The id has no domain."""
    row = await get_query(_SQL_FILE, "periodic_job_of_slot", schema).fetchrow(
        connection, periodic_job_id=periodic_job_id, slot=slot, queues=queues
    )
    return None if row is None else InsertedPeriodicJob(*row)
