"""AttemptLog: the log that the code of a job writes during one attempt, with a maximum size."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime

ENTRY_SIZE_MAX = 2 * 1024 * 1024
"""The maximum size of the log of one attempt in bytes. It is the same as in River."""


class AttemptLog:
    """The log of one attempt, which a job uses as `job.log`. Any thread may use it.

    It keeps the first `max_bytes` bytes. It drops the bytes after them, and counts the dropped
    bytes. It ignores lines below its level, and lines after the end of the attempt.
    """

    __slots__ = ("_is_open", "_lock", "_max_bytes", "_missing_bytes", "_parts", "_size", "level")

    def __init__(self, *, max_bytes: int = ENTRY_SIZE_MAX, level: int = logging.INFO) -> None:
        """`level` is the lowest level of lines that are kept, such as `logging.INFO`."""
        self._lock = threading.Lock()
        self._parts: list[bytes] = []
        self._max_bytes, self.level = max_bytes, level
        self._size = self._missing_bytes = 0
        self._is_open = True

    def debug(self, message: str, *args: object) -> None:
        """Log a message at the level DEBUG. `args` are the values for its placeholders, as in
        `logging`."""
        self._log(logging.DEBUG, message, args)

    def info(self, message: str, *args: object) -> None:
        """Log a message at the level INFO. `args` are the values for its placeholders, as in
        `logging`."""
        self._log(logging.INFO, message, args)

    def warning(self, message: str, *args: object) -> None:
        """Log a message at the level WARNING. `args` are the values for its placeholders, as in
        `logging`."""
        self._log(logging.WARNING, message, args)

    def error(self, message: str, *args: object) -> None:
        """Log a message at the level ERROR. `args` are the values for its placeholders, as in
        `logging`."""
        self._log(logging.ERROR, message, args)

    def exception(self, message: str, *args: object) -> None:
        """Log a message at the level ERROR with the traceback of the exception that is being
        handled."""
        trace = traceback.format_exc() if sys.exc_info()[0] is not None else ""
        self._log(logging.ERROR, message, args, trace)

    def _log(self, level: int, message: str, args: tuple[object, ...], trace: str = "") -> None:
        if level < self.level:
            return
        text = _format_message(message, args)
        line = f"{format_log_time()} {logging.getLevelName(level)} {text}"
        self.append(f"{line}\n{trace}" if trace else line)

    def append(self, text: str) -> None:
        """Append a text with one or more lines. Characters that PostgreSQL cannot store are
        replaced."""
        if not self._is_open:
            return
        line_end = "" if text.endswith("\n") else "\n"
        data = f"{text}{line_end}".replace("\0", "\ufffd").encode(errors="replace")
        with self._lock:
            room = 0 if self._missing_bytes else self._max_bytes - self._size
            if len(data) > room:
                # If the limit is in the middle of a character of several bytes, drop the character.
                kept = data[:room].decode(errors="ignore").encode()
                self._missing_bytes += len(data) - len(kept)
                data = kept
            if data:
                self._parts.append(data)
                self._size += len(data)

    @property
    def text(self) -> str:
        """The text that was logged so far. It does not have the line about missing bytes, which
        `close` adds. It is empty after `close`, i.e. after the end of the attempt."""
        with self._lock:
            return b"".join(self._parts).decode()

    def close(self) -> str:
        """Ignore later lines, and return the text that was logged. If the maximum size was
        exceeded, the last line of the text has the number of missing bytes. The text is empty if
        nothing was logged."""
        self._is_open = False
        with self._lock:
            text = b"".join(self._parts).decode()
            self._parts.clear()
            if self._missing_bytes:
                line_end = "" if text.endswith("\n") or not text else "\n"
                text += (
                    f"{line_end}… {self._missing_bytes:,} more bytes were logged: the limit is "
                    f"{self._max_bytes:,} bytes for each attempt\n"
                )
            return text


def format_log_time(time: datetime | None = None) -> str:
    """Return a UTC time as text with milliseconds, such as `2026-01-31T09:30:00.000Z`. If `time` is
    None, use the current time."""
    time = datetime.now(UTC) if time is None else time
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def to_text_or_placeholder(value: object, *, is_quoted: bool) -> str:
    """Return the text of a value or, if `is_quoted` is True, its `repr`. This never raises."""
    try:
        return repr(value) if is_quoted else str(value)
    except Exception:  # the __repr__ of user code may raise, but the logger must not
        return f"<unprintable {type(value).__name__} object>"


def _format_message(message: str, args: tuple[object, ...]) -> str:
    """Return a message with the values of its placeholders, as in `logging`. If the values do not
    match the placeholders, return the message, the values and a note. A wrong log message must not
    fail the job."""
    if not args:
        return to_text_or_placeholder(message, is_quoted=False)
    # As in `logging`, a message such as "%(name)s" gets its values from one mapping.
    has_mapping = len(args) == 1 and isinstance(args[0], Mapping)
    values: object = next(iter(args)) if has_mapping else args
    try:
        return message % values
    except Exception as error:
        texts = ", ".join(to_text_or_placeholder(value, is_quoted=True) for value in args)
        return (
            f"{to_text_or_placeholder(message, is_quoted=False)} [not formatted, "
            f"{type(error).__name__}; values: {texts}]"
        )
