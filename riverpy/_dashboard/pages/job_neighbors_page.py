"""The page that lists the neighbors of a job, i.e. the jobs that ran in the same client at the same
time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._attempt_errors import GO_ZERO_TIME
from riverpy._dashboard.database import open_read_transaction
from riverpy._dashboard.errors import PageError
from riverpy._dashboard.page import Page
from riverpy._postgres.damaged_jobs import read_jobs_despite_damage
from riverpy._postgres.dashboard_reads import ConcurrentJobs, job_list_concurrent
from riverpy._postgres.transactions import read_server_time
from riverpy.errors import ConfigError, NotFoundError
from riverpy.job import JobState, get_raw_state

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from riverpy._dashboard.page import PageRequest
    from riverpy.job import JobRow

SEARCHED_JOBS_MAX = 1_000
"""The maximum number of jobs to search in each state."""
JOBS_SHOWN_MAX = 100
_SEARCHED_STATES = ("running", "retryable", "completed", "cancelled", "discarded")


class LastAttempt(NamedTuple):
    """The client and the time range of a job's last attempt."""

    client_id: str
    since: datetime
    until: datetime


async def load_job_neighbors_page(view: PageRequest) -> Mapping[str, object]:
    """Read a job and the jobs that ran in the same client during its last attempt."""
    client, job_id = view.site.client, view.path_params["job_id"]
    async with open_read_transaction(client) as tx:
        try:
            job = await client.job_get(job_id, tx=tx)
        except (NotFoundError, ConfigError):
            raise PageError(
                404, f"There is no job {job_id}.", "Users or the leader have deleted it."
            ) from None
        now = await read_server_time(tx)
        place, found = find_last_attempt(job, now), ConcurrentJobs([], 0, is_partial=False)
        if place is not None:
            found, _ = await read_jobs_despite_damage(
                tx,
                client.config.schema,
                _SEARCHED_STATES,
                lambda damaged: job_list_concurrent(
                    tx,
                    client.config.schema,
                    job_id=job_id,
                    client_id=place.client_id,
                    since=place.since,
                    until=place.until,
                    searched_jobs_max=SEARCHED_JOBS_MAX,
                    limit=JOBS_SHOWN_MAX,
                    damaged_job_ids=damaged,
                ),
            )
    return {
        "job": job,
        "now": now,
        "place": place,
        "found": found,
        "searched_max": SEARCHED_JOBS_MAX,
        "is_running": get_raw_state(job) == JobState.RUNNING,
    }


PAGE = Page(
    "neighbors", "/jobs/{job_id:int}/neighbors", "job_neighbors.html", load_job_neighbors_page
)


def find_last_attempt(job: JobRow, now: datetime) -> LastAttempt | None:
    """Return the client and time range of a job's last attempt. Return None if no attempt has
    started, or if its client or time is not stored."""
    if not job.attempted_by or job.attempted_at is None:
        return None
    until = job.finalized_at
    if get_raw_state(job) == JobState.RUNNING:
        until = now
    elif until is None:
        last = job.errors[-1] if job.errors else None
        is_of_attempt = last is not None and last.attempt == job.attempt
        until = last.at if last is not None and is_of_attempt and last.at != GO_ZERO_TIME else None
    return LastAttempt(job.attempted_by[-1], job.attempted_at, until or job.attempted_at)
