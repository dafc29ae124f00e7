"""When a failed job is tried again, and who is told of the failure."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy.job import Job, JobRow

RETRY_DELAY_MAX = timedelta(microseconds=9_223_372_036_854_775)
"""The longest delay, about 292 years: River's 2^63 - 1 ns, to the microsecond."""
_CAPPED_FROM = 310
"""From this many errors on, the limit applies, without jitter."""


class RetryPolicy(Protocol):
    """Says how long a job waits after an attempt that failed."""

    def next_retry(self, job: JobRow, /) -> timedelta:
        """The delay from now. `job` is the row as it was claimed: this attempt's error is not in it
        yet."""
        ...


class DefaultRetryPolicy:
    """River's formula: n^4 seconds, up to 10 % more or less, where n counts the errors with this
    one.

    1 s, 16 s, 81 s, 256 s, … to 92 hours at the 24th. Snoozes and interruptions do not lengthen it.
    """

    def next_retry(self, job: JobRow, /) -> timedelta:
        """The delay from now."""
        errors = job.error_count + 1
        if errors >= _CAPPED_FROM:
            return RETRY_DELAY_MAX
        delay = timedelta(seconds=errors**4 * random.uniform(0.9, 1.1))  # noqa: S311 (no secret)
        return min(delay, RETRY_DELAY_MAX)


def retry_delay(
    job: Job[Any], next_retry: Callable[[Job[Any]], timedelta | None] | None, policy: RetryPolicy
) -> timedelta:
    """How long a job waits after an attempt that failed: the word of its worker, else the client's
    policy.

    Raises:
        ValueError: it lies in the past.
        Exception: what code of the user's raises.
    """
    delay = next_retry(job) if next_retry is not None else None
    if delay is None:
        delay = policy.next_retry(job)
    if delay < timedelta(0):
        raise ValueError(f"it gave {delay}")
    return min(delay, RETRY_DELAY_MAX)


class ErrorHandler(Protocol):
    """Told of each failed attempt. It is not told of snoozes, cancels by the job itself, and
    interruptions."""

    async def handle_error(self, job: JobRow, error: BaseException, /) -> bool | None:
        """Called when an attempt failed. Return True to cancel the job instead of retrying it.

        Bounded to 10 seconds. An error of its own is logged and counts as None.
        """
        ...
