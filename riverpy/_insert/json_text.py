"""The JSON text of args and metadata that is stored in the database."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from riverpy import _json
from riverpy._json_decoder import decoder
from riverpy.errors import ArgsError
from riverpy.job import RawArgs, check_metadata_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy.job import JobArgs


def args_text(args: JobArgs | RawArgs) -> str:
    """Return the args as JSON text.

    Raises:
        ArgsError: PostgreSQL cannot store the args, or a worker could not decode them.
    """
    if isinstance(args, RawArgs):
        return compact_json("RawArgs", args.json)
    text = _checked_size("args", _json.encode(args))
    if not text.startswith("{"):
        raise ArgsError(f"args must be a JSON object, got {text[:80]}")
    _check_decodable(type(args), text)
    return text


def _check_decodable(cls: type[object], text: str) -> None:
    """Check that a worker can decode the args. The constructor of a Struct or dataclass does not
    check the types of its values."""
    try:
        if (decode := _decoder_of(cls)) is not None:
            decode(text)
    except TypeError as error:
        raise ArgsError(f"args of {cls.__qualname__} can never be decoded: {error}") from None
    except Exception as error:
        reason, _, place = str(error).rpartition(" - at ")
        path = place.split("`")[-2] if reason else "$"
        raise ArgsError(
            f"{path}: {reason or error}; a worker could not decode these args of "
            f"{cls.__qualname__}",
            path=path,
        ) from None


@lru_cache(maxsize=4096)
def _decoder_of(cls: type[object]) -> Callable[[str], object] | None:
    """Return the decoder of an args class. None: the class is a dict, or the types of its fields
    cannot be imported in this process."""
    try:
        return None if issubclass(cls, Mapping) else decoder(cls)
    except NameError:
        return None


def compact_json(owner: str, given: object) -> str:
    """Return JSON text that the caller encoded, in compact form.

    Raises:
        ArgsError: `given` is not the text of a JSON object, or PostgreSQL cannot store it.
    """
    if not isinstance(given, str):
        raise ArgsError(
            f"$: {owner} takes its JSON as a text, got {type(given).__name__}: decode or "
            "serialize it first"
        )
    return _json.normalize_object(_checked_size("args", given), may_be_array=True)


def encode_job_metadata(metadata: object) -> str:
    """Return the metadata of a job as JSON text; see `encode_metadata`.

    Raises:
        ArgsError: also if the metadata has a key that River reserves.
    """
    text = encode_metadata(metadata)
    for key in cast("Mapping[object, object]", metadata or {}):
        check_metadata_key(key)
    return text


def encode_metadata(metadata: object) -> str:
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
    return _checked_size("metadata", _json.encode(cast("object", metadata), path="metadata"))


def _checked_size(name: str, text: str) -> str:
    size = json_size(text)
    if size > _json.SIZE_MAX:
        raise ArgsError(
            f"the {name} have {size:,} bytes as JSON, PostgreSQL can store {_json.SIZE_MAX:,}: "
            "store the data elsewhere and insert a reference to it"
        )
    return text


def json_size(text: str) -> int:
    """Return the number of bytes of a text in UTF-8. Lone surrogates raise no error here. Other
    code refuses lone surrogates."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
