"""The endpoints of the dashboard's JSON API for jobs. The inputs and answers have the fields of
River UI's API."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
from starlette.exceptions import HTTPException

from riverpy._calls.job_filters import check_filters
from riverpy._dashboard.api.endpoint import Endpoint, SuccessAnswer
from riverpy._dashboard.changes.job_changes import (
    IDS_PER_CHANGE_MAX,
    JobChangeForm,
    log_job_change,
    parse_job_id,
)
from riverpy._dashboard.database import acquire_connection, open_read_transaction
from riverpy._dashboard.job_actions import JobAction, get_change_method
from riverpy._dashboard.job_search import JobSearch, find_job_ids, read_jobs
from riverpy._dashboard.pages.job_page import read_job_and_time
from riverpy._dsn import mask_passwords
from riverpy._tools.text import format_count
from riverpy.job import JobColumn, JobState, get_raw_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._dashboard.api.endpoint import ApiCall
    from riverpy._dashboard.site import Site
    from riverpy._postgres.driver import Transaction
    from riverpy.job import JobRow
    from riverpy.job_list import JobChanges, JobFilters

JOBS_PER_LIST_DEFAULT = 20
JOBS_PER_LIST_MAX = 1_000
JOBS_PER_READ = 20
"""The maximum number of jobs that are read at a time. Longer lists are read in parts, because the
args, errors and other large columns of many jobs need much memory."""
LISTED_ARGS_LENGTH_MAX = 20_000
"""The maximum number of characters of a job's args in a list. Longer args are left out."""
VALUES_PER_FILTER_MAX = 100

_FilterValuesLimit = msgspec.Meta(max_length=VALUES_PER_FILTER_MAX)
_ChangedIds = Annotated[
    list[int | str],
    msgspec.Meta(
        min_length=1,
        max_length=IDS_PER_CHANGE_MAX,
        description="The ids of the jobs, as texts or as numbers.",
    ),
]


class JobSummary(msgspec.Struct):
    """The fields of a job in a list."""

    id: int
    args: Annotated[
        str,
        msgspec.Meta(
            description="The args as JSON text, so that numbers stay exact. If args are hidden, or "
            "too long for a list, the JSON text of a string that says so."
        ),
    ]
    attempt: int
    attempted_at: datetime | None
    attempted_by: list[str]
    created_at: datetime
    finalized_at: datetime | None
    kind: str
    max_attempts: int
    priority: int
    queue: str
    scheduled_at: datetime
    state: str
    tags: list[str]


class JobError(msgspec.Struct):
    """One entry of a job's errors: a failed attempt."""

    at: Annotated[
        datetime, msgspec.Meta(description="The first moment of the year 1, if it is not known.")
    ]
    attempt: Annotated[int, msgspec.Meta(description="0, if it is not known.")]
    error: str
    trace: str


class JobDetails(JobSummary):
    """One job with its errors and its metadata."""

    errors: list[JobError]
    metadata: Annotated[msgspec.Raw, msgspec.Meta(description="An object.")]


class UnreadableJob(msgspec.Struct):
    """A job that the server cannot read."""

    id: int
    error: str


class JobList(msgspec.Struct):
    """A page of a list of jobs."""

    data: list[JobSummary]
    damaged: Annotated[
        list[UnreadableJob],
        msgspec.Meta(description="Jobs of this page that the server cannot read."),
    ]
    next_cursor: Annotated[
        str | None,
        msgspec.Meta(description="The value of `after` for the next page. Null: the last page."),
    ]
    note: Annotated[
        str | None,
        msgspec.Meta(description="What was searched, if not all jobs were searched."),
    ]


class ListJobsInput(msgspec.Struct):
    """The filters of a list of jobs."""

    ids: Annotated[list[int], msgspec.Meta(max_length=JOBS_PER_LIST_MAX)] = []
    kinds: Annotated[list[str], _FilterValuesLimit] = []
    priorities: Annotated[list[int], _FilterValuesLimit] = []
    queues: Annotated[list[str], _FilterValuesLimit] = []
    tags: Annotated[
        list[str],
        msgspec.Meta(max_length=VALUES_PER_FILTER_MAX, description="One of them is enough."),
    ] = []
    state: Annotated[
        JobState,
        msgspec.Meta(
            description="Ended jobs are sorted by their end, the newest first. Others are sorted "
            "by their time, the oldest first."
        ),
    ] = JobState.RUNNING
    limit: Annotated[int, msgspec.Meta(ge=0, le=JOBS_PER_LIST_MAX)] = JOBS_PER_LIST_DEFAULT
    after: Annotated[str | None, msgspec.Meta(description="`next_cursor` of the page before.")] = (
        None
    )


class JobInput(msgspec.Struct):
    """The id of the job to read."""

    job_id: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class ChangeJobsInput(msgspec.Struct):
    """The ids of the jobs to change."""

    ids: _ChangedIds


async def list_jobs(call: ApiCall, given: ListJobsInput) -> JobList:
    """Return one page of the jobs that pass the filters."""
    filters = {
        "states": [given.state],
        "ids": given.ids,
        "kinds": given.kinds,
        "priorities": given.priorities,
        "queues": given.queues,
        "tags_any": given.tags,
    }
    used = {name: values for name, values in filters.items() if values}
    checked = check_filters(cast("JobFilters", used))
    search = JobSearch({"state": given.state.value}, checked, given.after)
    if given.limit == 0:
        return JobList([], [], None, None)
    schema = call.site.client.config.schema
    async with open_read_transaction(call.site.client) as tx:
        found = await find_job_ids(tx, schema, search, limit=given.limit)
        summaries, damaged = await _read_summaries(call.site, tx, found.ids)
    return JobList(summaries, damaged, found.next_cursor, found.limit_note)


