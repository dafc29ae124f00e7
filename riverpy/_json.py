"""Encodes values as JSON text in the same way as Go's encoding/json, so that unique keys equal
River's.

A Struct or dataclass is encoded like a Go struct (fields in declared order), a dict like a Go map
(keys sorted). For a value that jsonb cannot store, ArgsError is raised with the path of the value.
The types:

    str, bool, None     as Go does: <, >, &, U+2028 and U+2029 are escaped
    int                 decimal, exact; refused beyond the range of a float
    float               Go's shortest form, such as 3 or 1e+21; NaN and infinity are refused
    dict                keys are str, int, UUID or an Enum of these, sorted by their UTF-8 bytes
    list, tuple         an array
    msgspec Struct      declared order; `rename`, `field(name=)`, `tag`, `array_like` as in msgspec;
                        UNSET fields are left out, with `omit_defaults` those equal to their default
    dataclass           declared order; UNSET fields are left out
    pydantic model      declared order, by alias, with the values of pydantic's JSON mode
    datetime            RFC 3339, with a time zone; a naive one is refused
    date                2026-01-31
    timedelta           nanoseconds, as Go's Duration
    bytes, bytearray    base64 with padding
    UUID, Decimal       a string
    Enum                its value
    other types         refused; sets too, because they have no order

`riverpy/_json_decoder.py` decodes the text into the class that it was encoded from.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from json.encoder import encode_basestring  # a C function that keeps non-ASCII text, as Go does
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, cast, get_origin
from uuid import UUID

import msgspec

from riverpy._pydantic_models import ModelValueError, dump_model, is_model_class
from riverpy.errors import ArgsError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _typeshed import DataclassInstance

JSON_SIZE_MAX = 255 * 1024 * 1024
"""The maximum size of one document in bytes. PostgreSQL's limit for jsonb is 256 MiB."""
JSON_DEPTH_MAX = 200
"""The maximum depth of nested arrays and objects, so that every decoder has enough stack."""

_ERROR_PATH_LENGTH_MAX = 200
_SPECIAL_CHARACTER_PATTERN = re.compile("[\0<>&\u2028\u2029\ud800-\udfff]")
_REFUSED_CHARACTER_PATTERN = re.compile("[\0\ud800-\udfff]")
_GO_ESCAPES = {char: f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}
_IDENTIFIER_PATTERN = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_MICROSECOND = timedelta(microseconds=1)

_Encoder: TypeAlias = Callable[[Any, int], str]


