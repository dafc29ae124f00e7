"""The result of a job that has ended, and the errors of code that waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec

from riverpy._json_decoder import make_decoder
from riverpy.errors import ConfigError, RiverError
from riverpy.job import JobColumn, JobRow, JobState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

T = TypeVar("T")
JOBS_IN_ERROR_TEXT_MAX = 10
"""The maximum number of jobs that an error text names."""


_REASON_BY_LAST_STATE: Mapping[JobState | None, str] = {
    None: "; its state was not read: the database did not answer, or the client's pool had no free "
    "connection",
    JobState.AVAILABLE: "; it waits for a client that works its queue and its kind and has a free "
    "slot, or for the next attempt after a failed one. A job that waits for another job keeps its "
    "slot",
    JobState.PENDING: "; it is pending: another program has to make it available",
    JobState.RETRYABLE: "; its last attempt has failed, and its next attempt is not due yet",
    JobState.SCHEDULED: "; it is not due yet",
}
"""The last part of the text of a WaitTimeoutError about one job: why the job may not have ended.
The key is the last state of the job that was read; None: no state was read."""


class WaitTimeoutError(RiverError, TimeoutError):
    """An awaited job did not end in time. The jobs are not changed: they can be awaited again.

    Attributes:
        job_ids: the ids of the jobs that have not ended, in the order in which the caller passed
            them. Empty: the insert of the job did not end in time, so the job may be stored or not.
        last_states: the state of each of these jobs when it was last read, by id. None: the state
            was never read.
        ended_jobs: the rows of those awaited jobs that have ended.
    """

    def __init__(
        self,
        job_ids: Sequence[int],
        *,
        last_states: Mapping[int, JobState | None],
        ended_jobs: Sequence[JobRow] = (),
        timeout: float,
        read_error: str | None = None,
    ) -> None:
        named = ", ".join(
            f"{job_id} ({last_states.get(job_id) or 'not read'})"
            for job_id in job_ids[:JOBS_IN_ERROR_TEXT_MAX]
        )
        more = len(job_ids) - JOBS_IN_ERROR_TEXT_MAX
        text = f"{named} and {more} more" if more > 0 else named
        noun = "job" if len(job_ids) == 1 else "jobs"
        limit = f"within {round(timeout, 1 if timeout >= 1 else 3):g} s"
        text = f"{noun} {text} did not end {limit}"
        if not job_ids:
            text = (
                f"the insert of the job did not end {limit}: the job may be stored. Make it unique "
                "if it must not be inserted twice"
            )
        elif read_error is not None:
            text += f"; the last read of their states failed: {read_error}"
        elif len(job_ids) == 1:
            text += _REASON_BY_LAST_STATE.get(last_states.get(job_ids[0]), "")
        super().__init__(text)
        self.job_ids = list(job_ids)
        self.last_states = dict(last_states)
        self.ended_jobs = list(ended_jobs)


class JobNotCompletedError(RiverError):
    """A job has no result, because it was discarded or cancelled, or has not ended.

    Attributes:
        job: the row of the job.
    """

    def __init__(self, job: JobRow) -> None:
        super().__init__(_describe_missing_result(job))
        self.job = job


class OutputError(RiverError, ValueError):
    """The output of a job does not have the expected type.

    Attributes:
        job: the row of the job.
    """

    def __init__(self, job: JobRow, reason: str) -> None:
        super().__init__(f"the output of job {job.id} ({job.kind}) {reason}")
        self.job = job


@overload
def result(row: JobRow) -> Any: ...
@overload
def result(row: JobRow, type: type[T]) -> T: ...
@overload
def result(row: JobRow, type: Any) -> Any: ...
def result(row: JobRow, type: Any = Any) -> Any:  # noqa: A002 (the name that readers expect)
    """Return the output of a completed job: the value that its handler returned or recorded.

    Example: `riverpy.result(await client.wait(job_id), type=Invoice)`.

    Args:
        row: a row of the job, as `client.wait` returns it.
        type: the type of the result: a Struct, a dataclass, a pydantic model, or another type that
            msgspec can decode. Default Any: the decoded JSON (dicts, lists, numbers, strings).

    Raises:
        JobNotCompletedError: the job was discarded or cancelled, or it has not ended. The error
            text contains its state and its last error.
        OutputError: the output does not have this type. The error text names the part of the output
            that is wrong.
        ConfigError: `type` cannot be decoded from JSON.
    """
    if row.state is not JobState.COMPLETED:
        raise JobNotCompletedError(row)
    text = _read_output_text(row)
    if type is Any:
        return msgspec.json.decode(text)
    try:
        decode = make_decoder(type)
    except (TypeError, NameError) as error:
        raise ConfigError(f"the output cannot be decoded: {error}") from None
    try:
        return decode(text)
    except (msgspec.ValidationError, ValueError) as error:
        if text == "null":
            raise OutputError(row, "is missing: its handler returned None") from None
        raise OutputError(row, f"does not have the expected type: {error}") from None


def _read_output_text(row: JobRow) -> str:
    """Return the output as JSON text, or `null` if the job has no output."""
    try:
        members = msgspec.json.decode(
            row.get_encoded_values()[JobColumn.METADATA], type=dict[str, msgspec.Raw]
        )
    except msgspec.ValidationError:  # the metadata is not a JSON object, so it has no output
        return "null"
    raw = members.get("output")
    return "null" if raw is None else bytes(raw).decode()


def _describe_missing_result(job: JobRow) -> str:
    name = f"job {job.id} ({job.kind})"
    if job.finalized_at is None:
        return f"{name} has not ended, it is {job.state}: wait for it with client.wait({job.id})"
    errors = job.errors
    reason = f": {errors[-1].error}" if errors else ""
    return f"{name} was {job.state}{reason}"
