"""Functions that make events of attempts: events for subscribers of this client, and messages for
other clients."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from riverpy._attempt_errors import parse_error_entry
from riverpy._dsn import mask_passwords
from riverpy._fleet.messages import ERROR_LENGTH_MAX, PROGRESS_TEXT_LENGTH_MAX, EventMessage
from riverpy._timestamps import decode_timestamp, decode_wire_microseconds, encode_timestamp
from riverpy.events import Event, EventKind, FleetEventKind, JobStatistics
from riverpy.job import JobColumn, JobRow, JobState
from riverpy.progress import JobProgress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._postgres.fleet import EndedJob
    from riverpy._work.attempt import Attempt


def make_attempt_end_event(attempt: Attempt, kind: EventKind) -> Event:
    """Return the event for the end of an attempt whose result was stored."""
    row = _make_stored_row(attempt)
    if attempt.stored_row is None:
        row[JobColumn.METADATA] = attempt.encode_merged_metadata()
    return Event(kind, job=JobRow(row), statistics=_make_job_statistics(attempt, row))


def _make_stored_row(attempt: Attempt) -> list[Any]:
    """Return the row of an attempt as it is after its result was stored. The metadata may still be
    that of the claimed row."""
    if attempt.stored_row is not None:
        return list(attempt.stored_row)
    row = list(attempt.get_encoded_values())
    _apply_outcome_to_row(row, attempt)
    return row


def _make_job_statistics(attempt: Attempt, row: list[Any]) -> JobStatistics:
    """Return three durations: how long the job waited in its queue, how long it ran, and the
    time from its end until its result was stored."""
    attempted_at = decode_timestamp(row[JobColumn.ATTEMPTED_AT])
    due = max(attempt.scheduled_at, attempt.created_at)
    # `started_at` is 0 if the job was released before its start.
    started = attempt.started_at or attempt.ended_at
    wait = timedelta(0)
    if attempted_at is not None:
        wait = attempted_at - due + timedelta(seconds=started - attempt.claimed_at)
    return JobStatistics(
        queue_wait=max(wait, timedelta(0)),
        run=timedelta(seconds=attempt.ended_at - started),
        complete=timedelta(seconds=attempt.stored_at - attempt.ended_at),
    )


def _apply_outcome_to_row(row: list[Any], attempt: Attempt) -> None:
    """Change a claimed row as the database did when it stored the outcome. The times are
    estimates."""
    outcome = attempt.outcome
    state = attempt.stored_state or attempt.target_state
    row[JobColumn.STATE] = state
    claimed = encode_timestamp(attempt.attempted_at) if attempt.attempted_at else 0
    is_target_state = state == attempt.target_state
    if state in {JobState.COMPLETED, JobState.CANCELLED, JobState.DISCARDED}:
        at = attempt.ended_at if is_target_state else attempt.stored_at
        row[JobColumn.FINALIZED_AT] = claimed + _to_microseconds(at - attempt.claimed_at)
    if outcome is not None:
        if outcome.error_entry is not None:
            row[JobColumn.ERRORS] = [*(row[JobColumn.ERRORS] or ()), outcome.error_entry]
        if not outcome.is_final and is_target_state:
            row[JobColumn.ATTEMPT] = outcome.attempt_to_store
            if outcome.seconds_until_due is not None:
                delay = attempt.stored_at - attempt.claimed_at + outcome.seconds_until_due
                row[JobColumn.SCHEDULED_AT] = claimed + _to_microseconds(delay)


def _to_microseconds(seconds: float) -> int:
    return int(seconds * 1e6)


def make_attempt_end_message_for_clients(kind: EventKind, attempt: Attempt) -> EventMessage:
    """Return the message for other clients about an attempt whose result was stored."""
    row = _make_stored_row(attempt)
    times = _make_job_statistics(attempt, row)
    error = ""
    if kind in {EventKind.JOB_FAILED, EventKind.JOB_CANCELLED}:
        errors = JobRow(row).errors
        error = mask_passwords(errors[-1].error)[:ERROR_LENGTH_MAX] if errors else ""
    return _make_job_event_message(
        kind,
        row,
        error=error,
        wait=times.queue_wait.total_seconds(),
        run=times.run.total_seconds(),
        store=times.complete.total_seconds(),
    )


def make_running_job_message(
    kind: FleetEventKind, job: JobRow, progress_text: str | None = None
) -> EventMessage:
    """Return the message for other clients about a running job. For the kind JOB_PROGRESS,
    `progress_text` is the progress as JSON text."""
    message = _make_job_event_message(kind, job.get_encoded_values())
    if progress_text is not None:
        progress = msgspec.json.decode(progress_text, type=JobProgress)
        message.done, message.total = progress.done, progress.total
        message.text = (progress.text or "")[:PROGRESS_TEXT_LENGTH_MAX]
        message.reported_at = None if progress.at is None else encode_timestamp(progress.at)
    return message


def _make_job_event_message(
    kind: EventKind | FleetEventKind,
    row: Sequence[Any],
    *,
    error: str = "",
    wait: float | None = None,
    run: float | None = None,
    store: float | None = None,
) -> EventMessage:
    return EventMessage(
        event=kind.value,
        job_id=row[JobColumn.ID],
        kind=row[JobColumn.KIND],
        queue=row[JobColumn.QUEUE],
        state=row[JobColumn.STATE],
        priority=row[JobColumn.PRIORITY],
        attempt=row[JobColumn.ATTEMPT],
        max_attempts=row[JobColumn.MAX_ATTEMPTS],
        created_at=_to_integer_timestamp(row[JobColumn.CREATED_AT]) or 0,
        scheduled_at=_to_integer_timestamp(row[JobColumn.SCHEDULED_AT]) or 0,
        attempted_at=_to_integer_timestamp(row[JobColumn.ATTEMPTED_AT]),
        finalized_at=_to_integer_timestamp(row[JobColumn.FINALIZED_AT]),
        error=error,
        wait=wait,
        run=run,
        store=store,
    )


def make_job_ended_by_leader_message(kind: EventKind, job: EndedJob, state: str) -> EventMessage:
    """Return the message for other clients about a job that this client has ended as the leader."""
    error = "" if job.error is None else parse_error_entry(job.error).error
    return EventMessage(
        event=kind.value,
        job_id=job.id,
        kind=job.kind,
        queue=job.queue,
        state=state,
        priority=job.priority,
        attempt=job.attempt,
        max_attempts=job.max_attempts,
        created_at=decode_wire_microseconds(job.created_at),
        scheduled_at=decode_wire_microseconds(job.scheduled_at),
        attempted_at=_to_integer_timestamp(job.attempted_at),
        finalized_at=_to_integer_timestamp(job.finalized_at),
        error=mask_passwords(error)[:ERROR_LENGTH_MAX],
    )


def _to_integer_timestamp(timestamp: int | bytes | None) -> int | None:
    return decode_wire_microseconds(timestamp) if isinstance(timestamp, bytes) else timestamp


def make_queue_or_lease_message(event: Event) -> EventMessage:
    """Return the message for other clients about an event of a queue or a lease."""
    lease = event.lease
    if lease is None:
        return EventMessage(event=event.kind.value, queue=event.queue or "")
    return EventMessage(
        event=event.kind.value,
        lease=lease.name,
        use=lease.use.value,
        epoch=lease.epoch,
        acquired_at=encode_timestamp(lease.acquired_at),
        cause="" if lease.cause is None else lease.cause.value,
        reason=mask_passwords(lease.reason or "")[:ERROR_LENGTH_MAX],
    )
