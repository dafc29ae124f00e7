"""Makes the text of an exception for rows of the database and log events."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUP_ERRORS_MAX = 20
"""The maximum number of exceptions in the text of a group."""
TEXT_LENGTH_MAX = 16 * 1024
"""The maximum number of characters of the text of an exception."""
_CUT_MARK = " … [truncated]"


def error_text(error: BaseException) -> str:
    """Return the type and the message, such as `KeyError: 'user_id'`. For a group, return the
    distinct texts of its errors, such as `ValueError: no such order; TimeoutError`."""
    found = list(islice(flatten_group(error), GROUP_ERRORS_MAX + 1))
    texts = list(dict.fromkeys(_describe_one(one) for one in found[:GROUP_ERRORS_MAX]))
    if len(found) > GROUP_ERRORS_MAX:
        texts.append("…")
    return cut("; ".join(texts), TEXT_LENGTH_MAX)


def _describe_one(error: BaseException) -> str:
    name = type(error).__name__
    text = message(error)
    if text:
        return text if text.startswith(("<unprintable ", f"{name}: ")) else f"{name}: {text}"
    cause = error.__cause__
    if not isinstance(cause, Exception) or isinstance(cause, BaseExceptionGroup):
        return name  # the message of a cancellation or a group has no information
    return f"{name} from {type(cause).__name__}: {message(cause)}".removesuffix(": ")


def message(error: BaseException) -> str:
    """Return the message of an exception. It may be empty."""
    try:
        return cut(str(error).strip(), TEXT_LENGTH_MAX)
    except BaseException:  # a user's __str__ may raise anything
        return f"<unprintable {type(error).__name__} object>"


def cut(text: str, length: int, end: str = "") -> str:
    """Shorten a text that is longer than `length`, and append a mark and `end`."""
    return text if len(text) <= length else f"{text[: length - len(_CUT_MARK)]}{_CUT_MARK}{end}"


def flatten_group(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions of a group and its nested groups, or the error itself."""
    pending = [error]
    while pending:
        current = pending.pop()
        if isinstance(current, BaseExceptionGroup):
            group = cast("BaseExceptionGroup[BaseException]", current)
            pending.extend(reversed(group.exceptions))
        else:
            yield current
