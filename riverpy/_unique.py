"""The unique key of a job: what makes it unique as River's text, hashed, and the states of it."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from functools import lru_cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from riverpy import _json
from riverpy._log import get_logger
from riverpy.errors import InsertError
from riverpy.insert_opts import UNIQUE_STATES_DEFAULT, UNIQUE_STATES_REQUIRED, Unique, UniqueOpts
from riverpy.job import UNIQUE_STATE_BITS, JobState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TypeAlias

    from _typeshed import DataclassInstance

    _Node: TypeAlias = str | dict[str, "_Node"] | list["_Node"] | None
    """A document while its members are put into it: raw JSON, an opened container, or nothing."""

PERIOD_MIN = timedelta(seconds=1)

_PERIOD_EPOCH = datetime(1, 1, 1, tzinfo=UTC)
_NOT_VERBATIM = re.compile(r"[^ !#-\[\]-\x7f]")
_MANGLED = re.compile(
    r"[.|#@*?\\]|^:|^[\[{][\s\S]|^![-+\[{\"0-9]|^!(?:true|false|null|nan|inf)$", re.IGNORECASE
)
_MANGLED_PATH = re.compile(r"[|#@*?\\:\[{!]|^\.|\.$|\.\.")
_WILDCARD = re.compile(r"[|#@*?]")
_TANGLED = re.compile(r"\\:|[.|][\[{]")
"""Characters whose meanings change each other."""
_SELECTOR = re.compile(r"(?:\[\w+\]|\{\w+\})", re.ASCII)
_ARRAY_INDEX_MAX = 1000
_WARNINGS_MAX = 1000

_log = get_logger()
_warned: set[tuple[str, str]] = set()
_inserted: set[type[object]] = set()
"""The args classes whose marked fields `check_marks` has compared with their options."""
_decoder = json.JSONDecoder(parse_int=str, parse_float=str)


def unique_states(opts: UniqueOpts) -> int:
    """The mask of the states in which a job holds its key.

    Raises:
        InsertError: a state is unknown, or one that River requires is missing.
    """
    if opts.by_state is None:
        return _mask(UNIQUE_STATES_DEFAULT)
    try:
        states = {JobState(state) for state in opts.by_state}
    except (ValueError, TypeError) as error:
        raise InsertError(f"unique_opts.by_state: {error}; it holds states of a job") from None
    if missing := [state for state in UNIQUE_STATES_REQUIRED if state not in states]:
        raise InsertError(
            "unique_opts.by_state must have available, pending, running and scheduled; "
            f"missing: {', '.join(missing)}"
        )
    return _mask(states)


def unique_key(
    opts: UniqueOpts, *, kind: str, args_class: type[object], args: str, queue: str, now: datetime
) -> bytes:
    """The 32 bytes of the key.

    Args:
        opts: what makes the job unique.
        kind: its kind.
        args_class: the class of its args, whose fields may be marked `Unique`.
        args: its args as `riverpy._json` wrote them, an object.
        queue: its queue.
        now: when it is inserted, aware. Periods are those of UTC, so keys by period agree with Go
            processes that run in UTC, and with no others.

    Raises:
        InsertError: the args have a top-level key that River cannot put into a unique key, or the
            period is too short.
    """
    text = "" if opts.exclude_kind else f"&kind={kind}"
    if opts.by_args:
        text += f"&args={_args_part(kind, args_class, args)}"
    if opts.by_period is not None:
        text += f"&period={_period_start(now, opts.by_period)}"
    if opts.by_queue:
        text += f"&queue={queue}"
    return hashlib.sha256(text.encode()).digest()


def check_marks(opts: UniqueOpts | None, *, kind: str, args_class: type[object]) -> None:
    """Log at the first insert of a class that its marked fields do not count, if they do not."""
    if args_class in _inserted or len(_inserted) >= _WARNINGS_MAX:
        return
    _inserted.add(args_class)
    if opts is not None and opts.by_args:
        return
    try:
        fields = unique_paths(args_class)
    except InsertError:  # its marks are not known in this process
        return
    if fields:
        _log.warning(
            "fields marked Unique have no effect without by_args",
            kind=kind,
            fields=fields,
        )


def _mask(states: set[JobState] | frozenset[JobState]) -> int:
    return sum(1 << bit for bit, state in enumerate(UNIQUE_STATE_BITS) if state in states)


def _period_start(now: datetime, period: timedelta) -> str:
    if period < PERIOD_MIN:
        raise InsertError(f"unique_opts.by_period must be one second or longer, got {period}")
    utc = now.astimezone(UTC)
    start = utc - (utc - _PERIOD_EPOCH) % period
    return start.replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def _args_part(kind: str, args_class: type[object], args: str) -> str:
    members: dict[str, str] = {}
    for key, raw in _members(args):
        members.setdefault(key, raw)
    if paths := unique_paths(args_class):
        return _marked_fields(kind, paths, members)
    if "" in members:
        raise InsertError(
            f"the args of {kind!r} have an empty key, which River's unique keys cannot hold: "
            "rename it, or mark the fields that count as Unique"
        )
    if any(_MANGLED.search(key) for key in members):
        return _mangled_args(kind, members)
    return "{" + ",".join(f"{_key_text(key)}:{members[key]}" for key in sorted(members)) + "}"


def _members(text: str) -> Iterator[tuple[str, str]]:
    """The members of a compact JSON object: each key with the text of its value."""
    at = 1
    while text[at] != "}":
        key, colon = _decoder.raw_decode(text, at)
        _, end = _decoder.raw_decode(text, colon + 1)
        yield key, text[colon + 1 : end]
        at = end + 1 if text[end] == "," else end


def _key_text(key: str) -> str:
    return _json.string(key) if _NOT_VERBATIM.search(key) else f'"{key}"'


# Fields marked `Unique`


@lru_cache(maxsize=4096)
def unique_paths(args_class: type[object]) -> tuple[str, ...]:
    """The JSON names of the fields marked `Unique`, sorted; dotted for those inside others.

    A class is looked into once, as by River: the second field of the same class counts only if it
    is marked itself.

    Raises:
        InsertError: an annotation of the class cannot be resolved.
    """
    return tuple(sorted(_marked(args_class, {args_class})))


def _marked(cls: type[object], seen: set[type[object]]) -> Iterator[str]:
    for name, annotation in _annotations(cls):
        inner = _record_class(annotation)
        below: list[str] = []
        if inner is not None and inner not in seen:
            seen.add(inner)
            below = list(_marked(inner, seen))
        if below:
            yield from (f"{name}.{path}" for path in below)
        elif _is_marked(annotation):
            yield name


def _annotations(cls: type[object]) -> list[tuple[str, Any]]:
    if not (names := _field_names(cls)):
        return []
    try:
        hints = get_type_hints(cls, include_extras=True)
    except (NameError, TypeError) as error:
        raise InsertError(
            f"the annotations of {cls.__qualname__} cannot be resolved ({error}), so the "
            "fields that make a job unique are unknown: import their types at run time"
        ) from None
    return [(name, hints.get(attribute)) for attribute, name in names]


def _field_names(cls: type[object]) -> list[tuple[str, str]]:
    if issubclass(cls, msgspec.Struct):
        return list(zip(cls.__struct_fields__, cls.__struct_encode_fields__, strict=True))
    return _dataclass_names(cls) if is_dataclass(cls) else []


def _dataclass_names(cls: type[DataclassInstance]) -> list[tuple[str, str]]:
    return [(field.name, field.name) for field in fields(cls)]


def _alternatives(annotation: Any) -> list[Any]:
    """The types that a field may have, but for None and UNSET."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in {Union, UnionType}:
        return [t for t in get_args(annotation) if t not in {NoneType, msgspec.UnsetType}]
    return [annotation]


