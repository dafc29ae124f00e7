"""ExpectedJob: the values that an assertion expects of a job, and their comparison with a job."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields as get_dataclass_fields
from dataclasses import is_dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast, overload

import msgspec

from riverpy import _json
from riverpy._insert.json_text import encode_args
from riverpy.errors import ArgsError
from riverpy.job import JobRow, JobState, RawArgs
from riverpy.testing.made_job import MadeJob
from riverpy.testing.rows import parse_state
from riverpy.worker import make_args_decoder

if TYPE_CHECKING:
    from riverpy.job import JobArgs

ArgsT = TypeVar("ArgsT", bound="JobArgs | RawArgs")

_VALUE_LENGTH_MAX = 200
"""The maximum number of characters of a value that an error text shows."""


_SHOWN_START_LENGTH = 40
"""If two long values begin with the same text, an error text leaves out the beginning of both. It
shows this many characters before their first difference."""


class FieldDifference(NamedTuple):
    """A field or column of a job that does not have the expected value."""

    name: str
    expected: str
    """The expected value, as text."""
    found: str
    """The value of the job, as text."""


class ExpectedJob(msgspec.Struct, Generic[ArgsT], frozen=True, kw_only=True):
    """The kind, args and columns that an assertion expects of a job. `expect_job` creates it."""

    kinds: tuple[str, ...]
    """The kind of the args class, and older names of the kind. A job must have one of them."""
    args_type: Any
    """The class of the args. With `RawArgs`, the args are not decoded."""
    exact_args: str | None
    """All expected args, as JSON text; None: only `fields` are compared."""
    fields: Mapping[str, object]
    """The expected values of single fields of the args, by field name."""
    columns: Mapping[str, object]
    """The expected values of columns, by column name."""

    def __str__(self) -> str:
        name = (
            f"of kind {self.kinds[0]!r}" if self.args_type is RawArgs else self.args_type.__name__
        )
        values = [f"{key}={format_value(value)}" for key, value in self.fields.items()]
        if self.exact_args is not None:
            values.append(shorten_text(self.exact_args))
        text = name + (f"({', '.join(values)})" if values else "")
        columns = [f"{key}={format_value(value)}" for key, value in self.columns.items()]
        return f"{text} with {', '.join(columns)}" if columns else text

    def decode_job(self, row: JobRow) -> MadeJob[ArgsT]:
        """Return the job of a row, with its decoded args.

        Raises:
            ArgsError: the args cannot be decoded.
        """
        return MadeJob(row.get_encoded_values(), cast("ArgsT", self._decode_args(row)))

    def _decode_args(self, row: JobRow) -> object:
        if self.args_type is RawArgs:
            return RawArgs(row.kind, row.encoded_args)
        try:
            return make_args_decoder(self.args_type, self.args_type.__name__)(row.encoded_args)
        except Exception as error:  # a decoder of the user's class may raise anything
            raise ArgsError(
                f"the args of job {row.id} cannot be decoded as {self.args_type.__name__}: "
                f"{error}; they are {shorten_text(row.encoded_args)}"
            ) from error

    def list_differences(self, row: JobRow) -> list[FieldDifference]:
        """Return each field and column of a job that does not have the expected value. The job must
        have one of `kinds`."""
        return [*self._compare_args(row), *self._compare_columns(row)]

    def _compare_args(self, row: JobRow) -> Iterable[FieldDifference]:
        if self.exact_args is not None:
            yield from _compare_json(self.exact_args, row.encoded_args)
        if not self.fields:
            return
        try:
            args = self._decode_args(row)
        except ArgsError as error:
            yield FieldDifference("args", f"args of {self.args_type.__name__}", str(error))
            return
        for name, expected in self.fields.items():
            found = _get_field(args, name)
            if not _is_equal(expected, found):
                yield _make_difference(name, expected, found)

    def _compare_columns(self, row: JobRow) -> Iterable[FieldDifference]:
        for name, expected in self.columns.items():
            found = getattr(row, name)
            is_same = (
                sorted(found) == sorted(cast("list[str]", expected))
                if name == "tags"
                else found == expected
            )
            if not is_same:
                is_field = name in (_list_field_names(self.args_type) or ())
                hint = (
                    f" (the option; write args={{{name!r}: …}} for the field)" if is_field else ""
                )
                yield _make_difference(f"{name}{hint}", expected, found)


class _MissingField:
    """The value of a field that is missing, for comparisons. Error texts show it as
    `no such field`."""

    def __repr__(self) -> str:
        return "no such field"


_MISSING_FIELD = _MissingField()


@overload
def expect_job(
    expected: str,
    *,
    queue: str | None = None,
    priority: int | None = None,
    max_attempts: int | None = None,
    scheduled_at: datetime | None = None,
    state: JobState | str | None = None,
    tags: Sequence[str] | None = None,
    args: Mapping[str, object] | None = None,
    **fields: object,
) -> ExpectedJob[RawArgs]: ...
@overload
def expect_job(
    expected: type[ArgsT] | ExpectedJob[ArgsT] | ArgsT,
    *,
    queue: str | None = None,
    priority: int | None = None,
    max_attempts: int | None = None,
    scheduled_at: datetime | None = None,
    state: JobState | str | None = None,
    tags: Sequence[str] | None = None,
    args: Mapping[str, object] | None = None,
    **fields: object,
) -> ExpectedJob[ArgsT]: ...
def expect_job(
    expected: object,
    *,
    queue: str | None = None,
    priority: int | None = None,
    max_attempts: int | None = None,
    scheduled_at: datetime | None = None,
    state: JobState | str | None = None,
    tags: Sequence[str] | None = None,
    args: Mapping[str, object] | None = None,
    **fields: object,
) -> ExpectedJob[Any]:
    """Describe the job that an assertion expects. `require_many_inserted` takes a list of such
    descriptions.

    Args:
        expected: an args class, to accept any job of its kind; or args, to compare all their
            values; or, for a kind without an args class in Python, the name of the kind. Then the
            args of the found job are `RawArgs`.
        queue: the queue. Default None: any.
        priority: the priority, 1 to 4. Default None: any.
        max_attempts: the maximum number of attempts. Default None: any.
        scheduled_at: the exact time at which the job is due. Default None: any time.
        state: the state. Default None: any.
        tags: all tags, in any order. Default None: any.
        args: the values of single fields of the args, by name. Use it for fields that have the name
            of one of these parameters, such as `queue`.
        fields: the values of single fields of the args. Objects such as `unittest.mock.ANY` work.

    Raises:
        TypeError: `expected` has no kind, or the args have no such field.
        ValueError: a state or a time is not allowed.
    """
    if isinstance(expected, ExpectedJob):
        base = cast("ExpectedJob[Any]", expected)
    elif isinstance(expected, str):
        base = _make_raw_expected_job(expected, None)
    else:
        base = _make_expected_job(expected)
    all_fields = {**(args or {}), **fields}
    _check_field_names(base.args_type, all_fields)
    columns = {
        "queue": queue,
        "priority": priority,
        "max_attempts": max_attempts,
        "scheduled_at": None if scheduled_at is None else _convert_to_utc(scheduled_at),
        "state": None if state is None else parse_state(state),
        "tags": None if tags is None else list(tags),
    }
    given = {name: value for name, value in columns.items() if value is not None}
    return msgspec.structs.replace(
        base, fields={**base.fields, **all_fields}, columns={**base.columns, **given}
    )


def check_expected_is_list(expected: object) -> None:
    """Raise TypeError if `expected` is a single class, args or ExpectedJob instead of a list."""
    if isinstance(expected, (type, str, ExpectedJob)) or hasattr(expected, "kind"):
        name = expected.__name__ if isinstance(expected, type) else str(cast("object", expected))
        raise TypeError(f"require_many_inserted takes a list, as in [{name}]")


def _make_expected_job(expected: object) -> ExpectedJob[Any]:
    if isinstance(expected, RawArgs):
        return _make_raw_expected_job(expected.kind, encode_args(expected))
    cls: Any = expected if isinstance(expected, type) else type(expected)
    kind: object = getattr(cls, "kind", None)
    if not isinstance(kind, str):
        raise TypeError(
            f"{cls.__qualname__} has no kind: pass an args class or args, as in "
            "require_inserted(Welcome, user_id=1, tx=connection)"
        )
    exact_args = None if isinstance(expected, type) else encode_args(cast("Any", expected))
    aliases = tuple(getattr(cls, "kind_aliases", ()))
    return ExpectedJob(
        kinds=(kind, *aliases), args_type=cls, exact_args=exact_args, fields={}, columns={}
    )


def _make_raw_expected_job(kind: str, exact_args: str | None) -> ExpectedJob[Any]:
    """Return an ExpectedJob whose args are not decoded."""
    return ExpectedJob(
        kinds=(kind,), args_type=RawArgs, exact_args=exact_args, fields={}, columns={}
    )


def _check_field_names(args_type: Any, fields: Mapping[str, object]) -> None:
    names = _list_field_names(args_type)
    if names is None or not (unknown := [name for name in fields if name not in names]):
        return
    options = ["queue", "priority", "max_attempts", "scheduled_at", "state", "tags"]
    similar = difflib.get_close_matches(unknown[0], [*names, *options], 1)
    hint = f": did you mean {similar[0]}?" if similar else f": it has {', '.join(names)}"
    raise TypeError(f"{args_type.__name__} has no field {unknown[0]!r}{hint}")


def _list_field_names(args_type: Any) -> list[str] | None:
    """Return the field names of an args class, or None if it can have fields with any name."""
    if args_type is RawArgs:
        return None
    if issubclass(args_type, msgspec.Struct):
        return list(args_type.__struct_fields__)
    if is_dataclass(args_type):
        return [field.name for field in get_dataclass_fields(args_type)]
    model_fields: object = getattr(args_type, "model_fields", None)
    return list(cast("Mapping[str, object]", model_fields)) if model_fields else None


def _convert_to_utc(time: object) -> object:
    """Return a time in UTC. Return any other object, such as pytest's `approx`, unchanged."""
    if not isinstance(time, datetime):
        return time
    if time.utcoffset() is None:
        raise ValueError(
            f"scheduled_at has no time zone: {time.isoformat()}; give it one, as in "
            "datetime.now(UTC)"
        )
    return time.astimezone(UTC)


