"""Encodes values as JSON text in the same way as Go's encoding/json, so that unique keys equal
River's.

A Struct or dataclass is encoded like a Go struct (fields in declared order), a dict like a Go map
(keys sorted). Values that jsonb cannot store raise ArgsError with their place. The types:

    str, bool, None     as Go does: <, >, &, U+2028 and U+2029 are escaped
    int                 decimal, exact; refused beyond the range of a float
    float               Go's shortest form, such as 3 or 1e+21; NaN and infinity are refused
    dict                keys are str, int, UUID or an Enum of these, sorted by their UTF-8 bytes
    list, tuple         an array
    msgspec Struct      declared order; `rename`, `field(name=)`, `tag`, `array_like` as in msgspec;
                        UNSET fields are left out, with `omit_defaults` those equal to their default
    dataclass           declared order; UNSET fields are left out
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
from json.encoder import encode_basestring  # C; leaves non-ASCII as it is, like Go
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, get_origin
from uuid import UUID

import msgspec

from riverpy.errors import ArgsError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _typeshed import DataclassInstance

SIZE_MAX = 255 * 1024 * 1024
"""The maximum bytes of one document. PostgreSQL's limit for jsonb is 256 MiB."""
DEPTH_MAX = 200
"""The maximum levels of arrays and objects, so that every decoder has enough stack."""

_PATH_LENGTH_MAX = 200
_UNESCAPED = re.compile("[\0<>&\u2028\u2029\ud800-\udfff]")
_BAD_CHARACTER = re.compile("[\0\ud800-\udfff]")
_GO_ESCAPES = {char: f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}
_PLAIN_KEY = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_FLOAT = re.compile(r"(-?)(\d+)(?:\.(\d+))?(?:e([+-]\d+))?")
_MICROSECOND = timedelta(microseconds=1)

_Encoder: TypeAlias = Callable[[Any, int], str]


class _Refusal(Exception):
    """A value cannot be encoded. Each outer container adds its part of the path."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.segments: list[str] = []

    def error(self, path: str) -> ArgsError:
        where = path + "".join(reversed(self.segments))
        if len(where) > _PATH_LENGTH_MAX:
            where = where[:_PATH_LENGTH_MAX] + "..."
        return ArgsError(f"{where}: {self.message}", path=where)


def encode(value: object, *, path: str = "$") -> str:
    """Encode `value` as JSON text. `path` is the name of the value in errors.

    Raises:
        ArgsError: a part of `value` has no JSON form, or PostgreSQL cannot store it. The `path` of
            the error is the place of this part.
    """
    try:
        return _encode(value, 0)
    except _Refusal as refusal:
        raise refusal.error(path) from None
    except RecursionError:
        raise _too_deep().error(path) from None


def string(value: str) -> str:
    """Encode a string, with quotes. The caller must check for NUL and lone surrogates."""
    return _escaped(encode_basestring(value))


def _escaped(text: str) -> str:
    """Apply Go's escapes to JSON text. A text that would become too large is refused first."""
    left = SIZE_MAX - len(text)
    if left < 5 * len(text) and (more := 5 * sum(map(text.count, _GO_ESCAPES))) > left:
        raise _too_large(len(text) + more)
    for char, escape in _GO_ESCAPES.items():
        text = text.replace(char, escape)
    return text


def _too_large(size: int) -> _Refusal:
    return _Refusal(
        f"the text has {size:,} characters as JSON, PostgreSQL can store {SIZE_MAX:,} bytes"
    )


def _encode(value: object, depth: int) -> str:
    return _encoder(type(value))(value, depth)


@lru_cache(maxsize=4096)
def _encoder(cls: type[object]) -> _Encoder:
    for base, encoder in _ENCODERS:
        if issubclass(cls, base):
            return encoder
    if issubclass(cls, msgspec.Struct):
        return _array if cls.__struct_config__.array_like else _struct_encoder(cls)
    return _dataclass_encoder(cls) if is_dataclass(cls) else _refuse_type


def _refuse_type(value: object, _depth: int) -> NoReturn:
    raise _Refusal(f"the type {type(value).__qualname__} has no JSON form")


