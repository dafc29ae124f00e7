"""Events: the events that a client publishes to its subscribers."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

import msgspec

from riverpy._lifecycle import StopCause
from riverpy.job import JobRow
from riverpy.progress import JobProgress


class EventKind(StrEnum):
    """The kinds of events of jobs and queues. A subscriber chooses some of them."""

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


class FleetEventKind(StrEnum):
    """The kinds of events that only `client.subscribe(…, fleet=True)` has, beside those of
    `EventKind` and `LeaseEventKind`."""

    JOB_STARTED = "job_started"
    """An attempt started."""
    JOB_PROGRESS = "job_progress"
    """A running job has reported progress. At most one event a second and job."""
    JOB_OUTPUT_SAVED = "job_output_saved"
    """A running job has stored its output with `job.save_output`. The event does not have the
    output: read it with `client.job_get`."""


class JobStatistics(msgspec.Struct, frozen=True):
    """The durations of one attempt. No duration is negative."""

    queue_wait: timedelta
    """The time from the moment at which the job was due to the start of the attempt."""
    run: timedelta
    """The time from the start to the end of the attempt."""
    complete: timedelta
    """The time from the end of the attempt until the result was stored."""


class LeaseEventKind(StrEnum):
    """The kinds of events of leases: those of `client.lease`, of singletons, and of leaders.

    The events of each term, from the acquisition of a lease to its end, come in this order:
    ACQUIRED, perhaps FAILED, and then either LOST or RELEASED."""

    ACQUIRED = "lease_acquired"
    """The client acquired a lease: a term began."""
    FAILED = "lease_failed"
    """The code under the lease raised an error, and the term ends."""
    LOST = "lease_lost"
    """The term ended without a release: the client could not renew or release the lease in time, or
    another process may hold it. The code under the lease may still be stopping."""
    RELEASED = "lease_released"
    """The term ended with a release. The code under the lease has ended, and other processes can
    acquire the lease."""


class LeaseUse(StrEnum):
    """What a lease is used for."""

    LEASE = "lease"
    """A block of `client.lease`."""
    SINGLETON = "singleton"
    """The function of `client.singleton`."""
    LEADER = "leader"
    """The leader of a domain, or the maintenance of the schema."""


class LeaseChange(msgspec.Struct, frozen=True):
    """What happened to a lease of the client."""

    name: str
    """The name of the lease. For a leader: the leader domain, or `@schema` for the lease of the
    schema's maintenance."""
    use: LeaseUse
    epoch: int
    """The number of the term, from the acquisition of the lease to its end. It is higher than the
    number of every earlier term of this lease."""
    acquired_at: datetime
    """The start of the term, by the server's clock."""
    cause: StopCause | None = None
    """Why the client ended the term. None: the term has not ended, or the code under the lease has
    ended by itself."""
    reason: str | None = None
    """Why the term ended, as a text for people. None: it has not ended."""
    error: BaseException | None = None
    """The error of FAILED; None for the other kinds."""


class Event(msgspec.Struct, frozen=True):
    """An event of a job (with `job` and `statistics`), of a queue (with `queue`) or of a lease
    (with `lease`). Exactly one of `job`, `queue` and `lease` is set."""

    kind: EventKind | LeaseEventKind | FleetEventKind
    job: JobRow | None = None
    """The job after its result was stored.

    In an event of the fleet, the job has the columns id, kind, queue, state, priority, attempt,
    max_attempts, created_at, scheduled_at, attempted_at and finalized_at. `errors` has only the
    newest error, cut to 500 characters and without its trace. All other attributes, such as
    `encoded_args` and `metadata`, raise `ClientStateError`: read the job with `client.job_get`."""
    queue: str | None = None
    statistics: JobStatistics | None = None
    """The durations of an attempt that has ended."""
    lease: LeaseChange | None = None
    client_id: str | None = None
    """In an event of the fleet: the id of the client that sent it. None in other events."""
    progress: JobProgress | None = None
    """The progress of JOB_PROGRESS. Its text is cut to 500 characters."""
    at: datetime | None = None
    """In an event of the fleet: its time, by the clock of the client that sent it. None in other
    events."""


class JobChangeKind(StrEnum):
    """What has changed in the row of a watched job. If several things have changed since the last
    item, the kind is the first of STATE, ATTEMPT, OUTPUT and PROGRESS."""

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
    """A change of a job that `client.watch` has found."""

    kind: JobChangeKind
    """The most important change."""
    job: JobRow
    """The whole row after the change."""
    progress: JobProgress | None
    """The last progress of the job, whatever the kind of change is; None: it has reported none."""
    output: Any
    """The output of the job so far, as decoded JSON; None: no output. Every change has it, whatever
    its kind."""


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
    event: LeaseEventKind | None = None
    """How the leadership changed: ACQUIRED when the client became leader; LOST, FAILED (its
    maintenance failed) or RELEASED (any other end) when it is no longer leader. At FAILED and
    RELEASED the maintenance still has to stop before the lease is released. None: the client has
    not been leader."""
    reason: str | None = None
    """Why the client is no longer leader, as a text for people."""
    error: BaseException | None = None
    """The error of FAILED; None for the other kinds."""
