"""Support for pydantic models as args and output of jobs. This module does not import pydantic:
only programs that use it do."""

from __future__ import annotations

import math
import sys
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_MODEL_MODULES = {"pydantic.main", "pydantic.v1.main"}
_SECRET_TYPES = {"Secret", "SecretStr", "SecretBytes"}
_MASKED_SECRET = "*" * 10
"""The text that pydantic writes in place of a secret."""
_UNDECODABLE_SCHEMA_TYPES = {"is-instance", "is-subclass", "callable"}
"""The types in pydantic's core schema whose values cannot be decoded from JSON."""
_NON_OBJECT_SCHEMA_TYPES = {
    *("list", "set", "frozenset", "tuple", "str", "bytes", "int", "float", "decimal", "bool"),
    *("none", "date", "time", "datetime", "timedelta", "uuid", "url", "enum", "literal"),
}
"""The types in pydantic's core schema whose values are not JSON objects."""


class ModelValueError(TypeError):
    """A value in a model cannot be stored as JSON, or would be stored as another value.

    Args:
        reason: the reason, for the error text.
        keys: the JSON names and indexes that lead from the model to the value.
    """

    def __init__(self, reason: str, keys: Sequence[str | int]) -> None:
        super().__init__(reason)
        self.keys = keys


@lru_cache(maxsize=4096)
def is_model_class(cls: object) -> bool:
    """Whether `cls` is a model class of pydantic, of any version."""
    return isinstance(cls, type) and any(
        base.__name__ == "BaseModel" and base.__module__ in _MODEL_MODULES for base in cls.__mro__
    )


def dump_model(model: object, *, as_args: bool = False) -> object:
    """Convert a model to JSON values. In the result, the key of a field is its alias, or its name
    if it has no alias.

    Args:
        model: the model.
        as_args: True: leave out computed fields, so that the model class can decode the result.

    Raises:
        TypeError: the model is of pydantic 1.
        ModelValueError: a value is a secret, has no JSON form, or its serializer failed.
    """
    _require_pydantic_2(type(model))
    value: Any = model
    untyped = None
    try:
        dumped = value.model_dump(mode="json", by_alias=True, round_trip=as_args, warnings=False)
        if _has_untyped_values(type(model)):
            untyped = value.model_dump(by_alias=True, warnings=False)
    except RecursionError:
        raise
    except Exception as error:  # serializers of the user may raise anything
        raise ModelValueError(str(error), _find_keys_of_unwritable_part(value)) from None
    if untyped is not None:
        _require_lossless_value(untyped, ())
    return dumped


def _find_keys_of_unwritable_part(value: Any) -> list[str | int]:
    """Return the keys that lead to the value that pydantic cannot write as JSON. To find the value,
    let pydantic write each field and each item alone."""
    cls = cast("type[Any]", type(value))
    if getattr(cls, "__pydantic_root_model__", False):
        return _find_keys_of_unwritable_part(value.root)
    if is_model_class(cls):
        names = [*get_model_field_names(cls), *((name, name) for name in value.model_extra or ())]
        for name, json_name in names:
            if not _does_write_succeed(
                lambda name=name: value.model_dump(mode="json", include={name})
            ):
                return [json_name, *_find_keys_of_unwritable_part(getattr(value, name, None))]
        return []
    to_json: Any = sys.modules["pydantic_core"].to_jsonable_python
    for key, part in _list_keys_and_items(value):
        if not _does_write_succeed(lambda part=part: to_json(part)):
            return [key, *_find_keys_of_unwritable_part(part)]
    return []


def _list_keys_and_items(value: Any) -> list[tuple[str | int, Any]]:
    """Return the parts of a dict or collection, with their keys or indexes."""
    if isinstance(value, dict):
        items = cast("dict[object, Any]", value).items()
        return [(key if isinstance(key, int) else str(key), part) for key, part in items]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(enumerate(cast("Iterable[Any]", value)))
    return []


def _does_write_succeed(write: Callable[[], object]) -> bool:
    """Return whether `write` raises no exception."""
    try:
        write()
    except Exception:  # pydantic's errors, and any error of a serializer
        return False
    return True