def _refuse_set(value: object, _depth: int) -> NoReturn:
    raise _Refusal(f"a {type(value).__qualname__} has no order; use a sorted list")


def _too_deep() -> _Refusal:
    return _Refusal(f"nested more than {DEPTH_MAX} levels deep, or inside itself")


# Scalars


def _null(_value: None, _depth: int) -> str:
    return "null"


def _bool(value: bool, _depth: int) -> str:
    return "true" if value else "false"


def _str(value: str, _depth: int) -> str:
    if len(value) > SIZE_MAX:
        raise _too_large(len(value))
    text = encode_basestring(value)
    if _UNESCAPED.search(value):
        _check_characters(value)
        return _escaped(text)
    return text


def _check_characters(value: str) -> None:
    if match := _BAD_CHARACTER.search(value):
        name = (
            "a NUL character" if match[0] == "\0" else f"the lone surrogate U+{ord(match[0]):04X}"
        )
        raise _Refusal(f"the text has {name} at index {match.start()}, which PostgreSQL refuses")


def _int(value: int, _depth: int) -> str:
    try:
        float(value)
    except OverflowError:
        raise _Refusal("the integer is beyond the range of a float (1.8e308)") from None
    return int.__repr__(value)


def _float(value: float, _depth: int) -> str:
    if not math.isfinite(value):
        raise _Refusal(f"{float.__repr__(value)} has no JSON form; use None or a string")
    text = float.__repr__(value)
    if text.endswith(".0"):
        return text[:-2]
    if "e" not in text and not text.startswith(("0.0000", "-0.0000")):
        return text
    return _go_notation(text, exponent=not 1e-6 <= abs(value) < 1e21)


def _go_notation(text: str, *, exponent: bool) -> str:
    """Format a float like Go. Python and Go have the same digits, but another notation."""
    match = _FLOAT.fullmatch(text)
    assert match  # noqa: S101 (the form of repr)
    sign, whole, fraction, power = match[1], match[2], match[3] or "", int(match[4] or 0)
    all_digits = whole + fraction
    stripped = all_digits.lstrip("0")
    point = len(whole) + power - (len(all_digits) - len(stripped))
    digits = stripped.rstrip("0")
    if exponent:
        mantissa = digits[0] + ("." + digits[1:] if len(digits) > 1 else "")
        return (
            f"{sign}{mantissa}e{point - 1:+03d}" if point > 0 else f"{sign}{mantissa}e{point - 1}"
        )
    if point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    if point >= len(digits):
        return sign + digits + "0" * (point - len(digits))
    return f"{sign}{digits[:point]}.{digits[point:]}"


def _datetime(value: datetime, _depth: int) -> str:
    offset = value.utcoffset()
    if offset is None:
        raise _Refusal("the datetime has no time zone; add one, as in datetime.now(UTC)")
    if offset % timedelta(minutes=1):  # RFC 3339 has no seconds in an offset
        value, offset = value - offset, timedelta(0)
    text = value.replace(tzinfo=None).isoformat()
    if value.microsecond:
        text = text.rstrip("0")
    if not offset:
        return f'"{text}Z"'
    minutes = abs(offset) // timedelta(minutes=1)
    return f'"{text}{"-" if offset < timedelta(0) else "+"}{minutes // 60:02d}:{minutes % 60:02d}"'


def _date(value: date, _depth: int) -> str:
    return f'"{value.isoformat()}"'


