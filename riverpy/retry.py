"""RetryPolicy and ErrorHandler: the delay before a retry, and the handler of failed attempts."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy.job import Job, JobRow

RETRY_DELAY_MAX = timedelta(microseconds=9_223_372_036_854_775)
"""The longest delay, about 292 years: 2^63 - 1 ns as in River, rounded down to a microsecond."""
_CAPPED_FROM = 310
"""The number of errors from which the delay is `RETRY_DELAY_MAX`, without jitter."""


class RetryPolicy(Protocol):
    """Chooses how long a job waits after a failed attempt."""

    def next_retry(self, job: JobRow, /) -> timedelta:
        """Return the delay from now. `job` is the claimed row, without the error of this
        attempt."""
        ...


class DefaultRetryPolicy:
    """Computes the delay as River does: n^4 seconds, plus or minus up to 10 %. n is the number of
    errors, including the current one.

    The delays are 1 s, 16 s, 81 s, 256 s, … and 92 hours after the 24th error. Snoozes and
    interruptions do not count as errors.
    """

    def next_retry(self, job: JobRow, /) -> timedelta:
        """Return the delay from now."""
        errors = job.error_count + 1
        if errors >= _CAPPED_FROM:
            return RETRY_DELAY_MAX
        delay = timedelta(seconds=errors**4 * random.uniform(0.9, 1.1))  # noqa: S311 (no secret)
        return min(delay, RETRY_DELAY_MAX)


def retry_delay(
    job: Job[Any], next_retry: Callable[[Job[Any]], timedelta | None] | None, policy: RetryPolicy
) -> timedelta:
    """Return how long a job waits after a failed attempt: the delay of its worker, or else of the
    client's policy.

    Raises:
        ValueError: the delay is negative.
        Exception: user code raised it.
    """
    delay = next_retry(job) if next_retry is not None else None
    if delay is None:
        delay = policy.next_retry(job)
    if delay < timedelta(0):
        raise ValueError(f"it gave {delay}")
    return min(delay, RETRY_DELAY_MAX)


class ErrorHandler(Protocol):
    """A handler that is called for each failed attempt. Snoozes, cancels and interruptions are not
    failures."""

    async def handle_error(self, job: JobRow, error: BaseException, /) -> bool | None:
        """Handle a failed attempt. Return True to cancel the job instead of retrying it.

        The handler may take 10 seconds. An error of the handler is logged and counts as None.
        """
        ...
