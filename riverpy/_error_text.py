"""What an exception says in one text: its type and its message, of a group those of its leaves."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

LEAVES_MAX = 20
"""Exceptions of a group that its text names."""
TEXT_LENGTH_MAX = 16 * 1024
"""Characters of the text of one exception."""
_CUT_MARK = " … [truncated]"


def error_text(error: BaseException) -> str:
    """The type and the message: `KeyError: 'user_id'`. A group is the texts of its leaves, each
    once: `ValueError: no such order; TimeoutError`. It is at most TEXT_LENGTH_MAX long."""
    found = list(islice(leaves(error), LEAVES_MAX + 1))
    texts = list(dict.fromkeys(_text(leaf) for leaf in found[:LEAVES_MAX]))
    if len(found) > LEAVES_MAX:
        texts.append("…")
    return cut("; ".join(texts), TEXT_LENGTH_MAX)


def _text(error: BaseException) -> str:
    name = type(error).__name__
    text = message(error)
    if text:
        return text if text.startswith(("<unprintable ", f"{name}: ")) else f"{name}: {text}"
    cause = error.__cause__
    if not isinstance(cause, Exception) or isinstance(cause, BaseExceptionGroup):
        return name  # a cancellation explains nothing
    return f"{name} from {type(cause).__name__}: {message(cause)}".removesuffix(": ")


def message(error: BaseException) -> str:
    """What the exception says of itself, which may be nothing."""
    try:
        return cut(str(error).strip(), TEXT_LENGTH_MAX)
    except BaseException:  # a __str__ of the user's may raise anything
        return f"<unprintable {type(error).__name__} object>"


def cut(text: str, length: int, end: str = "") -> str:
    """`text`, with a mark where it is longer than `length`."""
    return text if len(text) <= length else f"{text[: length - len(_CUT_MARK)]}{_CUT_MARK}{end}"


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions of a group and of the groups in it, in their order; or the error itself."""
    pending = [error]
    while pending:
        current = pending.pop()
        if isinstance(current, BaseExceptionGroup):
            group = cast("BaseExceptionGroup[BaseException]", current)
            pending.extend(reversed(group.exceptions))
        else:
            yield current
