"""The logger of the whole package, and loggers that limit repeated events."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, Protocol

from riverpy._log_events import (
    LOG_EVENTS_LIMITED,
    NOTIFICATION_QUEUE_DRAINED,
    NOTIFICATION_QUEUE_FILLED,
)

EVENTS_PER_WINDOW_MAX = 10
"""How many times within `EVENT_WINDOW_SECONDS` a `RateLimitedLog` logs the same event at the level
that the caller chose. Further entries of the event are logged at level debug."""
EVENT_WINDOW_SECONDS = 60.0
"""The length of the period, in seconds, in which `RateLimitedLog` counts the entries of one
event."""
_LOGGER_NAME = "riverpy"
_LEVEL_NUMBERS = logging.getLevelNamesMapping()
_LOG_RECORD_ATTRIBUTES = {
    *vars(logging.LogRecord("", 0, "", 0, "", (), None)),
    *("message", "asctime", "taskName"),
}
"""The attributes that `logging` itself sets on each record. Extra attributes must have other
names."""


class LogEventWriter(Protocol):
    """Writes log events in the format of the command `riverpy`."""

    lowest_level: int
    """The lowest level that is written, as a level number of the module `logging`, such as
    `logging.INFO`."""

    def write_log_event(self, level: str, event: str, keys: dict[str, Any]) -> None:
        """Write an event. `level` is at least `lowest_level`."""
        ...


_log_event_writer: LogEventWriter | None = None


def set_log_event_writer(writer: LogEventWriter | None) -> None:
    """Send the log events of this process to `writer`. None: send them to `logging` again."""
    global _log_event_writer
    _log_event_writer = writer


class Log:
    """A logger of events with key-value pairs.

    If the program has configured structlog, events go to structlog. Otherwise they go to the writer
    that `set_log_event_writer` has set. If there is no writer, they go to
    `logging.getLogger("riverpy")`. Each log call checks this, so the program can configure
    structlog at any time.
    """

    __slots__ = ("_keys",)

    def __init__(self, keys: dict[str, object]) -> None:
        """Create a logger whose events all have these keys."""
        self._keys = keys

    def bind(self, **keys: object) -> Log:
        """Return a new logger with the keys of this logger and these keys."""
        return Log({**self._keys, **keys})

    def with_rate_limit(self) -> RateLimitedLog:
        """Return a logger with the same keys that limits repeated events."""
        return RateLimitedLog(self._keys)

    @property
    def is_debug_enabled(self) -> bool:
        """Whether an event of level debug would be written."""
        structlog = _find_configured_structlog()
        if structlog is None and _log_event_writer is not None:
            return _log_event_writer.lowest_level <= logging.DEBUG
        if structlog is None:
            return logging.getLogger(_LOGGER_NAME).isEnabledFor(logging.DEBUG)
        log: Any = structlog.get_logger(_LOGGER_NAME).bind()
        is_enabled = getattr(log, "is_enabled_for", None) or getattr(log, "isEnabledFor", None)
        return is_enabled is None or bool(is_enabled(logging.DEBUG))

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

    def _choose_level(self, level: str, event: str) -> str:
        """Return the level at which to write the event. `RateLimitedLog` overrides this method."""
        return level

    def _write(self, level: str, event: str, keys: dict[str, Any]) -> None:
        level = self._choose_level(level, event)
        structlog = _find_configured_structlog()
        if structlog is not None:
            log: Any = structlog.get_logger(_LOGGER_NAME).bind(**self._keys)
            getattr(log, level)(event, **keys)
            return
        number = _LEVEL_NUMBERS[level.upper()]
        if _log_event_writer is not None:
            if number >= _log_event_writer.lowest_level:
                _log_event_writer.write_log_event(level, event, {**self._keys, **keys})
            return
        logger = logging.getLogger(_LOGGER_NAME)
        if not logger.isEnabledFor(number):
            return
        exc_info = keys.pop("exc_info", None)
        keys = {**keys, **self._keys, **keys}  # the event's keys come first and take precedence
        # The values are passed as arguments, so that no text is formatted for a record that is
        # dropped.
        text = " ".join([event.replace("%", "%%"), *(f"{key}=%r" for key in keys)])
        extra = {
            f"{key}_" if key in _LOG_RECORD_ATTRIBUTES else key: value
            for key, value in keys.items()
        }
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


def _find_configured_structlog() -> Any:
    """Return the module structlog if the program has configured it, otherwise None.

    This function does not import structlog, because a program that has configured structlog has
    imported it before. The import would take about a fifth of the time of the import of riverpy.
    """
    structlog: Any = sys.modules.get("structlog")
    is_configured = getattr(structlog, "is_configured", None)  # None during the import of structlog
    return structlog if is_configured is not None and is_configured() else None


class RateLimitedLog(Log):
    """A logger of events about single jobs or rows, with a limit for each event.

    One cause can affect thousands of jobs. So only the first `EVENTS_PER_WINDOW_MAX` entries of an
    event within `EVENT_WINDOW_SECONDS` are logged at the level that the caller chose. Further
    entries are logged at level debug. At the first of these, the warning `log events limited` is
    logged too.
    """

    __slots__ = ("_window_by_event",)

    def __init__(self, keys: dict[str, object]) -> None:
        """Create a logger whose events all have these keys."""
        super().__init__(keys)
        self._window_by_event: dict[str, tuple[float, int]] = {}
        """For each event, the monotonic time at which its window ends, and the number of entries in
        the window."""

    def _choose_level(self, level: str, event: str) -> str:
        if event == LOG_EVENTS_LIMITED:
            return level
        now = time.monotonic()
        until, count = self._window_by_event.get(event, (0.0, 0))
        if now >= until:
            until, count = now + EVENT_WINDOW_SECONDS, 0
        self._window_by_event[event] = until, count + 1
        if count == EVENTS_PER_WINDOW_MAX:
            self.warning(LOG_EVENTS_LIMITED, limited_event=event)
        return "debug" if count >= EVENTS_PER_WINDOW_MAX else level


class RepeatedFailureLog:
    """Logs a failure that repeats. The first time, the failure is logged at the level that the
    caller chose. After that, it is logged at level debug until a success or until the cause
    changes."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._last_cause: str | None = None

    @property
    def is_failing(self) -> bool:
        """Whether, since the last success, a failure was logged at the level that the caller
        chose."""
        return self._last_cause is not None

    def log_failure(
        self,
        event: str,
        *,
        level: str = "warning",
        cause: str = "",
        is_cause_logged: bool = False,
        exc_info: BaseException | None = None,
        **keys: object,
    ) -> None:
        """Log a failure.

        Args:
            event: the log event of the failure.
            level: the level for the first failure with this cause.
            cause: the cause of the failure. If it differs from the last cause, the failure is
                logged at `level` again.
            is_cause_logged: whether an entry of another event already reports the cause. If True,
                this failure is logged at level debug.
            exc_info: an error whose traceback is logged, except at level debug.
            **keys: the keys of the event.
        """
        if is_cause_logged or cause == self._last_cause:
            self._log.debug(event, **keys)
        else:
            self._last_cause = cause
            if exc_info is not None:
                keys["exc_info"] = exc_info
            getattr(self._log, level)(event, **keys)

    def log_recovery(self, event: str | None = None, **keys: object) -> None:
        """Record a success. If `is_failing` was True, log `event` at level info. None: log
        nothing."""
        if self._last_cause is not None:
            self._last_cause = None
            if event is not None:
                self._log.info(event, **keys)


class ServerNotificationQueueLog:
    """Logs once that the server's notification queue is full, and once that it has room again."""

    def __init__(self) -> None:
        self._failure_log = RepeatedFailureLog(get_logger())

    def log_queue_state(self, *, is_full: bool) -> None:
        """Log a change of the queue's state: it became full, or it has room again. `is_full`:
        whether the queue had no room for the last notification."""
        if not is_full:
            self._failure_log.log_recovery(NOTIFICATION_QUEUE_DRAINED)
        elif not self._failure_log.is_failing:
            self._failure_log.log_failure(
                NOTIFICATION_QUEUE_FILLED,
                effect="jobs are stored without a notification and found by polling",
                advice="`riverpy doctor` shows the session that blocks the queue",
            )
