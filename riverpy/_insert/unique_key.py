"""Computes the unique key of a job, and the states in which the job keeps this key. As in River,
the key is the SHA-256 hash of a text."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from riverpy import _json
from riverpy._log import get_logger
from riverpy._log_events import UNIQUE_FIELDS_IGNORED
from riverpy._pydantic_models import (
    get_model_field_annotations,
    get_model_field_names,
    is_model_class,
)
from riverpy.errors import InsertError
from riverpy.insert_opts import UNIQUE_STATES_DEFAULT, UNIQUE_STATES_REQUIRED, Unique, UniqueOpts
from riverpy.job import UNIQUE_STATE_BY_BIT, JobState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

UNIQUE_PERIOD_MIN = timedelta(seconds=1)
"""The shortest period that `UniqueOpts.by_period` allows."""

_UNIQUE_PERIOD_EPOCH = datetime(1, 1, 1, tzinfo=UTC)
_CHARACTER_TO_ESCAPE = re.compile(r"[^ !#-\[\]-\x7f]")
_ARRAY_INDEX_MAX = 1000
_CHECKED_CLASSES_MAX = 1000

_log = get_logger()
_checked_args_classes: set[type[object]] = set()
"""The args classes that `warn_of_ignored_unique_fields` has checked."""
_json_decoder = json.JSONDecoder(parse_int=str, parse_float=str)


def check_unique_opts(opts: UniqueOpts) -> None:
    """Check the options `exclude_kind` and `by_period` by River's rules.

    Raises:
        InsertError: `exclude_kind` is the only option, or the period is shorter than one second.
    """
    if opts.exclude_kind and not (opts.by_args or opts.by_queue or opts.by_period is not None):
        raise InsertError("unique_opts.exclude_kind requires by_args, by_queue or by_period")
    if opts.by_period is not None and opts.by_period < UNIQUE_PERIOD_MIN:
        raise InsertError(
            f"unique_opts.by_period must be one second or longer, got {opts.by_period}"
        )


def make_unique_state_bits(opts: UniqueOpts) -> int:
    """Return the bit mask of the states in which a job keeps its unique key.

    Raises:
        InsertError: a state is unknown, or a state that River requires is missing.
    """
    if opts.by_state is None:
        return _make_state_bits(UNIQUE_STATES_DEFAULT)
    try:
        states = {JobState(state) for state in opts.by_state}
    except (ValueError, TypeError) as error:
        raise InsertError(f"unique_opts.by_state must be a list of job states: {error}") from None
    if missing := [state for state in UNIQUE_STATES_REQUIRED if state not in states]:
        raise InsertError(
            "unique_opts.by_state must include available, pending, running and scheduled; "
            f"missing: {', '.join(missing)}"
        )
    return _make_state_bits(states)


def compute_unique_key(
    opts: UniqueOpts,
    *,
    kind: str,
    args_class: type[object],
    args_json: str,
    queue: str,
    due_at: datetime,
) -> bytes:
    """Return the unique key, 32 bytes.

    Args:
        opts: the checked options.
        kind: the kind of the job.
        args_class: the class of the args. Fields of the class may be marked `Unique`.
        args_json: the args as JSON text: an object, or an empty array.
        queue: the queue of the job.
        due_at: `scheduled_at` of the job, or the time of the insert if `scheduled_at` is not set.

    Raises:
        InsertError: the fields that are marked `Unique` cannot be found, or River's unique keys do
            not support the name of such a field.
    """
    text = "" if opts.exclude_kind else f"&kind={kind}"
    if opts.by_args:
        text += f"&args={_make_args_part_of_key(kind, args_class, args_json)}"
    if opts.by_period is not None:
        text += f"&period={_format_period_start(due_at, opts.by_period)}"
    if opts.by_queue:
        text += f"&queue={queue}"
    return hashlib.sha256(text.encode()).digest()


def warn_of_ignored_unique_fields(
    opts: UniqueOpts | None, *, kind: str, args_class: type[object]
) -> None:
    """Log a warning if fields of an args class are marked `Unique`, but `opts` ignores these marks.
    Only the first insert of each class is checked."""
    if args_class in _checked_args_classes or len(_checked_args_classes) >= _CHECKED_CLASSES_MAX:
        return
    _checked_args_classes.add(args_class)
    if opts is not None and opts.by_args:
        return
    try:
        fields = [".".join(path) for path in find_unique_field_paths(args_class)]
    except InsertError:  # the types of the fields cannot be imported in this process
        return
    if fields:
        _log.warning(
            UNIQUE_FIELDS_IGNORED,
            advice="set UniqueOpts(by_args=True)",
            kind=kind,
            fields=fields,
        )


def _make_state_bits(states: set[JobState] | frozenset[JobState]) -> int:
    return sum(1 << bit for bit, state in enumerate(UNIQUE_STATE_BY_BIT) if state in states)


def _format_period_start(due_at: datetime, period: timedelta) -> str:
    utc = due_at.astimezone(UTC)
    start = utc - (utc - _UNIQUE_PERIOD_EPOCH) % period
    return start.replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def _make_args_part_of_key(kind: str, args_class: type[object], args_json: str) -> str:
    members: dict[str, str] = {}
    for key, raw in _iterate_json_members(args_json):
        members.setdefault(key, raw)
    if paths := find_unique_field_paths(args_class):
        found = [
            (path, raw) for path in paths if (raw := _find_json_value(members, path)) is not None
        ]
        return _build_json_text(kind, found) if found else ""
    return (
        "{" + ",".join(f"{_encode_json_name(key)}:{members[key]}" for key in sorted(members)) + "}"
    )


def _iterate_json_members(json_text: str) -> Iterator[tuple[str, str]]:
    """Yield each key of a JSON object, and the JSON text of the key's value. `json_text` must have
    no spaces between its tokens. If this text is not an object, yield nothing."""
    at = 1
    while json_text.startswith("{") and json_text[at] != "}":
        key, colon = _json_decoder.raw_decode(json_text, at)
        _, end = _json_decoder.raw_decode(json_text, colon + 1)
        yield key, json_text[colon + 1 : end]
        at = end + 1 if json_text[end] == "," else end


def _encode_json_name(name: str) -> str:
    return _json.encode_unchecked_string(name) if _CHARACTER_TO_ESCAPE.search(name) else f'"{name}"'


# Fields marked `Unique`


@lru_cache(maxsize=4096)
def find_unique_field_paths(args_class: type[object]) -> tuple[tuple[str, ...], ...]:
    """Return the path of JSON names to each field that is marked `Unique`. The paths are sorted by
    their text, in which dots separate the names.

    As in River, the fields of each nested class are searched only once. So if two fields have the
    same class, the marked fields inside this class are returned only for the first field. The path
    of the second field is returned if the second field itself is marked.

    Raises:
        InsertError: an annotation of the class cannot be resolved.
    """
    return tuple(sorted(_iterate_unique_field_paths(args_class, {args_class}), key=".".join))


def _iterate_unique_field_paths(
    cls: type[object], visited: set[type[object]]
) -> Iterator[tuple[str, ...]]:
    for name, annotation in _get_field_annotations(cls):
        inner = _get_struct_class(annotation)
        below: list[tuple[str, ...]] = []
        if inner is not None and inner not in visited:
            visited.add(inner)
            below = list(_iterate_unique_field_paths(inner, visited))
        if below:
            yield from ((name, *path) for path in below)
        elif _is_annotated_unique(annotation):
            yield (name,)


def _get_field_annotations(cls: type[object]) -> list[tuple[str, Any]]:
    if not (names := _get_field_json_names(cls)):
        return []
    try:
        if is_model_class(cls):
            hints = get_model_field_annotations(cls)
        else:
            hints = get_type_hints(cls, include_extras=True)
    except (NameError, TypeError) as error:
        raise InsertError(
            f"the annotations of {cls.__qualname__} cannot be resolved ({error}), so its fields "
            "marked Unique are not known: import their types at run time"
        ) from None
    return [(name, hints.get(attribute)) for attribute, name in names]


def _get_field_json_names(cls: type[object]) -> list[tuple[str, str]]:
    """Return the attribute and the JSON name of each field of a model, Struct or dataclass."""
    if is_model_class(cls):
        return get_model_field_names(cls)
    if issubclass(cls, msgspec.Struct):
        return list(zip(cls.__struct_fields__, cls.__struct_encode_fields__, strict=True))
    return [(field.name, field.name) for field in fields(cls)] if is_dataclass(cls) else []


def _split_types_and_marks(annotation: Any) -> tuple[list[Any], list[Any]]:
    """Return the types that an annotation allows, without None and UNSET, and the marks in its
    `Annotated` parts."""
    parts = get_args(annotation)
    if get_origin(annotation) is Annotated:
        types, marks = _split_types_and_marks(parts[0])
        return types, [*parts[1:], *marks]
    if get_origin(annotation) in {Union, UnionType}:
        found = [_split_types_and_marks(part) for part in parts]
        return [t for types, _ in found for t in types], [m for _, marks in found for m in marks]
    return ([] if annotation in (NoneType, msgspec.UnsetType) else [annotation]), []


def _get_struct_class(annotation: Any) -> type[object] | None:
    """Return the Struct, dataclass or pydantic model that an annotation allows. Return None if the
    annotation allows another type or several types."""
    types, _ = _split_types_and_marks(annotation)
    cls = get_origin(types[0]) or types[0] if len(types) == 1 else None
    return cls if isinstance(cls, type) and _get_field_json_names(cls) else None


def _is_annotated_unique(annotation: Any) -> bool:
    _, marks = _split_types_and_marks(annotation)
    return any(mark is Unique or isinstance(mark, Unique) for mark in marks)


def _find_json_value(members: Mapping[str, str], path: Sequence[str]) -> str | None:
    """Return the JSON text of the value at this path. Return None if there is no value."""
    found = members.get(path[0])
    for name in path[1:]:
        if found is None:
            return None
        found = next((value for key, value in _iterate_json_members(found) if key == name), None)
    return found


def _build_json_text(kind: str, paths_and_values: Sequence[tuple[Sequence[str], str]]) -> str:
    """Return the text of a JSON object in which each value is at its path.

    As in River, an object whose first name is a number becomes an array, and its names become the
    indexes.
    """
    path, raw = paths_and_values[0]
    if not path:
        return raw
    below: dict[str, list[tuple[Sequence[str], str]]] = {}
    for path, raw in paths_and_values:
        below.setdefault(path[0], []).append((path[1:], raw))
    values = {name: _build_json_text(kind, inner) for name, inner in below.items()}
    if not _is_array_index(next(iter(values))):
        return (
            "{" + ",".join(f"{_encode_json_name(name)}:{raw}" for name, raw in values.items()) + "}"
        )
    elements: list[str] = []
    for name, raw in values.items():
        if not _is_array_index(name) or int(name) > _ARRAY_INDEX_MAX:
            raise InsertError(
                f"the field {name!r} of {kind!r} is marked Unique, but River's unique keys do not "
                "support its name: rename it"
            )
        elements += ["null"] * (int(name) + 1 - len(elements))
        elements[int(name)] = raw
    return "[" + ",".join(elements) + "]"


def _is_array_index(name: str) -> bool:
    return name.isdecimal() and name.isascii()
