"""Failures: functions that classify an exception of a job, and make the texts to store."""

from __future__ import annotations

import asyncio
import re
import traceback
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec

from riverpy._attempt_errors import format_json_time
from riverpy._error_text import (
    flatten_exception_group,
    format_error_with_type,
    get_error_message,
    truncate_text,
)
from riverpy.errors import JobCancel, JobSnooze

TRACE_FRAMES_MAX = 100
"""The maximum number of frames in a stored traceback. Of a longer traceback, the innermost frames
are stored."""
TRACE_ENTRY_LENGTH_MAX = 1024
"""The maximum number of characters of one frame in a traceback, or of the line with the
exception."""
TRACE_LENGTH_MAX = 32 * 1024
"""The maximum number of characters of a stored traceback. Of a longer traceback, the start is
dropped."""
_STANDARD_LIBRARY_DIRECTORY = Path(traceback.__file__).parent
FILES_THAT_CALL_JOB_CODE = {
    *(
        str(Path(__file__).with_name(name))
        for name in ("executor.py", "middleware.py", "blocking.py", "child_main.py", "steps.py")
    ),
    str(Path(__file__).parent.with_name("_middleware_chain.py")),
    str(Path(__file__).parent.with_name("joblog.py")),
    *(
        str(Path(__file__).parents[1] / "django" / name)
        for name in ("task_runs.py", "task_workers.py")
    ),
    # These paths are built without an import of the modules, because an import of multiprocessing
    # takes 1 MiB of memory.
    str(_STANDARD_LIBRARY_DIRECTORY / "concurrent" / "futures" / "thread.py"),
    str(_STANDARD_LIBRARY_DIRECTORY / "multiprocessing" / "spawn.py"),
    "<frozen runpy>",
}
"""The files of riverpy and Python that call the code of a job. Stored tracebacks start after the
frames of these files."""
_UNSTORABLE_CHARACTER_PATTERN = re.compile("[\0\ud800-\udfff]")
"""The characters that PostgreSQL refuses: NUL and lone surrogates."""

AttemptEnding: TypeAlias = Literal["completed", "snoozed", "cancelled", "stopped", "failed"]
"""How an attempt ends. `stopped` means that `job_cancel` or a stop of the client has cancelled the
attempt."""
ErrorT = TypeVar("ErrorT", bound=BaseException)


def replace_unstorable_characters(text: str) -> str:
    """Return the text. Each character that PostgreSQL cannot store is replaced with U+FFFD."""
    return _UNSTORABLE_CHARACTER_PATTERN.sub("\ufffd", text)


def make_storable_type_and_message(error: BaseException) -> str:
    """Return the type and the message of the exception, without characters that PostgreSQL
    refuses."""
    return replace_unstorable_characters(format_error_with_type(error))


def make_storable_message(error: BaseException) -> str:
    """Return the message of the exception, or its type if there is no message, without characters
    that PostgreSQL refuses."""
    return replace_unstorable_characters(get_error_message(error)) or type(error).__name__


def make_storable_trace(error: BaseException) -> str:
    """Return the traceback from the first frame of user code, without local variables. Of a long
    traceback, the start is dropped."""
    first = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename in FILES_THAT_CALL_JOB_CODE:
        first = first.tb_next
    try:
        lines = traceback.format_exception(type(error), error, first, limit=-TRACE_FRAMES_MAX)
    except BaseException:  # `__str__` of the exception may raise: it is user code
        return ""
    text = "".join(truncate_text(line, TRACE_ENTRY_LENGTH_MAX, suffix="\n") for line in lines)
    return replace_unstorable_characters(text[-TRACE_LENGTH_MAX:])


def encode_error_entry(*, attempt: int, seconds_ago: float, error: str, trace: str) -> str:
    """Return an entry for the column `errors` of a job, as JSON. The attempt started `seconds_ago`
    seconds ago."""
    at = datetime.now(UTC) - timedelta(seconds=seconds_ago)
    entry = {"at": format_json_time(at), "attempt": attempt, "error": error, "trace": trace}
    return msgspec.json.encode(entry).decode()


def find_error_of_type(error: BaseException, error_type: type[ErrorT]) -> ErrorT | None:
    """Return `error` if it has the wanted type. If it is an exception group, return the first
    exception of this type in the group. Otherwise return None."""
    return next(
        (one for one in flatten_exception_group(error) if isinstance(one, error_type)), None
    )


def is_cancellation(error: BaseException) -> bool:
    """Whether the error is a cancellation, or a group of cancellations only."""
    return all(isinstance(one, asyncio.CancelledError) for one in flatten_exception_group(error))


def find_deciding_error(error: BaseException) -> BaseException:
    """Return the exception that decides how an attempt ends.

    For an exception group, this is the first JobSnooze in it. If there is none, it is the first
    JobCancel. If there is none either, it is a CancelledError if all exceptions are cancellations,
    otherwise the group itself.
    """
    for wanted in (JobSnooze, JobCancel):
        if (found := find_error_of_type(error, wanted)) is not None:
            return found
    return next(flatten_exception_group(error)) if is_cancellation(error) else error


def classify_attempt_ending(error: BaseException | None) -> AttemptEnding:
    """Return how an attempt ends if its code or its middleware raises `error`, or raises nothing
    (None).

    A `job_cancel`, hooks and outer middleware may still change how the attempt ends.
    """
    match None if error is None else find_deciding_error(error):
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
