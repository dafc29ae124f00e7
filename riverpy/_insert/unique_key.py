"""The unique key of a job, and the states in which the job keeps its key. The key is the hash of a
text, as in River."""

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
from riverpy.errors import InsertError
from riverpy.insert_opts import UNIQUE_STATES_DEFAULT, UNIQUE_STATES_REQUIRED, Unique, UniqueOpts
from riverpy.job import UNIQUE_STATE_BITS, JobState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PERIOD_MIN = timedelta(seconds=1)
"""The shortest unique period."""

_PERIOD_EPOCH = datetime(1, 1, 1, tzinfo=UTC)
_CHARACTER_TO_ESCAPE = re.compile(r"[^ !#-\[\]-\x7f]")
_ARRAY_INDEX_MAX = 1000
_WARNINGS_MAX = 1000

_log = get_logger()
_checked_classes: set[type[object]] = set()
"""The args classes that `warn_of_ignored_marks` has checked."""
_decoder = json.JSONDecoder(parse_int=str, parse_float=str)


def check_unique_opts(opts: UniqueOpts) -> None:
    """Check options that River allows only in combination or in a range.

    Raises:
        InsertError: `exclude_kind` is the only option, or the period is shorter than one second.
    """
    if opts.exclude_kind and not (opts.by_args or opts.by_queue or opts.by_period is not None):
        raise InsertError("unique_opts.exclude_kind requires by_args, by_queue or by_period")
    if opts.by_period is not None and opts.by_period < PERIOD_MIN:
        raise InsertError(
            f"unique_opts.by_period must be one second or longer, got {opts.by_period}"
        )


def unique_states(opts: UniqueOpts) -> int:
    """Return the bit mask of the states in which a job keeps its key.

    Raises:
        InsertError: a state is unknown, or a state that River requires is missing.
    """
    if opts.by_state is None:
        return _state_mask(UNIQUE_STATES_DEFAULT)
    try:
        states = {JobState(state) for state in opts.by_state}
    except (ValueError, TypeError) as error:
        raise InsertError(f"unique_opts.by_state must be a list of job states: {error}") from None
    if missing := [state for state in UNIQUE_STATES_REQUIRED if state not in states]:
        raise InsertError(
            "unique_opts.by_state must include available, pending, running and scheduled; "
            f"missing: {', '.join(missing)}"
        )
    return _state_mask(states)


def unique_key(
    opts: UniqueOpts,
    *,
    kind: str,
    args_class: type[object],
    args: str,
    queue: str,
    due_at: datetime,
) -> bytes:
    """Return the unique key, 32 bytes.

    Args:
        opts: the checked options.
        kind: the kind of the job.
        args_class: the class of the args. Fields of the class may be marked `Unique`.
        args: the args as JSON text: an object, or an empty array.
        queue: the queue of the job.
        due_at: `scheduled_at` of the job, or else the time of the insert.

    Raises:
        InsertError: the marked fields of the class cannot be found, or River's unique keys do not
            support the name of a marked field.
    """
    text = "" if opts.exclude_kind else f"&kind={kind}"
    if opts.by_args:
        text += f"&args={_args_part(kind, args_class, args)}"
    if opts.by_period is not None:
        text += f"&period={_period_start(due_at, opts.by_period)}"
    if opts.by_queue:
        text += f"&queue={queue}"
    return hashlib.sha256(text.encode()).digest()


def warn_of_ignored_marks(opts: UniqueOpts | None, *, kind: str, args_class: type[object]) -> None:
    """Log a warning if fields of an args class are marked `Unique`, but the options ignore the
    marks. Only the first insert of each class is checked."""
    if args_class in _checked_classes or len(_checked_classes) >= _WARNINGS_MAX:
        return
    _checked_classes.add(args_class)
    if opts is not None and opts.by_args:
        return
    try:
        fields = [".".join(path) for path in unique_paths(args_class)]
    except InsertError:  # the types of the fields cannot be imported in this process
        return
    if fields:
        _log.warning(
            UNIQUE_FIELDS_IGNORED,
            advice="set UniqueOpts(by_args=True)",
            kind=kind,
            fields=fields,
        )


def _state_mask(states: set[JobState] | frozenset[JobState]) -> int:
    return sum(1 << bit for bit, state in enumerate(UNIQUE_STATE_BITS) if state in states)


def _period_start(due_at: datetime, period: timedelta) -> str:
    utc = due_at.astimezone(UTC)
    start = utc - (utc - _PERIOD_EPOCH) % period
    return start.replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def _args_part(kind: str, args_class: type[object], args: str) -> str:
    members: dict[str, str] = {}
    for key, raw in _iterate_members(args):
        members.setdefault(key, raw)
    if paths := unique_paths(args_class):
        found = [(path, raw) for path in paths if (raw := _value_at(members, path)) is not None]
        return _build_document(kind, found) if found else ""
    return "{" + ",".join(f"{_encode_key(key)}:{members[key]}" for key in sorted(members)) + "}"


