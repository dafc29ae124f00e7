"""One job on its way into the table: checked, encoded, with its unique key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import msgspec

from riverpy import _json
from riverpy._insert.unique_key import check_marks, check_unique_opts, unique_key, unique_states
from riverpy._json_decoder import decoder
from riverpy._names import KIND_LENGTH_MAX, validate_kind, validate_queue, validate_tag
from riverpy.errors import ArgsError, InsertError, UnknownJobKindError
from riverpy.insert_opts import (
    PRIORITY_DEFAULT,
    QUEUE_DEFAULT,
    InsertOpts,
    JobInsertParams,
    UniqueOpts,
)
from riverpy.job import JobState, RawArgs, check_metadata_key

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from riverpy.insert_opts import InsertManyParams
    from riverpy.job import JobArgs

T = TypeVar("T")

MAX_ATTEMPTS_MAX = 32767
PRIORITY_MAX = 4

_KEY_SIZE = 32
_STATES = (JobState.AVAILABLE, JobState.PENDING, JobState.SCHEDULED)
_NO_OPTS = InsertOpts()
_NOT_UNIQUE = UniqueOpts()


class InsertRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a client says about all of its inserts."""

    max_attempts: int
    known_kinds: Container[str] | None = None
    """The kinds that may be inserted. None: all."""
    skip_job_kind_validation: bool = False
    notify: bool = True
    """Whether inserts wake the workers."""


class InsertRow(NamedTuple):
    """One checked job as it is sent: as texts, since a connection may have codecs of its own."""

    args: str
    unique_key: str | None
    """In hexadecimal digits."""
    kind: str
    metadata: str
    queue: str
    priority: str
    max_attempts: str
    state: str
    scheduled_at: str | None
    """None: the server's now."""
    tags: str
    """Joined by commas, which no tag has."""
    unique_states: str | None
    """The eight bits as the table has them."""

    @property
    def size(self) -> int:
        """Bytes of its args and metadata."""
        return json_size(self.args) + json_size(self.metadata)

    @property
    def lock_order(self) -> str:
        """All batches send their keys in this order, so no two of them wait for each other."""
        return self.unique_key or ""

    def shared(self) -> tuple[object, ...]:
        """What all jobs have in common that go by the simple form of the statement."""
        return self[2:]


class PreparedJob(NamedTuple):
    """A job that was checked, with the args that it was made of."""

    args: JobArgs | RawArgs
    row: InsertRow


def prepare_all(
    jobs: Iterable[InsertManyParams], *, rules: InsertRules, now: datetime
) -> list[InsertRow]:
    """Check jobs and encode them; see `prepare`.

    Batches are mostly of one class with the same options. What depends on these alone is checked
    for the first job of each such kind, and taken over for the others.
    """
    rows: list[InsertRow] = []
    firsts: dict[tuple[type, int], tuple[InsertOpts | None, InsertRow]] = {}
    for job in jobs:
        args, opts = job.args, job.opts
        key = (type(args), id(opts))  # the options are kept, so that no others have their id
        is_single = isinstance(args, RawArgs) or callable(getattr(args, "insert_opts", None))
        if not is_single and (first := firsts.get(key)) is not None:
            row = InsertRow(_args_text(args), *first[1][1:])
        else:
            row = prepare(args, opts, rules=rules, now=now)
            if not is_single and row.unique_states is None:
                firsts[key] = (opts, row)
        rows.append(row)
    return rows


def prepare(
    args: JobArgs | RawArgs, opts: InsertOpts | None, *, rules: InsertRules, now: datetime
) -> InsertRow:
    """Check one job and encode it; nothing is sent.

    Args:
        args: its args.
        opts: the options of this insert. What they leave open is as the args class says in
            `insert_opts`, else as the client does; metadata and pending are taken from here alone.
        rules: the client's.
        now: the time of the insert, which decides the unique period of a job without a
            `scheduled_at`.

    Raises:
        ConfigError: its kind, queue or a tag breaks the rule for such names.
        UnknownJobKindError: the client has workers, but none for its kind.
        ArgsError: its args or metadata cannot be stored as a JSON object.
        InsertError: another option is out of range.
    """
    kind = _kind(args, rules)
    text = _args_text(args)
    call = _NO_OPTS if opts is None else _expect("opts", opts, InsertOpts)
    own = _own_opts(args)
    queue = _expect("queue", _first(call.queue, own.queue, QUEUE_DEFAULT), str)
    validate_queue(queue)
    tags = _tags(_first(call.tags, own.tags, ()))
    priority = _first(call.priority, own.priority, PRIORITY_DEFAULT)
    max_attempts = _first(call.max_attempts, own.max_attempts, rules.max_attempts)
    scheduled_at = _scheduled_at(_first(call.scheduled_at, own.scheduled_at, None))
    unique = _unique_opts(call, own)
    check_marks(unique, kind=kind, args_class=type(args))
    states = unique_states(unique) if unique else None
    key = (
        unique_key(
            unique,
            kind=kind,
            args_class=type(args),
            args=text,
            queue=queue,
            due_at=scheduled_at or now,
        )
        if unique
        else None
    )
    return InsertRow(
        kind=kind,
        args=text,
        metadata=_metadata(call.metadata),
        queue=queue,
        priority=_in_range("priority", priority, PRIORITY_MAX),
        max_attempts=_in_range("max_attempts", max_attempts, MAX_ATTEMPTS_MAX),
        state=_state(
            pending=_expect("pending", call.pending, bool), scheduled=scheduled_at is not None
        ),
        scheduled_at=_time_text(scheduled_at),
        tags=tags,
        unique_key=key.hex() if key else None,
        unique_states=None if states is None else f"{states:08b}",
    )