@lru_cache(maxsize=4096)
def _has_untyped_values(cls: type[Any]) -> bool:
    """Whether a field may have a value of any type. pydantic writes NaN as null in such a field."""
    text = repr(cls.__pydantic_core_schema__)
    return "'type': 'any'" in text or "'extra_fields_behavior': 'allow'" in text


@lru_cache(maxsize=4096)
def make_model_decoder(cls: type[Any]) -> Callable[[str], Any]:
    """Return the function that decodes JSON text into a model.

    Raises:
        NameError: an annotation cannot be resolved.
        TypeError: the JSON of such a model could never be decoded into the model again.
    """
    _require_pydantic_2(cls)
    if not cls.__pydantic_complete__:
        cls.model_rebuild()
    _require_storable_fields(cls, "$", set())
    if (place := _find_undecodable_value_path(cls.__pydantic_core_schema__, "$")) is not None:
        raise TypeError(f"{place}: its type cannot be decoded from JSON")
    return cls.model_validate_json


def require_json_object_model(cls: type[Any]) -> None:
    """Raise TypeError if a model is a RootModel whose values can never be JSON objects."""
    schema: Any = cls.__pydantic_core_schema__
    while schema["type"] in {"model", "definitions", "function-after"}:
        schema = schema["schema"]
    if schema["type"] in _NON_OBJECT_SCHEMA_TYPES:
        raise TypeError(f"args must be a JSON object, but its root is of type {schema['type']}")


def decode_model(cls: type[Any], text: str) -> Any:
    """Decode JSON text into a model."""
    return make_model_decoder(cls)(text)


def get_model_field_names(cls: type[Any]) -> list[tuple[str, str]]:
    """Return the attribute name and the JSON name of each field."""
    return [(name, field.serialization_alias or name) for name, field in cls.model_fields.items()]


def get_model_field_annotations(cls: type[Any]) -> dict[str, Any]:
    """Return the annotation of each field, including the metadata of `Annotated`."""
    return {name: field.rebuild_annotation() for name, field in cls.model_fields.items()}


def find_validation_problem(error: Exception) -> tuple[str, str] | None:
    """Return the path and the reason of the first problem in a ValidationError of pydantic. Return
    None for another error."""
    list_problems: Any = getattr(error, "errors", None)
    if type(error).__name__ != "ValidationError" or not callable(list_problems):
        return None
    problems: Any = list_problems(include_url=False, include_input=False, include_context=False)
    problem: dict[str, Any] = problems[0]
    keys: Sequence[str | int] = problem["loc"]
    path = "".join(f".{key}" if isinstance(key, str) else f"[{key}]" for key in keys)
    return f"${path}", str(problem["msg"])


def _require_pydantic_2(cls: type[Any]) -> None:
    """Raise TypeError if the class is a model of pydantic 1."""
    if not hasattr(cls, "model_validate_json"):
        raise TypeError(
            f"{cls.__qualname__} is a model of pydantic 1: derive it from the BaseModel of "
            "pydantic 2, or insert its dict"
        )


def _require_storable_fields(cls: type[Any], path: str, checked: set[type[Any]]) -> None:
    """Raise TypeError if a field of a model, dataclass or Struct is a secret, or if pydantic could
    not read a field that it has written. Check the classes of the fields, too."""
    if cls in checked:
        return
    checked.add(cls)
    if is_model_class(cls):
        _require_readable_json_names(cls, path)
    for name, annotation in _list_fields(cls):
        for inner in _iterate_classes(annotation):
            if _is_secret_class(inner):
                raise TypeError(_make_secret_error_text(f"{path}.{name}"))
            _require_storable_fields(inner, f"{path}.{name}", checked)