def _iterate_members(text: str) -> Iterator[tuple[str, str]]:
    """Yield each key of a compact JSON object, and the text of the key's value. Yield nothing for
    other JSON."""
    at = 1
    while text.startswith("{") and text[at] != "}":
        key, colon = _decoder.raw_decode(text, at)
        _, end = _decoder.raw_decode(text, colon + 1)
        yield key, text[colon + 1 : end]
        at = end + 1 if text[end] == "," else end


def _encode_key(key: str) -> str:
    return _json.encode_string(key) if _CHARACTER_TO_ESCAPE.search(key) else f'"{key}"'


# Fields marked `Unique`


@lru_cache(maxsize=4096)
def unique_paths(args_class: type[object]) -> tuple[tuple[str, ...], ...]:
    """Return the path of JSON names to each field that is marked `Unique`. The paths are sorted by
    their text, in which dots separate the names.

    As in River, the fields of each nested class are searched only once. If another field has the
    same class, its path is returned only if this field itself is marked.

    Raises:
        InsertError: an annotation of the class cannot be resolved.
    """
    return tuple(sorted(_marked_paths(args_class, {args_class}), key=".".join))


def _marked_paths(cls: type[object], visited: set[type[object]]) -> Iterator[tuple[str, ...]]:
    for name, annotation in _field_annotations(cls):
        inner = _record_class(annotation)
        below: list[tuple[str, ...]] = []
        if inner is not None and inner not in visited:
            visited.add(inner)
            below = list(_marked_paths(inner, visited))
        if below:
            yield from ((name, *path) for path in below)
        elif _is_marked(annotation):
            yield (name,)


def _field_annotations(cls: type[object]) -> list[tuple[str, Any]]:
    if not (names := _field_names(cls)):
        return []
    try:
        hints = get_type_hints(cls, include_extras=True)
    except (NameError, TypeError) as error:
        raise InsertError(
            f"the annotations of {cls.__qualname__} cannot be resolved ({error}), so its fields "
            "marked Unique are not known: import their types at run time"
        ) from None
    return [(name, hints.get(attribute)) for attribute, name in names]


def _field_names(cls: type[object]) -> list[tuple[str, str]]:
    """Return the attribute and the JSON name of each field of a Struct or dataclass."""
    if issubclass(cls, msgspec.Struct):
        return list(zip(cls.__struct_fields__, cls.__struct_encode_fields__, strict=True))
    return [(field.name, field.name) for field in fields(cls)] if is_dataclass(cls) else []


def _types_and_marks(annotation: Any) -> tuple[list[Any], list[Any]]:
    """Return the types that an annotation allows, without None and UNSET, and the marks in its
    `Annotated` parts."""
    parts = get_args(annotation)
    if get_origin(annotation) is Annotated:
        types, marks = _types_and_marks(parts[0])
        return types, [*parts[1:], *marks]
    if get_origin(annotation) in {Union, UnionType}:
        found = [_types_and_marks(part) for part in parts]
        return [t for types, _ in found for t in types], [m for _, marks in found for m in marks]
    return ([] if annotation in (NoneType, msgspec.UnsetType) else [annotation]), []


def _record_class(annotation: Any) -> type[object] | None:
    """Return the Struct or dataclass of an annotation that allows no other type."""
    types, _ = _types_and_marks(annotation)
    cls = get_origin(types[0]) or types[0] if len(types) == 1 else None
    return cls if isinstance(cls, type) and _field_names(cls) else None


def _is_marked(annotation: Any) -> bool:
    _, marks = _types_and_marks(annotation)
    return any(mark is Unique or isinstance(mark, Unique) for mark in marks)


def _value_at(members: Mapping[str, str], path: Sequence[str]) -> str | None:
    """Return the JSON text of the value at this path; None: there is no value."""
    found = members.get(path[0])
    for name in path[1:]:
        if found is None:
            return None
        found = next((value for key, value in _iterate_members(found) if key == name), None)
    return found


def _build_document(kind: str, chosen: Sequence[tuple[Sequence[str], str]]) -> str:
    """Return a JSON text that has each value at its path.

    As in River, an object whose first name is a number becomes an array, and its names become the
    indexes.
    """
    path, raw = chosen[0]
    if not path:
        return raw
    below: dict[str, list[tuple[Sequence[str], str]]] = {}
    for path, raw in chosen:
        below.setdefault(path[0], []).append((path[1:], raw))
    values = {name: _build_document(kind, inner) for name, inner in below.items()}
    if not _is_index(next(iter(values))):
        return "{" + ",".join(f"{_encode_key(name)}:{raw}" for name, raw in values.items()) + "}"
    elements: list[str] = []
    for name, raw in values.items():
        if not _is_index(name) or int(name) > _ARRAY_INDEX_MAX:
            raise InsertError(
                f"the field {name!r} of {kind!r} is marked Unique, but River's unique keys do not "
                "support its name: rename it"
            )
        elements += ["null"] * (int(name) + 1 - len(elements))
        elements[int(name)] = raw
    return "[" + ",".join(elements) + "]"


def _is_index(name: str) -> bool:
    return name.isdecimal() and name.isascii()
