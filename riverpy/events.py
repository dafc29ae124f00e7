"""What a client tells its subscribers."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from riverpy._lifecycle import StopCause
    from riverpy.job import JobRow


class EventKind(StrEnum):
    """The kinds of events. A subscriber names those it wants."""

    JOB_CANCELLED = "job_cancelled"
    JOB_COMPLETED = "job_completed"
    JOB_FAILED = "job_failed"
    """An attempt failed: the job is retryable, available again after a short delay, or
    discarded."""
    JOB_INTERRUPTED = "job_interrupted"
    """A stop ended the attempt; it does not count."""
    JOB_SNOOZED = "job_snoozed"
    QUEUE_PAUSED = "queue_paused"
    QUEUE_RESUMED = "queue_resumed"


class JobStatistics(msgspec.Struct, frozen=True):
    """How long one attempt took. No value is negative."""

    queue_wait: timedelta
    """From the time the job was due to the start of the attempt."""
    run: timedelta
    """The attempt itself."""
    complete: timedelta
    """From its end until its result was stored."""


class Event(msgspec.Struct, frozen=True):
    """One event: of a job (`job` and `statistics` are set) or of a queue (`queue` is set)."""

    kind: EventKind
    job: JobRow | None = None
    """The job after its result was stored."""
    queue: str | None = None
    statistics: JobStatistics | None = None


class LeadershipChange(msgspec.Struct, frozen=True):
    """A client begins or ceases to lead."""

    is_leader: bool
    """Whether it leads from now on."""
    leader_id: str
    """The client's id."""
    elected_at: datetime | None = None
    """When the term began that begins or ends, by the server's clock. None: it has not led yet."""
    cause: StopCause | None = None
    """Why the term ended; None if it did not."""
    domain: str = "default"
    """The leader domain that it leads."""
    epoch: int | None = None
    """The number of the term, higher than any before; None in the domain `default`, whose terms
    have none, and if it has not led yet."""