class _EncodingError(Exception):
    """A value cannot be encoded."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.path_keys: list[str | int] = []
        """The keys and indexes that lead to the value, innermost first."""

    def make_args_error(self, path: str) -> ArgsError:
        """Return an ArgsError with the path of the value. `path` is the name of the document."""
        for key in reversed(self.path_keys):
            is_plain = isinstance(key, str) and _IDENTIFIER_PATTERN.fullmatch(key)
            path += f".{key}" if is_plain else f"[{key!a}]"
        if len(path) > _ERROR_PATH_LENGTH_MAX:
            path = path[:_ERROR_PATH_LENGTH_MAX] + "..."
        return ArgsError(f"{path}: {self.message}", path=path)


def encode(value: object, *, path: str = "$", as_args: bool = False) -> str:
    """Encode `value` as JSON text. `path` is the name of the value in errors. If `as_args` is True,
    computed fields of a pydantic model are left out, so that its class can decode the text.

    Raises:
        ArgsError: a part of `value` has no JSON form, or PostgreSQL cannot store it. The `path` of
            the error leads to this part.
    """
    try:
        if as_args and is_model_class(type(value)):
            return _encode_pydantic_model(value, 0, as_args=True)
        return _encode_value(value, 0)
    except _EncodingError as error:
        raise error.make_args_error(path) from None
    except RecursionError:
        raise _make_depth_error().make_args_error(path) from None


def encode_unchecked_string(value: str) -> str:
    """Encode a string, with quotes. The caller must check for NUL and lone surrogates."""
    return _apply_go_escapes(encode_basestring(value))


def _apply_go_escapes(text: str) -> str:
    """Replace the characters that Go escapes in JSON text. Raise _EncodingError if the result would
    be larger than `JSON_SIZE_MAX`."""
    if len(text) > JSON_SIZE_MAX // 6:  # an escape has 6 characters instead of 1
        _check_size(len(text) + 5 * sum(map(text.count, _GO_ESCAPES)))
    for char, escape in _GO_ESCAPES.items():
        text = text.replace(char, escape)
    return text


def _check_size(size: int) -> None:
    if size > JSON_SIZE_MAX:
        raise _EncodingError(
            f"the text has {size:,} characters as JSON, PostgreSQL can store {JSON_SIZE_MAX:,} "
            "bytes"
        )


def _encode_value(value: object, depth: int) -> str:
    return _find_encoder(type(value))(value, depth)


@lru_cache(maxsize=4096)
def _find_encoder(cls: type[object]) -> _Encoder:
    for base, encoder in _ENCODER_BY_TYPE:
        if issubclass(cls, base):
            return encoder
    if is_model_class(cls):
        return _encode_pydantic_model
    if issubclass(cls, msgspec.Struct):
        return _encode_array if cls.__struct_config__.array_like else _make_struct_encoder(cls)
    return _make_dataclass_encoder(cls) if is_dataclass(cls) else _refuse_type


def _refuse_type(value: object, _depth: int) -> NoReturn:
    name = type(value).__qualname__
    if isinstance(value, (set, frozenset)):
        raise _EncodingError(f"a {name} has no order; use a sorted list")
    raise _EncodingError(
        f"an instance of {name} has no JSON form; use a dict, a Struct, a dataclass or a pydantic "
        "model"
    )


def _make_depth_error() -> _EncodingError:
    return _EncodingError(f"nested more than {JSON_DEPTH_MAX} levels deep, or inside itself")


# Scalars


def _encode_str(value: str, _depth: int) -> str:
    _check_size(len(value))
    text = encode_basestring(value)
    if _SPECIAL_CHARACTER_PATTERN.search(value):
        _check_characters(value)
        return _apply_go_escapes(text)
    return text


def _check_characters(value: str) -> None:
    if match := _REFUSED_CHARACTER_PATTERN.search(value):
        name = (
            "a NUL character" if match[0] == "\0" else f"the lone surrogate U+{ord(match[0]):04X}"
        )
        raise _EncodingError(
            f"the text has {name} at index {match.start()}, which PostgreSQL refuses"
        )


def _encode_int(value: int, _depth: int) -> str:
    try:
        float(value)
    except OverflowError:
        raise _EncodingError("the integer is beyond the range of a float (1.8e308)") from None
    return int.__repr__(value)


def _encode_float(value: float, _depth: int) -> str:
    if not math.isfinite(value):
        raise _EncodingError(f"{float.__repr__(value)} has no JSON form; use None or a string")
    text = float.__repr__(value)
    if text.endswith(".0"):
        return text[:-2]
    if "e" in text and not 1e-6 <= abs(value) < 1e21:
        return text.replace("e-0", "e-")
    return f"{Decimal(text):f}" if "e" in text else text


def _encode_datetime(value: datetime, _depth: int) -> str:
    offset = value.utcoffset()
    if offset is None:
        raise _EncodingError("the datetime has no time zone; add one, as in datetime.now(UTC)")
    if offset % timedelta(minutes=1):  # RFC 3339 has no seconds in an offset: use UTC
        value, offset = value - offset, timedelta(0)
    text = value.replace(tzinfo=None).isoformat()
    zone = value.isoformat()[len(text) :] if offset else "Z"
    return f'"{text.rstrip("0") if value.microsecond else text}{zone}"'


def _encode_decimal(value: Decimal, _depth: int) -> str:
    if not value.is_finite():
        raise _EncodingError(f"the Decimal {value} has no JSON form; use None or a string")
    return f'"{value}"'


# Containers


def _encode_members(
    members: Iterable[tuple[str | int, str | None, object]], depth: int, tag: Iterable[str] = ()
) -> str:
    """Encode the members of an array or object, without its brackets. If the object is a
    Struct with a type tag, `tag` contains the encoded tag, such as `"type":"A"`, and the result
    starts with this tag. Otherwise `tag` is empty.

    A member is a tuple: its key or index, the text before its value (such as `"key":`), and its
    value. If the text before the value is None, the key and a colon are encoded.
    """
    if depth >= JSON_DEPTH_MAX:
        raise _make_depth_error()
    parts = list(tag)
    for key, prefix, value in members:
        try:
            prefix = f"{_encode_str(str(key), depth)}:" if prefix is None else prefix
            parts.append(prefix + _encode_value(value, depth + 1))
        except _EncodingError as error:
            error.path_keys.append(key)
            raise
    return ",".join(parts)


def _encode_array(values: Iterable[object], depth: int) -> str:
    if isinstance(values, msgspec.Struct):
        tag: object = values.__struct_config__.tag
        members = [getattr(values, name) for name in values.__struct_fields__]
        values = members if tag is None else [tag, *members]
    items = ((index, "", value) for index, value in enumerate(values))
    return f"[{_encode_members(items, depth)}]"


def _encode_map(value: Mapping[object, object], depth: int) -> str:
    items: Mapping[Any, object] = value
    if not all(type(key) is str for key in value):
        items = {_encode_key(key): item for key, item in value.items()}
        if len(items) != len(value):
            raise _EncodingError("two keys have the same text")
    members = ((key, None, items[key]) for key in sorted(items))
    return f"{{{_encode_members(members, depth)}}}"


def _encode_key(key: object) -> str:
    if isinstance(key, Enum):
        return _encode_key(key.value)
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return _encode_int(key, 0)
    if isinstance(key, UUID):
        return str(key)
    raise _EncodingError(
        f"a key of an object must be a str, int, UUID or Enum, got {type(key).__qualname__}"
    )


def _encode_pydantic_model(value: object, depth: int, *, as_args: bool = False) -> str:
    """Encode a pydantic model. Its fields keep their order. The keys of objects inside the model
    are sorted, because pydantic's output does not show which of these objects are dicts."""
    try:
        dumped = dump_model(value, as_args=as_args)
    except TypeError as error:
        found = _EncodingError(str(error))
        if isinstance(error, ModelValueError):
            found.path_keys = [*reversed(error.keys)]
        raise found from None
    if not isinstance(dumped, dict):  # the model is a RootModel
        return _encode_value(dumped, depth)
    members = cast("dict[str, object]", dumped)
    items = ((key, _encode_field_name_and_colon(key), members[key]) for key in members)
    return f"{{{_encode_members(items, depth)}}}"


