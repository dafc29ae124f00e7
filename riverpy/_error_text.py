"""Formats exceptions as texts for the database and the log."""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

ERRORS_IN_GROUP_TEXT_MAX = 20
"""The maximum number of exceptions in the text of an exception group."""
ERROR_TEXT_LENGTH_MAX = 16 * 1024
"""The maximum number of characters in the text of an exception."""
_TRUNCATION_MARK = " … [truncated]"
_DENIED_OBJECT_PATTERN = re.compile(r"permission denied for (table|sequence|schema) (\S+)$")
_RIGHTS_BY_OBJECT_NAME = {
    "river_job": "SELECT, INSERT, UPDATE (kind)",  # the rights that inserts need
    "river_migration": "SELECT",
}
_RIGHTS_BY_OBJECT_TYPE = {
    "table": "SELECT, INSERT, UPDATE, DELETE",
    "sequence": "USAGE",
    "schema": "USAGE",
}


def format_error_with_type(error: BaseException) -> str:
    """Return the type and the message of an exception, such as `KeyError: 'user_id'`. For an
    exception group, return the distinct texts of its exceptions, such as `ValueError: no such
    order; TimeoutError`."""
    found = list(islice(flatten_exception_group(error), ERRORS_IN_GROUP_TEXT_MAX + 1))
    texts = list(
        dict.fromkeys(_describe_single_error(one) for one in found[:ERRORS_IN_GROUP_TEXT_MAX])
    )
    if len(found) > ERRORS_IN_GROUP_TEXT_MAX:
        texts.append("…")
    return truncate_text("; ".join(texts), ERROR_TEXT_LENGTH_MAX)


def _describe_single_error(error: BaseException) -> str:
    name = type(error).__name__
    text = get_error_message(error)
    if text:
        return text if text.startswith(("<unprintable ", f"{name}: ")) else f"{name}: {text}"
    cause = error.__cause__
    if not isinstance(cause, Exception) or isinstance(cause, BaseExceptionGroup):
        return name  # the message of a cancellation or group contains no information
    return f"{name} from {type(cause).__name__}: {get_error_message(cause)}".removesuffix(": ")


def get_error_message(error: BaseException) -> str:
    """Return the message of an exception. It may be empty."""
    try:
        return truncate_text(str(error).strip(), ERROR_TEXT_LENGTH_MAX)
    except BaseException:  # a user's __str__ may raise anything
        return f"<unprintable {type(error).__name__} object>"


def truncate_text(text: str, length_max: int, suffix: str = "") -> str:
    """If a text is longer than `length_max` characters, shorten it and append ` … [truncated]` and
    `suffix`. Without `suffix`, the result then has `length_max` characters."""
    return (
        text
        if len(text) <= length_max
        else f"{text[: length_max - len(_TRUNCATION_MARK)]}{_TRUNCATION_MARK}{suffix}"
    )


def flatten_exception_group(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions of an exception group and its nested groups. For any other exception,
    yield the exception itself."""
    pending = [error]
    while pending:
        current = pending.pop()
        if isinstance(current, BaseExceptionGroup):
            group = cast("BaseExceptionGroup[BaseException]", current)
            pending.extend(reversed(group.exceptions))
        else:
            yield current


def describe_missing_grant(refusal: str) -> str:
    """Return a sentence with the GRANT statement that the role needs. `refusal` is the server's
    error text, to which the caller appends the sentence. Return an empty text if `refusal` names no
    table, sequence or schema."""
    found = _DENIED_OBJECT_PATTERN.search(refusal)
    if found is None:
        return ""
    object_type, name = found.groups()
    rights = _RIGHTS_BY_OBJECT_NAME.get(name, _RIGHTS_BY_OBJECT_TYPE[object_type])
    place = name if object_type == "table" else f"{object_type.upper()} {name}"
    workers = "; a worker also needs UPDATE and DELETE" if name == "river_job" else ""
    return (
        f". Execute GRANT {rights} ON {place} TO this role, as the owner{workers} (docs/grants.md)"
    )