def _get_field(args: object, name: str) -> object:
    if isinstance(args, RawArgs):
        args = json.loads(args.json)
    if isinstance(args, Mapping):
        return cast("Mapping[str, object]", args).get(name, _MISSING_FIELD)
    return getattr(args, name, _MISSING_FIELD)


def _is_equal(expected: object, found: object) -> bool:
    """Return whether two values are equal, as Python objects or as JSON."""
    if expected == found:
        return True
    if found is _MISSING_FIELD:
        return False
    try:
        return json.loads(_json.encode(expected)) == json.loads(_json.encode(found))
    except ArgsError:
        return False


def _compare_json(expected_text: str, found_text: str) -> Iterable[FieldDifference]:
    """Compare two JSON objects, and yield a difference for each member with different values. The
    arguments are JSON texts."""
    expected, found = json.loads(expected_text), json.loads(found_text)
    if not isinstance(expected, dict) or not isinstance(found, dict):
        if expected != found:
            yield FieldDifference("args", shorten_text(expected_text), shorten_text(found_text))
        return
    expected, found = cast("dict[str, Any]", expected), cast("dict[str, Any]", found)
    for name in dict.fromkeys([*expected, *found]):
        values = expected.get(name, _MISSING_FIELD), found.get(name, _MISSING_FIELD)
        if values[0] != values[1]:
            yield _make_difference(name, *values)


def _make_difference(name: str, expected: object, found: object) -> FieldDifference:
    """Return a FieldDifference with both values as text. If long values begin with the same text,
    omit most of this text."""
    texts = [_to_text(value) for value in (expected, found)]
    pairs = enumerate(zip(*texts, strict=False))
    same = next((index for index, (a, b) in pairs if a != b), min(map(len, texts)))
    if same > _VALUE_LENGTH_MAX // 2 and max(map(len, texts)) > _VALUE_LENGTH_MAX:
        texts = [f"…{text[same - _SHOWN_START_LENGTH :]}" for text in texts]
    return FieldDifference(name, *map(shorten_text, texts))


def format_value(value: object) -> str:
    """Return a value as text for error texts. A long text is cut."""
    return shorten_text(_to_text(value))


def _to_text(value: object) -> str:
    if isinstance(value, JobState):
        return repr(value.value)
    return value.isoformat(" ") if isinstance(value, datetime) else repr(value)


def shorten_text(text: str) -> str:
    """Return a text with at most 200 characters. A longer text is cut."""
    return text if len(text) <= _VALUE_LENGTH_MAX else f"{text[: _VALUE_LENGTH_MAX - 1]}…"
