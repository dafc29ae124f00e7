"""JobWaitCall: the state of one call that waits for jobs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from riverpy.errors import NotFoundError
from riverpy.job_result import WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from riverpy.job import JobRow, JobState


def make_missing_job_error(job_id: int) -> NotFoundError:
    """Return the error that is raised if a caller waits for or follows a job that has no row."""
    return NotFoundError(
        f"there is no job {job_id}: it was deleted, or the transaction of its insert is not "
        "committed"
    )


class JobWaitCall:
    """The state of one call that waits for jobs. The wait ends when all of its jobs have ended, or
    with an error."""

    def __init__(self, job_ids: Iterable[int]) -> None:
        self.waiting_ids = dict.fromkeys(job_ids)
        """The ids of the jobs that have not ended, in the order in which the caller passed them."""
        self.row_by_id: dict[int, JobRow] = {}
        """The rows of the jobs that have ended."""
        self.error: Exception | None = None
        self.ended = asyncio.Event()

    def add_row(self, row: JobRow) -> None:
        """Add the row of a job that has ended."""
        self.row_by_id[row.id] = row
        self.waiting_ids.pop(row.id, None)
        if not self.waiting_ids:
            self.ended.set()

    def fail(self, error: Exception) -> None:
        """End the wait with an error."""
        self.error = self.error or error
        self.ended.set()

    def get_rows_or_raise(
        self, timeout: float, last_states: Mapping[int, JobState], read_error: str | None
    ) -> dict[int, JobRow]:
        """Return the rows of the jobs by id. Call this when the wait has ended or timed out. The
        arguments are used for the WaitTimeoutError.

        Args:
            timeout: the timeout of the call in seconds.
            last_states: the last known states of jobs by id.
            read_error: why the last read of the database failed; None: it did not fail.

        Raises:
            WaitTimeoutError: a job has not ended.
            Exception: the error that ended the wait.
        """
        if self.error is not None:
            raise self.error.with_traceback(None)  # another wait may raise the same error
        if self.waiting_ids:
            raise WaitTimeoutError(
                list(self.waiting_ids),
                last_states={job_id: last_states.get(job_id) for job_id in self.waiting_ids},
                ended_jobs=list(self.row_by_id.values()),
                timeout=timeout,
                read_error=read_error,
            )
        return self.row_by_id
