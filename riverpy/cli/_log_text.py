"""Formats log entries as text: either one line with columns, or one JSON object."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, cast

from riverpy._dsn import mask_passwords

_EVENT_WIDTH, _LEVEL_WIDTH = 30, 9
_DIM, _BOLD, _RESET = "\033[2m", "\033[1m", "\033[0m"
_RED, _GREEN, _YELLOW, _BLUE, _MAGENTA, _CYAN = (f"\033[{code}m" for code in range(31, 37))
_COLOR_BY_LEVEL = {"debug": _GREEN, "info": _GREEN, "warning": _YELLOW}
_CHARACTERS_THAT_NEED_QUOTES = frozenset(" \t\r\n=\"'")


class LogEntryFormatter:
    """Formats log entries as text. An entry is a dict with the key `event`.

    Args:
        is_json: whether an entry becomes one JSON object; otherwise it becomes a line with columns.
        has_colors: whether lines with columns have colours.
        process_number: the value of the key `process` in each entry; None: the key is not added.
    """

    def __init__(
        self, *, is_json: bool, has_colors: bool, process_number: int | None = None
    ) -> None:
        self._is_json, self._has_colors = is_json, has_colors
        self._process_number = process_number

    def format_entry(self, level: str, entry: dict[str, Any]) -> str:
        """Return the text of an entry. The value of the key `exc_info` is formatted as a traceback.
        Passwords in URLs are masked."""
        entry["level"] = level
        entry["timestamp"] = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        if self._process_number is not None:
            entry.setdefault("process", self._process_number)
        if exc_info := entry.pop("exc_info", None):
            entry["exception"] = _format_traceback(exc_info)
        # The entry of a failed job has the traceback as a text.
        if not self._is_json and (trace := entry.pop("trace", None)):
            entry["exception"] = trace
        for key, value in entry.items():
            if isinstance(value, str):
                entry[key] = mask_passwords(value)
        return json.dumps(entry, default=repr) if self._is_json else self._format_columns(entry)

    def _format_columns(self, entry: dict[str, Any]) -> str:
        level, event = str(entry.pop("level")), str(entry.pop("event", ""))
        level_color = _BOLD + _COLOR_BY_LEVEL.get(level, _RED)
        columns = [
            self._colorize(entry.pop("timestamp"), _DIM),
            f"[{self._colorize(level.ljust(_LEVEL_WIDTH), level_color)}]",
            self._colorize(event.ljust(_EVENT_WIDTH), _BOLD),
        ]
        if logger := entry.pop("logger", None):
            columns.append(f"[{self._colorize(logger, _BOLD + _BLUE)}]")
        blocks = [entry.pop(key, None) for key in ("stack", "exception")]
        columns += [
            f"{self._colorize(key, _CYAN)}={self._colorize(_format_value(entry[key]), _MAGENTA)}"
            for key in sorted(entry)
        ]
        return "\n".join([" ".join(columns).rstrip(), *(str(one) for one in blocks if one)])

    def _colorize(self, text: str, color: str) -> str:
        return f"{color}{text}{_RESET}" if self._has_colors else text


class LogRecordFormatter(logging.Formatter):
    """Formats the records of `logging` in the same way as the events of riverpy."""

    def __init__(self, entry_format: LogEntryFormatter) -> None:
        super().__init__()
        self._entry_format = entry_format

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        entry: dict[str, Any] = {"event": record.getMessage()}
        # Add the values that the program has bound with `structlog.contextvars`.
        if contextvars := sys.modules.get("structlog.contextvars"):
            entry |= contextvars.get_contextvars()
        entry["logger"] = record.name
        if record.exc_info:
            entry["exc_info"] = record.exc_info
        if record.stack_info:
            entry["stack"] = record.stack_info
        return self._entry_format.format_entry(record.levelname.lower(), entry)


def _format_traceback(exc_info: object) -> str:
    """Return the text of a traceback. `exc_info` is an exception or the result of `sys.exc_info()`.
    For any other value, use the exception that is being handled."""
    if isinstance(exc_info, tuple):
        exc_info = cast("tuple[Any, ...]", exc_info)[1]
    error = exc_info if isinstance(exc_info, BaseException) else sys.exc_info()[1]
    return "" if error is None else "".join(traceback.format_exception(error)).rstrip("\n")


def _format_value(value: object) -> str:
    if isinstance(value, str) and _CHARACTERS_THAT_NEED_QUOTES.isdisjoint(value):
        return value
    return repr(value)