@lru_cache(maxsize=4096)
def _encode_field_name_and_colon(name: str) -> str | None:
    """Return the encoded name of a field and a colon. None: PostgreSQL refuses the name."""
    try:
        return f"{_encode_str(name, 0)}:"
    except _EncodingError:
        return None


class _Field(NamedTuple):
    """A field of a Struct or dataclass."""

    attribute: str
    json_key: str
    """The key in JSON."""
    json_key_prefix: str
    """The encoded key and a colon."""
    default: object = msgspec.NODEFAULT
    """A field with this value is left out of the JSON text. NODEFAULT: only the value UNSET is left
    out."""

    def should_omit(self, value: object) -> bool:
        """Return whether the value is left out of the JSON text. A value that equals its default is
        left out, because equal args must have the same text. msgspec would compare only the
        identity."""
        if value is msgspec.UNSET or type(value) is not type(self.default):
            return value is msgspec.UNSET
        return value == self.default and not (value == 0 and _encode_value(value, 0) == "-0")


def _make_object_encoder(declared: list[_Field], tag: Iterable[str] = ()) -> _Encoder:
    """Return a function that encodes the declared fields of an object, in their order. For `tag`,
    see `_encode_members`."""

    def encode_object(value: object, depth: int) -> str:
        members = (
            (field.json_key, field.json_key_prefix, member)
            for field in declared
            if not field.should_omit(member := getattr(value, field.attribute))
        )
        return f"{{{_encode_members(members, depth, tag)}}}"

    return encode_object


def _make_struct_encoder(cls: type[msgspec.Struct]) -> _Encoder:
    config, names = cls.__struct_config__, cls.__struct_encode_fields__
    defaults = list(map(_resolve_default, cls.__struct_defaults__)) if config.omit_defaults else []
    defaults = [msgspec.NODEFAULT] * (len(names) - len(defaults)) + defaults
    declared = [
        _Field(attribute, name, f"{encode_unchecked_string(name)}:", default)
        for attribute, name, default in zip(cls.__struct_fields__, names, defaults, strict=True)
    ]
    if config.tag is None:
        return _make_object_encoder(declared)
    tag = f"{encode_unchecked_string(config.tag_field or 'type')}:{_encode_value(config.tag, 0)}"
    return _make_object_encoder(declared, [tag])


def _resolve_default(default: object) -> object:
    """Return the default value of a field. For an empty list, dict, set or bytearray, msgspec
    stores a factory instead of the value."""
    factory: object = getattr(default, "factory", None)
    for empty in (list[object], dict[object, object], set[object], bytearray):
        if factory is (get_origin(empty) or empty):
            return empty()
    return default