def _record_class(annotation: Any) -> type[object] | None:
    found = _alternatives(annotation)
    while len(found) == 1 and get_origin(found[0]) is Annotated:
        found = _alternatives(found[0])
    cls = get_origin(found[0]) or found[0] if len(found) == 1 else None
    return cls if isinstance(cls, type) and _field_names(cls) else None


def _is_marked(annotation: Any) -> bool:
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        return any(mark is Unique or isinstance(mark, Unique) for mark in marks) or _is_marked(
            inner
        )
    found = _alternatives(annotation)
    return any(_is_marked(t) for t in found if t is not annotation)


def _marked_fields(kind: str, paths: Sequence[str], members: dict[str, str]) -> str:
    document: _Node = None
    for path in paths:
        if _MANGLED_PATH.search(path):
            raise InsertError(
                f"the field {path!r} of {kind!r} is marked Unique, but River's unique keys cannot "
                "hold its name: rename it"
            )
        names = path.split(".")
        raw = _look_up(members, names)
        if raw is None:
            if names[0] not in members and path in members:
                _warn(kind, path)
            continue
        document = _put(document, [(name, False) for name in names], raw)
    return _render(document)


# Keys that River reads as paths


def _mangled_args(kind: str, members: dict[str, str]) -> str:
    """The args when some of their keys mean something else in the path language that River uses.

    A dot goes one level down, a backslash or a colon in front is lost, a key with a wildcard is
    left out, and a value that cannot be found by such a key is left empty.
    """
    document: dict[str, _Node] = {}
    for key in sorted(members):
        if not _MANGLED.search(key):
            document[key] = members[key]
            continue
        if _is_tangled(key):
            raise _unpredictable(kind, key)
        _warn(kind, key)
        if not _WILDCARD.search(key):
            path = [(part.removeprefix(":"), part.startswith(":")) for part in _split(key)]
            _put(document, path, _value(kind, key, members))
        elif _matches_any(key, document):
            raise _unpredictable(kind, key)
    return _render(document)


