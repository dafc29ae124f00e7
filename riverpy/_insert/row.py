"""Makes the rows of inserted jobs: checks options, encodes args, and computes unique keys."""

from __future__ import annotations

from collections.abc import Container, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import msgspec

from riverpy import _json
from riverpy._insert.json_text import compact_json_object, encode_args, encode_job_metadata
from riverpy._insert.replacement import (
    check_expiry_after_due_time,
    check_replacing_row,
    encode_expires_in,
    encode_replace_opts,
)
from riverpy._insert.unique_key import (
    check_unique_opts,
    compute_unique_key,
    make_unique_state_bits,
    warn_of_ignored_unique_fields,
)
from riverpy._names import KIND_LENGTH_MAX, validate_kind, validate_queue_name, validate_tag
from riverpy._postgres.inserts import InsertRow
from riverpy._postgres.waits import NOTIFY_END_METADATA_KEY
from riverpy.errors import InsertError, UnknownJobKindError
from riverpy.insert_opts import (
    MAX_ATTEMPTS_MAX,
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    QUEUE_DEFAULT,
    InsertOpts,
    JobInsertParams,
    UniqueOpts,
)
from riverpy.job import JobState, RawArgs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from riverpy.insert_opts import InsertManyParams
    from riverpy.job import JobArgs

T = TypeVar("T")

_UNIQUE_KEY_BYTES = 32
_INSERTABLE_STATES = (JobState.AVAILABLE, JobState.PENDING, JobState.SCHEDULED)
TEMPLATES_MAX = 1_000
"""The maximum number of args classes whose rows `RowTemplates` keeps."""
_EMPTY_INSERT_OPTS = InsertOpts()
_EMPTY_UNIQUE_OPTS = UniqueOpts()


class InsertSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a client that apply to all its inserts."""

    default_max_attempts: int
    """The maximum number of attempts of a job whose options do not set it."""
    known_kinds: Container[str] | None = None
    """The kinds that may be inserted; None: all kinds."""
    skip_job_kind_validation: bool = False
    should_notify: bool = True
    """Whether inserts notify the workers."""


class PreparedJob(NamedTuple):
    """The row of a checked job, and the args from which the row was made."""

    args: JobArgs | RawArgs
    row: InsertRow


class _UniqueRule(NamedTuple):
    """The unique options of a job, and the time at which it is due. `compute_key` combines both
    with the row and the args class of the job."""

    opts: UniqueOpts
    due_at: datetime

    def compute_key(self, args_class: type, row: InsertRow) -> str:
        """Return the unique key of a job in hexadecimal digits."""
        return compute_unique_key(
            self.opts,
            kind=row.kind,
            args_class=args_class,
            args_json=row.args,
            queue=row.queue,
            due_at=self.due_at,
        ).hex()


class RowTemplates:
    """Keeps one row for each args class, for jobs that are inserted without options. The next such
    job of the class gets a copy of this row with its own args."""

    def __init__(self) -> None:
        self._row_by_class: dict[type, InsertRow] = {}

    def make_row(self, args: JobArgs | RawArgs) -> InsertRow | None:
        """Return the row of a job that is inserted without options: a copy of the row that this
        object keeps for the args class, with the new args.

        Return None if no row is kept for the args class, if the `kind` of the class has changed
        since, or if the args may set options.

        Raises:
            ArgsError: the args cannot be stored as a JSON object.
        """
        template = self._row_by_class.get(type(args))
        if template is None or type(args).kind != template.kind:
            return None
        if callable(getattr(args, "insert_opts", None)):  # it may set options
            return None
        return InsertRow(encode_args(args), *template[1:])

    def add_template(self, args: JobArgs | RawArgs, row: InsertRow) -> None:
        """Keep the row of a job that was inserted without options, for later jobs of its args
        class. Do nothing if these jobs may need a different row."""
        if row.unique_states is None and not _may_have_own_options(args):
            if len(self._row_by_class) >= TEMPLATES_MAX:
                self._row_by_class.clear()
            self._row_by_class[type(args)] = row


def _may_have_own_options(args: JobArgs | RawArgs) -> bool:
    """Return whether the kind or the options may differ between objects of the same args class."""
    return isinstance(args, RawArgs) or callable(getattr(args, "insert_opts", None))


def prepare_rows(
    jobs: Iterable[InsertManyParams],
    *,
    settings: InsertSettings,
    now: datetime,
    templates: RowTemplates,
) -> list[InsertRow]:
    """Check and encode the jobs of a batch, and return their rows; see `prepare_row`.

    Most batches have one args class and the same options. The values that depend only on the class
    and the options are checked once, and copied to the other jobs. For jobs without options,
    `templates` keeps these values for later batches too.
    """
    rows: list[InsertRow] = []
    firsts: dict[tuple[type, int], tuple[InsertOpts | None, InsertRow, _UniqueRule | None]] = {}
    for job in jobs:
        args, opts = job.args, job.opts
        if opts is None and (row := templates.make_row(args)) is not None:
            rows.append(row)
            continue
        key = (type(args), id(opts))  # `firsts` keeps the options alive, so their id is not reused
        is_single = _may_have_own_options(args)
        if not is_single and (first := firsts.get(key)) is not None:
            _, first_row, rule = first
            row = InsertRow(encode_args(args), *first_row[1:])
            if rule is not None:
                row = row._replace(unique_key=rule.compute_key(type(args), row))
        else:
            row, rule = _prepare_row_and_unique_rule(args, opts, settings=settings, now=now)
            if opts is None:
                templates.add_template(args, row)
            if not is_single:
                firsts[key] = (opts, row, rule)
        rows.append(row)
    return rows


def prepare_row(
    args: JobArgs | RawArgs, opts: InsertOpts | None, *, settings: InsertSettings, now: datetime
) -> InsertRow:
    """Check and encode one job, and return its row. This does not use the database.

    Precedence of options: this insert, then `insert_opts` of the args class, then the client.
    `metadata` and `pending` come from this insert only. `now` is the time of the insert, which
    decides the unique period of a job without `scheduled_at`.

    Raises:
        ConfigError: the kind, the queue or a tag is not a valid name.
        UnknownJobKindError: the client has workers, but none for this kind.
        ArgsError: the args or the metadata cannot be stored as a JSON object.
        InsertError: another option is not allowed.
    """
    return _prepare_row_and_unique_rule(args, opts, settings=settings, now=now)[0]


def _prepare_row_and_unique_rule(
    args: JobArgs | RawArgs, opts: InsertOpts | None, *, settings: InsertSettings, now: datetime
) -> tuple[InsertRow, _UniqueRule | None]:
    """Return the row of a job, and the rule for its unique key; see `prepare_row`."""
    kind = _check_kind(_get_kind(args), settings)
    text = encode_args(args)
    call_opts = _EMPTY_INSERT_OPTS if opts is None else _check_type("opts", opts, InsertOpts)
    class_opts = _get_class_opts(args)
    time = _first_not_none(call_opts.scheduled_at, class_opts.scheduled_at, None)
    scheduled_at = _check_scheduled_at(time)
    state = JobState.AVAILABLE if scheduled_at is None else JobState.SCHEDULED
    expires_in = _first_not_none(call_opts.expires_in, class_opts.expires_in, None)
    row = _make_checked_row(
        args=text,
        kind=kind,
        metadata=_encode_metadata(call_opts, class_opts),
        queue=_first_not_none(call_opts.queue, class_opts.queue, QUEUE_DEFAULT),
        priority=_first_not_none(call_opts.priority, class_opts.priority, PRIORITY_DEFAULT),
        max_attempts=_first_not_none(
            call_opts.max_attempts, class_opts.max_attempts, settings.default_max_attempts
        ),
        state=JobState.PENDING if _check_type("pending", call_opts.pending, bool) else state,
        tags=_first_not_none(call_opts.tags, class_opts.tags, ()),
        scheduled_at=scheduled_at and scheduled_at.isoformat(),
        expires_in=encode_expires_in(expires_in),
        replace=encode_replace_opts(_first_not_none(call_opts.replace, class_opts.replace, None)),
    )
    check_expiry_after_due_time(expires_in, scheduled_at, now)
    unique = _choose_unique_opts(call_opts, class_opts)
    warn_of_ignored_unique_fields(unique, kind=kind, args_class=type(args))
    if unique is None:
        check_replacing_row(row)
        return row, None
    states, rule = make_unique_state_bits(unique), _UniqueRule(unique, scheduled_at or now)
    row = row._replace(unique_key=rule.compute_key(type(args), row), unique_states=f"{states:08b}")
    check_replacing_row(row)
    return row, rule


def _encode_metadata(call_opts: InsertOpts, class_opts: InsertOpts) -> str:
    """Encode the metadata of a job. If the option `notify_end` is set, add the metadata key that
    causes a notification when the job ends."""
    is_notified = _check_type("notify_end", call_opts.notify_end, bool) or class_opts.notify_end
    if not is_notified:
        return encode_job_metadata(call_opts.metadata)
    metadata = {} if call_opts.metadata is None else call_opts.metadata
    if not isinstance(metadata, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        return encode_job_metadata(metadata)  # raises ArgsError
    return encode_job_metadata({**metadata, NOTIFY_END_METADATA_KEY: True})


def _make_checked_row(
    *,
    args: str,
    kind: str,
    metadata: str,
    queue: object,
    priority: object,
    max_attempts: object,
    state: JobState,
    tags: object,
    scheduled_at: str | None,
    expires_in: str | None,
    replace: str | None,
) -> InsertRow:
    """Check the options that hooks may change, and return a row without a unique key."""
    validate_queue_name(_check_type("queue", queue, str))
    return InsertRow(
        args=args,
        unique_key=None,
        expires_in=expires_in,
        replace=replace,
        kind=kind,
        metadata=metadata,
        queue=cast("str", queue),
        priority=_encode_checked_number("priority", priority, PRIORITY_MAX),
        max_attempts=_encode_checked_number("max_attempts", max_attempts, MAX_ATTEMPTS_MAX),
        state=state,
        tags=_encode_tags(tags),
        unique_states=None,
        scheduled_at=scheduled_at,
    )


def make_insert_params(job: PreparedJob) -> JobInsertParams:
    """Return the parameters that hooks and middleware receive for a job."""
    row = job.row
    return JobInsertParams(
        args=job.args,
        encoded_args=row.args,
        kind=row.kind,
        max_attempts=int(row.max_attempts),
        metadata=_decode_metadata(row.metadata),
        priority=int(row.priority),
        queue=row.queue,
        scheduled_at=_parse_time(row.scheduled_at),
        state=JobState(row.state),
        tags=row.tags.split(",") if row.tags else [],
        unique_key=None if row.unique_key is None else bytes.fromhex(row.unique_key),
    )


def make_row_after_hooks(
    job: PreparedJob, params: JobInsertParams, *, settings: InsertSettings
) -> InsertRow:
    """Return the row of a job after hooks and middleware, which may have changed `params`.

    Raises:
        InsertError, ConfigError: a hook or middleware set a value that is not allowed.
    """
    old = job.row
    is_same_text = params.encoded_args == old.args
    is_same_metadata = params.metadata == _decode_metadata(old.metadata)
    time = _check_scheduled_at(params.scheduled_at)
    state = _check_type("state", params.state, JobState)
    if state not in _INSERTABLE_STATES:
        raise InsertError(f"state must be one of {', '.join(_INSERTABLE_STATES)}, got {state}")
    row = _make_checked_row(
        args=old.args if is_same_text else compact_json_object("encoded_args", params.encoded_args),
        kind=_check_kind(_check_type("kind", params.kind, str), settings),
        metadata=old.metadata if is_same_metadata else encode_job_metadata(params.metadata),
        queue=params.queue,
        priority=params.priority,
        max_attempts=params.max_attempts,
        state=state,
        tags=params.tags,
        scheduled_at=time and time.isoformat(),
        expires_in=old.expires_in,
        replace=None if params.unique_key is None else old.replace,
    )
    key = _check_unique_key(params.unique_key, is_unique=old.unique_states is not None)
    if key is None:
        return row
    row = row._replace(unique_key=key.hex(), unique_states=old.unique_states)
    check_replacing_row(row)
    return row


def _check_unique_key(unique_key: object, *, is_unique: bool) -> bytes | None:
    if unique_key is None:
        return None
    if not isinstance(unique_key, bytes) or len(unique_key) != _UNIQUE_KEY_BYTES:
        raise InsertError(f"unique_key must be {_UNIQUE_KEY_BYTES} bytes or None")
    if not is_unique:
        raise InsertError("the unique_key of a job without unique_opts cannot be set")
    return unique_key


def _decode_metadata(metadata: str) -> dict[str, Any]:
    return msgspec.json.decode(metadata, type=dict[str, Any])


def _parse_time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _first_not_none(call_value: T | None, class_value: T | None, default: T) -> T:
    if call_value is not None:
        return call_value
    return default if class_value is None else class_value


def _check_type(name: str, value: object, expected_type: type[T]) -> T:
    if not isinstance(value, expected_type) or (isinstance(value, bool) and expected_type is int):
        raise InsertError(f"{name} must be {expected_type.__name__}, got {type(value).__name__}")
    return value


def _encode_checked_number(name: str, value: object, maximum: int) -> str:
    number = _check_type(name, value, int)
    if not 1 <= number <= maximum:
        raise InsertError(f"{name} must be between 1 and {maximum}, got {number}")
    return str(int(number))


def _get_kind(args: JobArgs | RawArgs) -> str:
    if isinstance(args, RawArgs):
        return _check_type("the kind of RawArgs", args.kind, str)
    if isinstance(args, type):
        raise InsertError(f"args must be an object, got the class {args.__qualname__}: call it")
    kind: object = getattr(type(args), "kind", None)
    if not isinstance(kind, str):
        raise InsertError(
            f"{type(args).__qualname__} has no kind: give its class `kind: ClassVar[str] = ...`, "
            "or insert RawArgs"
        )
    return kind


def _check_kind(kind: str, settings: InsertSettings) -> str:
    if settings.skip_job_kind_validation:
        _json.encode(kind, path="kind")
        if not 1 <= len(kind) <= KIND_LENGTH_MAX:
            raise InsertError(f"a job kind has 1 to {KIND_LENGTH_MAX} characters, got {len(kind)}")
    else:
        validate_kind(kind)
    if settings.known_kinds is not None and kind not in settings.known_kinds:
        raise UnknownJobKindError(kind)
    return kind


def _get_class_opts(args: JobArgs | RawArgs) -> InsertOpts:
    provider = getattr(args, "insert_opts", None)
    if not callable(provider):
        return _EMPTY_INSERT_OPTS
    source = f"the result of {type(args).__qualname__}.insert_opts"
    return _check_type(source, provider(), InsertOpts)


def _encode_tags(tags: object) -> str:
    if tags == ():
        return ""
    if isinstance(tags, str):
        raise InsertError(f"tags must be a sequence of strings, got the string {tags[:80]!r}")
    sequence = cast("Sequence[object]", _check_type("tags", tags, Sequence))
    texts = [_check_type("a tag", tag, str) for tag in sequence]
    for text in texts:
        validate_tag(text)
    return ",".join(texts)


def _check_scheduled_at(value: object) -> datetime | None:
    if value is None:
        return None
    time = _check_type("scheduled_at", value, datetime)
    if time.utcoffset() is None:
        raise InsertError(
            f"scheduled_at has no time zone: {time.isoformat()}; give it one, as in "
            "datetime.now(UTC) + timedelta(hours=1)"
        )
    try:
        return time.astimezone(UTC)
    except OverflowError:
        raise InsertError(
            f"scheduled_at is outside the years 1 to 9999 in UTC: {time.isoformat()}"
        ) from None


def _choose_unique_opts(call_opts: InsertOpts, class_opts: InsertOpts) -> UniqueOpts | None:
    """Return the checked unique options of a job, or None if the job is not unique."""
    for opts in (call_opts.unique_opts, class_opts.unique_opts):
        if opts is None:
            continue
        _check_type("unique_opts", opts, UniqueOpts)
        for name in ("by_args", "by_queue", "exclude_kind"):
            _check_type(f"unique_opts.{name}", getattr(opts, name), bool)
        if opts.by_period is not None:
            _check_type("unique_opts.by_period", opts.by_period, timedelta)
        if opts != _EMPTY_UNIQUE_OPTS:
            check_unique_opts(opts)
            return opts
    return None
