"""MadeJob: a job for a test that calls a handler directly, without a database."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import (
    TYPE_CHECKING,
    Any,
    NoReturn,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)

import msgspec

from riverpy._insert.row import InsertSettings, prepare_row
from riverpy._names import CURSORS_METADATA_KEY, KEPT_RESULTS_METADATA_KEY, STEP_METADATA_KEY
from riverpy._work.attempt_store import encode_json_object
from riverpy._work.steps import AttemptStepRunner
from riverpy.attempt_log import AttemptLog
from riverpy.errors import ClientStateError, ConfigError
from riverpy.insert_opts import MAX_ATTEMPTS_DEFAULT, InsertOpts
from riverpy.job import (
    OUTPUT_METADATA_KEY,
    AttemptError,
    Job,
    JobColumn,
    JobRow,
    JobState,
    RawArgs,
    encode_metadata_value,
)
from riverpy.progress import PROGRESS_METADATA_KEY, JobProgress, decode_progress
from riverpy.steps import is_in_event_loop, make_event_loop_required_error
from riverpy.testing.rows import encode_time, make_inserted_row, parse_state
from riverpy.worker import make_args_decoder

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from riverpy._postgres.sessions.protocols import BlockingTransaction, CallerTransaction

ArgsT = TypeVar("ArgsT")
ArgsT_co = TypeVar("ArgsT_co", covariant=True)

CLIENT_ID = "test"
"""The client id in the column `attempted_by` of jobs that `make_job` creates."""
_STEP_METADATA_KEYS = (STEP_METADATA_KEY, CURSORS_METADATA_KEY, KEPT_RESULTS_METADATA_KEY)
_OPTION_COLUMNS = ("max_attempts", "metadata", "priority", "queue", "scheduled_at", "tags")
"""The columns that are set by options of `InsertOpts`."""
_WAITING_STATES = (JobState.AVAILABLE, JobState.PENDING, JobState.SCHEDULED)
_FAILED_STATES = (JobState.RETRYABLE, JobState.DISCARDED)
_FINAL_STATES = (JobState.CANCELLED, JobState.COMPLETED, JobState.DISCARDED)
_JOB_ID_MAX = 2**63 - 1
_next_job_id = itertools.count(1)


class JobColumns(TypedDict, total=False):
    """The columns of a job that a test can pass to `make_job`. Times must have a time zone."""

    id: int
    """The id, 1 or more. Default: the next number of a counter, which starts at 1."""
    attempt: int
    """The number of this attempt, 1 to `max_attempts`. 0: the job waits for its first attempt.

    The default is the number of `errors` if the state is available, pending or scheduled. If it is
    retryable or discarded, the default is the number of `errors`, at least 1. In the other states,
    the default is the number of `errors` plus 1."""
    attempted_at: datetime
    attempted_by: Sequence[str]
    created_at: datetime
    errors: Sequence[AttemptError | str]
    """The errors of earlier attempts. If the state is retryable or discarded, the last error is of
    this attempt. Default: none."""
    finalized_at: datetime
    kind: str
    """The kind. Default: the kind of the args class."""
    max_attempts: int
    metadata: Mapping[str, Any]
    priority: int
    queue: str
    scheduled_at: datetime
    state: JobState
    """The state. Default: running."""
    tags: Sequence[str]


class MadeJob(Job[ArgsT_co]):
    """A job that `make_job` creates for a handler. It keeps the output, progress, metadata and log
    of the handler in memory, where a test can read them."""

    def __init__(self, row: Sequence[Any], args: ArgsT_co) -> None:
        """Create the job. `row` has the columns in the order of `JobColumn`. `args` are the decoded
        args."""
        super().__init__(row)
        self._args = args
        self._metadata_updates = None
        self._log = AttemptLog(level=logging.DEBUG)
        self._stored_metadata: dict[str, str] = {}
        """The metadata that steps and checkpoints have stored during the attempt, as JSON texts."""
        self._step_runner: AttemptStepRunner | None = None
        self.saved_outputs: list[Any] = []
        """The values that the handler has passed to `save_output`, in the order of the calls."""

    # -- what the handler has recorded

    @property
    def recorded_output(self) -> Any:
        """The output that the handler has recorded; None: it has recorded none."""
        return self._decode_recorded_values().get(OUTPUT_METADATA_KEY)

    @property
    def recorded_metadata(self) -> dict[str, Any]:
        """The metadata that the handler has set with `set_metadata`."""
        own_keys = {OUTPUT_METADATA_KEY, PROGRESS_METADATA_KEY, *_STEP_METADATA_KEYS}
        return {
            key: value
            for key, value in self._decode_recorded_values().items()
            if key not in own_keys
        }

    @property
    def recorded_progress(self) -> JobProgress | None:
        """The last progress that the handler has reported; None: it has reported none."""
        return decode_progress(encode_json_object(self._get_recorded_json()))

    @property
    def recorded_log(self) -> str:
        """The text that the handler has logged with `job.log`, at all levels."""
        return self._log.text

    def _get_recorded_json(self) -> dict[str, str]:
        return {**self._stored_metadata, **(self._metadata_updates or {})}

    def _decode_recorded_values(self) -> dict[str, Any]:
        return {key: msgspec.json.decode(text) for key, text in self._get_recorded_json().items()}

    # -- what a test does with the job

    def cancel(self) -> None:
        """Set the flag `job.cancelled`, which a blocking handler checks."""
        self._get_cancelled_event().set()

    def make_next_attempt(self, error: str = "failed") -> MadeJob[ArgsT_co]:
        """Return the job for the next attempt, as if this attempt failed. The new job has the
        metadata that this attempt recorded, with its steps and cursors.

        Args:
            error: the text of the error that is added to `errors`.

        Raises:
            ClientStateError: this attempt is the last one.
        """
        if self.attempt >= self.max_attempts:
            raise ClientStateError(
                f"attempt {self.attempt} of {self.max_attempts} is the last one: a job that fails "
                "in it is discarded"
            )
        if self._step_runner is not None:
            self._step_runner.merge_step_metadata()
        texts = {
            key: bytes(raw).decode()
            for key, raw in msgspec.json.decode(
                self.metadata_text, type=dict[str, msgspec.Raw]
            ).items()
        }
        row = [*self._row]
        row[JobColumn.METADATA] = encode_json_object({**texts, **self._get_recorded_json()})
        row[JobColumn.ERRORS] = [
            *(row[JobColumn.ERRORS] or ()),
            _encode_error(error, self.attempt, datetime.now(UTC)),
        ]
        row[JobColumn.ATTEMPT] += 1
        row[JobColumn.ATTEMPTED_AT] = encode_time(datetime.now(UTC))
        return MadeJob(row, self._args)

    # -- what a client does for its jobs

    def _report_progress(self, progress: JobProgress) -> None:
        self._record_metadata(PROGRESS_METADATA_KEY, msgspec.json.encode(progress).decode())

    def save_output(self, value: object) -> Coroutine[object, None, None]:
        """Keep an output in memory. In production, the client stores it at once."""
        if not is_in_event_loop():
            raise make_event_loop_required_error("job.save_output")
        text = encode_metadata_value(value)
        return self._keep_saved_output(text)

    async def _keep_saved_output(self, text: str) -> None:
        """Append an output to `saved_outputs`, and record it in the metadata."""
        self.saved_outputs.append(msgspec.json.decode(text))
        self._record_metadata(OUTPUT_METADATA_KEY, text)

    @property
    def metadata_text(self) -> str:
        """The metadata of the row, as JSON text."""
        return self._row[JobColumn.METADATA]

    def record_metadata(self, key: str, json_text: str) -> None:
        """Set a metadata key in the recorded metadata. The value is a JSON text."""
        self._record_metadata(key, json_text)

    def remove_metadata_update(self, key: str) -> None:
        """Remove the recorded value of a metadata key."""
        if self._metadata_updates is not None:
            self._metadata_updates.pop(key, None)

    async def store_metadata_now(
        self,
        updates: Mapping[str, str],
        *,
        tx: CallerTransaction | None = None,
        timeout: float = 0.0,
    ) -> None:
        """Keep metadata in memory. In production, the client stores it at once."""
        self._stored_metadata.update(updates)

    def _get_step_runner(self, method: str, *, needs_event_loop: bool = True) -> AttemptStepRunner:
        if not is_in_event_loop() and (needs_event_loop or self._step_runner is None):
            raise make_event_loop_required_error(method)
        if self._step_runner is None:
            self._step_runner = AttemptStepRunner(self)
        return self._step_runner

    def _store_steps(
        self, tx: BlockingTransaction | CallerTransaction | None, *, now: bool
    ) -> Coroutine[object, None, bool]:
        if tx is not None:
            _raise_row_required_error("job.checkpoint(tx)")
        return self._get_step_runner("job.checkpoint").checkpoint(None, now=now)

    @overload
    def complete_tx(self, tx: BlockingTransaction) -> JobRow: ...
    @overload
    def complete_tx(self, tx: CallerTransaction) -> Coroutine[object, None, JobRow]: ...
    def complete_tx(
        self, tx: BlockingTransaction | CallerTransaction
    ) -> JobRow | Coroutine[object, None, JobRow]:
        _raise_row_required_error("job.complete_tx")


def _raise_row_required_error(method: str) -> NoReturn:
    """Raise an error, because the method needs a row in the database."""
    raise ClientStateError(
        f"{method} needs a row in the database, and make_job has made none: use "
        "riverpy.testing.TestWorker, which works the job in the transaction of the test"
    )


@overload
def make_job(
    args: RawArgs, opts: InsertOpts | None = None, **columns: Unpack[JobColumns]
) -> MadeJob[Any]: ...
@overload
def make_job(
    args: ArgsT, opts: InsertOpts | None = None, **columns: Unpack[JobColumns]
) -> MadeJob[ArgsT]: ...
def make_job(
    args: Any, opts: InsertOpts | None = None, **columns: Unpack[JobColumns]
) -> MadeJob[Any]:
    """Create a job to pass to a handler, without a database: `await welcome(make_job(Welcome(1)))`.

    The args are encoded and decoded, so that the handler receives the same values as in production.
    After the call, the test can read what the handler recorded: see `MadeJob`. Hooks, middleware,
    timeouts and retries do not run. `TestWorker` runs a job with all of them.

    Args:
        args: the args of the job. With `RawArgs`, the handler receives the decoded JSON.
        opts: options as for an insert. Default: the options of the args class.
        columns: the values of columns, see `JobColumns`. They override `opts`.

    Raises:
        InsertError: an insert would refuse the job.
        TypeError: there is no such column, or a value has the wrong type.
        ConfigError: a number is too small or too large.
        ValueError: a time has no time zone, or a state does not exist.
    """
    given = cast("dict[str, Any]", columns)
    if unknown := given.keys() - JobColumns.__annotations__.keys():
        raise TypeError(_describe_unknown_column(min(unknown), args))
    changes = {name: given.pop(name) for name in _OPTION_COLUMNS if name in given}
    if isinstance(changes.get("metadata"), Mapping):
        changes["metadata"] = dict(changes["metadata"])
    for name, value in given.items():
        _check_column_type(name, value)
    settings = InsertSettings(
        default_max_attempts=MAX_ATTEMPTS_DEFAULT, skip_job_kind_validation=True
    )
    now = datetime.now(UTC)
    opts = msgspec.structs.replace(opts or InsertOpts(), **changes)
    row = prepare_row(args, opts, settings=settings, now=now)
    job_id = given["id"] if "id" in given else next(_next_job_id)
    values = make_inserted_row(row, job_id=job_id, now=now)
    _set_non_insert_columns(values, given, now)
    _check_id_and_attempt(values)
    cls = Any if isinstance(args, RawArgs) else cast("type[Any]", type(args))
    return MadeJob(values, make_args_decoder(cls, "this job")(row.args))


def _describe_unknown_column(name: str, args: object) -> str:
    place = type(args).__name__
    if hasattr(args, name):
        return f"{name} is a field of the args: write make_job({place}({name}=…))"
    return f"a job has no column {name!r}: make_job takes {', '.join(JobColumns.__annotations__)}"


def _check_column_type(name: str, value: object) -> None:
    """Raise TypeError if the value of a column has the wrong type. Pass only columns that
    `InsertOpts` cannot set, because `prepare_row` checks the options of `InsertOpts`."""
    expected, is_expected = _COLUMN_CHECK_BY_NAME[name]
    if not is_expected(value):
        raise TypeError(f"make_job: {name} takes {expected}, got {value!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(value: object, *types: type[object]) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, (str, bytes))
        and all(isinstance(one, types) for one in cast("Sequence[object]", value))
    )


_Check: TypeAlias = tuple[str, Callable[[object], bool]]
_INT_CHECK: _Check = ("an int", _is_int)
_TIME_CHECK: _Check = ("a datetime", lambda value: isinstance(value, datetime))
_COLUMN_CHECK_BY_NAME: Mapping[str, _Check] = {
    "id": _INT_CHECK,
    "attempt": _INT_CHECK,
    "attempted_at": _TIME_CHECK,
    "attempted_by": ("a list of str", lambda value: _is_list_of(value, str)),
    "created_at": _TIME_CHECK,
    "errors": (
        "a list of AttemptError or str",
        lambda value: _is_list_of(value, AttemptError, str),
    ),
    "finalized_at": _TIME_CHECK,
    "kind": ("a str", lambda value: isinstance(value, str)),
    "state": ("a JobState or its name", lambda value: isinstance(value, str)),
}


def _check_id_and_attempt(values: Sequence[Any]) -> None:
    """Raise ConfigError if the id or the attempt of a row is too small or too large."""
    job_id, attempt, max_attempts, state = (
        values[column]
        for column in (JobColumn.ID, JobColumn.ATTEMPT, JobColumn.MAX_ATTEMPTS, JobColumn.STATE)
    )
    if not 1 <= job_id <= _JOB_ID_MAX:
        raise ConfigError(f"make_job: id is 1 to 2^63 - 1, got {job_id}")
    attempt_min = 1 if state == JobState.RUNNING else 0
    if not attempt_min <= attempt <= max_attempts:
        raise ConfigError(
            f"make_job: attempt is {attempt_min} to {max_attempts} (max_attempts) for a job that "
            f"is {state}, got {attempt}"
        )


def _set_non_insert_columns(values: list[Any], given: Mapping[str, Any], now: datetime) -> None:
    """Set the columns of a row that an insert cannot set, such as the state and the errors. `given`
    has the values of the test. Columns that are not in `given` get defaults."""
    state = parse_state(given.get("state", JobState.RUNNING))
    errors = [
        _encode_error(error, index, now) for index, error in enumerate(given.get("errors", ()), 1)
    ]
    is_waiting = state in _WAITING_STATES
    values[JobColumn.STATE] = state.value
    values[JobColumn.ERRORS] = errors or None
    values[JobColumn.ATTEMPT] = given.get("attempt", _count_attempts(state, len(errors)))
    values[JobColumn.KIND] = given.get("kind", values[JobColumn.KIND])
    if not is_waiting:
        values[JobColumn.ATTEMPTED_AT] = encode_time(now)
        values[JobColumn.ATTEMPTED_BY] = [CLIENT_ID]
    if state in _FINAL_STATES:
        values[JobColumn.FINALIZED_AT] = encode_time(now)
    for name in ("attempted_at", "created_at", "finalized_at"):
        if name in given:
            values[getattr(JobColumn, name.upper())] = encode_time(given[name])
    if "attempted_by" in given:
        values[JobColumn.ATTEMPTED_BY] = list(given["attempted_by"])


def _count_attempts(state: JobState, error_count: int) -> int:
    """Return how many attempts a job has started, from its state and its number of errors."""
    if state in _WAITING_STATES:
        return error_count
    return max(error_count, 1) if state in _FAILED_STATES else error_count + 1


def _encode_error(error: AttemptError | str, attempt: int, now: datetime) -> str:
    entry = AttemptError(at=now, attempt=attempt, error=error) if isinstance(error, str) else error
    return msgspec.json.encode(entry).decode()
