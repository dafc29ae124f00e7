"""The page of one job: its timeline, attempts, args, metadata, log, steps and output."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from riverpy._attempt_errors import GO_ZERO_TIME
from riverpy._dashboard.cancelling_jobs import describe_running_job
from riverpy._dashboard.database import open_read_transaction
from riverpy._dashboard.errors import PageError
from riverpy._dashboard.job_actions import list_possible_actions
from riverpy._dashboard.page import Page
from riverpy._dsn import mask_passwords
from riverpy._postgres.damaged_jobs import DAMAGED_JOB_REMEDY
from riverpy._postgres.transactions import read_server_time
from riverpy._work.attempt import SNOOZE_COUNT_METADATA_KEY
from riverpy._work.steps import (
    CURSORS_METADATA_KEY,
    KEPT_RESULTS_METADATA_KEY,
    STEP_METADATA_KEY,
)
from riverpy.errors import ConfigError, JobDamagedError, NotFoundError
from riverpy.job import OUTPUT_METADATA_KEY, JobColumn, JobState, get_raw_state
from riverpy.joblog import LOG_METADATA_KEY, decode_log_entries
from riverpy.progress import PROGRESS_METADATA_KEY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import datetime

    from riverpy._attempt_errors import AttemptError
    from riverpy._dashboard.page import PageRequest
    from riverpy.client import Client
    from riverpy.job import JobRow

_METADATA_KEYS_WITH_SECTION = {OUTPUT_METADATA_KEY, LOG_METADATA_KEY, PROGRESS_METADATA_KEY}
"""The metadata keys that have their own section on the page."""


class TimelineEntry(NamedTuple):
    """One event in the timeline of a job."""

    title: str
    at: datetime | None
    text: str = ""


class StoredAttemptLog(msgspec.Struct):
    """The log of one attempt, in River's format."""

    attempt: int
    log: str


class ErrorEntry(NamedTuple):
    """The error of one attempt, as the page shows it."""

    attempt: int
    at: datetime | None
    client_id: str | None
    error: str
    trace: str


async def read_job_and_time(client: Client, job_id: int) -> tuple[JobRow, datetime]:
    """Return a job and the server's current time.

    Raises:
        PageError: there is no such job.
        JobDamagedError: the server cannot read the job.
    """
    try:
        async with open_read_transaction(client) as tx:
            return await client.job_get(job_id, tx=tx), await read_server_time(tx)
    except (NotFoundError, ConfigError):
        raise PageError(
            404,
            f"There is no job {job_id}.",
            "The leader deletes old jobs that have ended. Users can delete jobs too.",
        ) from None


async def load_job_page(view: PageRequest) -> Mapping[str, object]:
    """Read one job and return the values of its page."""
    job_id: int = view.path_params["job_id"]
    try:
        job, now = await read_job_and_time(view.site.client, job_id)
    except JobDamagedError as error:
        remedy = DAMAGED_JOB_REMEDY
        return {"job_id": job_id, "job": None, "damage": str(error), "remedy": remedy}
    return {
        **_make_job_values(job),
        "running_job": await describe_running_job(view.site, job, now),
        "job_id": job_id,
        "now": now,
        "args": view.site.get_visible_args(job),
    }


PAGE = Page("job", "/jobs/{job_id:int}", "job.html", load_job_page)


def _make_job_values(job: JobRow) -> dict[str, object]:
    metadata = _decode_json_object(job.get_encoded_values()[JobColumn.METADATA])
    shown = {
        key: value for key, value in metadata.items() if key not in _METADATA_KEYS_WITH_SECTION
    }
    return {
        "job": job,
        "state": get_raw_state(job),
        "timeline": list(_make_timeline(job)),
        "errors": [_make_error_entry(job, error) for error in reversed(job.errors)],
        "errors_left_out": job.error_count - len(job.errors),
        "metadata_json": msgspec.json.encode(shown).decode(),
        "output_json": _get_member_as_json(metadata, OUTPUT_METADATA_KEY),
        "steps": _list_stored_step_data(metadata),
        "log": list(_decode_attempt_logs(job)),
        "unique_key": job.unique_key.hex() if job.unique_key else None,
        "actions": list_possible_actions(get_raw_state(job)),
    }


