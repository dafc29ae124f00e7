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
"""The maximum number of errors in a job's row: the first error and the newest errors. The SQL
statements have the same limit."""
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
    """The args of a job: a msgspec Struct, a dataclass, a pydantic model or a dict subclass with a
    class variable `kind`.

    Two members are optional. `kind_aliases: ClassVar[Sequence[str]]` has older names of the kind
    that the worker accepts too. `def insert_opts(self) -> InsertOpts` returns the default options
    for an insert of the job.
    """

    kind: ClassVar[str]


class RawArgs(msgspec.Struct, frozen=True):
    """Args as JSON text. The unique key depends on the key order and the number format of this
    text."""

    kind: str
    json: str


class JobColumn:
    """The position of each column in a job row. Every statement that returns jobs uses this
    order."""

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


# The state of each bit of unique_states, beginning with the lowest bit.
UNIQUE_STATE_BY_BIT: tuple[JobState, ...] = tuple(JobState)


class JobRow:
    """A row of `river_job`. Columns are decoded when they are read.

    The object holds the values of one row in the order of `JobColumn`, with timestamps in
    microseconds since 2000 and JSON as text.
    """

    __slots__ = ("_row",)

    def __init__(self, row: Sequence[Any]) -> None:
        self._row = row

    def __repr__(self) -> str:
        state = get_stored_state(self)
        return f"<{type(self).__name__} {self.id} {self.kind} {state} attempt {self.attempt}>"

    def columns(self) -> Sequence[Any]:
        """The row's values, in the order of `JobColumn`."""
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
        return list(self.columns()[JobColumn.ATTEMPTED_BY] or ())

    @property
    def created_at(self) -> datetime:
        """The time of the insert."""
        return decode_timestamp(self._row[JobColumn.CREATED_AT]) or PG_EPOCH

    @property
    def errors(self) -> list[AttemptError]:
        """The errors of earlier attempts, the oldest first. Entries in an unexpected form are read
        too."""
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
        """The metadata, decoded at each read; empty: the row has no JSON object, or an object that
        Python cannot decode."""
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
        """The progress that the job had reported last when the row was read; None: no progress."""
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
        """The tags of the job, in the order of the insert."""
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


def get_stored_state(job: JobRow) -> str:
    """Return the state of a job as the table has it. A newer version of River may have stored a
    state that is not in `JobState`."""
    return job.columns()[JobColumn.STATE]


class CancelFlag:
    """A flag that is set when an attempt is cancelled: by the timeout, by `job_cancel`, or by a
    hard stop. The flag is never reset, and may be used in any thread."""

    __slots__ = ("_event",)

    def __init__(self, event: threading.Event) -> None:
        """`event` is set when the attempt is cancelled."""
        self._event = event

    def is_set(self) -> bool:
        """Whether the attempt was cancelled."""
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the attempt is cancelled, and return whether it was.

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
"""The lock that is held while a job creates its `_cancelled_event`."""


