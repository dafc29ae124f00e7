"""Jobs: their states, their args, and the rows of `river_job`."""

from __future__ import annotations

import asyncio
import threading
from enum import StrEnum
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Protocol,
    TypeVar,
    overload,
    runtime_checkable,
)

import msgspec

from riverpy import _json
from riverpy._attempt_errors import AttemptError, iterate_error_entries, parse_error_entry
from riverpy._timestamps import PG_EPOCH, decode_timestamp
from riverpy.attempt_log import AttemptLog  # noqa: TC001 (typing.get_type_hints reads it)
from riverpy.errors import ArgsError, ClientStateError
from riverpy.progress import decode_progress, make_progress
from riverpy.steps import StepMethods, make_event_loop_required_error

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from datetime import datetime

    from riverpy._postgres.sessions.protocols import BlockingTransaction, CallerTransaction
    from riverpy.progress import JobProgress

ERRORS_PER_JOB_MAX = 100
"""The maximum number of errors in a job's row. The row keeps the first error and the newest ones.
The SQL statements use the same limit."""
OUTPUT_SIZE_MAX = 32 * 1024 * 1024
"""The maximum number of bytes of a recorded output. River has the same limit."""
OUTPUT_METADATA_KEY = "output"
"""The metadata key of the output, as in River."""
_RESERVED_METADATA_KEYS = {"cancel_attempted_at", "river:rescue_count"}

ArgsT_co = TypeVar("ArgsT_co", covariant=True)


class JobState(StrEnum):
    """The states of a job, as in the database."""

    AVAILABLE = "available"
    CANCELLED = "cancelled"
    COMPLETED = "completed"
    DISCARDED = "discarded"
    PENDING = "pending"
    RETRYABLE = "retryable"
    RUNNING = "running"
    SCHEDULED = "scheduled"


@runtime_checkable
class JobArgs(Protocol):
    """The interface of args classes. An args class has the class variable `kind`, and is a msgspec
    Struct, a dataclass, a pydantic model or a subclass of dict.

    Two members are optional. `kind_aliases: ClassVar[Sequence[str]]` lists older names of the kind,
    which the worker accepts too. `def insert_opts(self) -> InsertOpts` returns the default options
    for an insert of the job.
    """

    kind: ClassVar[str]


class RawArgs(msgspec.Struct, frozen=True):
    """The kind of a job and its args as JSON text, for inserts without an args class.

    The unique key depends on the order of the keys and the format of the numbers in this text."""

    kind: str
    json: str


class JobColumn:
    """The position of each column in a job row. Every SQL statement that returns jobs has its
    columns in this order."""

    ID = 0
    ARGS = 1
    ATTEMPT = 2
    ATTEMPTED_AT = 3
    ATTEMPTED_BY = 4
    CREATED_AT = 5
    ERRORS = 6
    FINALIZED_AT = 7
    KIND = 8
    MAX_ATTEMPTS = 9
    METADATA = 10
    PRIORITY = 11
    QUEUE = 12
    STATE = 13
    SCHEDULED_AT = 14
    TAGS = 15
    UNIQUE_KEY = 16
    UNIQUE_STATES = 17


# The job state that each bit of the column `unique_states` stands for, beginning with the lowest
# bit.
UNIQUE_STATE_BY_BIT: tuple[JobState, ...] = tuple(JobState)