def _make_dataclass_encoder(cls: type[DataclassInstance]) -> _Encoder:
    names = [field.name for field in fields(cls)]
    return _make_object_encoder(
        [_Field(name, name, f"{encode_unchecked_string(name)}:") for name in names]
    )


_ENCODER_BY_TYPE: tuple[tuple[Any, _Encoder], ...] = (
    (Enum, lambda member, depth: _encode_value(member.value, depth)),
    (bool, lambda value, _depth: "true" if value else "false"),
    (str, _encode_str),
    (int, _encode_int),
    (float, _encode_float),
    (NoneType, lambda _value, _depth: "null"),
    (Mapping, _encode_map),
    ((list, tuple), _encode_array),
    (datetime, _encode_datetime),
    (date, lambda value, _depth: f'"{value.isoformat()}"'),
    (timedelta, lambda value, _depth: str(value // _MICROSECOND * 1000)),
    ((bytes, bytearray), lambda value, _depth: f'"{base64.b64encode(value).decode()}"'),
    (UUID, lambda value, _depth: f'"{value}"'),
    (Decimal, _encode_decimal),
)
"""The types that can be encoded, each with its encoder. The first match counts, so a subclass comes
before its base class."""


# JSON text from callers

_ESCAPE_PATTERN = re.compile(
    r"\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w"  # a pair of surrogates
    r"|\\u(?:(?P<nul>0000)|(?P<surrogate>[dD][89a-fA-F]\w\w))|\\."
)
_REFUSED_ESCAPE_START_PATTERN = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
_BRACKET_OR_STRING_PATTERN = re.compile(r'[\[\]{}]|"(?:[^"\\]|\\.)*"')


def compact_like_go(text: str, *, path: str = "$") -> str:
    """Remove spaces from JSON text, and apply Go's escapes.

    The order of keys, repeated keys and the text of numbers do not change.

    Raises:
        ArgsError: the text is not strict JSON, or PostgreSQL cannot store it.
    """
    try:
        _check_is_json(text)
        compact = msgspec.json.format(text, indent=-1)
        return _apply_go_escapes(compact) if _SPECIAL_CHARACTER_PATTERN.search(compact) else compact
    except _EncodingError as error:
        raise error.make_args_error(path) from None
    except RecursionError:
        raise _make_depth_error().make_args_error(path) from None


def compact_object_like_go(text: str, *, path: str = "$", may_be_array: bool = False) -> str:
    """Remove spaces from the text of a JSON object, and apply Go's escapes; see `compact_like_go`.
    If `may_be_array` is True, the text may also be `[]`: in the args of a job, River treats an
    empty array as an empty object."""
    compact = compact_like_go(text, path=path)
    if not compact.startswith("{") and not (may_be_array and compact == "[]"):
        raise ArgsError(f"{path}: must be a JSON object, got {compact[:80]}", path=path)
    return compact


def _check_is_json(text: str) -> None:
    _check_characters(text)
    try:
        json.loads(
            text,
            parse_int=_check_number_range,
            parse_float=_check_number_range,
            parse_constant=_refuse_nan_or_infinity,
        )
    except json.JSONDecodeError as error:
        raise _EncodingError(f"the text is not JSON: {error}") from None
    if _REFUSED_ESCAPE_START_PATTERN.search(text):
        _check_escapes(text)
    if text.count("[") + text.count("{") > JSON_DEPTH_MAX:
        _check_nesting(text)


def _check_number_range(text: str) -> str:
    if not math.isfinite(float(text)):
        raise _EncodingError(f"the number {text[:40]} is beyond the range of a float (1.8e308)")
    return text


def _refuse_nan_or_infinity(name: str) -> NoReturn:
    raise _EncodingError(f"{name} has no JSON form")


def _check_escapes(text: str) -> None:
    for match in _ESCAPE_PATTERN.finditer(text):
        if match.lastgroup is not None:
            name = "a NUL character" if match["nul"] else "a lone surrogate"
            raise _EncodingError(
                f"{name} is escaped at index {match.start()}, which PostgreSQL refuses"
            )


def _check_nesting(text: str) -> None:
    depth = 0
    for match in _BRACKET_OR_STRING_PATTERN.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if depth > JSON_DEPTH_MAX:
            raise _make_depth_error()
