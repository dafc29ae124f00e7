"""The runs of periodic jobs, in words: why the leader inserted each job, and how the job ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._dashboard.rendering import format_utc, format_with_escapes
from riverpy._dashboard.sentence import HealthSentence
from riverpy._postgres.periodic import decode_periodic_insert_reason, find_periodic_insert_reason
from riverpy.job import JobColumn, JobState, get_raw_state

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from riverpy._dashboard.sentence import Health
    from riverpy._postgres.dashboard_reads import InsertedPeriodicJob
    from riverpy._postgres.periodic import PeriodicInsertReason
    from riverpy.job import JobRow

UNKNOWN_CAUSE = "not known"
_OUTCOME_BY_STATE: dict[str, tuple[Health, str]] = {
    JobState.AVAILABLE: ("ok", "waits for a worker"),
    JobState.CANCELLED: ("look", "was cancelled"),
    JobState.COMPLETED: ("ok", "completed"),
    JobState.DISCARDED: ("look", "failed every attempt"),
    JobState.PENDING: ("ok", "is pending"),
    JobState.RETRYABLE: ("look", "failed, and is tried again"),
    JobState.RUNNING: ("ok", "runs now"),
    JobState.SCHEDULED: ("ok", "is scheduled"),
}


class ListedRun(NamedTuple):
    """A run of a periodic job, i.e. one inserted job, with the reason for its insert."""

    job_id: int
    kind: str
    queue: str
    state: str
    cause: str
    """Why the leader inserted the job, in words such as `by hand: ann`."""
    is_by_schedule: bool
    due_at: datetime | None
    """The time at which the run was scheduled or requested. None: not known."""

    def describe(self) -> HealthSentence:
        """Return a sentence about this run and the state of its job. Call this only for the last
        run that the schedule caused, because the sentence calls it `the last run by schedule`."""
        health, outcome = _OUTCOME_BY_STATE.get(self.state, ("ok", f"is {self.state}"))
        due = "" if self.due_at is None else f" was due at {format_utc(self.due_at)}. It"
        text = f"The last run by schedule{due} {outcome}."
        return HealthSentence(health, text, f"/jobs/{self.job_id}", f"Job {self.job_id}")


def make_run_of_inserted_job(job: InsertedPeriodicJob) -> ListedRun:
    """Convert an InsertedPeriodicJob, i.e. some columns of a job, to a ListedRun."""
    run = None if job.run_json is None else decode_periodic_insert_reason(job.run_json)
    return _make_run(job.job_id, job.kind, job.queue, job.state, run)


def make_run_of_job(job: JobRow) -> ListedRun:
    """Convert a job to a ListedRun. The cause of the run is in the job's metadata."""
    run = find_periodic_insert_reason(job.get_encoded_values()[JobColumn.METADATA])
    return _make_run(job.id, job.kind, job.queue, get_raw_state(job), run)


def find_run_caused_by_schedule(runs: Sequence[ListedRun]) -> ListedRun | None:
    """Return the first run in the list that the schedule caused. None: there is none."""
    return next((run for run in runs if run.is_by_schedule), None)


def _make_run(
    job_id: int, kind: str, queue: str, state: str, run: PeriodicInsertReason | None
) -> ListedRun:
    if run is None:
        return ListedRun(job_id, kind, queue, state, UNKNOWN_CAUSE, False, None)
    return ListedRun(
        job_id, kind, queue, state, _describe_cause(run), run.cause == "schedule", run.due_at
    )


def _describe_cause(run: PeriodicInsertReason) -> str:
    match run.cause:
        case "schedule":
            return "by schedule"
        case "start":
            return "by run_on_start"
        case "request":
            return "by hand" if run.user is None else f"by hand: {format_with_escapes(run.user)}"
