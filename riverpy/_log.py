"""Log: the logger of the whole package, and limits for lines that repeat."""

from __future__ import annotations

import logging
import time
from typing import Any

import structlog

from riverpy._log_events import (
    LOG_EVENTS_LIMITED,
    NOTIFICATION_QUEUE_DRAINED,
    NOTIFICATION_QUEUE_FILLED,
)

LINES_MAX = 10
"""Lines of one sentence that are told at their level within `WINDOW`."""
WINDOW = 60.0
"""Seconds, from the first of them."""
_NAME = "riverpy"
_LEVELS = logging.getLevelNamesMapping()
_STANDARD = {
    *vars(logging.LogRecord("", 0, "", 0, "", (), None)),
    *("message", "asctime", "taskName"),
}
"""Attributes that a record has of its own. logging refuses them as extra ones."""


class Log:
    """A logger of events with keys. They go to the program's structlog if the program has
    configured it, and otherwise to `logging.getLogger("riverpy")`. Each call decides this, so it
    does not matter when the program configures structlog."""

    __slots__ = ("_keys",)

    def __init__(self, keys: dict[str, object]) -> None:
        """Make one whose events all have these keys."""
        self._keys = keys

    def bind(self, **keys: object) -> Log:
        """Return a logger whose events have these keys too."""
        return Log({**self._keys, **keys})

    def is_enabled_for(self, level: int) -> bool:
        """Whether an event of this level would be written."""
        if not structlog.is_configured():
            return logging.getLogger(_NAME).isEnabledFor(level)
        log: Any = structlog.get_logger(_NAME).bind()
        asked = getattr(log, "is_enabled_for", None) or getattr(log, "isEnabledFor", None)
        return asked is None or bool(asked(level))

    def debug(self, event: str, **keys: object) -> None:
        """Log at level debug."""
        self._write("debug", event, keys)

    def info(self, event: str, **keys: object) -> None:
        """Log at level info."""
        self._write("info", event, keys)

    def warning(self, event: str, **keys: object) -> None:
        """Log at level warning."""
        self._write("warning", event, keys)

    def error(self, event: str, **keys: object) -> None:
        """Log at level error."""
        self._write("error", event, keys)

    def exception(self, event: str, **keys: object) -> None:
        """Log the current exception at level error, with its traceback."""
        self._write("error", event, {"exc_info": True, **keys})

    def _write(self, level: str, event: str, keys: dict[str, Any]) -> None:
        if structlog.is_configured():
            log: Any = structlog.get_logger(_NAME).bind(**self._keys)
            getattr(log, level)(event, **keys)
            return
        logger, number = logging.getLogger(_NAME), _LEVELS[level.upper()]
        if not logger.isEnabledFor(number):
            return
        exc_info = keys.pop("exc_info", None)
        keys = {**keys, **self._keys, **keys}  # the event's own come first
        # The values are arguments: a handler that drops the record formats nothing.
        text = " ".join([event.replace("%", "%%"), *(f"{key}=%r" for key in keys)])
        extra = {f"{key}_" if key in _STANDARD else key: value for key, value in keys.items()}
        values = tuple(keys.values())
        logger.log(
            number,
            text if values else event,
            *values,
            exc_info=exc_info,
            extra=extra,
            stacklevel=3,
        )


def get_logger(**keys: object) -> Log:
    """Return a logger whose events have these keys."""
    return Log(keys)


def tells_of_jobs(log: Log) -> bool:
    """Whether a line for each job is written: the program wants debug lines."""
    return log.is_enabled_for(logging.DEBUG)


class JobLines:
    """One sentence about single jobs that is worth more than a debug line. What befalls one job may
    befall thousands at once: past LINES_MAX of them in a minute they are lines for debugging, which
    one line says."""

    __slots__ = ("_count", "_level", "_log", "_until")

    def __init__(self, log: Log, level: str) -> None:
        """Make it.

        Args:
            log: where to.
            level: the method of `log` that tells the first of them.
        """
        self._log, self._level = log, level
        self._until, self._count = 0.0, 0

    def say(self, event: str, **keys: object) -> None:
        """Tell of a job."""
        now = time.monotonic()
        if now >= self._until:
            self._until, self._count = now + WINDOW, 0
        self._count += 1
        if self._count <= LINES_MAX:
            getattr(self._log, self._level)(event, **keys)
            return
        if self._count == LINES_MAX + 1:
            self._log.warning(LOG_EVENTS_LIMITED, limited_event=event)
        if tells_of_jobs(self._log):
            if self._level == "exception":
                keys["exc_info"] = True
            self._log.debug(event, **keys)


class NotificationQueueLog:
    """Logs once that the server's queue of notifications is full, and once that it is not."""

    def __init__(self) -> None:
        self._log = get_logger()
        self._is_full = False

    def report(self, *, is_full: bool) -> None:
        """Take what the last statement found that notifies."""
        if is_full is self._is_full:
            return
        self._is_full = is_full
        if is_full:
            self._log.warning(
                NOTIFICATION_QUEUE_FILLED,
                effect="jobs are stored without a notification and found by polling",
                advice="`riverpy doctor` shows the session that blocks the queue",
            )
        else:
            self._log.info(NOTIFICATION_QUEUE_DRAINED)
