"""The events that a client sends to its subscribers: changes of jobs, queues and leases."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

import msgspec

from riverpy._lifecycle import StopCause
from riverpy.job import JobRow
from riverpy.progress import JobProgress


class EventKind(StrEnum):
    """The kinds of events of jobs and queues. `client.subscribe` takes the kinds to receive."""

    JOB_CANCELLED = "job_cancelled"
    JOB_COMPLETED = "job_completed"
    JOB_FAILED = "job_failed"
    """An attempt failed. The job is then discarded, retryable or, if its next attempt is due within
    5 seconds, available."""
    JOB_INTERRUPTED = "job_interrupted"
    """The attempt was ended because the client stopped. The attempt does not count towards
    `max_attempts`."""
    JOB_SNOOZED = "job_snoozed"
    QUEUE_PAUSED = "queue_paused"
    QUEUE_RESUMED = "queue_resumed"


class FleetEventKind(StrEnum):
    """The kinds of events that only a subscription with `fleet=True` can receive. It can also
    receive the kinds of `EventKind` and `LeaseEventKind`."""

    JOB_STARTED = "job_started"
    """An attempt started."""
    JOB_PROGRESS = "job_progress"
    """A running job has reported progress. Each job has at most one such event per second."""
    JOB_OUTPUT_SAVED = "job_output_saved"
    """A running job has stored its output with `job.save_output`. The event does not contain the
    output: read it with `client.job_get`."""


class JobStatistics(msgspec.Struct, frozen=True):
    """The durations of one attempt. No duration is negative."""

    queue_wait: timedelta
    """The time from the job's due time to the start of the attempt."""
    run: timedelta
    """The time from the start to the end of the attempt."""
    complete: timedelta
    """The time from the end of the attempt to the moment when its result was stored."""


class LeaseEventKind(StrEnum):
    """The kinds of events of leases. They are sent for leases of `client.lease`, of singletons and
    of leaders.

    A term is the time from the acquisition of a lease to its end. The events of a term come in this
    order: ACQUIRED, perhaps FAILED, then either LOST or RELEASED."""

    ACQUIRED = "lease_acquired"
    """The client acquired a lease: a term began."""
    FAILED = "lease_failed"
    """The code that runs under the lease raised an error, so the term ends."""
    LOST = "lease_lost"
    """The term ended without a release, because the client could not renew or release the lease in
    time, or because another process may hold it. The code under the lease may still be stopping."""
    RELEASED = "lease_released"
    """The code under the lease ended, and the client released the lease. Other processes can
    acquire it."""


class LeaseUse(StrEnum):
    """What a lease is used for."""

    LEASE = "lease"
    """An `async with client.lease(…)` block."""
    SINGLETON = "singleton"
    """A function that is registered with `client.singleton`."""
    LEADER = "leader"
    """The leader of a leader domain, or the client that maintains the schema."""


class LeaseChange(msgspec.Struct, frozen=True):
    """What happened to a lease that the client acquired."""

    name: str
    """The name of the lease. The lease of a leader has the name of its leader domain. The lease for
    the maintenance of the schema has the name `@schema`."""
    use: LeaseUse
    epoch: int
    """The number of the term (the time from the acquisition of the lease to its end). It is higher
    than the number of every earlier term of this lease."""
    acquired_at: datetime
    """The start of the term, by the server's clock."""
    cause: StopCause | None = None
    """Why the client ended the term. None: the term has not ended, or the code under the lease has
    ended by itself."""
    reason: str | None = None
    """Why the term ended, as a text for people. None: the term has not ended."""
    error: BaseException | None = None
    """The error that the code raised, for the kind FAILED; None for the other kinds."""


class Event(msgspec.Struct, frozen=True):
    """An event of a job (with `job` and `statistics`), of a queue (with `queue`) or of a lease
    (with `lease`). Exactly one of `job`, `queue` and `lease` is set."""

    kind: EventKind | LeaseEventKind | FleetEventKind
    job: JobRow | None = None
    """The job after its result was stored.

    An event of `subscribe(…, fleet=True)` has only a part of the job: id, kind, queue, state,
    priority, attempt, max_attempts, created_at, scheduled_at, attempted_at and finalized_at.
    `errors` has only the newest error, cut to 500 characters and without its trace. Any other
    attribute, such as `encoded_args` or `metadata`, raises `ClientStateError`: read the job with
    `client.job_get`."""
    queue: str | None = None
    statistics: JobStatistics | None = None
    """The durations of an attempt that has ended."""
    lease: LeaseChange | None = None
    client_id: str | None = None
    """The id of the client that sent the event. None without `fleet=True`."""
    progress: JobProgress | None = None
    """The progress that the job reported, for the kind JOB_PROGRESS. Its text is cut to 500
    characters."""
    at: datetime | None = None
    """The time of the event, by the clock of the client that sent it. None without `fleet=True`."""


class JobChangeKind(StrEnum):
    """What has changed in a job that `client.watch` watches.

    If several things have changed since the last item of the watch, the kind is the first of these:
    STATE, ATTEMPT, OUTPUT, PROGRESS."""

    PRESENT = "present"
    """The first item of a watch: the job as it was when the watch began."""
    STATE = "state"
    """The state has changed."""
    ATTEMPT = "attempt"
    """The number of the attempt has changed, and the state is the same as before."""
    OUTPUT = "output"
    """The output was stored or has changed."""
    PROGRESS = "progress"
    """The job has reported progress."""


class JobChange(msgspec.Struct, frozen=True):
    """One item of `client.watch`: the watched job when the watch began, or after a change."""

    kind: JobChangeKind
    """What has changed. `JobChangeKind` says which kind is chosen if several things have
    changed."""
    job: JobRow
    """The whole row after the change."""
    progress: JobProgress | None
    """The last progress that the job has reported; None: none yet. It is set for every kind."""
    output: Any
    """The output of the job so far, as decoded JSON; None: no output. It is set for every kind."""


class LeadershipChange(msgspec.Struct, frozen=True):
    """A change of a client's leadership: the client became leader, or is no longer leader.

    The first item of `client.leadership` is the client's last change before the subscription. If
    there was none, `is_leader` of this item is False, and most other fields are None.
    """

    is_leader: bool
    """Whether the client is the leader now."""
    leader_id: str
    """The id of the client that this item is about."""
    elected_at: datetime | None = None
    """The start of the client's term, i.e. the time at which it became leader, by the server's
    clock. None: the client has never been leader."""
    cause: StopCause | None = None
    """The reason why the client is no longer leader. None: the client is the leader, or has never
    been leader."""
    domain: str = "default"
    """The leader domain of the client. Each domain has its own leader."""
    epoch: int | None = None
    """The number of the term (one client's time as leader). It is higher than the number of every
    earlier term. None: the domain is `default`, whose terms have no number, or the client has never
    been leader."""
    event: LeaseEventKind | None = None
    """How the leadership changed. ACQUIRED: the client became leader. LOST: its lease was lost.
    FAILED: its maintenance failed. RELEASED: its term ended in any other way, for example because
    the client stopped. None: the client has never been leader.

    After FAILED and RELEASED, the client first stops its maintenance and then releases the
    lease."""
    reason: str | None = None
    """Why the client is no longer leader, as a text for people."""
    error: BaseException | None = None
    """The error of the maintenance, for the event FAILED; None for other events."""