def _timedelta(value: timedelta, _depth: int) -> str:
    return str(value // _MICROSECOND * 1000)


def _bytes(value: bytes | bytearray, _depth: int) -> str:
    return f'"{base64.b64encode(value).decode()}"'


def _uuid(value: UUID, _depth: int) -> str:
    return f'"{value}"'


def _decimal(value: Decimal, _depth: int) -> str:
    if not value.is_finite():
        raise _Refusal(f"the Decimal {value} has no JSON form; use None or a string")
    return f'"{value}"'


def _enum(value: Enum, depth: int) -> str:
    return _encode(value.value, depth)


# Containers


def _array(values: Iterable[object], depth: int) -> str:
    if depth >= DEPTH_MAX:
        raise _too_deep()
    parts: list[str] = []
    try:
        for value in _array_values(values):
            parts.append(_encode(value, depth + 1))  # noqa: PERF401 (the length is the index in an error)
    except _Refusal as refusal:
        refusal.segments.append(f"[{len(parts)}]")
        raise
    return "[" + ",".join(parts) + "]"


def _array_values(values: Iterable[object]) -> Iterable[object]:
    if not isinstance(values, msgspec.Struct):
        return values
    tag: object = values.__struct_config__.tag
    return ([] if tag is None else [tag]) + [getattr(values, f) for f in values.__struct_fields__]


def _map(value: Mapping[object, object], depth: int) -> str:
    if depth >= DEPTH_MAX:
        raise _too_deep()
    items = {_key(key): item for key, item in value.items()}
    if len(items) != len(value):
        raise _Refusal("two keys have the same text")
    parts: list[str] = []
    for key in sorted(items):
        try:
            _check_characters(key)
            parts.append(f"{string(key)}:{_encode(items[key], depth + 1)}")
        except _Refusal as refusal:
            refusal.segments.append(_segment(key))
            raise
    return "{" + ",".join(parts) + "}"


def _key(key: object) -> str:
    if isinstance(key, Enum):
        return _key(key.value)
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return _int(key, 0)
    if isinstance(key, UUID):
        return str(key)
    raise _Refusal(
        f"a key of an object must be a str, int, UUID or Enum, got {type(key).__qualname__}"
    )


def _segment(key: str) -> str:
    return f".{key}" if _PLAIN_KEY.fullmatch(key) else f"[{key!a}]"


class _Field(NamedTuple):
    attribute: str
    name: str
    prefix: str
    has_default: bool
    default: object

    @classmethod
    def of(
        cls, attribute: str, name: str, *, has_default: bool = False, default: object = None
    ) -> _Field:
        return cls(attribute, name, string(name) + ":", has_default, default)

    def is_default(self, value: object) -> bool:
        """Whether the value equals the default. msgspec compares by identity. Here equal values
        count, because equal args must have the same text."""
        if type(value) is not type(self.default):
            return False
        return value == self.default and not (value == 0 and _encode(value, 0) == "-0")


class _FieldsEncoder:
    """Encodes the declared fields of one class, in their order."""

    def __init__(self, declared: list[_Field], first: str = "") -> None:
        self._fields = declared
        self._first = first

    def __call__(self, value: object, depth: int) -> str:
        if depth >= DEPTH_MAX:
            raise _too_deep()
        parts = [self._first] if self._first else []
        for field in self._fields:
            member = getattr(value, field.attribute)
            if member is msgspec.UNSET or (field.has_default and field.is_default(member)):
                continue
            try:
                parts.append(field.prefix + _encode(member, depth + 1))
            except _Refusal as refusal:
                refusal.segments.append(_segment(field.name))
                raise
        return "{" + ",".join(parts) + "}"


def _struct_encoder(cls: type[msgspec.Struct]) -> _FieldsEncoder:
    config = cls.__struct_config__
    names = list(zip(cls.__struct_fields__, cls.__struct_encode_fields__, strict=True))
    defaults: list[object] = [msgspec.NODEFAULT] * (len(names) - len(cls.__struct_defaults__))
    defaults += cls.__struct_defaults__
    declared = [
        _Field.of(
            attribute,
            name,
            has_default=config.omit_defaults and default is not msgspec.NODEFAULT,
            default=_default_value(default),
        )
        for (attribute, name), default in zip(names, defaults, strict=True)
    ]
    if config.tag is None:
        return _FieldsEncoder(declared)
    return _FieldsEncoder(
        declared, f"{string(config.tag_field or 'type')}:{_encode(config.tag, 0)}"
    )


def _default_value(default: object) -> object:
    factory: object = getattr(default, "factory", None)  # msgspec's object for a default_factory
    for empty in (list[object], dict[object, object], set[object], bytearray):
        if factory is (get_origin(empty) or empty):
            return empty()
    return default


def _dataclass_encoder(cls: type[DataclassInstance]) -> _FieldsEncoder:
    return _FieldsEncoder([_Field.of(field.name, field.name) for field in fields(cls)])


_ENCODERS: tuple[tuple[type, _Encoder], ...] = (
    (Enum, _enum),
    (bool, _bool),
    (str, _str),
    (int, _int),
    (float, _float),
    (NoneType, _null),
    (Mapping, _map),
    (list, _array),
    (tuple, _array),
    (datetime, _datetime),
    (date, _date),
    (timedelta, _timedelta),
    (bytes, _bytes),
    (bytearray, _bytes),
    (UUID, _uuid),
    (Decimal, _decimal),
    (set, _refuse_set),
    (frozenset, _refuse_set),
)


# JSON text from callers

_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})|\\.")
_NEEDS_ESCAPE_SCAN = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
_NESTING = re.compile(r'[\[\]{}]|"(?:[^"\\]|\\.)*"')


