"""Outcomes: functions that make the outcome of each attempt that did not simply complete."""

from __future__ import annotations

import time
from datetime import timedelta

from riverpy._lifecycle import StopCause
from riverpy._work.attempt import Attempt, Outcome
from riverpy._work.failure import error_entry, storable
from riverpy._work.snoozes import SNOOZES_KEY, next_snoozes
from riverpy.events import EventKind
from riverpy.job import JobColumn, JobState
from riverpy.retry import RETRY_DELAY_MAX

AVAILABLE_DELAY_MAX = timedelta(seconds=5)
"""A job with a delay up to this one becomes `available` at once, not `scheduled` or `retryable`.
River's scheduler has the same interval."""
REMOTE_CANCEL = "job cancelled remotely"


def snoozed(attempt: Attempt, delay: timedelta) -> Outcome:
    """Return the outcome of a snooze. The attempt does not count."""
    count = next_snoozes(attempt.columns()[JobColumn.METADATA])
    attempt.merge_metadata(SNOOZES_KEY, str(count))
    return Outcome(
        event=EventKind.JOB_SNOOZED,
        state=JobState.AVAILABLE if delay <= AVAILABLE_DELAY_MAX else JobState.SCHEDULED,
        attempt=max(attempt.attempt - 1, 0),
        final=False,
        delay=min(delay, RETRY_DELAY_MAX).total_seconds(),
    )


def interrupted(attempt: Attempt, *, delay: float | None = 0.0) -> Outcome:
    """Return the outcome of an attempt that a stop ended. The attempt does not count."""
    return Outcome(
        event=EventKind.JOB_INTERRUPTED,
        state=JobState.AVAILABLE,
        attempt=max(attempt.attempt - 1, 0),
        final=False,
        delay=delay,
    )


def cancelled(attempt: Attempt, text: str) -> Outcome:
    """Return the outcome of a cancelled attempt."""
    return Outcome(
        event=EventKind.JOB_CANCELLED,
        state=JobState.CANCELLED,
        attempt=attempt.attempt,
        final=True,
        error=_error_entry(attempt, f"JobCancelError: {text}", ""),
    )


def failed(attempt: Attempt, text: str, trace: str, delay: float) -> Outcome:
    """Return the outcome of a failed attempt. The job is retried after `delay` seconds, or
    discarded after its last attempt."""
    is_last = attempt.attempt >= attempt.max_attempts
    is_soon = delay <= AVAILABLE_DELAY_MAX.total_seconds()
    retry_state = JobState.AVAILABLE if is_soon else JobState.RETRYABLE
    return Outcome(
        event=EventKind.JOB_FAILED,
        state=JobState.DISCARDED if is_last else retry_state,
        attempt=attempt.attempt,
        final=is_last,
        delay=0.0 if is_last else delay,
        error=_error_entry(attempt, text, trace),
    )


def set_released(attempt: Attempt) -> None:
    """Set the outcome of a claimed attempt that does not start. The job is released, or, after
    `job_cancel`, cancelled."""
    attempt.started, attempt.ended = 0.0, time.monotonic()
    if attempt.cause is StopCause.JOB_CANCELLED:
        attempt.started = attempt.ended
        attempt.outcome = cancelled(attempt, REMOTE_CANCEL)
    else:
        attempt.outcome = interrupted(attempt, delay=None)


def _error_entry(attempt: Attempt, text: str, trace: str) -> str:
    return error_entry(
        attempt=attempt.attempt,
        seconds_ago=time.monotonic() - (attempt.started or attempt.ended),
        error=storable(text),
        trace=trace,
    )