def _make_timeline(job: JobRow) -> Iterator[TimelineEntry]:
    yield TimelineEntry("Inserted", job.created_at)
    for error in job.errors:
        name = f"Attempt {error.attempt}" if error.attempt else "An attempt"
        client_id = _find_client_of_attempt(job, error.attempt)
        first_line = mask_passwords(error.error).strip().partition("\n")[0]
        where = f" in {client_id}" if client_id else ""
        at = None if error.at == GO_ZERO_TIME else error.at
        yield TimelineEntry(f"{name} failed{where}", at, first_line[:200])
    state = get_raw_state(job)
    match state:
        case JobState.RUNNING:
            name = f"Attempt {job.attempt} of {job.max_attempts} runs in {_get_last_client(job)}"
            yield TimelineEntry(name, job.attempted_at)
        case JobState.COMPLETED | JobState.CANCELLED | JobState.DISCARDED:
            if state == JobState.COMPLETED:
                name = f"Attempt {job.attempt} started in {_get_last_client(job)}"
                yield TimelineEntry(name, job.attempted_at)
            yield TimelineEntry(state.capitalize(), job.finalized_at)
        case JobState.RETRYABLE:
            yield TimelineEntry(f"Attempt {job.attempt + 1} is due", job.scheduled_at)
        case _:
            yield TimelineEntry("Due", job.scheduled_at)


def _get_last_client(job: JobRow) -> str:
    return job.attempted_by[-1] if job.attempted_by else "an unknown client"


def _find_client_of_attempt(job: JobRow, attempt: int) -> str | None:
    """Return the id of the client that ran an attempt. None: not known, for example because
    `attempted_by` also contains the clients of snoozed attempts, which are not counted."""
    clients = job.attempted_by
    if len(clients) == job.attempt and 1 <= attempt <= len(clients):
        return clients[attempt - 1]
    return None


def _make_error_entry(job: JobRow, error: AttemptError) -> ErrorEntry:
    return ErrorEntry(
        error.attempt,
        None if error.at == GO_ZERO_TIME else error.at,
        _find_client_of_attempt(job, error.attempt),
        mask_passwords(error.error),
        mask_passwords(error.trace),
    )


def _decode_json_object(json_text: str) -> dict[str, msgspec.Raw]:
    """Return the members of a JSON object. The values stay JSON texts, so that numbers keep their
    exact form."""
    try:
        return msgspec.json.decode(json_text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return {"(not an object)": msgspec.Raw(json_text.encode())}


def _get_member_as_json(members: Mapping[str, msgspec.Raw], key: str) -> str | None:
    raw = members.get(key)
    return None if raw is None else bytes(raw).decode()


def _list_stored_step_data(metadata: Mapping[str, msgspec.Raw]) -> list[tuple[str, str]]:
    """Return the stored data about the job's steps as pairs: a title, and the data as JSON."""
    names = {
        STEP_METADATA_KEY: "Last completed step",
        CURSORS_METADATA_KEY: "Cursors",
        KEPT_RESULTS_METADATA_KEY: "Kept results",
        SNOOZE_COUNT_METADATA_KEY: "Snoozes",
    }
    return [
        (name, text)
        for key, name in names.items()
        if (text := _get_member_as_json(metadata, key)) is not None
    ]


def _decode_attempt_logs(job: JobRow) -> Iterator[StoredAttemptLog]:
    for raw in decode_log_entries(job.get_encoded_values()[JobColumn.METADATA]):
        try:
            yield msgspec.json.decode(raw, type=StoredAttemptLog)
        except (msgspec.DecodeError, RecursionError):
            yield StoredAttemptLog(0, raw.decode("utf-8", "replace"))
