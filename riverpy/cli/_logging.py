"""Logging to stderr: of structlog, of the standard library, and of uncaught errors."""

from __future__ import annotations

import logging
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

import structlog

from riverpy._dsn import mask_passwords
from riverpy._log import get_logger
from riverpy._log_events import UNCAUGHT_ERROR_RAISED
from riverpy.cli._log_stream import LogStream
from riverpy.cli._output import should_use_color

if TYPE_CHECKING:
    from collections.abc import Callable

    from structlog.typing import EventDict, Processor


class _LineLogger:
    """Writes the lines of structlog without a lock. With a lock, a finalizer that logs during a
    write would wait forever."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write_text = write

    def msg(self, line: str) -> None:
        self._write_text(f"{line}\n")

    debug = info = warning = error = critical = msg


def send_log_to_stderr() -> None:
    """Send structlog's log to stderr, from level info on. Structlog's default is stdout, which
    commands use for data."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        # Read sys.stderr at each line, because other code may replace it.
        logger_factory=lambda *_args: _LineLogger(lambda line: sys.stderr.write(line)),
    )


def configure_logging(
    log_format: str, lowest_level: str, *, process_number: int | None = None
) -> LogStream:
    """Send structlog's and the standard library's log to stderr.

    Args:
        log_format: `console` for text, `json` for one object per line.
        lowest_level: the lowest level that is written: debug, info, warning or error.
        process_number: the value of the key `process` of each line; None: there is no such key.

    Returns:
        The stream of log lines. The caller can set `on_reader_ended` of the stream.
    """
    stream = LogStream(sys.stderr)
    number = logging.getLevelNamesMapping()[lowest_level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if process_number is not None:
        shared.append(partial(_add_process_number, process_number))
    last = _make_rendering_processors(log_format)
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_args: _LineLogger(stream.write),
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
    sys.unraisablehook = _log_unraisable_error
    threading.excepthook = _log_thread_error
    return stream


def _add_process_number(number: int, _logger: object, _method: str, event: EventDict) -> EventDict:
    event.setdefault("process", number)
    return event


def _log_unraisable_error(unraisable: sys.UnraisableHookArgs) -> None:
    """Log an error in `__del__` or in a callback of the garbage collector."""
    place = getattr(unraisable.object, "__qualname__", type(unraisable.object).__name__)
    _log_uncaught_error(unraisable, place)


def _log_thread_error(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is not SystemExit:  # as in Python: SystemExit ends a thread silently
        name = "thread" if args.thread is None else args.thread.name
        _log_uncaught_error(args, name)


def _log_uncaught_error(
    args: sys.UnraisableHookArgs | threading.ExceptHookArgs, place: str
) -> None:
    log = get_logger()
    error = args.exc_type() if args.exc_value is None else args.exc_value
    log.error(
        UNCAUGHT_ERROR_RAISED, place=place, exc_info=(args.exc_type, error, args.exc_traceback)
    )


def _make_rendering_processors(log_format: str) -> list[Processor]:
    if log_format == "json":
        return [
            structlog.processors.format_exc_info,
            _mask_passwords,
            structlog.processors.JSONRenderer(),
        ]
    # plain_traceback is used because structlog's default, if rich is installed, shows local
    # variables.
    return [
        structlog.processors.format_exc_info,
        _show_trace_as_exception,
        _mask_passwords,
        structlog.dev.ConsoleRenderer(
            colors=should_use_color(sys.stderr), exception_formatter=structlog.dev.plain_traceback
        ),
    ]


def _show_trace_as_exception(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Show the traceback of a failed job below the log line, as for other errors."""
    if trace := event.pop("trace", None):
        event["exception"] = trace
    return event


def _mask_passwords(_logger: object, _method: str, event: EventDict) -> EventDict:
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = mask_passwords(value)
    return event