def params_of(job: PreparedJob) -> JobInsertParams:
    """The job as hooks and middleware see it."""
    row = job.row
    return JobInsertParams(
        args=job.args,
        encoded_args=row.args,
        kind=row.kind,
        max_attempts=int(row.max_attempts),
        metadata=_decoded(row.metadata),
        priority=int(row.priority),
        queue=row.queue,
        scheduled_at=_time(row.scheduled_at),
        state=JobState(row.state),
        tags=row.tags.split(",") if row.tags else [],
        unique_key=None if row.unique_key is None else bytes.fromhex(row.unique_key),
    )


def row_of(job: PreparedJob, params: JobInsertParams, *, rules: InsertRules) -> InsertRow:
    """The job as hooks and middleware left it, checked again.

    Raises:
        InsertError, ConfigError: they set what is not allowed.
    """
    row = job.row
    state = _expect("state", params.state, JobState)
    if state not in _STATES:
        raise InsertError(f"state must be one of {', '.join(_STATES)}, got {state}")
    key = params.unique_key
    if key is not None and (not isinstance(key, bytes) or len(key) != _KEY_SIZE):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InsertError(f"unique_key must be {_KEY_SIZE} bytes or None")
    if key is not None and row.unique_states is None:
        raise InsertError("the unique_key of a job that is not unique cannot be set")
    validate_queue(_expect("queue", params.queue, str))
    same_time = params.scheduled_at == _time(row.scheduled_at)
    same_metadata = params.metadata == _decoded(row.metadata)
    return InsertRow(
        args=row.args
        if params.encoded_args == row.args
        else _raw_text("encoded_args", params.encoded_args),
        unique_key=None if key is None else key.hex(),
        kind=_checked_kind(_expect("kind", params.kind, str), rules),
        metadata=row.metadata if same_metadata else _metadata(params.metadata),
        queue=params.queue,
        priority=_in_range("priority", params.priority, PRIORITY_MAX),
        max_attempts=_in_range("max_attempts", params.max_attempts, MAX_ATTEMPTS_MAX),
        state=state,
        scheduled_at=row.scheduled_at
        if same_time
        else _time_text(_scheduled_at(params.scheduled_at)),
        tags=_tags(params.tags),
        unique_states=None if key is None else row.unique_states,
    )


def _decoded(metadata: str) -> dict[str, Any]:
    return msgspec.json.decode(metadata, type=dict[str, Any])


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _time_text(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()


def _first(call: T | None, own: T | None, default: T) -> T:
    if call is not None:
        return call
    return default if own is None else own


def _expect(name: str, value: object, expected: type[T]) -> T:
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is int):
        raise InsertError(f"{name} must be {expected.__name__}, got {type(value).__name__}")
    return value


def _in_range(name: str, value: object, most: int) -> str:
    number = _expect(name, value, int)
    if not 1 <= number <= most:
        raise InsertError(f"{name} must be between 1 and {most}, got {number}")
    return str(int(number))


def _kind(args: JobArgs | RawArgs, rules: InsertRules) -> str:
    kind: object = args.kind if isinstance(args, RawArgs) else getattr(type(args), "kind", None)
    if isinstance(args, RawArgs):
        _expect("the kind of RawArgs", kind, str)
    if isinstance(args, type):
        raise InsertError(f"args must be an object, got the class {args.__qualname__}: call it")
    if not isinstance(kind, str):
        raise InsertError(
            f"{type(args).__qualname__} says no kind: give its class `kind: ClassVar[str] = ...`, "
            "or insert RawArgs"
        )
    return _checked_kind(kind, rules)


