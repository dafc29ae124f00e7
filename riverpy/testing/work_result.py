"""WorkResult: how one attempt in a test ended."""

from __future__ import annotations

from typing import Any, Self

import msgspec

from riverpy.events import Event
from riverpy.job import JobRow, JobState


class WorkResult(msgspec.Struct, frozen=True):
    """How one attempt at a job ended."""

    event: Event
    """The event that a running client would publish about the end of the attempt."""
    job: JobRow
    """The job after its result was stored."""
    error: BaseException | None = None
    """What the job's code has raised, with its traceback; also a `JobSnooze` or `JobCancel`. None:
    it raised nothing."""

    @property
    def output(self) -> Any:
        """The output of the job; None: it has none."""
        return self.job.output

    def require_completed(self) -> Self:
        """Return this result if the job is completed.

        Raises:
            AssertionError: the job is not completed. What the job's code raised is the cause.
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
