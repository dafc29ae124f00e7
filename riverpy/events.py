"""Events: the events that a client publishes to its subscribers."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from riverpy._lifecycle import StopCause
    from riverpy.job import JobRow


class EventKind(StrEnum):
    """The kinds of events. A subscriber chooses some of them."""

    JOB_CANCELLED = "job_cancelled"
    JOB_COMPLETED = "job_completed"
    JOB_FAILED = "job_failed"
    """An attempt failed. The job is retryable, available again after a short delay, or
    discarded."""
    JOB_INTERRUPTED = "job_interrupted"
    """A stop ended the attempt. The attempt does not count."""
    JOB_SNOOZED = "job_snoozed"
    QUEUE_PAUSED = "queue_paused"
    QUEUE_RESUMED = "queue_resumed"


class JobStatistics(msgspec.Struct, frozen=True):
    """The durations of one attempt. No duration is negative."""

    queue_wait: timedelta
    """The time from the moment at which the job was due to the start of the attempt."""
    run: timedelta
    """The time from the start to the end of the attempt."""
    complete: timedelta
    """The time from the end of the attempt until the result was stored."""


class Event(msgspec.Struct, frozen=True):
    """An event of a job (with `job` and `statistics`) or of a queue (with `queue`)."""

    kind: EventKind
    job: JobRow | None = None
    """The job after its result was stored."""
    queue: str | None = None
    statistics: JobStatistics | None = None


class LeadershipChange(msgspec.Struct, frozen=True):
    """A client became leader, or is no longer leader."""

    is_leader: bool
    """Whether the client is the leader now."""
    leader_id: str
    """The client's id."""
    elected_at: datetime | None = None
    """The time at which the client became leader (the start of its term), by the server's clock;
    None: the client has not been leader."""
    cause: StopCause | None = None
    """The reason why the client is no longer leader; None: it is the leader, or has not been
    leader."""
    domain: str = "default"
    """The leader domain."""
    epoch: int | None = None
    """The number of the term (the time as leader). It is higher than the number of every earlier
    term; None: the domain is `default`, whose terms have no number, or the client has not been
    leader."""
