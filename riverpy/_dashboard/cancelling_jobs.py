"""Sentences about jobs that still run after their cancellation was requested."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from riverpy._dashboard.database import open_read_transaction
from riverpy._dashboard.paths import make_worker_path
from riverpy._dashboard.rendering import format_duration
from riverpy._dashboard.sentence import HealthSentence
from riverpy._postgres.dashboard_reads import client_list_stuck_jobs
from riverpy._postgres.transactions import read_server_time
from riverpy.errors import ConfigError, JobDamagedError, NotFoundError
from riverpy.job import JobColumn, JobState, get_raw_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._dashboard.site import Site
    from riverpy._postgres.dashboard_reads import StuckJob
    from riverpy._tools.top.status import OverallStatus
    from riverpy.job import JobRow

STUCK_JOBS_READ_MAX = 1_000
"""The maximum number of stuck jobs to read. A stuck job ignores its cancellation."""


class _CancelMetadata(msgspec.Struct):
    """The part of a job's metadata that contains the time of the cancellation request."""

    cancel_attempted_at: datetime | None = None


class CancellingJob(NamedTuple):
    """A job that still runs after its cancellation was requested."""

    job_id: int
    kind: str
    client_id: str
    """The id of the client that runs the job. Empty: not known."""
    seconds: float
    """The time in seconds since the last cancellation request."""


async def read_stuck_jobs(site: Site, fleet: OverallStatus) -> Sequence[StuckJob]:
    """Return the jobs that workers report as stuck, i.e. that ignore their cancellation."""
    if not any(worker.stuck for worker in fleet.workers):
        return ()
    async with open_read_transaction(site.client) as tx:
        schema = site.client.config.schema
        return await client_list_stuck_jobs(tx, schema, limit=STUCK_JOBS_READ_MAX)


def describe_ignored_cancellation(job_id: int, kind: str, client_id: str, since: str = "") -> str:
    """Return a sentence about a job that ignores its cancellation, with advice. `since` is the part
    of the sentence about the time of the cancellation request, such as `, which was requested 5s
    ago`."""
    return (
        f"Job {job_id} ({kind}) ignores its cancellation{since}. Restart worker {client_id}, and "
        "correct the code of the job."
    )


def as_cancelling_job(job: JobRow, now: datetime) -> CancellingJob | None:
    """Return the CancellingJob for a job that runs and whose cancellation was requested. Return
    None for any other job."""
    if get_raw_state(job) != JobState.RUNNING:
        return None
    try:
        mark = msgspec.json.decode(
            job.get_encoded_values()[JobColumn.METADATA], type=_CancelMetadata
        )
    except (msgspec.DecodeError, RecursionError):
        return None
    if mark.cancel_attempted_at is None or mark.cancel_attempted_at.tzinfo is None:
        return None
    client_id = job.attempted_by[-1] if job.attempted_by else ""
    seconds = (now - mark.cancel_attempted_at).total_seconds()
    return CancellingJob(job.id, job.kind, client_id, seconds)


async def describe_cancelling_job(site: Site, run: CancellingJob) -> HealthSentence:
    """Return a sentence that explains why a job still runs after its cancellation was requested,
    with advice. `run` describes this job."""
    fleet = await site.statuses.read()
    states = {worker.client_id: worker.state for worker in fleet.workers}
    stuck_ids = {one.id for one in await read_stuck_jobs(site, fleet)}
    since = format_duration(run.seconds)
    name = f"Worker {run.client_id}" if run.client_id else "Its worker"
    link = make_worker_path(run.client_id) if run.client_id else None
    if states.get(run.client_id) == "silent":
        text = (
            f"The cancellation of job {run.job_id} was requested {since} ago. {name} sends no "
            "heartbeat: the leader ends the job when the worker counts as dead."
        )
    elif run.job_id in stuck_ids:
        requested = f", which was requested {since} ago"
        text = describe_ignored_cancellation(run.job_id, run.kind, run.client_id, requested)
    else:
        text = (
            f"Job {run.job_id} still runs. {name} was notified of the cancellation {since} ago. If "
            "it runs much longer, its code ignores the cancellation: restart the worker."
        )
    return HealthSentence("look", text, link, name if link else "")


async def describe_running_job(site: Site, job: JobRow, now: datetime) -> HealthSentence | None:
    """Return a sentence about a job that runs although it was cancelled or has timed out. Return
    None for any other job."""
    run = as_cancelling_job(job, now)
    if run is not None:
        return await describe_cancelling_job(site, run)
    if get_raw_state(job) != JobState.RUNNING or not job.attempted_by:
        return None
    client_id = job.attempted_by[-1]
    stuck_jobs = await read_stuck_jobs(site, await site.statuses.read())
    if not any((one.id, one.client_id) == (job.id, client_id) for one in stuck_jobs):
        return None
    text = describe_ignored_cancellation(job.id, job.kind, client_id)
    return HealthSentence("look", text, make_worker_path(client_id), f"Worker {client_id}")


async def read_cancelling_job(site: Site, job_id: int) -> CancellingJob | None:
    """Read a job and return its CancellingJob. Return None if the job does not run, or its
    cancellation was not requested."""
    try:
        async with open_read_transaction(site.client) as tx:
            job = await site.client.job_get(job_id, tx=tx)
            return as_cancelling_job(job, await read_server_time(tx))
    except (NotFoundError, ConfigError, JobDamagedError):
        return None
