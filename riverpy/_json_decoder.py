"""Decodes JSON text into args with msgspec. A duration is an integer of nanoseconds, as `_json`
encodes it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from datetime import timedelta
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints

import msgspec
from msgspec import inspect

from riverpy._pydantic_models import is_model_class, make_model_decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

_JSON_VALUE_TYPES = (dict, list, str, int, float, bool, NoneType)
"""The types of the values that msgspec returns if it decodes JSON without a target type."""


def make_decoder(cls: type[T]) -> Callable[[str], T]:
    """Return a function that decodes the text of `_json.encode` into `cls`. The function follows
    msgspec's rules, but reads a duration as nanoseconds, as in Go, and not as seconds.

    Raises:
        NameError: an annotation cannot be resolved.
        TypeError: the type, or the type of a field, cannot be decoded. The error text names the
            field.
    """
    if is_model_class(cls):
        return make_model_decoder(cls)
    try:
        decode = msgspec.json.Decoder(cls, dec_hook=_decode_pydantic_model).decode
        info = inspect.type_info(cls)
    except TypeError as error:
        raise TypeError(f"{_find_unsupported_field_path(cls)}{error}") from None
    types = list(_iterate_types(info, "$", set()))
    for path, inner in types:
        if isinstance(inner, inspect.CustomType) and is_model_class(inner.cls):
            make_model_decoder(inner.cls)
        elif isinstance(inner, inspect.CustomType) and not _is_json_value_type(inner.cls):
            raise TypeError(
                f"{path}: the type {inner.cls.__qualname__} cannot be decoded from JSON"
            )
    if not any(isinstance(inner, inspect.TimeDeltaType) for _, inner in types):
        return decode
    plain = msgspec.json.Decoder[Any]()

    def decode_durations(text: str) -> T:
        return msgspec.convert(
            _convert_durations(plain.decode(text), info),
            cls,
            builtin_types=(timedelta,),
            str_keys=True,
            dec_hook=_decode_pydantic_model,
        )

    return decode_durations


def _decode_pydantic_model(cls: type[Any], value: object) -> object:
    """Decode a pydantic model inside a Struct or dataclass."""
    if not is_model_class(cls):
        return value  # msgspec then checks the type of the value
    return make_model_decoder(cls)(msgspec.json.encode(value).decode())


def _is_json_value_type(cls: type) -> bool:
    """Return whether this is a class of decoded JSON values, such as `str` or `dict`, or a base
    class of such a class."""
    return any(issubclass(plain, cls) for plain in _JSON_VALUE_TYPES)


def _find_unsupported_field_path(cls: type[Any]) -> str:
    """Return the path of the first field that msgspec does not support, in the form "$.name: ".
    Return "" if msgspec supports all fields."""
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


def _iterate_types(
    info: inspect.Type, path: str, seen: set[int]
) -> Iterator[tuple[str, inspect.Type]]:
    """Yield a type and its inner types, each once, with their paths. `seen` has the `id()` of each
    type that was yielded before."""
    if id(info) in seen:
        return
    seen.add(id(info))
    yield path, info
    for segment, inner in _list_inner_types(info):
        yield from _iterate_types(inner, path + segment, seen)


def _list_inner_types(info: inspect.Type) -> list[tuple[str, inspect.Type]]:
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


def _convert_durations(value: Any, info: inspect.Type) -> Any:
    """Replace the integers in `value` with timedeltas where the type `info` declares a duration.
    Return the new value."""
    match info, value:
        case inspect.TimeDeltaType(), int():
            try:
                return timedelta(microseconds=value // 1000)
            except OverflowError:
                return value  # msgspec then raises an error with the path of the value
        case inspect.UnionType(), _:
            possible = [member for member in info.types if _can_have_type(member, value)]
            return _convert_durations(value, possible[0]) if len(possible) == 1 else value
        case inspect.Metadata(), _:
            return _convert_durations(value, info.type)
        case inspect.DictType(), dict():
            items = cast("dict[str, Any]", value).items()
            return {key: _convert_durations(item, info.value_type) for key, item in items}
        case ((inspect.StructType() | inspect.DataclassType() | inspect.TypedDictType()), dict()):
            types = {field.encode_name: field.type for field in info.fields}
            return {
                key: _convert_durations(item, types[key]) if key in types else item
                for key, item in cast("dict[str, Any]", value).items()
            }
        case ((inspect.ListType() | inspect.VarTupleType()), list()):
            return [_convert_durations(item, info.item_type) for item in cast("list[Any]", value)]
        case ((inspect.StructType() | inspect.NamedTupleType() | inspect.TupleType()), list()):
            items = cast("list[Any]", value)
            types = [inner for _, inner in _list_inner_types(info)]
            if isinstance(info, inspect.StructType) and info.tag is not None:
                types.insert(0, inspect.AnyType())
            # `items` may have more or fewer elements than `types`. Elements without a type stay
            # unchanged. If the type does not allow this number of elements, msgspec raises an error
            # with the path.
            return [*map(_convert_durations, items, types), *items[len(types) :]]
        case _:
            return value


def _can_have_type(info: inspect.Type, value: object) -> bool:
    """Return whether a decoded value may have this type. The type is a member of a union."""
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
