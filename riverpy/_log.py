"""Log: lines that would come again and again, and how many of them are wanted."""

from __future__ import annotations

import logging
import time
from typing import Any

import structlog

LINES_MAX = 10
"""Lines of one sentence that are told at their level within `WINDOW`."""
WINDOW = 60.0
"""Seconds, from the first of them."""


def tells_of_jobs(log: Any) -> bool:
    """Whether a line for each job would be written: the program asked structlog for debug lines. A
    program that never configured structlog asked for nothing."""
    if not structlog.is_configured():
        return False
    asked = getattr(log, "is_enabled_for", None) or getattr(log, "isEnabledFor", None)
    return asked is None or bool(asked(logging.DEBUG))


class JobLines:
    """One sentence about single jobs that is worth more than a debug line. What befalls one job may
    befall thousands at once: past LINES_MAX of them in a minute they are lines for debugging, which
    one line says."""

    __slots__ = ("_count", "_level", "_log", "_until")

    def __init__(self, log: Any, level: str) -> None:
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
            self._log.warning("more lines like this are at debug, for a minute at most", line=event)
        if tells_of_jobs(self._log):
            if self._level == "exception":
                keys["exc_info"] = True
            self._log.debug(event, **keys)


class NotificationQueueLog:
    """Logs once that the server's queue of notifications is full, and once that it is not."""

    def __init__(self) -> None:
        self._log: Any = structlog.get_logger("riverpy")
        self._is_full = False

    def report(self, *, is_full: bool) -> None:
        """Take what the last statement found that notifies."""
        if is_full is self._is_full:
            return
        self._is_full = is_full
        if is_full:
            self._log.warning(
                "notification queue full",
                effect="jobs are stored without a notification, and are found by polling",
                advice="`riverpy doctor` names the session that holds the queue back",
            )
        else:
            self._log.info("notification queue no longer full")
