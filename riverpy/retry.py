"""RetryPolicy chooses the delay before a retry. ErrorHandler is called for failed attempts.
JobStuckHandler is called for jobs that keep running after their cancellation."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from riverpy._error_text import format_error_with_type
from riverpy._log_events import RETRY_POLICY_FAILED

if TYPE_CHECKING:
    from riverpy._log import RateLimitedLog
    from riverpy.job import Job, JobRow
    from riverpy.worker import RegisteredWorker

RETRY_DELAY_MAX = timedelta(microseconds=9_223_372_036_854_775)
"""The longest delay, about 292 years: 2^63 - 1 ns as in River, rounded down to a microsecond."""
_MAX_DELAY_ERROR_COUNT = 310
"""From this number of errors on, the delay is always `RETRY_DELAY_MAX`, without jitter."""


class RetryPolicy(Protocol):
    """Chooses how long a job waits after a failed attempt."""

    def next_retry(self, job: JobRow, /) -> timedelta:
        """Return the delay from now to the next attempt. `job` is the row as it was claimed, so
        `job.errors` does not contain the error of this attempt."""
        ...


class DefaultRetryPolicy:
    """Computes the same delay as River: n^4 seconds, plus or minus up to 10 %. n is the number of
    errors of the job, including the current one.

    The delays are 1 s, 16 s, 81 s, 256 s, … and 92 hours after the 24th error. Snoozes and
    interruptions do not count as errors.
    """

    def next_retry(self, job: JobRow, /) -> timedelta:
        """Return the delay from now to the next attempt."""
        errors = job.error_count + 1
        if errors >= _MAX_DELAY_ERROR_COUNT:
            return RETRY_DELAY_MAX
        delay = timedelta(seconds=errors**4 * random.uniform(0.9, 1.1))  # noqa: S311 (no secret)
        return min(delay, RETRY_DELAY_MAX)


def choose_retry_delay(
    job: Job[Any], worker: RegisteredWorker | None, policy: RetryPolicy, log: RateLimitedLog
) -> timedelta:
    """Return how long a job waits after a failed attempt.

    The method `next_retry` of the job's worker decides. If the worker has no such method, or the
    method returns None, the client's retry policy decides. If the worker or the policy raises an
    error or returns a negative delay, a warning is logged and `DefaultRetryPolicy` decides.
    """
    try:
        delay = (
            worker.next_retry(job) if worker is not None and worker.next_retry is not None else None
        )
        if delay is None:
            delay = policy.next_retry(job)
        if delay >= timedelta(0):
            return min(delay, RETRY_DELAY_MAX)
        problem = f"it gave {delay}"
    except BaseException as error:  # catch SystemExit too: it would end the event loop
        problem = format_error_with_type(error)
    log.warning(
        RETRY_POLICY_FAILED,
        effect="the default retry policy is used",
        job_id=job.id,
        kind=job.kind,
        error=problem,
    )
    return DefaultRetryPolicy().next_retry(job)


class ErrorHandler(Protocol):
    """A handler that is called for each failed attempt. Snoozes, cancels and interruptions are not
    failures."""

    async def handle_error(self, job: JobRow, error: BaseException, /) -> bool | None:
        """Handle a failed attempt. Return True to cancel the job instead of retrying it.

        If the handler takes longer than 10 seconds, it is cancelled, which counts as None. An error
        of the handler is logged and counts as None.
        """
        ...


class StuckJob(msgspec.Struct, frozen=True):
    """A job that runs longer than `Config.job_stuck_threshold` after its cancellation."""

    id: int
    kind: str
    queue: str
    running: timedelta
    """How long the attempt has been running."""
    total: int
    """The number of stuck jobs of this client, including this one."""


class JobStuckHandler(Protocol):
    """A handler that is called once for each stuck job, i.e. a job that keeps running for longer
    than `Config.job_stuck_threshold` after its cancellation."""

    def handle_stuck(self, job: StuckJob, /) -> bool:
        """Handle a stuck job. This method runs in the event loop, so it must not block.

        Return True to let another job use the slot of the stuck job. Then more than `max_workers`
        jobs may run until the stuck job ends. An error of the handler is logged and counts as
        False.
        """
        ...
