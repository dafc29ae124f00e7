"""The errors of code that waits for jobs and reads their results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy.errors import RiverError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from riverpy.job import JobRow, JobState

NAMED_JOBS_MAX = 10
"""The maximum number of jobs that an error text names."""


class WaitTimeoutError(RiverError, TimeoutError):
    """An awaited job did not end in time. The jobs are not changed: they can be awaited again.

    Attributes:
        job_ids: the ids of the jobs that have not ended, in the order of the call.
        last_states: their states at the last read, by id. None: the job was never read.
        ended_jobs: the rows of the other jobs of the call, which have ended.
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
            for job_id in job_ids[:NAMED_JOBS_MAX]
        )
        more = len(job_ids) - NAMED_JOBS_MAX
        text = f"{named} and {more} more" if more > 0 else named
        noun = "job" if len(job_ids) == 1 else "jobs"
        text = f"{noun} {text} did not end within {timeout:g} s"
        if read_error is not None:
            text += f"; the last read of their states failed: {read_error}"
        super().__init__(text)
        self.job_ids = list(job_ids)
        self.last_states = dict(last_states)
        self.ended_jobs = list(ended_jobs)
