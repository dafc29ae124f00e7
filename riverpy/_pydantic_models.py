"""Pydantic models as args and output. Only the user imports pydantic."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast, get_args, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_MODEL_MODULES = {"pydantic.main", "pydantic.v1.main"}
_SECRET_TYPES = {"Secret", "SecretStr", "SecretBytes"}
_MASKED_SECRET = "*" * 10
"""What pydantic writes in place of a secret."""
_UNDECODABLE_SCHEMAS = {"is-instance", "is-subclass", "callable"}
"""The types of a core schema that accept no JSON value."""


@lru_cache(maxsize=4096)
def is_model_class(cls: object) -> bool:
    """Whether this is a model class of pydantic, of any version."""
    return isinstance(cls, type) and any(
        base.__name__ == "BaseModel" and base.__module__ in _MODEL_MODULES for base in cls.__mro__
    )


def dump_model(model: object, *, as_args: bool = False) -> object:
    """Return the JSON values of a model, by their aliases.

    Args:
        model: the model.
        as_args: whether the values must be valid as the input of the class. Then computed fields
            are left out.

    Raises:
        TypeError: the model has a secret, or is of version 1.
        Exception: a serializer of the model failed.
    """
    _expect_version_2(type(model))
    value: Any = model
    dumped = value.model_dump(mode="json", by_alias=True, round_trip=as_args, warnings=False)
    if _has_untyped_values(type(model)):
        reason = _find_lost_value(value.model_dump(warnings=False))
        if reason is not None:
            raise TypeError(reason)
    return dumped


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
        TypeError: the model can never be decoded from the JSON that it is encoded as.
    """
    _expect_version_2(cls)
    if not cls.__pydantic_complete__:
        cls.model_rebuild()
    _check_types(cls, "$", set())
    if (place := _find_undecodable_place(cls.__pydantic_core_schema__, "$")) is not None:
        raise TypeError(f"{place}: its type cannot be decoded from JSON")
    return cls.model_validate_json


def decode_model(cls: type[Any], text: str) -> Any:
    """Decode JSON text into a model."""
    return make_model_decoder(cls)(text)


def get_model_field_names(cls: type[Any]) -> list[tuple[str, str]]:
    """Return the attribute and the JSON name of each field."""
    return [(name, field.serialization_alias or name) for name, field in cls.model_fields.items()]


def get_model_field_annotations(cls: type[Any]) -> dict[str, Any]:
    """Return the annotation of each field, with its `Annotated` marks."""
    return {name: field.rebuild_annotation() for name, field in cls.model_fields.items()}


def find_validation_problem(error: Exception) -> tuple[str, str] | None:
    """Return the path and the reason of the first problem in an error of pydantic. None: this is
    another error."""
    list_problems: Any = getattr(error, "errors", None)
    if type(error).__name__ != "ValidationError" or not callable(list_problems):
        return None
    problems: Any = list_problems(include_url=False, include_input=False, include_context=False)
    problem: dict[str, Any] = problems[0]
    keys: Sequence[str | int] = problem["loc"]
    path = "".join(f".{key}" if isinstance(key, str) else f"[{key}]" for key in keys)
    return f"${path}", str(problem["msg"])


def _expect_version_2(cls: type[Any]) -> None:
    if not hasattr(cls, "model_validate_json"):
        raise TypeError(
            f"{cls.__qualname__} is a model of pydantic 1: derive it from the BaseModel of "
            "pydantic 2, or insert its dict"
        )


def _check_types(cls: type[Any], path: str, checked: set[type[Any]]) -> None:
    """Check the fields of a model, dataclass or Struct, and of the classes in its fields."""
    if cls in checked:
        return
    checked.add(cls)
    if is_model_class(cls):
        _check_aliases(cls, path)
    for name, annotation in _list_fields(cls):
        for inner in _iterate_classes(annotation):
            if _is_secret_class(inner):
                raise TypeError(_secret_reason(f"{path}.{name}"))
            _check_types(inner, f"{path}.{name}", checked)


def _list_fields(cls: type[Any]) -> list[tuple[str, Any]]:
    if is_model_class(cls):
        return [(name, field.annotation) for name, field in cls.model_fields.items()]
    names: Sequence[str] = getattr(cls, "__struct_fields__", ())
    names = [field.name for field in fields(cls)] if is_dataclass(cls) else names
    try:
        hints = get_type_hints(cls) if names else {}
    except (NameError, TypeError):  # pydantic or msgspec reports it
        return []
    return [(name, hints.get(name)) for name in names]


def _iterate_classes(annotation: Any) -> Iterator[type[Any]]:
    """Yield the classes in an annotation, such as `list[Order] | None`."""
    if isinstance(annotation, type):
        yield annotation
    for inner in get_args(annotation):
        yield from _iterate_classes(inner)


def _check_aliases(cls: type[Any], path: str) -> None:
    """Check that each field is read from the name under which it is written. Otherwise the value
    would be lost, or the args could not be decoded."""
    config: Any = cls.model_config
    for name, field in cls.model_fields.items():
        written = field.serialization_alias or name
        if field.exclude or written in _accepted_names(name, field.validation_alias, config):
            continue
        raise TypeError(
            f"{path}.{name}: it is written as {written!r}, but not read from this name: use "
            "alias=, or the same serialization_alias and validation_alias"
        )


def _accepted_names(name: str, alias: Any, config: Any) -> set[object]:
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


def _find_lost_value(value: object) -> str | None:
    """Return why a value would be lost; None: no value would be lost."""
    if isinstance(value, dict):
        values = cast("dict[object, object]", value).values()
        return next(filter(None, map(_find_lost_value, values)), None)
    if isinstance(value, (list, tuple, set, frozenset)):
        return next(filter(None, map(_find_lost_value, cast("list[object]", value))), None)
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} has no JSON form; use None or a string"
    return _secret_reason("a value") if _is_secret_class(type(value)) else None


def _secret_reason(place: str) -> str:
    return (
        f"{place} is a secret of pydantic, which would be stored as {_MASKED_SECRET}: keep secrets "
        "out of jobs, and store the name or the id of the secret"
    )


def _find_undecodable_place(schema: Any, path: str) -> str | None:
    """Return the path of the first required value that no JSON is valid for. Validators that run
    before the check of a type may convert JSON, so the types after them are not checked."""
    kind = schema["type"]
    if kind in _UNDECODABLE_SCHEMAS:
        return path
    if kind in {"model", "definitions", "function-after"}:
        return _find_undecodable_place(schema["schema"], path)
    if kind == "json-or-python":
        return _find_undecodable_place(schema["json_schema"], path)
    if kind == "model-fields":
        places = (
            _find_undecodable_place(field["schema"], f"{path}.{name}")
            for name, field in schema["fields"].items()
        )
        return next(filter(None, places), None)
    return None