async def _read_summaries(
    site: Site, tx: Transaction, ids: Sequence[int]
) -> tuple[list[JobSummary], list[UnreadableJob]]:
    """Return the readable jobs, and the jobs that the server cannot read. Args can be large, so the
    jobs are read in parts of `JOBS_PER_READ`."""
    summaries: list[JobSummary] = []
    damaged: list[UnreadableJob] = []
    for start in range(0, len(ids), JOBS_PER_READ):
        part = ids[start : start + JOBS_PER_READ]
        rows, errors = await read_jobs(tx, site.client.config.schema, part)
        summaries += [
            JobSummary(**_make_summary_fields(site, job, LISTED_ARGS_LENGTH_MAX)) for job in rows
        ]
        damaged += [UnreadableJob(job_id, error) for job_id, error in errors.items()]
    return summaries, damaged


def _make_summary_fields(site: Site, job: JobRow, args_length_max: int | None) -> dict[str, Any]:
    shown = site.get_visible_args(job)
    note, args = shown.note, shown.json_text
    if args is not None and args_length_max is not None and len(args) > args_length_max:
        note, args = f"These args have {len(args):,} characters: GET /api/jobs/{job.id}", None
    return {
        "id": job.id,
        "args": msgspec.json.encode(note).decode() if args is None else args,
        "attempt": job.attempt,
        "attempted_at": job.attempted_at,
        "attempted_by": job.attempted_by,
        "created_at": job.created_at,
        "finalized_at": job.finalized_at,
        "kind": job.kind,
        "max_attempts": job.max_attempts,
        "priority": job.priority,
        "queue": job.queue,
        "scheduled_at": job.scheduled_at,
        "state": get_raw_state(job),
        "tags": list(job.tags),
    }


async def get_job(call: ApiCall, given: JobInput) -> JobDetails:
    """Return one job."""
    job, _ = await read_job_and_time(call.site.client, given.job_id)
    errors = [
        JobError(one.at, one.attempt, mask_passwords(one.error), mask_passwords(one.trace))
        for one in job.errors
    ]
    metadata = msgspec.Raw(job.get_encoded_values()[JobColumn.METADATA].encode())
    return JobDetails(
        **_make_summary_fields(call.site, job, None), errors=errors, metadata=metadata
    )


async def retry_jobs(call: ApiCall, given: ChangeJobsInput) -> SuccessAnswer:
    """Retry jobs: make them available now."""
    return await _change_jobs(call, "retry", given)


async def cancel_jobs(call: ApiCall, given: ChangeJobsInput) -> SuccessAnswer:
    """Cancel jobs."""
    return await _change_jobs(call, "cancel", given)


async def delete_jobs(call: ApiCall, given: ChangeJobsInput) -> SuccessAnswer:
    """Delete jobs."""
    return await _change_jobs(call, "delete", given)


async def _change_jobs(call: ApiCall, action: JobAction, given: ChangeJobsInput) -> SuccessAnswer:
    """Change the jobs with the ids in `given`, all in one transaction. If an error occurs, no job
    is changed."""
    form = JobChangeForm(action, sorted({parse_job_id(str(one)) for one in given.ids}))
    client = call.site.client
    async with acquire_connection(client) as connection, connection.transaction():
        changes = await get_change_method(client, action)(ids=form.ids, tx=connection)
        _require_all_changed(form, changes)
    log_job_change(form, call.access, changes)
    return SuccessAnswer()


def _require_all_changed(form: JobChangeForm, changes: JobChanges) -> None:
    which = f"Job {form.ids[0]}" if len(form.ids) == 1 else None
    nothing = "nothing was changed"
    if changes.missing:
        some = which or f"{changes.missing:,} of the jobs"
        verb = "does" if which else "do" if changes.missing > 1 else "does"
        raise HTTPException(404, f"{some} {verb} not exist, so {nothing}.")
    if changes.running and form.action == "delete":
        some = which or f"{changes.running:,} of the jobs"
        verb = "runs" if which else "run"
        raise HTTPException(
            400, f"{some} {verb}, so {nothing}: cancel it, and delete it when it has ended."
        )
    if changes.refused:
        job_id, reason = next(iter(changes.reasons.items()))
        more = f" {format_count(changes.refused, 'job')} cannot be changed." if not which else ""
        raise HTTPException(409, f"Job {job_id}: {reason}, so {nothing}.{more}")


_NOT_FOUND_REASON = {404: "A job does not exist. Nothing was changed."}
_CONFLICT_REASON = {409: "A job has the unique key of another one. Nothing was changed."}
ENDPOINTS: tuple[Endpoint[Any], ...] = (
    Endpoint(
        "GET",
        "/jobs",
        "List jobs of one state",
        ListJobsInput,
        JobList,
        list_jobs,
    ),
    Endpoint(
        "GET",
        "/jobs/{job_id:int}",
        "Read one job",
        JobInput,
        JobDetails,
        get_job,
        {404: "There is no such job."},
    ),
    Endpoint(
        "POST",
        "/jobs/retry",
        "Make jobs available now",
        ChangeJobsInput,
        SuccessAnswer,
        retry_jobs,
        _NOT_FOUND_REASON | _CONFLICT_REASON,
    ),
    Endpoint(
        "POST",
        "/jobs/cancel",
        "Cancel jobs",
        ChangeJobsInput,
        SuccessAnswer,
        cancel_jobs,
        _NOT_FOUND_REASON,
    ),
    Endpoint(
        "POST",
        "/jobs/delete",
        "Delete jobs",
        ChangeJobsInput,
        SuccessAnswer,
        delete_jobs,
        _NOT_FOUND_REASON | {400: "A job runs. Nothing was changed."},
    ),
)