class Job(JobRow, StepMethods, Generic[ArgsT_co]):
    """The job that a worker receives: the claimed row, its decoded `args`, and what the attempt
    records."""

    __slots__ = ("_args", "_cancelled_event", "_log", "_metadata_updates")

    _args: ArgsT_co
    _cancelled_event: threading.Event
    """The event of the property `cancelled`. It is created when the property is first read, because
    most attempts do not need it."""
    _log: AttemptLog
    """The log of the attempt. The middleware `JobLog` sets it."""
    _metadata_updates: dict[str, str] | None
    """The metadata to store when the attempt ends. The values are JSON texts."""

    @property
    def args(self) -> ArgsT_co:
        """The decoded args.

        Raises:
            ClientStateError: the args cannot be decoded, or are not decoded yet (in a hook or
                middleware).
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

        A `work_begin` hook may set the text. The new text is decoded, but not stored.
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
        a hard stop.

        The flag is for blocking jobs, which get no `CancelledError`. Check
        `job.cancelled.is_set()`, or sleep with `job.cancelled.wait(seconds)`. Raise
        `asyncio.CancelledError` to end the attempt."""
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
                in a process.
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
        """Report how far the job has come. `riverpy job show` shows it.

        This call does not wait. The client stores the newest progress of all its jobs at most once
        a second with one statement, and stores the last progress with the result of the attempt.
        May be called in any thread, and in a job with `executor="process"`.

        The job never fails because of a number that it computed. Numbers below 0 count as 0, and
        numbers above 2^63 - 1 count as 2^63 - 1. `done` may be more than `total`. If `done` is
        infinite or NaN, nothing is reported. If `total` is infinite or NaN, it counts as unknown. A
        text of more than 1,000 characters is cut and ends with "…". Characters that PostgreSQL
        cannot store are replaced.

        Args:
            done: how much is done, in any unit.
            total: how much there is to do, in the same unit. Default None: unknown.
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
        """Whether this attempt has recorded an output, so that a returned value is not stored."""
        return self._metadata_updates is not None and "output" in self._metadata_updates

    def record_output(self, value: object) -> None:
        """Store `value` as the job's output (metadata key `output`) at the end of this attempt,
        whatever its outcome is. A second call replaces the output of the first call. A value that
        the handler returns is stored only if this method was not called.

        Raises:
            ArgsError: the value is not JSON, or larger than 32 MiB when encoded.
        """
        self._record_metadata(OUTPUT_METADATA_KEY, encode_metadata_value(value))

    def save_output(self, value: object) -> Coroutine[object, None, None]:
        """Store `value` as the job's output now: `await job.save_output(rows)`. So other programs
        can read a part of the output while the job runs, with `client.watch` and
        `riverpy.web.events`.

        The call returns when the output is stored. Each call is a statement, so call it as often as
        readers need the output, for example once a second. Of calls at the same time, only the
        newest is stored. The last output is also stored at the end of this attempt, as with
        `record_output`.

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
        """Merge `key` into the job's metadata at the end of this attempt, whatever its outcome is.

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
        """Complete this job in your transaction, with the recorded output and metadata. Returns the
        completed job.

        The job and your data are then stored in one commit, or neither of them. After the commit,
        the rest of the code no longer changes how the job ends. After a rollback, the attempt ends
        as usual.

        The type of `tx` decides how the call is made. A session for async code needs
        `await job.complete_tx(session)`. With a blocking session, as in a blocking job in a thread,
        `job.complete_tx(session)` has done its work when it returns.

        Args:
            tx: your connection or session, in a transaction.

        Raises:
            AttemptLostError: the attempt no longer belongs to this client, or the job is completed
                already. The transaction stays usable: roll it back.
            UniqueConflictError: another job has the same unique key.
            TransactionError: `tx` is closed, aborted or not in a transaction.
            ClientStateError: the job runs in a process of its own, or a blocking job has a session
                for async code.
        """
        raise make_event_loop_required_error("job.complete_tx", is_blocking_session_allowed=True)

    def _record_metadata(self, key: str, json_text: str) -> None:
        if self._metadata_updates is None:
            self._metadata_updates = {}
        self._metadata_updates[key] = json_text


def encode_metadata_value(value: object) -> str:
    """Return an output or another metadata value as JSON text.

    Raises:
        ArgsError: the value has no JSON form, or is larger than 32 MiB when encoded.
    """
    if isinstance(
        value, str | bytes
    ):  # check first: encoding a huge text would block the event loop
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
    """Refuse metadata keys that River uses for rescues and cancels, in upper or lower case letters.

    A value that River in Go cannot read would stop the rescues of all clients. Go's JSON decoder
    ignores the case of keys.

    Raises:
        ArgsError: the key is one of these keys.
    """
    if isinstance(key, str) and key.casefold() in _RESERVED_METADATA_KEYS:
        raise ArgsError(f"metadata: the key {key!r} belongs to River", path="metadata")
