"""Outcomes: functions that make the outcome of an attempt that failed, or was snoozed, cancelled or
interrupted."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import msgspec

from riverpy._lifecycle import StopCause
from riverpy._work.attempt import SNOOZE_COUNT_METADATA_KEY, Attempt, Outcome
from riverpy._work.failure import encode_error_entry, replace_unstorable_characters
from riverpy.events import EventKind
from riverpy.job import JobState
from riverpy.retry import RETRY_DELAY_MAX

AVAILABLE_STATE_DELAY_MAX = timedelta(seconds=5)
"""A job that is due again within this time becomes `available` at once, not `scheduled` or
`retryable`. The time equals the interval of River's scheduler."""
REMOTE_CANCEL_ERROR_TEXT = "job cancelled remotely"
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_SNOOZE_COUNT_PATTERN = re.compile(r"[+-]?(?:\d++\.?\d*+|\.\d++)(?:[eE][+-]?\d++)?", re.ASCII)
_EXACT_INTEGER_LENGTH_MAX = 25
"""The maximum length of an integer's text that is converted with `int`. A longer text is converted
with `float`. A 64-bit integer has at most 19 digits."""


def make_snooze_outcome(attempt: Attempt, delay: timedelta) -> Outcome:
    """Return the outcome of a snooze. The attempt does not count towards `max_attempts`."""
    count = next_snooze_count(attempt.metadata_text)
    attempt.record_metadata(SNOOZE_COUNT_METADATA_KEY, str(count))
    return Outcome(
        event_kind=EventKind.JOB_SNOOZED,
        state=JobState.AVAILABLE if delay <= AVAILABLE_STATE_DELAY_MAX else JobState.SCHEDULED,
        attempt_to_store=max(attempt.attempt - 1, 0),
        is_final=False,
        seconds_until_due=min(delay, RETRY_DELAY_MAX).total_seconds(),
    )


def make_interrupt_outcome(attempt: Attempt, *, delay: float | None = 0.0) -> Outcome:
    """Return the outcome of an attempt that a stop of the client has interrupted. The attempt does
    not count towards `max_attempts`. `delay` is the time until the job is due again, in seconds;
    None: the due time does not change."""
    return Outcome(
        event_kind=EventKind.JOB_INTERRUPTED,
        state=JobState.AVAILABLE,
        attempt_to_store=max(attempt.attempt - 1, 0),
        is_final=False,
        seconds_until_due=delay,
    )


def make_cancel_outcome(attempt: Attempt, text: str) -> Outcome:
    """Return the outcome of a cancelled attempt."""
    return Outcome(
        event_kind=EventKind.JOB_CANCELLED,
        state=JobState.CANCELLED,
        attempt_to_store=attempt.attempt,
        is_final=True,
        error_entry=_encode_error_entry(attempt, f"JobCancelError: {text}", ""),
    )


def make_failure_outcome(attempt: Attempt, text: str, trace: str, delay: float) -> Outcome:
    """Return the outcome of a failed attempt. The job is retried after `delay` seconds, or
    discarded after its last attempt."""
    is_last = attempt.attempt >= attempt.max_attempts
    is_soon = delay <= AVAILABLE_STATE_DELAY_MAX.total_seconds()
    retry_state = JobState.AVAILABLE if is_soon else JobState.RETRYABLE
    return Outcome(
        event_kind=EventKind.JOB_FAILED,
        state=JobState.DISCARDED if is_last else retry_state,
        attempt_to_store=attempt.attempt,
        is_final=is_last,
        seconds_until_due=0.0 if is_last else delay,
        error_entry=_encode_error_entry(attempt, text, trace),
    )


def set_released_outcome(attempt: Attempt) -> None:
    """Set the outcome of a claimed attempt that does not start. After a `job_cancel` the job is
    cancelled. Otherwise the job becomes available, and the attempt does not count towards
    `max_attempts`."""
    attempt.started_at, attempt.ended_at = 0.0, time.monotonic()
    if attempt.stop_cause is StopCause.JOB_CANCELLED:
        attempt.started_at = attempt.ended_at
        attempt.outcome = make_cancel_outcome(attempt, REMOTE_CANCEL_ERROR_TEXT)
    else:
        attempt.outcome = make_interrupt_outcome(attempt, delay=None)


def _encode_error_entry(attempt: Attempt, text: str, trace: str) -> str:
    return encode_error_entry(
        attempt=attempt.attempt,
        seconds_ago=time.monotonic() - (attempt.started_at or attempt.ended_at),
        error=replace_unstorable_characters(text),
        trace=trace,
    )


def next_snooze_count(metadata: str) -> int:
    """Return the number of snoozes after one more snooze. `metadata` is the job's metadata as JSON
    text.

    If the stored value is not an integer, it is converted as in River. A number, or a number in a
    string, becomes its integer part. `true` becomes 1. Every other value becomes 0. The largest
    number is 2^63 - 1.
    """
    try:
        members = msgspec.json.decode(metadata, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return 1
    raw = members.get(SNOOZE_COUNT_METADATA_KEY)
    count = 0 if raw is None else _parse_snooze_count(bytes(raw).decode())
    return min(count, _INT64_MAX - 1) + 1


def _parse_snooze_count(text: str) -> int:
    if text == "true":
        return 1
    text = text.strip('"')
    if not _SNOOZE_COUNT_PATTERN.fullmatch(text):
        return 0
    is_exact = len(text) <= _EXACT_INTEGER_LENGTH_MAX and text.lstrip("+-").isdigit()
    number = int(text) if is_exact else float(text)
    return int(min(max(number, _INT64_MIN), _INT64_MAX))
