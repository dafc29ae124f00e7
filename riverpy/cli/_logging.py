"""Configures logging to stderr: for riverpy, for the standard library, for uncaught errors, and for
structlog if the code of the user imports it."""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING, Any

from riverpy._log import LogEventWriter, get_logger, set_log_event_writer
from riverpy._log_events import UNCAUGHT_ERROR_RAISED
from riverpy.cli._log_stream import LogStream
from riverpy.cli._log_text import LogEntryFormatter, LogRecordFormatter
from riverpy.cli._output import should_use_color

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _LineWriter(LogEventWriter):
    """Writes each log event as one line. It uses no lock, because a finalizer that logs during a
    write would wait for the lock forever."""

    def __init__(
        self, entry_format: LogEntryFormatter, lowest_level: int, write: Callable[[str], object]
    ) -> None:
        self._entry_format, self._write_text = entry_format, write
        self.lowest_level = lowest_level

    def write_log_event(self, level: str, event: str, keys: dict[str, Any]) -> None:
        self.msg(self._entry_format.format_entry(level, {**keys, "event": event}))

    def render_structlog_event(self, _logger: object, method: str, entry: Any) -> str:
        """Return the text of a structlog event. structlog calls this as its last processor."""
        return self._entry_format.format_entry("error" if method == "exception" else method, entry)

    def make_structlog_logger(self, *_names: object) -> _LineWriter:
        """Return this object. structlog uses it as the logger that receives the finished lines."""
        return self

    def msg(self, line: str) -> None:
        """Write a line. structlog calls this method."""
        self._write_text(f"{line}\n")

    debug = info = warning = error = critical = msg


class _StructlogConfigurer:
    """Configures structlog when the code of the user imports it, so that its lines look like those
    of riverpy.

    By default, structlog writes to stdout, which commands use for their data. riverpy itself does
    not import structlog, because structlog also imports rich. Together they need 6 MiB of memory
    and a third of the start time of a command.
    """

    def __init__(self, writer: _LineWriter) -> None:
        self._writer = writer

    def install(self) -> None:
        """Configure structlog now if it is already imported, otherwise as soon as it is imported.
        If the code of the user has already configured structlog, change nothing."""
        for other in [one for one in sys.meta_path if isinstance(one, _StructlogConfigurer)]:
            sys.meta_path.remove(other)
        structlog: Any = sys.modules.get("structlog")
        if structlog is None:
            sys.meta_path.insert(0, self)
            return
        factory = structlog.get_config()["logger_factory"]
        is_ours = isinstance(getattr(factory, "__self__", None), _LineWriter)
        if is_ours or not structlog.is_configured():
            self._configure(structlog)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the import spec of structlog. Its loader configures structlog after the import.
        Return None for any other module."""
        if fullname != "structlog":
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute_module = loader.exec_module

            def execute_and_configure(module: ModuleType) -> None:
                execute_module(module)
                self._configure(module)

            loader.exec_module = execute_and_configure
        return spec

    def _configure(self, structlog: Any) -> None:
        structlog.configure(
            processors=[
                structlog.contextvars.merge_contextvars,
                self._writer.render_structlog_event,
            ],
            wrapper_class=structlog.make_filtering_bound_logger(self._writer.lowest_level),
            logger_factory=self._writer.make_structlog_logger,
            cache_logger_on_first_use=True,
        )


def configure_default_logging() -> None:
    """Write the logs of riverpy and of structlog to stderr, at level info and above."""
    # Use the current sys.stderr for each line, because other code may replace it.
    _install_line_writer(
        LogEntryFormatter(is_json=False, has_colors=should_use_color(sys.stderr)),
        logging.INFO,
        lambda line: sys.stderr.write(line),
    )


def configure_logging(
    log_format: str, lowest_level: str, *, process_number: int | None = None
) -> LogStream:
    """Write the logs of riverpy, of structlog and of the standard library to stderr.

    Args:
        log_format: `console` for text, `json` for one object on each line.
        lowest_level: the lowest level that is written: debug, info, warning or error.
        process_number: the value of the key `process` in each line; None: the key is not added.

    Returns:
        The stream of the log lines. The caller can set its attribute `on_reader_ended`.
    """
    stream = LogStream(sys.stderr)
    number = logging.getLevelNamesMapping()[lowest_level.upper()]
    entry_format = LogEntryFormatter(
        is_json=log_format == "json",
        has_colors=should_use_color(sys.stderr),
        process_number=process_number,
    )
    _install_line_writer(entry_format, number, stream.write)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogRecordFormatter(entry_format))
    logging.basicConfig(handlers=[handler], level=number, force=True)
    logging.captureWarnings(capture=True)
    sys.unraisablehook = _log_unraisable_error
    threading.excepthook = _log_thread_error
    return stream


def _install_line_writer(
    entry_format: LogEntryFormatter, lowest_level: int, write: Callable[[str], object]
) -> None:
    writer = _LineWriter(entry_format, lowest_level, write)
    set_log_event_writer(writer)
    _StructlogConfigurer(writer).install()


def _log_unraisable_error(unraisable: sys.UnraisableHookArgs) -> None:
    """Log an error that was raised in `__del__` or in a callback of the garbage collector."""
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
