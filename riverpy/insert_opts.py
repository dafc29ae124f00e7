"""What may be said about a job when it is inserted, and what comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from riverpy.job import JobState

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from riverpy.job import JobArgs, JobRow, RawArgs

MAX_ATTEMPTS_DEFAULT = 25
MAX_ATTEMPTS_MAX = 32_767
PRIORITY_DEFAULT = 1
PRIORITY_MAX = 4
QUEUE_DEFAULT = "default"
UNIQUE_STATES_DEFAULT = frozenset(
    {
        JobState.AVAILABLE,
        JobState.COMPLETED,
        JobState.PENDING,
        JobState.RETRYABLE,
        JobState.RUNNING,
        JobState.SCHEDULED,
    }
)
UNIQUE_STATES_REQUIRED = (
    JobState.AVAILABLE,
    JobState.PENDING,
    JobState.RUNNING,
    JobState.SCHEDULED,
)


class Unique:
    """Marks a field of an args class as part of the unique key: `user_id: Annotated[int,
    riverpy.Unique]`.

    With `UniqueOpts(by_args=True)` only the marked fields count; with none marked, all args do.
    The mark alone makes no job unique.
    """


class UniqueOpts(msgspec.Struct, frozen=True, kw_only=True):
    """When a job is a duplicate of one that exists. All that is chosen must be equal.

    A duplicate is not inserted; the existing job is returned in its place.
    """

    by_args: bool = False
    """The args, or those of their fields that are marked `Unique`."""
    by_period: timedelta | None = None
    """The same period of this length, at least one second, counted from the year 1 in UTC. The
    period of a job is that of its `scheduled_at`, or of the insert if it has none."""
    by_queue: bool = False
    """The queue."""
    by_state: Sequence[JobState] | None = None
    """The states in which a job holds its key. Default: all but cancelled and discarded.
    Must have available, pending, running and scheduled."""
    exclude_kind: bool = False
    """Jobs of other kinds count too. Needs by_args, by_queue or by_period beside it."""


class InsertOpts(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one insert. None means: as the args class says, else the client, else River's
    default."""

    max_attempts: int | None = None
    """1 to 32767 attempts. Default 25."""
    metadata: dict[str, Any] | None = None
    """A JSON object stored with the job. Default empty. An args class cannot set it."""
    pending: bool = False
    """Insert as `pending`: not worked until somebody changes the state. An args class cannot set
    it."""
    priority: int | None = None
    """1 (first) to 4 (last). Default 1."""
    queue: str | None = None
    """Default `default`."""
    scheduled_at: datetime | None = None
    """When the job is due; must have a time zone. Given, even in the past, the job starts as
    `scheduled` and waits for the leader's scheduler. Default now."""
    tags: Sequence[str] | None = None
    """Default none. An empty sequence overrides the tags of the args class."""
    unique_opts: UniqueOpts | None = None
    """Default: not unique."""


@runtime_checkable
class JobArgsWithInsertOpts(Protocol):
    """Args that bring their own defaults for inserting them."""

    def insert_opts(self) -> InsertOpts:
        """The defaults for this job; options given to the insert win."""
        ...


class InsertManyParams(msgspec.Struct, frozen=True):
    """One job of `insert_many`."""

    args: JobArgs | RawArgs
    opts: InsertOpts | None = None


class JobInsertParams(msgspec.Struct, kw_only=True):
    """A job just before it is sent, as hooks and middleware of inserts see it. What they set is
    checked as the options of an insert are."""

    args: JobArgs | RawArgs
    """As they were given to the insert; what is stored is `encoded_args`."""
    encoded_args: str
    """The JSON text that is stored. A change does not change the unique key."""
    kind: str
    max_attempts: int
    metadata: dict[str, Any]
    priority: int
    queue: str
    scheduled_at: datetime | None
    """None: the server's now."""
    state: JobState
    """Available, pending or scheduled."""
    tags: list[str]
    unique_key: bytes | None
    """32 bytes; None: the job is not unique, and stays so."""


class InsertResult(msgspec.Struct, frozen=True):
    """What became of one inserted job."""

    job: JobRow
    """The inserted job or, for a duplicate, the one that exists."""
    unique_skipped_as_duplicate: bool
    """Whether a job with the same unique key existed (or came earlier in the batch), so that
    nothing was inserted."""
