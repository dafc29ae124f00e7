"""ChildOutputLogger: logs the output (stdout and stderr) of the jobs of one child process, and of
the programs that these jobs start.

Each line is one log event. A line that is longer than `LINE_SIZE_MAX` is shortened. If lines arrive
faster than the rate limit allows, further lines are dropped and counted. So a job never waits for
the log.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import IO

from riverpy._log import get_logger
from riverpy._log_events import JOB_OUTPUT_DROPPED, JOB_WROTE_OUTPUT

LINE_SIZE_MAX = 4096
"""The maximum number of bytes of a logged line. The rest of a longer line is dropped."""
LINES_PER_SECOND_MAX = 100
"""The maximum number of lines of one process that are logged per second, on average."""
LINE_BURST_MAX = 1000
"""The maximum number of lines of one process that are logged in a burst, after a time with little
output."""
DROPPED_LINES_LOG_INTERVAL = 10.0
"""Seconds between two log events about dropped lines of the same job."""
_PIPE_READ_SIZE = 65536
_CONTROL_CHARACTER_ESCAPES = {
    number: f"\\x{number:02x}"
    for number in (*range(0x20), *range(0x7F, 0xA0))
    if number != ord("\t")
}
"""Escapes control characters, so that a logged line cannot control the reader's terminal."""


class ChildOutputLogger:
    """Logs the output of one child process line by line, in a thread of its own."""

    def __init__(self, pipe: IO[bytes], end_of_job: bytes) -> None:
        """`pipe` carries the output. `end_of_job` is the random text that the child writes after
        the output of each job."""
        self._pipe, self._end_of_job = pipe, end_of_job
        self._log = get_logger()
        self._next_jobs: deque[tuple[int, str]] = deque()
        """The jobs whose output is read next, each with its id and kind: first ended jobs whose
        output may still be in the pipe, then the running job."""
        self._last_ended_job: tuple[int | None, str | None] = (None, None)
        """The id and the kind of the last job that ended. Output that follows is logged with them,
        until the next job is added."""
        self._partial_line = bytearray()
        """The beginning of a line that is not complete."""
        self._is_line_cut = False
        self._line_allowance = float(LINE_BURST_MAX)
        self._allowance_updated_at = time.monotonic()
        self._dropped_line_count = 0
        self._next_dropped_lines_log_at = 0.0
        self._lock = threading.Lock()
        self._reader_thread = threading.Thread(
            target=self._read_pipe, name="riverpy job output", daemon=True
        )
        self._reader_thread.start()

    def add_next_job(self, job_id: int, kind: str) -> None:
        """Add a job that starts next. Its output follows the output of the job before it, and is
        logged with its id and kind."""
        self._next_jobs.append((job_id, kind))

    def log_startup_output(self, data: bytes) -> None:
        """Log `data`, which the child wrote to its stdout before its first message. For example,
        code that Python runs at its start may print text. At that time, stdout is still the pipe
        for messages."""
        if data:
            with self._lock:
                self._add_output(data if data.endswith(b"\n") else data + b"\n")

    def wait_until_all_logged(self, timeout: float) -> None:
        """Wait at most `timeout` seconds until all output of an ended process is logged."""
        self._reader_thread.join(timeout)

    def _read_pipe(self) -> None:
        while True:
            try:
                data = os.read(self._pipe.fileno(), _PIPE_READ_SIZE)
            except OSError:
                data = b""
            if not data:
                break
            with self._lock:
                self._add_output(data)
        with self._lock:
            if self._partial_line:
                self._end_line()
            self._log_dropped_lines()
        self._pipe.close()

    def _add_output(self, data: bytes) -> None:
        first, *others = data.split(b"\n")
        self._add_line_part(first)
        for part in others:
            self._end_line()
            self._add_line_part(part)

    def _add_line_part(self, part: bytes) -> None:
        """Add a part to the current line. Of a long line, only the beginning and the end are kept.
        The end is needed because the text `_end_of_job`, which the child writes after each job, may
        be at the end of a line."""
        self._partial_line += part
        excess = len(self._partial_line) - LINE_SIZE_MAX - len(self._end_of_job)
        if excess > 0:
            del self._partial_line[LINE_SIZE_MAX : LINE_SIZE_MAX + excess]
            self._is_line_cut = True

    def _end_line(self) -> None:
        line = bytes(self._partial_line)
        self._partial_line.clear()
        is_end_of_job = line.endswith(self._end_of_job)
        if is_end_of_job:
            line = line.removesuffix(self._end_of_job)
        if line or not is_end_of_job:
            self._log_line(line)
        self._is_line_cut = False
        if is_end_of_job:
            self._log_dropped_lines()
            if self._next_jobs:
                self._last_ended_job = self._next_jobs.popleft()

    def _describe_current_job(self) -> dict[str, int | str | None]:
        job_id, kind = self._next_jobs[0] if self._next_jobs else self._last_ended_job
        return {"kind": kind, "job_id": job_id}

    def _log_line(self, line: bytes) -> None:
        now = time.monotonic()
        allowed = self._line_allowance + (now - self._allowance_updated_at) * LINES_PER_SECOND_MAX
        self._line_allowance, self._allowance_updated_at = min(allowed, LINE_BURST_MAX), now
        if self._line_allowance < 1:
            self._dropped_line_count += 1
            return
        self._line_allowance -= 1
        if now > self._next_dropped_lines_log_at:
            self._log_dropped_lines()
        text = line[:LINE_SIZE_MAX].decode("utf-8", "backslashreplace").rstrip("\r")
        text = text.translate(_CONTROL_CHARACTER_ESCAPES)
        is_cut = {"is_cut": True} if self._is_line_cut or len(line) > LINE_SIZE_MAX else {}
        self._log.info(JOB_WROTE_OUTPUT, **self._describe_current_job(), line=text, **is_cut)

    def _log_dropped_lines(self) -> None:
        if self._dropped_line_count:
            count, self._dropped_line_count = self._dropped_line_count, 0
            self._next_dropped_lines_log_at = time.monotonic() + DROPPED_LINES_LOG_INTERVAL
            self._log.warning(JOB_OUTPUT_DROPPED, **self._describe_current_job(), lines=count)