def _checked_kind(kind: str, rules: InsertRules) -> str:
    if rules.skip_job_kind_validation:
        _json.encode(kind, path="kind")
        if not 1 <= len(kind) <= KIND_LENGTH_MAX:
            raise InsertError(f"a job kind has 1 to {KIND_LENGTH_MAX} characters, got {len(kind)}")
    else:
        validate_kind(kind)
    if rules.known_kinds is not None and kind not in rules.known_kinds:
        raise UnknownJobKindError(kind)
    return kind


def _own_opts(args: JobArgs | RawArgs) -> InsertOpts:
    provider = getattr(args, "insert_opts", None)
    if not callable(provider):
        return _NO_OPTS
    return _expect(f"what {type(args).__qualname__}.insert_opts returns", provider(), InsertOpts)


def _args_text(args: JobArgs | RawArgs) -> str:
    if isinstance(args, RawArgs):
        return _raw_text("RawArgs", args.json)
    text = _within_limit("args", _json.encode(args))
    if not text.startswith("{"):
        raise ArgsError(f"args must be a JSON object, got {text[:80]}")
    _check_decodable(type(args), text)
    return text


def _check_decodable(cls: type[object], text: str) -> None:
    """Decode the args as a worker will: neither a Struct nor a dataclass checks the values that it
    is given."""
    try:
        if (decode := _decoder_of(cls)) is not None:
            decode(text)
    except TypeError as error:
        raise ArgsError(f"args of {cls.__qualname__} can never be decoded: {error}") from None
    except Exception as error:
        reason, _, place = str(error).rpartition(" - at ")
        path = place.split("`")[-2] if reason else "$"
        raise ArgsError(
            f"{path}: {reason or error}; a worker could not decode these args of "
            f"{cls.__qualname__}",
            path=path,
        ) from None


@lru_cache(maxsize=4096)
def _decoder_of(cls: type[object]) -> Callable[[str], object] | None:
    """Decodes the args of this class. None: it is a map, with values of any type, or its types are
    not known in this process, which may insert for others."""
    try:
        return None if issubclass(cls, Mapping) else decoder(cls)
    except NameError:
        return None


def _raw_text(owner: str, given: object) -> str:
    if not isinstance(given, str):
        raise ArgsError(
            f"$: {owner} takes its JSON as a text, got {type(given).__name__}: decode or "
            "serialize it first"
        )
    return _json.normalize_args(_within_limit("args", given))


def _metadata(metadata: object) -> str:
    if isinstance(metadata, Mapping):
        metadata = cast("Mapping[object, object]", metadata)
        for key in metadata:
            check_metadata_key(key)
    return encode_metadata(metadata)


def encode_metadata(metadata: object) -> str:
    """Metadata as JSON text; None stands for none. ArgsError if it is no JSON object."""
    if metadata is None:
        return "{}"
    if not isinstance(metadata, Mapping):
        raise ArgsError(
            f"metadata: must be a JSON object, got {type(metadata).__name__}", path="metadata"
        )
    return _within_limit("metadata", _json.encode(cast("object", metadata), path="metadata"))


def _within_limit(name: str, text: str) -> str:
    size = json_size(text)
    if size > _json.SIZE_MAX:
        raise ArgsError(
            f"the {name} have {size:,} bytes as JSON, PostgreSQL can store {_json.SIZE_MAX:,}: "
            "store the data elsewhere and give the job its place"
        )
    return text


def json_size(text: str) -> int:
    """Its bytes in UTF-8. Lone surrogates are counted, not refused: that is up to the check of the
    text."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _tags(tags: object) -> str:
    if tags == ():
        return ""
    if isinstance(tags, str):
        raise InsertError(f"tags must be a sequence of texts, got the text {tags[:80]!r}")
    sequence = cast("Sequence[object]", _expect("tags", tags, Sequence))
    texts = [_expect("a tag", tag, str) for tag in sequence]
    for text in texts:
        validate_tag(text)
    return ",".join(texts)


def _scheduled_at(value: object) -> datetime | None:
    if value is None:
        return None
    time = _expect("scheduled_at", value, datetime)
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


def _state(*, pending: bool, scheduled: bool) -> JobState:
    if pending:
        return JobState.PENDING
    return JobState.SCHEDULED if scheduled else JobState.AVAILABLE


def _unique_opts(call: InsertOpts, own: InsertOpts) -> UniqueOpts | None:
    for opts in (call.unique_opts, own.unique_opts):
        if opts is None:
            continue
        _expect("unique_opts", opts, UniqueOpts)
        for name in ("by_args", "by_queue", "exclude_kind"):
            _expect(f"unique_opts.{name}", getattr(opts, name), bool)
        if opts.by_period is not None:
            _expect("unique_opts.by_period", opts.by_period, timedelta)
        if opts != _NOT_UNIQUE:
            check_unique_opts(opts)
            return opts
    return None
