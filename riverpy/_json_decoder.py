"""Decodes args with msgspec, but durations in the form in which `_json` encodes them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from datetime import timedelta
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints

import msgspec
from msgspec import inspect

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

_PLAIN_TYPES = (dict, list, str, int, float, bool, NoneType)
"""The types of decoded JSON when no type is given."""


def decoder(cls: type[T]) -> Callable[[str], T]:
    """Return a function that decodes the text of `_json.encode` into `cls`.

    The function follows msgspec's rules, except for durations: a duration is a number of
    nanoseconds, as in Go, and not of seconds.

    Raises:
        NameError: an annotation cannot be resolved.
        TypeError: the type, or the type of a field, cannot be decoded. The text has the field.
    """
    try:
        decode = msgspec.json.Decoder(cls).decode
        info = inspect.type_info(cls)
    except TypeError as error:
        raise TypeError(f"{_unsupported_field(cls)}{error}") from None
    if (found := _custom_type(info, "$", set())) is not None:
        path, custom = found
        raise TypeError(f"{path}: the type {custom.__qualname__} cannot be decoded from JSON")
    if not _holds_duration(info, set()):
        return decode
    plain = msgspec.json.Decoder[Any]()

    def decode_durations(text: str) -> T:
        return msgspec.convert(
            _with_durations(plain.decode(text), info),
            cls,
            builtin_types=(timedelta,),
            str_keys=True,
        )

    return decode_durations


def _unsupported_field(cls: type[Any]) -> str:
    """Return the path of the first field that msgspec does not support, with a colon, or ""."""
    names: Sequence[str] = getattr(cls, "__struct_fields__", ())
    if is_dataclass(cls):
        names = [field.name for field in fields(cls)]
    hints = get_type_hints(cls, include_extras=True) if names else {}
    for name in names:
        try:
            msgspec.json.Decoder(hints[name])
        except TypeError:
            return f"$.{name}: "
    return ""


def _custom_type(info: inspect.Type, path: str, seen: set[int]) -> tuple[str, type] | None:
    """Return the first class that has no values in JSON, with its path."""
    if isinstance(info, inspect.CustomType):
        cls = info.cls
        is_plain = any(issubclass(plain, cls) for plain in _PLAIN_TYPES)
        return None if is_plain else (path, cls)
    if id(info) in seen:
        return None
    seen.add(id(info))
    for segment, inner in _inner_types(info):
        if (found := _custom_type(inner, path + segment, seen)) is not None:
            return found
    return None


def _inner_types(info: inspect.Type) -> list[tuple[str, inspect.Type]]:
    """Return the inner types of a type, each with its part of the path."""
    match info:
        case (
            inspect.StructType()
            | inspect.DataclassType()
            | inspect.TypedDictType()
            | inspect.NamedTupleType()
        ):
            return [(f".{field.encode_name}", field.type) for field in info.fields]
        case inspect.DictType():
            return [("[...]", info.key_type), ("[...]", info.value_type)]
        case inspect.CollectionType():
            return [("[...]", info.item_type)]
        case inspect.TupleType():
            return [(f"[{index}]", item) for index, item in enumerate(info.item_types)]
        case inspect.UnionType():
            return [("", one) for one in info.types]
        case inspect.Metadata():
            return [("", info.type)]
        case _:
            return []


def _holds_duration(info: inspect.Type, seen: set[int]) -> bool:
    if isinstance(info, inspect.TimeDeltaType):
        return True
    if id(info) in seen:
        return False
    seen.add(id(info))
    return any(_holds_duration(inner, seen) for _, inner in _inner_types(info))


def _with_durations(value: Any, info: inspect.Type) -> Any:
    """Replace integers by durations where `info` has a duration."""
    match info, value:
        case inspect.TimeDeltaType(), int():
            return _duration(value)
        case inspect.UnionType(), _:
            chosen = [one for one in info.types if _may_be(one, value)]
            return _with_durations(value, chosen[0]) if len(chosen) == 1 else value
        case inspect.Metadata(), _:
            return _with_durations(value, info.type)
        case (
            (inspect.StructType() | inspect.DataclassType() | inspect.TypedDictType()),
            dict(),
        ):
            types = {field.encode_name: field.type for field in info.fields}
            return {
                key: _with_durations(item, types[key]) if key in types else item
                for key, item in cast("dict[str, Any]", value).items()
            }
        case inspect.DictType(), dict():
            items = cast("dict[str, Any]", value).items()
            return {key: _with_durations(item, info.value_type) for key, item in items}
        case (inspect.NamedTupleType(), list()):
            items = cast("list[Any]", value)
            if len(items) <= len(info.fields):
                types = [field.type for field in info.fields]
                return list(map(_with_durations, items, types[: len(items)]))
            return items
        case ((inspect.ListType() | inspect.VarTupleType()), list()):
            return [_with_durations(item, info.item_type) for item in cast("list[Any]", value)]
        case inspect.TupleType(), list():
            items = cast("list[Any]", value)
            if len(items) == len(info.item_types):
                return list(map(_with_durations, items, info.item_types))
            return items
        case _:
            return value


def _may_be(info: inspect.Type, value: object) -> bool:
    """Whether a decoded value can belong to this member of a union."""
    match info:
        case inspect.TimeDeltaType() | inspect.IntType():
            return isinstance(value, int)
        case inspect.StructType():
            tag_field = info.tag_field
            return isinstance(value, dict) and (
                tag_field is None or cast("dict[str, Any]", value).get(tag_field) == info.tag
            )
        case inspect.DataclassType() | inspect.DictType():
            return isinstance(value, dict)
        case inspect.ListType() | inspect.TupleType() | inspect.VarTupleType():
            return isinstance(value, list)
        case _:
            return False


def _duration(nanoseconds: int) -> timedelta | int:
    try:
        return timedelta(microseconds=nanoseconds // 1000)
    except OverflowError:
        return nanoseconds  # msgspec then raises an error that names the place
