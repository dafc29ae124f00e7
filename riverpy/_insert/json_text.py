"""Encodes the args and metadata of jobs as the JSON text that the database stores."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from riverpy import _json
from riverpy._json_decoder import make_decoder
from riverpy._pydantic_models import find_validation_problem
from riverpy.errors import ArgsError
from riverpy.job import RawArgs, check_metadata_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy.job import JobArgs


def encode_args(args: JobArgs | RawArgs) -> str:
    """Return the args as JSON text.

    Raises:
        ArgsError: PostgreSQL cannot store the args, or a worker could not decode them.
    """
    if isinstance(args, RawArgs):
        return compact_json_object("RawArgs", args.json)
    text = _check_json_size("args", _json.encode(args, as_args=True))
    if not text.startswith("{"):
        raise ArgsError(f"args must be a JSON object, got {text[:80]}")
    _check_args_decodable(type(args), text)
    return text


def _check_args_decodable(cls: type[object], args_json: str) -> None:
    """Raise ArgsError if a worker could not decode the args. This check is needed because the
    constructor of a Struct or dataclass accepts values of wrong types."""
    try:
        if (decode := _get_args_decoder(cls)) is not None:
            decode(args_json)
    except TypeError as error:
        place = str(error).partition(" ")[0].rstrip(":")
        raise ArgsError(
            f"args of {cls.__qualname__} can never be decoded: {error}",
            path=place if place.startswith("$") else "$",
        ) from None
    except Exception as error:
        if (problem := find_validation_problem(error)) is not None:
            path, reason = problem
        else:
            reason, _, place = str(error).rpartition(" - at ")
            path = place.split("`")[-2] if reason else "$"
        raise ArgsError(
            f"{path}: {reason or error}; a worker could not decode these args of "
            f"{cls.__qualname__}",
            path=path,
        ) from None


@lru_cache(maxsize=4096)
def _get_args_decoder(args_class: type[object]) -> Callable[[str], object] | None:
    """Return the function that decodes JSON text into an object of the args class. Return None if
    the class is a dict, or if the types of its fields cannot be imported in this process."""
    try:
        return None if issubclass(args_class, Mapping) else make_decoder(args_class)
    except NameError:
        return None


def compact_json_object(field_name: str, json_text: object) -> str:
    """Check JSON text that the caller has encoded, and return it without unneeded spaces.

    Raises:
        ArgsError: `json_text` is not the text of a JSON object, or PostgreSQL cannot store it.
    """
    if not isinstance(json_text, str):
        raise ArgsError(
            f"$: {field_name} takes its JSON as a text, got {type(json_text).__name__}: decode or "
            "serialize it first"
        )
    return _json.compact_object_like_go(_check_json_size("args", json_text), may_be_array=True)


def encode_job_metadata(metadata: object) -> str:
    """Return the metadata of a job as JSON text. None means an empty object.

    Raises:
        ArgsError: the metadata is not a JSON object, has a key that River reserves, or cannot be
            stored by PostgreSQL.
    """
    text = encode_metadata_with_any_keys(metadata)
    for key in cast("Mapping[object, object]", metadata or {}):
        check_metadata_key(key)
    return text


def encode_metadata_with_any_keys(metadata: object) -> str:
    """Return metadata as JSON text. None means an empty object.

    Raises:
        ArgsError: the metadata is not a JSON object, or PostgreSQL cannot store it.
    """
    if metadata is None:
        return "{}"
    if not isinstance(metadata, Mapping):
        raise ArgsError(
            f"metadata: must be a JSON object, got {type(metadata).__name__}", path="metadata"
        )
    return _check_json_size("metadata", _json.encode(cast("object", metadata), path="metadata"))


def _check_json_size(field_name: str, json_text: str) -> str:
    size = utf8_size(json_text)
    if size > _json.JSON_SIZE_MAX:
        raise ArgsError(
            f"the {field_name} have {size:,} bytes as JSON, PostgreSQL can store "
            f"{_json.JSON_SIZE_MAX:,}: store the data elsewhere and insert a reference to it"
        )
    return json_text


def utf8_size(text: str) -> int:
    """Return the number of bytes of a text in UTF-8. A lone surrogate counts as three bytes and
    raises no error here, because the module `_json` refuses it."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
