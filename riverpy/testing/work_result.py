"""WorkResult: the result of one attempt of a job in a test."""

from __future__ import annotations

from typing import Any, Self

import msgspec

from riverpy.events import Event
from riverpy.job import JobRow, JobState


class WorkResult(msgspec.Struct, frozen=True):
    """The result of one attempt: the event, the job and the error."""

    event: Event
    """The event that a running client would send to its subscribers at the end of this attempt."""
    job: JobRow
    """The job after its result was stored."""
    error: BaseException | None = None
    """The error that the job's code raised, with its traceback. It may be a `JobSnooze` or
    `JobCancel`. None: the code raised no error."""

    @property
    def output(self) -> Any:
        """The output of the job; None: it has none."""
        return self.job.output

    def require_completed(self) -> Self:
        """Return this result if the job is completed.

        Raises:
            AssertionError: the job is not completed. `__cause__` is the error that the job's code
                raised.
        """
        if self.job.state is JobState.COMPLETED:
            return self
        raise AssertionError(self._describe_end()) from self.error

    def _describe_end(self) -> str:
        job = self.job
        text = (
            f"job {job.id} ({job.kind}) is {job.state} after attempt {job.attempt} of "
            f"{job.max_attempts}, not completed"
        )
        if self.error is not None:
            return f"{text}: {type(self.error).__name__}: {self.error}"
        errors = job.errors
        return f"{text}: {errors[-1].error}" if errors else text
