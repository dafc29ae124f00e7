"""What pages of the dashboard read about one queue and one worker: one typed function for each
statement in `sql/queries/riverpy_dashboard.sql`."""

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
