"""EventLine: an event as a JSON object, for the health server, commands and web pages.

The objects do not contain the args, tags and metadata of jobs, except the progress. So a reader
needs no permission to read the data of jobs.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from riverpy._dsn import mask_passwords
from riverpy._fleet.messages import ERROR_LENGTH_MAX
from riverpy._postgres.driver import describe_error
from riverpy.events import EventKind
from riverpy.progress import JobProgress

if TYPE_CHECKING:
    from enum import StrEnum

    from riverpy.events import Event, LeaseChange
    from riverpy.job import JobRow


class EventLine(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An event of a job, a queue or a lease, as a JSON object. The args, tags and metadata of the
    job (except its progress) are left out."""

    event: str
    """The kind of event. `dropped` means that events were dropped because there were too many."""
    at: datetime
    """The time of the event, by the clock of the client that sent it."""
    queue: str = ""
    job_id: int = 0
    kind: str = ""
    state: str = ""
    attempt: int = 0
    max_attempts: int = 0
    wait: float | None = None
    """The time in seconds from when the job was due until the attempt started."""
    run: float | None = None
    """The run time of the attempt, in seconds."""
    lease: str = ""
    use: str = ""
    """The use of the lease: `lease`, `singleton` or `leader`."""
    epoch: int = 0
    reason: str = ""
    """Why the client no longer holds the lease."""
    error: str = ""
    """The first `ERROR_LENGTH_MAX` characters of an error. For a job, it is the error of the failed
    or cancelled attempt. For a lease, it is the error that the code under the lease raised.
    Passwords in URLs are masked."""
    dropped: int = 0
    """The number of dropped events."""
    client: str = ""
    """The id of the client that sent the event. Empty: this client."""
    progress: JobProgress | None = None
    """The progress of the job. Only the event `job_progress` has it."""


def build_event_line(event: Event) -> EventLine:
    """Convert an event to an EventLine."""
    job, times = event.job, event.statistics
    at, client = event.at or datetime.now(UTC), event.client_id or ""
    if event.lease is not None:
        return _build_lease_line(event.kind, event.lease, at, client)
    if job is None:
        return EventLine(event=event.kind.value, at=at, client=client, queue=event.queue or "")
    return EventLine(
        event=event.kind.value,
        at=at,
        client=client,
        queue=job.queue,
        job_id=job.id,
        kind=job.kind,
        state=job.state,
        attempt=job.attempt,
        max_attempts=job.max_attempts,
        wait=None if times is None else round(times.queue_wait.total_seconds(), 6),
        run=None if times is None else round(times.run.total_seconds(), 6),
        error=_job_error_text(event.kind, job),
        progress=event.progress,
    )


def build_dropped_events_line(count: int) -> EventLine:
    """Return an EventLine that reports the number of dropped events."""
    return EventLine(event="dropped", at=datetime.now(UTC), dropped=count)


def _build_lease_line(kind: StrEnum, lease: LeaseChange, at: datetime, client: str) -> EventLine:
    error = "" if lease.error is None else describe_error(lease.error)
    return EventLine(
        event=kind.value,
        at=at,
        client=client,
        lease=lease.name,
        use=lease.use.value,
        epoch=lease.epoch,
        reason=lease.reason or "",
        error=mask_passwords(error)[:ERROR_LENGTH_MAX],
    )


def _job_error_text(event_kind: StrEnum, job: JobRow) -> str:
    if event_kind not in {EventKind.JOB_FAILED, EventKind.JOB_CANCELLED} or not job.errors:
        return ""
    return mask_passwords(job.errors[-1].error)[:ERROR_LENGTH_MAX]