def _is_tangled(key: str) -> bool:
    is_mixed = key.startswith(("[", "{")) or "\\" in key
    return _TANGLED.search(key) is not None or (is_mixed and _WILDCARD.search(key) is not None)


def _matches_any(key: str, document: dict[str, _Node]) -> bool:
    first = re.split(r"[.|]", key)[0].replace("[", "[[]")  # a bracket means itself here
    return any(fnmatchcase(name, first) for name in document)


def _split(key: str) -> list[str]:
    """The key at its dots; a backslash takes the meaning from what follows it, and is lost."""
    parts, escaped = [""], False
    for char in key:
        if escaped or char not in "\\.":
            parts[-1] += char
            escaped = False
        elif char == "\\":
            escaped = True
        else:
            parts.append("")
    return parts


def _value(kind: str, key: str, members: dict[str, str]) -> str:
    if key.startswith("!"):
        raise _unpredictable(kind, key)
    if not key.startswith(("[", "{")):
        return _look_up(members, _split(key)) or ""
    if match := _SELECTOR.fullmatch(key):
        name = key[1:-1]
        chosen = [members[name]] if name in members else []
        if match[0].startswith("{"):
            chosen = [f"{_key_text(name)}:{value}" for value in chosen]
        return key[0] + "".join(chosen) + key[-1]
    if re.search(r"[\]}.,]", key):
        raise _unpredictable(kind, key)
    return ""


def _look_up(members: dict[str, str], names: Sequence[str]) -> str | None:
    """The text of the value at this path, or None."""
    raw = members.get(names[0])
    for name in names[1:]:
        if raw is None:
            return None
        raw = _child(raw, name)
    return raw


def _child(raw: str, name: str) -> str | None:
    if raw.startswith("{"):
        return next((value for key, value in _members(raw) if key == name), None)
    if raw.startswith("[") and name.isdecimal() and name.isascii():
        return next((value for at, value in enumerate(_elements(raw)) if at == int(name)), None)
    return None


def _put(node: _Node, path: Sequence[tuple[str, bool]], raw: str) -> _Node:
    """`node` with `raw` at this path of names; what is in the way is made a container.

    A number makes an array and is an index in it, unless it is forced to be a key.
    """
    if not path:
        return raw
    (name, forced), rest = path[0], path[1:]
    is_index = not forced and (not name or (name.isdecimal() and name.isascii()))
    opened = _open(node, [] if is_index else {})
    if isinstance(opened, dict):
        opened[name] = _put(opened.get(name), rest, raw)
        return opened
    index = int(name or 0) if is_index else -1
    if not 0 <= index <= _ARRAY_INDEX_MAX:
        raise InsertError(f"the key part {name!r} is no index of an array: rename the key")
    opened += ["null"] * (index + 1 - len(opened))
    opened[index] = _put(opened[index] if rest else None, rest, raw)
    return opened


def _open(node: _Node, default: dict[str, _Node] | list[_Node]) -> dict[str, _Node] | list[_Node]:
    if node is None:
        return default
    if not isinstance(node, str):
        return node
    opened: dict[str, _Node] | list[_Node] = default
    if node.startswith("{"):
        opened = dict(_members(node))
    elif node.startswith("["):
        opened = list(_elements(node))
    return opened


def _elements(text: str) -> Iterator[str]:
    at = 1
    while text[at] != "]":
        _, end = _decoder.raw_decode(text, at)
        yield text[at:end]
        at = end + 1 if text[end] == "," else end


def _render(node: _Node) -> str:
    if isinstance(node, dict):
        return "{" + ",".join(f"{_key_text(k)}:{_render(v)}" for k, v in node.items()) + "}"
    if isinstance(node, list):
        return "[" + ",".join(map(_render, node)) + "]"
    return node or ""


def _unpredictable(kind: str, key: str) -> InsertError:
    return InsertError(
        f"the args of {kind!r} have the key {key!r}, which River reads as an expression: "
        "rename it, or mark the fields that make the job unique as Unique"
    )


def _warn(kind: str, key: str) -> None:
    """Once per kind and key."""
    if (kind, key) in _warned or len(_warned) >= _WARNINGS_MAX:
        return
    _warned.add((kind, key))
    _log.warning(
        "a key of the args does not count as it stands in River's unique keys: jobs that differ in "
        "it alone may be taken for duplicates; rename it",
        kind=kind,
        key=key,
    )
