"""JobLog: stores the log of each attempt in the metadata of its job, in the same format as River.

River UI shows these logs, and `riverpy job show ID --log` prints them.
"""

from __future__ import annotations

import logging
import traceback
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from riverpy._work.attempt import Attempt
from riverpy.attempt_log import (
    ENTRY_SIZE_MAX,
    AttemptLog,
    format_log_time,
    to_text_or_placeholder,
)
from riverpy.context import running_job
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from riverpy.job import Job
    from riverpy.middleware import WorkInner

LOG_METADATA_KEY = "river:log"
"""The metadata key of the log. River uses the same key."""
JOB_LOG_SIZE_MAX = 8 * 1024 * 1024
"""The maximum number of bytes of all entries of a job. River has the same limit."""
_LEVEL_NUMBERS = logging.getLevelNamesMapping()
_LEVEL_BY_METHOD = {"exception": logging.ERROR, "warn": logging.WARNING, "fatal": logging.CRITICAL}


class JobLog:
    """A worker middleware that stores the log of each attempt:
    `Config(middleware=[riverpy.joblog.JobLog()])`.

    A job logs with `job.log`, with the module `logging` (add a `JobLogHandler` to the root logger),
    or with structlog (add `record_event` to its processors). Lines from tasks and threads of the
    job are stored too, if they run in a copy of the job's context. Tasks and `asyncio.to_thread`
    copy the context. By default, `threading.Thread` does not.

    At the end of every attempt, the entry `{"attempt": n, "log": "…"}` is appended to the metadata
    key `river:log`. If the attempt has logged nothing, no entry is stored. All entries of a job
    together have at most 8 MiB. If they have more, the oldest entries are removed.
    """

    def __init__(self, *, max_bytes: int = ENTRY_SIZE_MAX, level: int | str = logging.INFO) -> None:
        """Create the middleware.

        Args:
            max_bytes: the maximum number of bytes that are stored for one attempt, from 1 byte to
                2 MiB. If there are more, only the first bytes are stored, and the last line
                contains the number of missing bytes. Default 2 MiB.
            level: the lowest level that is stored, as a number or name of the module `logging`.
                Default INFO. For records of the module `logging`, the level of the root logger
                counts too: it is WARNING by default.

        Raises:
            ConfigError: a value is not valid.
        """
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"JobLog: max_bytes must be an int, got {type(max_bytes).__name__}")
        if not 1 <= max_bytes <= ENTRY_SIZE_MAX:
            raise ConfigError(
                f"JobLog: max_bytes must be from 1 to {ENTRY_SIZE_MAX}, got {max_bytes}"
            )
        number = _LEVEL_NUMBERS.get(level.upper()) if isinstance(level, str) else level
        if not isinstance(number, int) or isinstance(number, bool):
            names = ", ".join(_LEVEL_NUMBERS)
            raise ConfigError(f"JobLog: level must be a number or one of {names}, got {level!r}")
        self._max_bytes, self._level = max_bytes, number

    async def work(self, job: Job[Any], do_inner: WorkInner, /) -> None:
        """Run the attempt, and add its log to the job's metadata when the attempt ends."""
        # If there are several JobLogs, only the outermost one stores the log. Only an Attempt can
        # store a log.
        if job.has_log or not isinstance(job, Attempt):
            await do_inner()
            return
        log = AttemptLog(max_bytes=self._max_bytes, level=self._level)
        job.set_log(log)
        try:
            await do_inner()
        finally:
            text = log.close()
            if text:
                entries = append_log_entry(job.metadata_text, job.attempt, text)
                job.record_metadata(LOG_METADATA_KEY, entries)


class JobLogHandler(logging.Handler):
    """A handler for the root logger of the module `logging`. It adds the records of a running job
    to the log of the job, and ignores records of other code.

    The default format is `%(asctime)s %(levelname)s %(name)s: %(message)s`. The time is in UTC, as
    in the lines of `job.log`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_UtcFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Add a record to the log of the running job."""
        log = _find_running_job_log()
        if log is None or record.levelno < log.level:
            return
        try:
            log.append(self.format(record))
        except Exception:
            self.handleError(record)


class _UtcFormatter(logging.Formatter):
    """A formatter that writes times in UTC, in the format of `job.log`."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return format_log_time(datetime.fromtimestamp(record.created, UTC))


def record_event(
    logger: object, method_name: str, event_dict: MutableMapping[str, Any], /
) -> MutableMapping[str, Any]:
    """Add an event of structlog to the log of the running job. The event is not changed.

    This function is a structlog processor. Place it before the renderer, which is the last
    processor. With `structlog.stdlib.LoggerFactory`, use a `JobLogHandler` instead, because events
    then reach the handlers of `logging`.
    """
    log = _find_running_job_log()
    level = _LEVEL_BY_METHOD.get(method_name) or _LEVEL_NUMBERS.get(
        method_name.upper(), logging.INFO
    )
    if log is not None and level >= log.level:
        log.append(_format_event(logging.getLevelName(level), event_dict))
    return event_dict


def _find_running_job_log() -> AttemptLog | None:
    job = running_job.get()
    return job.log if job is not None and job.has_log else None


def _format_event(level: str, event_dict: MutableMapping[str, Any]) -> str:
    """Return a structlog event as text: one line, and the traceback if the event has an error."""
    values = dict(event_dict)
    event = to_text_or_placeholder(values.pop("event", ""), is_quoted=False)
    line = f"{format_log_time()} {level} {event}"
    for key in ("timestamp", "level"):  # the line already has these values
        values.pop(key, None)
    trace = values.pop("exception", None)
    exc_info = values.pop("exc_info", None)
    for key, value in values.items():
        line += f" {key}={to_text_or_placeholder(value, is_quoted=True)}"
    if trace is None and exc_info:
        trace = _format_trace(exc_info)
    return f"{line}\n{to_text_or_placeholder(trace, is_quoted=False)}" if trace else line


def _format_trace(exc_info: Any) -> str:
    if isinstance(exc_info, BaseException):
        return "".join(traceback.format_exception(exc_info))
    if isinstance(exc_info, tuple):
        return "".join(traceback.format_exception(*exc_info))  # pyright: ignore[reportUnknownArgumentType]
    return traceback.format_exc()


def append_log_entry(metadata_text: str, attempt: int, text: str) -> str:
    """Add an entry to the log in a job's metadata, and return the new log as JSON text.

    A stored log that is not a list is replaced. The oldest entries are removed until all entries
    fit into `JOB_LOG_SIZE_MAX`."""
    entry = msgspec.json.encode({"attempt": attempt, "log": text})
    entries = [*decode_log_entries(metadata_text), entry]
    size = 2 + sum(len(one) + 1 for one in entries)
    first = 0
    while size > JOB_LOG_SIZE_MAX and first < len(entries) - 1:
        size -= len(entries[first]) + 1
        first += 1
    return f"[{b','.join(entries[first:]).decode()}]"


def decode_log_entries(metadata_text: str) -> list[bytes]:
    """Return the entries of the log in a job's metadata, each as JSON text. Empty if there is no
    log, or if it is not a list."""
    if LOG_METADATA_KEY not in metadata_text:
        return []
    try:
        members = msgspec.json.decode(metadata_text, type=dict[str, msgspec.Raw])
        log = msgspec.json.decode(members.get(LOG_METADATA_KEY, b"[]"), type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return []
    return [bytes(entry) for entry in log]