def _list_fields(cls: type[Any]) -> list[tuple[str, Any]]:
    """Return the name and the annotation of each field. If an annotation cannot be resolved, return
    an empty list."""
    if is_model_class(cls):
        return [(name, field.annotation) for name, field in cls.model_fields.items()]
    names: Sequence[str] = getattr(cls, "__struct_fields__", ())
    if is_dataclass(cls):
        names = [field.name for field in fields(cls)]
    elif hasattr(cls, "__required_keys__") or hasattr(cls, "_fields"):  # a TypedDict or NamedTuple
        names = list(getattr(cls, "__annotations__", ()))
    try:
        hints = get_type_hints(cls) if names else {}
    except (NameError, TypeError):  # no check here: pydantic or msgspec itself reports this error
        return []
    return [(name, hints.get(name)) for name in names]


def _iterate_classes(annotation: Any) -> Iterator[type[Any]]:
    """Yield the classes in an annotation, such as `list[Order] | None`, or in a type alias."""
    annotation = getattr(annotation, "__value__", annotation)
    for cls in (annotation, get_origin(annotation)):
        if isinstance(cls, type):
            yield cls
    for inner in get_args(annotation):
        yield from _iterate_classes(inner)


def _require_readable_json_names(cls: type[Any], path: str) -> None:
    """Raise TypeError if pydantic writes a field under a JSON name from which it does not read the
    field, or if a required field is excluded from JSON. The value of such a field would be lost, or
    the args could not be decoded."""
    config: Any = cls.model_config
    for name, field in cls.model_fields.items():
        written = field.serialization_alias or name
        if field.exclude and field.is_required():
            raise TypeError(f"{path}.{name}: it is excluded from JSON, so give it a default")
        if field.exclude or written in _get_accepted_json_names(
            name, field.validation_alias, config
        ):
            continue
        raise TypeError(
            f"{path}.{name}: it is written as {written!r}, but not read from this name: use "
            "alias=, or the same serialization_alias and validation_alias"
        )


def _get_accepted_json_names(name: str, alias: Any, config: Any) -> set[object]:
    """Return the JSON names from which a field is read."""
    names: set[object] = set()
    if alias is None or config.get("validate_by_name") or config.get("populate_by_name"):
        names.add(name)
    if alias is not None and config.get("validate_by_alias") is not False:
        for choice in getattr(alias, "choices", [alias]):
            path: Any = getattr(choice, "path", [choice])
            names.update(path if len(path) == 1 else [])
    return names


def _is_secret_class(cls: type[Any]) -> bool:
    return any(
        base.__module__ == "pydantic.types" and base.__name__ in _SECRET_TYPES
        for base in cls.__mro__
    )


def _require_lossless_value(value: Any, keys: tuple[str | int, ...]) -> None:
    """Raise ModelValueError if a part of this value is a secret, NaN or infinite. pydantic would
    write asterisks or null instead, so the value would be lost. `keys` lead from the model to the
    value."""
    for key, part in _list_keys_and_items(value):
        _require_lossless_value(part, (*keys, key))
    if isinstance(value, float) and not math.isfinite(value):
        raise ModelValueError(f"{value} has no JSON form; use None or a string", keys)
    if _is_secret_class(cast("type[Any]", type(value))):
        raise ModelValueError(_make_secret_error_text("the value"), keys)


def _make_secret_error_text(place: str) -> str:
    return (
        f"{place} is a secret of pydantic, which would be stored as {_MASKED_SECRET}: keep secrets "
        "out of jobs, and store the name or the id of the secret"
    )


def _find_undecodable_value_path(schema: Any, path: str) -> str | None:
    """Return the path of the first required value that cannot be decoded from JSON. None: no such
    value was found.

    The function does not examine a type whose validator runs before pydantic's own check of the
    type: the validator may convert the JSON value to this type.
    """
    kind = schema["type"]
    if kind in _UNDECODABLE_SCHEMA_TYPES:
        return path
    if kind in {"model", "definitions", "function-after"}:
        return _find_undecodable_value_path(schema["schema"], path)
    if kind == "json-or-python":
        return _find_undecodable_value_path(schema["json_schema"], path)
    if kind == "model-fields":
        places = (
            _find_undecodable_value_path(field["schema"], f"{path}.{name}")
            for name, field in schema["fields"].items()
        )
        return next(filter(None, places), None)
    return None
