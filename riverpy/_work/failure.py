"""Failures: the texts of an exception that a job raised, the stored error entry, and its class."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import traceback
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec

from riverpy._attempt_errors import json_time
from riverpy._error_text import cut, leaves, message
from riverpy._error_text import error_text as typed_text
from riverpy.errors import JobCancel, JobSnooze

TRACE_FRAMES_MAX = 100
TRACE_ENTRY_LENGTH_MAX = 1024
"""Characters of one frame, or of the exception's own line, in a trace."""
TRACE_LENGTH_MAX = 32 * 1024
"""Characters of a stored trace. The end is kept."""
OWN_FILES = {
    concurrent.futures.thread.__file__,
    *(
        str(Path(__file__).with_name(name))
        for name in ("executor.py", "middleware.py", "blocking.py", "child_process.py")
    ),
    str(Path(__file__).parent.with_name("_middleware_chain.py")),
}
"""The files whose frames come before the frames of a job."""
_UNSTORABLE = dict.fromkeys([0, *range(0xD800, 0xE000)], "\ufffd")
"""NUL and lone surrogates, which PostgreSQL refuses, become the replacement character."""

Ending: TypeAlias = Literal["completed", "snoozed", "cancelled", "stopped", "failed"]
"""`stopped` means: by a cancel or a stop from outside."""
ErrorT = TypeVar("ErrorT", bound=BaseException)


def storable(text: str) -> str:
    """Return the text with characters replaced that PostgreSQL cannot store."""
    return text.translate(_UNSTORABLE)


def error_text(error: BaseException) -> str:
    """Return the type and the message of the exception, as they can be stored."""
    return storable(typed_text(error))


def message_text(error: BaseException) -> str:
    """Return the message alone, as it can be stored, or the type if there is no message."""
    return storable(message(error)) or type(error).__name__


def trace_text(error: BaseException) -> str:
    """Return the traceback from the first frame of user code, without local variables. A long one
    loses its start."""
    first = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename in OWN_FILES:
        first = first.tb_next
    try:
        lines = traceback.format_exception(type(error), error, first, limit=-TRACE_FRAMES_MAX)
    except BaseException:  # formatting runs user code
        return ""
    text = "".join(cut(line, TRACE_ENTRY_LENGTH_MAX, end="\n") for line in lines)
    return storable(text[-TRACE_LENGTH_MAX:])


def error_entry(*, attempt: int, seconds_ago: float, error: str, trace: str) -> str:
    """Return one element of a job's errors as JSON. Its time is the start of the attempt."""
    at = datetime.now(UTC) - timedelta(seconds=seconds_ago)
    entry = {
        "at": json_time(at),
        "attempt": attempt,
        "error": error,
        "trace": trace,
    }
    return msgspec.json.encode(entry).decode()


def find(error: BaseException, wanted: type[ErrorT]) -> ErrorT | None:
    """Return the exception itself, or one inside its groups, if it has this type."""
    return next((leaf for leaf in leaves(error) if isinstance(leaf, wanted)), None)


def is_cancellation(error: BaseException) -> bool:
    """Whether this is only a cancellation. Of a group, all exceptions must be cancellations."""
    return all(isinstance(leaf, asyncio.CancelledError) for leaf in leaves(error))


def deciding_error(error: BaseException) -> BaseException:
    """Return the exception that decides how an attempt ends.

    This is the first JobSnooze inside groups, else the first JobCancel, else a CancelledError if
    there is nothing else, else the error itself.
    """
    for wanted in (JobSnooze, JobCancel):
        if (found := find(error, wanted)) is not None:
            return found
    return next(leaves(error)) if is_cancellation(error) else error


def ending(error: BaseException | None) -> Ending:
    """Return how an attempt ends if its code or its middleware ends with this error.

    A cancel of the job, hooks and outer middleware may still change that.
    """
    match None if error is None else deciding_error(error):
        case None:
            return "completed"
        case JobSnooze():
            return "snoozed"
        case JobCancel():
            return "cancelled"
        case asyncio.CancelledError():
            return "stopped"
        case _:
            return "failed"
