"""The options and results of inserting jobs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from riverpy.job import JobArgs, JobRow, JobState, RawArgs

MAX_ATTEMPTS_DEFAULT = 25
MAX_ATTEMPTS_MAX = 32_767
INSERT_DURATION_MAX = timedelta(days=36_500)
"""The largest value of `expires_in` and `max_wait`."""
PRIORITY_DEFAULT = 1
PRIORITY_MAX = 4
QUEUE_DEFAULT = "default"
UNIQUE_STATES_DEFAULT = frozenset(JobState) - {JobState.CANCELLED, JobState.DISCARDED}
UNIQUE_STATES_REQUIRED = (
    JobState.AVAILABLE,
    JobState.PENDING,
    JobState.RUNNING,
    JobState.SCHEDULED,
)


class Unique:
    """Marks a field of an args class as part of the unique key, as in `user_id: Annotated[int,
    riverpy.Unique]`.

    With `UniqueOpts(by_args=True)`, only the marked fields are part of the key. If no field is
    marked, all fields are. Without `by_args` the mark has no effect.
    """


class UniqueOpts(msgspec.Struct, frozen=True, kw_only=True):
    """Options that make a job unique. They select the properties to compare: the job is a duplicate
    if these properties are the same in an existing job.

    A duplicate is not inserted. The insert returns the existing job instead.
    """

    by_args: bool = False
    """Compare the args. If fields of the args class are marked `Unique`, compare only these.
    Default False."""
    by_period: timedelta | None = None
    """Compare the time periods to which the jobs belong. The value is the length of a period, at
    least 1 second. All periods have this length, and the first one starts at 0001-01-01 00:00 UTC.
    A job belongs to the period of its `scheduled_at` or, if that is not set, of the time of the
    insert. Default None: periods are not compared."""
    by_queue: bool = False
    """Compare the queue. Default False."""
    by_state: Sequence[JobState] | None = None
    """The states in which this job keeps its unique key after its insert. While this job is in one
    of these states, a later job with the same key is its duplicate. The states must include
    available, pending, running and scheduled. Default: all states except cancelled and
    discarded."""
    exclude_kind: bool = False
    """Compare with jobs of all kinds, not only with jobs of the same kind. Requires by_args,
    by_queue or by_period. Default False."""


class ReplaceOpts(msgspec.Struct, frozen=True, kw_only=True):
    """Selects the values of the existing job that the insert of a duplicate replaces. At least one
    of the bool fields must be True.

    The existing job is changed only if it is available, pending, scheduled or retryable. It keeps
    its id, its attempts and its queue.
    """

    args: bool = True
    """Replace the args. Default True."""
    scheduled_at: bool = True
    """Replace the job's `scheduled_at` and `expires_in`. If the insert sets no `scheduled_at`, the
    existing job becomes due now. A pending job stays pending. Default True."""
    priority: bool = False
    """Replace the priority. Default False."""
    metadata: bool = False
    """Replace the metadata, except for the keys that River and riverpy use themselves. Default
    False."""
    max_wait: timedelta | None = None
    """How far duplicates can postpone the existing job: its `scheduled_at` is at most this long
    after its `created_at`. More than 0, at most 100 years. Needs `ReplaceOpts.scheduled_at`.
    Default None: no limit."""


class InsertOpts(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one insert. Precedence: this insert, then `insert_opts` of the args class, then
    the client, then the default. None means not set."""

    expires_in: timedelta | None = None
    """How long after the insert the job expires. From then on no attempt starts, and the job is
    cancelled with the error `JobCancelError: expired`. A running attempt continues. More than 0, at
    most 100 years, and longer than the time until `scheduled_at`. Default None: the job does not
    expire."""
    max_attempts: int | None = None
    """How many attempts the job has: 1 to 32,767. Default 25."""
    metadata: dict[str, Any] | None = None
    """A JSON object that is stored with the job. Default empty. An args class cannot set it."""
    notify_end: bool = False
    """Send a notification when the job ends, so that a `client.wait` for the job returns as soon as
    the job has ended. Without this option, `client.wait` may return up to a second later. If the
    worker stores the results of several such jobs together, it sends one notification for up to 200
    of them. `insert_and_wait` sets this option. Default False."""
    pending: bool = False
    """Insert the job as `pending`. It does not run until its state is changed, for example with
    `job_retry`. Default False. An args class cannot set it."""
    priority: int | None = None
    """The priority, 1 (worked first) to 4 (worked last). Default 1."""
    queue: str | None = None
    """The queue of the job. Default `default`."""
    replace: ReplaceOpts | None = None
    """The values to replace in the existing job if this job is a duplicate. Needs `unique_opts`.
    `insert_many_fast` refuses it. Default None: the existing job is not changed."""
    scheduled_at: datetime | None = None
    """The time at which the job is due, with a time zone. If it is set, even to a past time, the
    job is inserted as `scheduled`, and the leader makes it available. Default None: the job is
    available at once."""
    tags: Sequence[str] | None = None
    """Tags of the job. Each has 3 to 255 characters: letters, digits, `_` and `-`. Default none. An
    empty sequence overrides the tags of the args class."""
    unique_opts: UniqueOpts | None = None
    """The options that make the job unique. Default None: the job is not unique."""


class InsertManyParams(msgspec.Struct, frozen=True):
    """One job of `insert_many`."""

    args: JobArgs | RawArgs
    opts: InsertOpts | None = None


class JobInsertParams(msgspec.Struct, kw_only=True):
    """The values of a job before the insert. Hooks and middleware receive them and may change them.
    Changed values are checked like the options of an insert."""

    args: JobArgs | RawArgs
    """The args that the caller passed. They are not stored: the database stores `encoded_args`."""
    encoded_args: str
    """The args as JSON text, which is stored. If a hook or middleware changes this text, the unique
    key stays the same."""
    kind: str
    max_attempts: int
    metadata: dict[str, Any]
    priority: int
    queue: str
    scheduled_at: datetime | None
    """The time at which the job is due; None: the server's current time."""
    state: JobState
    """The state in which the job is inserted: available, pending or scheduled."""
    tags: list[str]
    unique_key: bytes | None
    """The unique key, 32 bytes; None: the job is not unique. Hooks can change a key, but not add
    one."""


class InsertResult(msgspec.Struct, frozen=True):
    """The result of inserting one job."""

    job: JobRow
    """The inserted job or, for a duplicate, the existing one."""
    unique_skipped_as_duplicate: bool
    """Whether the job was not inserted, because it is a duplicate of an existing job or of an
    earlier job in the batch."""
    is_replaced: bool = False
    """Whether the existing job was changed. This happens only if `replace` was set and the existing
    job was available, pending, scheduled or retryable. If this is False although `replace` was set,
    `job.state` shows why."""
