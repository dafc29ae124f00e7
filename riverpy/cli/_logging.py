"""The log of a worker process: of structlog and of the standard library's loggers, to stderr.

When the reader of a pipe has gone, the log goes silent and a stop is asked for.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import IO, TYPE_CHECKING, Any

import structlog

from riverpy._dsn import mask_url
from riverpy.cli._output import has_color

if TYPE_CHECKING:
    from collections.abc import Callable

    from structlog.typing import EventDict, Processor


class LogStream:
    """Stderr for log lines. When its reader has gone, all later output is dropped."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self.on_broken: Callable[[], None] | None = None
        """Called once, from any thread, when the reader has gone."""
        self._is_broken = False

    def write(self, text: str) -> None:
        """Write, or do nothing."""
        self._guarded(self._stream.write, text)

    def flush(self) -> None:
        """Flush, or do nothing."""
        self._guarded(self._stream.flush)

    def _guarded(self, operation: Callable[..., Any], *args: str) -> None:
        with self._lock:
            if self._is_broken:
                return
            try:
                operation(*args)
                return
            except BrokenPipeError:
                self._is_broken = True
        _silence(self._stream)
        if self.on_broken:
            self.on_broken()


class _Stderr:
    """Whatever stderr is at the time."""

    def write(self, text: str) -> None:
        """Write to it."""
        sys.stderr.write(text)

    def flush(self) -> None:
        """Flush it."""
        sys.stderr.flush()


def log_to_stderr() -> None:
    """Send structlog's log to stderr, with all else as structlog has it.

    Its own choice is stdout, which is for data, as it was when structlog was imported.
    """
    structlog.configure(
        logger_factory=structlog.WriteLoggerFactory(_Stderr())  # pyright: ignore[reportArgumentType]
    )


def configure_logging(log: str, level: str) -> LogStream:
    """Send structlog's and the standard library's log to stderr.

    Args:
        log: `console` for people, `json` for machines: one object a line.
        level: the least level that is written: debug, info, warning or error.

    Returns:
        The stream, to be told what to do when its reader has gone.
    """
    stream = LogStream(sys.stderr)
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last = _last_processors(log)
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(stream),  # pyright: ignore[reportArgumentType]
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(handlers=[handler], level=number, force=True)
    logging.captureWarnings(capture=True)
    return stream


def _last_processors(log: str) -> list[Processor]:
    if log == "json":
        return [
            structlog.processors.format_exc_info,
            _mask_passwords,
            structlog.processors.JSONRenderer(),
        ]
    # Not rich's traceback, which structlog takes where rich is installed: it shows local variables.
    return [
        structlog.processors.format_exc_info,
        _mask_passwords,
        structlog.dev.ConsoleRenderer(
            colors=has_color(sys.stderr), exception_formatter=structlog.dev.plain_traceback
        ),
    ]


def _mask_passwords(_logger: object, _method: str, event: EventDict) -> EventDict:
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = mask_url(value)
    return event


def _silence(stream: IO[str]) -> None:
    """Let stderr, and stdout if it is the same pipe, lead nowhere: nobody's write fails."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    numbers = {stream.fileno()}
    if os.path.sameopenfile(stream.fileno(), 1):
        numbers.add(1)
    for number in numbers:
        os.dup2(devnull, number)
    os.close(devnull)