class JobRow:
    """A row of `river_job`. Each property decodes its column when it is read.

    The object keeps the encoded values in the order of `JobColumn`: timestamps are microseconds
    since 2000, and JSON is text.
    """

    __slots__ = ("_row",)

    def __init__(self, row: Sequence[Any]) -> None:
        self._row = row

    def __repr__(self) -> str:
        state = get_raw_state(self)
        return f"<{type(self).__name__} {self.id} {self.kind} {state} attempt {self.attempt}>"

    def get_encoded_values(self) -> Sequence[Any]:
        """Return the encoded values of the row, in the order of `JobColumn`."""
        return self._row

    @property
    def id(self) -> int:
        """The number of the job, assigned by the database."""
        return self._row[JobColumn.ID]

    @property
    def encoded_args(self) -> str:
        """The args as JSON text, formatted by PostgreSQL."""
        return self._row[JobColumn.ARGS]

    @property
    def attempt(self) -> int:
        """The number of the running or the last attempt; 0: no attempt has started."""
        return self._row[JobColumn.ATTEMPT]

    @property
    def attempted_at(self) -> datetime | None:
        """The time of the last claim; None: the job was not claimed yet."""
        return decode_timestamp(self._row[JobColumn.ATTEMPTED_AT])

    @property
    def attempted_by(self) -> list[str]:
        """The ids of the clients that claimed the job, the newest last; at most 100."""
        return list(self.get_encoded_values()[JobColumn.ATTEMPTED_BY] or ())

    @property
    def created_at(self) -> datetime:
        """The time of the insert."""
        return decode_timestamp(self._row[JobColumn.CREATED_AT]) or PG_EPOCH

    @property
    def errors(self) -> list[AttemptError]:
        """The errors of earlier attempts, the oldest first. For entries that another program has
        stored in an unexpected form, see `AttemptError`."""
        return [
            parse_error_entry(text) for text in iterate_error_entries(self._row[JobColumn.ERRORS])
        ]

    @property
    def error_count(self) -> int:
        """The number of failed attempts so far. It also counts errors that the row no longer
        keeps."""
        kept = len(self._row[JobColumn.ERRORS] or ())
        if kept < ERRORS_PER_JOB_MAX:
            return kept
        dropped = self.metadata.get("riverpy:errors_dropped")
        return kept + dropped if isinstance(dropped, int) and dropped > 0 else kept

    @property
    def finalized_at(self) -> datetime | None:
        """The time at which the job was completed, cancelled or discarded; None: it has no final
        state yet."""
        return decode_timestamp(self._row[JobColumn.FINALIZED_AT])

    @property
    def kind(self) -> str:
        """The kind, which selects the worker."""
        return self._row[JobColumn.KIND]

    @property
    def max_attempts(self) -> int:
        """The number of failed attempts after which the job is discarded."""
        return self._row[JobColumn.MAX_ATTEMPTS]

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata, decoded at each read. Empty if the column does not contain a JSON
        object, or if Python cannot decode the object."""
        try:
            return msgspec.json.decode(self._row[JobColumn.METADATA], type=dict[str, Any])
        except (msgspec.ValidationError, RecursionError):
            return {}

    @property
    def output(self) -> Any:
        """The recorded output, or None."""
        return self.metadata.get(OUTPUT_METADATA_KEY)

    @property
    def last_progress(self) -> JobProgress | None:
        """The newest progress that the row contains; None: the job has reported no progress."""
        return decode_progress(self._row[JobColumn.METADATA])

    @property
    def priority(self) -> int:
        """The priority, from 1 (worked first) to 4 (worked last)."""
        return self._row[JobColumn.PRIORITY]

    @property
    def queue(self) -> str:
        """The queue of the job."""
        return self._row[JobColumn.QUEUE]

    @property
    def state(self) -> JobState:
        """The state when the row was read.

        Raises:
            ValueError: a newer version of River has stored a state that this version of riverpy
                does not know.
        """
        return JobState(self._row[JobColumn.STATE])

    @property
    def scheduled_at(self) -> datetime:
        """The time at which the job is due."""
        return decode_timestamp(self._row[JobColumn.SCHEDULED_AT]) or PG_EPOCH

    @property
    def tags(self) -> list[str]:
        """The tags of the job, in the order in which the insert listed them."""
        return list(self._row[JobColumn.TAGS] or ())

    @property
    def unique_key(self) -> bytes | None:
        """The unique key, 32 bytes; None: the job is not unique."""
        return self._row[JobColumn.UNIQUE_KEY]

    @property
    def unique_states(self) -> list[JobState] | None:
        """The states in which the job holds its unique key; None: the job is not unique."""
        mask: int | None = self._row[JobColumn.UNIQUE_STATES]
        if mask is None:
            return None
        return [state for bit, state in enumerate(UNIQUE_STATE_BY_BIT) if mask >> bit & 1]


def get_raw_state(job: JobRow) -> str:
    """Return the state of a job as the database stores it. It may be a state that is not in
    `JobState`, if a newer version of River has stored it."""
    return job.get_encoded_values()[JobColumn.STATE]


class CancelFlag:
    """A flag that shows a blocking job that its attempt is cancelled: by the timeout, by
    `job_cancel`, or by a hard stop of the client. The flag is never reset. Any thread may use
    it."""

    __slots__ = ("_event",)

    def __init__(self, event: threading.Event) -> None:
        """Create the flag. riverpy sets `event` when the attempt is cancelled."""
        self._event = event

    def is_set(self) -> bool:
        """Whether the attempt was cancelled."""
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the attempt is cancelled or the timeout expires. Return whether the attempt
        was cancelled.

        Args:
            timeout: seconds to wait at most; None: no limit.

        Raises:
            ClientStateError: the calling thread runs an event loop, which this call would block.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._event.wait(timeout)
        raise ClientStateError(
            "job.cancelled.wait() would block the event loop: an async job gets a CancelledError "
            "where it awaits"
        )


_cancelled_event_lock = threading.Lock()
"""Prevents two threads from creating `_cancelled_event` of the same job."""


class Job(JobRow, StepMethods, Generic[ArgsT_co]):
    """The job that a worker receives: the claimed row, the decoded `args`, and methods to store
    output, progress, metadata and steps."""

    __slots__ = ("_args", "_cancelled_event", "_log", "_metadata_updates")

    _args: ArgsT_co
    _cancelled_event: threading.Event
    """The event that the flag `cancelled` reads. It is created only when the property `cancelled`
    is first read or the attempt is cancelled, because most attempts do not need the event."""
    _log: AttemptLog
    """The log of the attempt. The middleware `JobLog` sets it."""
    _metadata_updates: dict[str, str] | None
    """The metadata to store when the attempt ends. The values are JSON texts."""

    @property
    def args(self) -> ArgsT_co:
        """The args, decoded as the worker's args class.

        Raises:
            ClientStateError: the args cannot be decoded, or are not decoded yet, because a hook or
                middleware reads them before the job's code runs.
        """
        try:
            return self._args
        except AttributeError:
            raise ClientStateError(
                "the args are decoded inside of all middleware and after work_begin: read "
                "encoded_args here"
            ) from None

    @property
    def encoded_args(self) -> str:
        """The args as JSON text, formatted by PostgreSQL.

        A `work_begin` hook may set the text. Then `args` is decoded from the new text. The row in
        the database does not change.
        """
        return self._row[JobColumn.ARGS]

    @encoded_args.setter
    def encoded_args(self, text: str) -> None:
        row = list(self._row)
        row[JobColumn.ARGS] = text
        self._row = row

    @property
    def cancelled(self) -> CancelFlag:
        """A flag that is set when this attempt is cancelled: by its timeout, by `job_cancel`, or by
        a hard stop of the client.

        The flag is for blocking jobs, which get no `CancelledError`. They check
        `job.cancelled.is_set()`, or sleep with `job.cancelled.wait(seconds)`. To end the attempt,
        they raise `asyncio.CancelledError`."""
        return CancelFlag(self._get_cancelled_event())

    def _get_cancelled_event(self) -> threading.Event:
        with _cancelled_event_lock:
            try:
                return self._cancelled_event
            except AttributeError:
                event = self._cancelled_event = threading.Event()
                return event

    @property
    def log(self) -> AttemptLog:
        """The log of this attempt, which is stored with the job: `job.log.info("read %d rows", n)`.

        Raises:
            ClientStateError: the client has no middleware `riverpy.joblog.JobLog`, or the job runs
                with `executor="process"`.
        """
        try:
            return self._log
        except AttributeError:
            raise ClientStateError(
                "job.log works with Config(middleware=[riverpy.joblog.JobLog()]), in async jobs "
                "and in threads: in a job with executor='process', print the lines, and they go to "
                "the worker's log"
            ) from None

    @property
    def has_log(self) -> bool:
        """Whether `log` can be used."""
        return hasattr(self, "_log")

    def progress(self, done: float, total: float | None = None, text: str | None = None) -> None:
        """Report how much of its work the job has done. `riverpy job show` prints this progress.

        This call does not wait. At most once a second, the client stores the newest progress of all
        its jobs with one statement. The last progress is stored with the result of the attempt. Any
        thread may call this method, and jobs with `executor="process"` too.

        Numbers and texts with unexpected values never make the job fail, only wrong types do.
        Numbers below 0 count as 0, and numbers above 2^63 - 1 count as 2^63 - 1. `done` may be more
        than `total`. If `done` is infinite or NaN, nothing is reported. If `total` is infinite or
        NaN, it counts as unknown. A text of more than 1,000 characters is cut and ends with "…".
        Characters that PostgreSQL cannot store are replaced.

        Args:
            done: the amount of work that is done, in any unit.
            total: the amount of work of the whole job, in the same unit. Default None: unknown.
            text: what the job does now. Default None.

        Raises:
            ArgsError: a value has a wrong type.
        """
        progress = make_progress(done, total, text)
        if progress is not None:
            self._report_progress(progress)

    def _report_progress(self, progress: JobProgress) -> None:
        raise ClientStateError("job.progress is for a job that a client runs")

    @property
    def has_recorded_output(self) -> bool:
        """Whether this attempt has recorded an output. If True, the value that the handler returns
        is not stored."""
        return self._metadata_updates is not None and "output" in self._metadata_updates

    def record_output(self, value: object) -> None:
        """Store `value` as the job's output (metadata key `output`) at the end of this attempt, for
        every outcome of the attempt.

        A second call replaces the output of the first call. The value that the handler returns is
        stored only if this method was not called.

        Raises:
            ArgsError: the value is not JSON, or larger than 32 MiB when encoded.
        """
        self._record_metadata(OUTPUT_METADATA_KEY, encode_metadata_value(value))

    def save_output(self, value: object) -> Coroutine[object, None, None]:
        """Store `value` as the job's output now: `await job.save_output(rows)`.

        Other programs can then read the output while the job runs, with `client.watch` or
        `riverpy.web.events`. The call returns when the output is stored.

        Each call runs an SQL statement, so do not call it more often than readers need, for example
        once a second. If several calls wait at the same time, only the newest value is stored. The
        last value is stored again at the end of this attempt, as with `record_output`.

        Raises:
            ArgsError: the value is not JSON, or larger than 32 MiB when encoded.
            AttemptLostError: the attempt no longer belongs to this client: end the job.
            TransactionError: another transaction, perhaps the job's own, has locked the row.
            ClientStateError: the job is a blocking job: use `record_output`.
            Exception: the database cannot be reached. The output is stored at the end of the
                attempt.
        """
        raise make_event_loop_required_error("job.save_output")

    def set_metadata(self, key: str, value: object) -> None:
        """Set `key` in the job's metadata to `value` at the end of this attempt, for every outcome
        of the attempt. Other keys are kept.

        Raises:
            ArgsError: the value is not JSON, or larger than 32 MiB when encoded, or the key is
                reserved by River.
        """
        if key.startswith("river:"):
            raise ArgsError(f"metadata keys that start with 'river:' belong to River, got {key!r}")
        check_metadata_key(key)
        _json.encode(key)
        self._record_metadata(key, encode_metadata_value(value))

    @overload
    def complete_tx(self, tx: BlockingTransaction) -> JobRow: ...
    @overload
    def complete_tx(self, tx: CallerTransaction) -> Coroutine[object, None, JobRow]: ...
    def complete_tx(
        self, tx: BlockingTransaction | CallerTransaction
    ) -> JobRow | Coroutine[object, None, JobRow]:
        """Complete this job in your transaction, with the recorded output and metadata. Return the
        completed job.

        One commit stores both your data and the completed job. After the commit, the job stays
        completed, even if the rest of the handler fails. After a rollback, the attempt ends as if
        this method was not called.

        With an async session, use `await job.complete_tx(session)`. With a blocking session,
        as in a blocking job in a thread, use `job.complete_tx(session)` without `await`.

        Args:
            tx: your connection or session, in a transaction.

        Raises:
            AttemptLostError: the attempt no longer belongs to this client, or the job is completed
                already. The transaction stays usable: roll it back.
            UniqueConflictError: another job has the same unique key.
            TransactionError: `tx` is closed, aborted or not in a transaction.
            ClientStateError: the job runs with `executor="process"`, or a blocking job passes an
                async session.
        """
        raise make_event_loop_required_error("job.complete_tx", is_blocking_session_allowed=True)

    def _record_metadata(self, key: str, json_text: str) -> None:
        if self._metadata_updates is None:
            self._metadata_updates = {}
        self._metadata_updates[key] = json_text


def encode_metadata_value(value: object) -> str:
    """Return an output, or another metadata value, as JSON text.

    Raises:
        ArgsError: the value has no JSON form, or is larger than 32 MiB when encoded.
    """
    # Check the length before the encoding, because encoding a huge text would block the event loop.
    if isinstance(value, str | bytes):
        _check_output_size(len(value))
    text = _json.encode(value)
    _check_output_size(len(text.encode()))
    return text


def _check_output_size(size: int) -> None:
    if size > OUTPUT_SIZE_MAX:
        raise ArgsError(
            f"an output or a metadata value has at most {OUTPUT_SIZE_MAX} bytes when encoded, "
            f"got {size}; store the data elsewhere, and here only where it is"
        )


def check_metadata_key(key: object) -> None:
    """Raise an error if River uses this metadata key itself, to rescue or cancel jobs.

    River in Go decodes the values of these keys when it rescues jobs. A value of another type would
    make the decoding fail, and River would rescue no jobs of any client any more. The check ignores
    the case of letters, because Go's JSON decoder ignores it.

    Raises:
        ArgsError: River uses the key.
    """
    if isinstance(key, str) and key.casefold() in _RESERVED_METADATA_KEYS:
        raise ArgsError(f"metadata: the key {key!r} belongs to River", path="metadata")