def normalize(text: str, *, path: str = "$") -> str:
    """Remove spaces from JSON text, and apply Go's escapes.

    The order of keys, repeated keys and the text of numbers do not change.

    Raises:
        ArgsError: the text is not strict JSON, or PostgreSQL cannot store it.
    """
    try:
        _check_text(text)
        compact = msgspec.json.format(text, indent=-1)
        return _escaped(compact) if _UNESCAPED.search(compact) else compact
    except _Refusal as refusal:
        raise refusal.error(path) from None
    except RecursionError:
        raise _too_deep().error(path) from None


def normalize_object(text: str, *, path: str = "$") -> str:
    """Like `normalize`, but the text must be a JSON object."""
    return _expect_object(normalize(text, path=path), path)


def normalize_args(text: str, *, path: str = "$") -> str:
    """Like `normalize_object`, but an empty array is allowed too. River treats it as an empty
    object."""
    compact = normalize(text, path=path)
    return compact if compact == "[]" else _expect_object(compact, path)


def _expect_object(compact: str, path: str) -> str:
    if not compact.startswith("{"):
        raise ArgsError(f"{path}: must be a JSON object, got {compact[:80]}", path=path)
    return compact


def _check_text(text: str) -> None:
    _check_characters(text)
    try:
        json.loads(
            text,
            parse_int=_check_number,
            parse_float=_check_number,
            parse_constant=_refuse_constant,
        )
    except json.JSONDecodeError as error:
        raise _Refusal(f"the text is not JSON: {error}") from None
    if _NEEDS_ESCAPE_SCAN.search(text):
        _check_escapes(text)
    if text.count("[") + text.count("{") > DEPTH_MAX:
        _check_nesting(text)


def _check_number(text: str) -> str:
    if not math.isfinite(float(text)):
        raise _Refusal(f"the number {text[:40]} is beyond the range of a float (1.8e308)")
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise _Refusal(f"{name} has no JSON form")


def _check_escapes(text: str) -> None:
    high_ends_at = -1
    """The end of a high surrogate whose low surrogate must follow."""
    for match in _ESCAPE.finditer(text):
        code = int(match[1] or "20", 16)
        if high_ends_at >= 0 and not (0xDC00 <= code <= 0xDFFF and match.start() == high_ends_at):
            raise _Refusal(f"a lone surrogate is escaped at index {high_ends_at - 6}")
        if code == 0 or (high_ends_at < 0 and 0xDC00 <= code <= 0xDFFF):
            name = "a lone surrogate" if code else "a NUL character"
            raise _Refusal(f"{name} is escaped at index {match.start()}, which PostgreSQL refuses")
        high_ends_at = match.end() if 0xD800 <= code <= 0xDBFF else -1
    if high_ends_at >= 0:
        raise _Refusal(f"a lone surrogate is escaped at index {high_ends_at - 6}")


def _check_nesting(text: str) -> None:
    depth = 0
    for match in _NESTING.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if depth > DEPTH_MAX:
            raise _too_deep()
