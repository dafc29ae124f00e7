"""Writes log lines to stderr without blocking the process.

A line is written at once if this does not block. If the reader of the pipe or terminal is slow, the
line is buffered, and a thread writes it. If the buffer is full (`LOG_BUFFER_BYTES_MAX`), lines are
dropped, and their number is logged when the buffer is empty again. If the reader of the pipe or
terminal ends, all further lines are dropped, and `on_reader_ended` is called.
"""

from __future__ import annotations

import atexit
import errno
import os
import select
import socket
import stat
import threading
import weakref
from collections import deque
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, TextIO

from riverpy._log import get_logger
from riverpy._log_events import LOG_LINES_DROPPED

if TYPE_CHECKING:
    from collections.abc import Callable

LOG_BUFFER_BYTES_MAX = 4 * 2**20
"""The maximum size of the lines that one stream buffers, in bytes."""
LOG_FLUSH_TIMEOUT = 0.5
"""The maximum number of seconds for which the process waits at its end until the buffered lines of
a stream are written. Lines that are not written by then are lost."""
_STANDARD_DESCRIPTOR_MAX = 2
"""The highest descriptor of stdin, stdout and stderr. These three are used directly, not
duplicated, so that a program can redirect them."""
_READER_ENDED_ERRNOS = {errno.EPIPE, errno.ECONNRESET, errno.EIO}
"""The error numbers of a write to a pipe, socket or terminal whose reader has ended."""


class LogStream:
    """A stream for log lines. Any thread may call its methods. A finalizer may call them too, even
    while it interrupts a write.

    Args:
        stream: the text stream to write to. If it has no file descriptor, writes may block.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        own_descriptors = ExitStack()
        self._descriptor = _find_file_descriptor(stream)
        if self._descriptor > _STANDARD_DESCRIPTOR_MAX:
            # The stream may be closed while handlers still write. The system then gives its
            # descriptor to the next opened file or socket, and a log line would be written there.
            self._descriptor = os.dup(self._descriptor)
            own_descriptors.callback(os.close, self._descriptor)
        self._write_nonblocking = _make_nonblocking_write(self._descriptor, own_descriptors)
        # Do not close the descriptors at exit, because the last lines must still be written.
        weakref.finalize(self, own_descriptors.close).atexit = False
        self.on_reader_ended: Callable[[], None] | None = None
        """The function that is called once when the reader of the pipe, socket or terminal has
        ended. The call may come from any thread."""
        self._has_reader_ended = False
        self.reset_after_fork()
        _log_streams.add(self)

    def reset_after_fork(self) -> None:
        """Drop the buffered lines in a forked child process. The parent process writes them."""
        self._unwritten_lines: deque[bytes] = deque()
        """The lines that are not written yet. Only code that holds `_write_lock` removes lines."""
        self._unwritten_bytes = self._dropped_line_count = 0
        self._write_lock = threading.Lock()
        self._writer_thread: threading.Thread | None = None
        """The thread that writes the buffered lines. It holds `_write_lock`."""

    def write(self, text: str) -> None:
        """Write a text or add it to the buffer. If the buffer is full, drop the text."""
        if self._descriptor < 0:
            self._stream.write(text)
            return
        data = text.encode(self._stream.encoding or "utf-8", "backslashreplace")
        if self._has_reader_ended:
            return
        if self._unwritten_bytes + len(data) > LOG_BUFFER_BYTES_MAX:
            self._dropped_line_count += 1
            return
        self._unwritten_bytes += len(data)
        self._unwritten_lines.append(data)
        self._write_now_or_in_thread()

    def flush(self) -> None:
        """Do nothing, because the writer thread writes the buffered lines."""

    def wait_until_written(self, seconds: float) -> None:
        """Wait at most `seconds` until the buffered lines are written."""
        if (thread := self._writer_thread) is not None:
            thread.join(seconds)

    def _write_now_or_in_thread(self) -> None:
        """Write the unwritten lines, or start a thread that writes them. If `_write_lock` is
        locked, do nothing, because the holder of the lock writes the lines. The holder is another
        thread, or code of this thread that a finalizer has interrupted."""
        while self._unwritten_lines and self._write_lock.acquire(blocking=False):
            if self._write_lines(may_block=False):
                self._write_lock.release()
                continue
            self._writer_thread = threading.Thread(
                target=self._run_writer_thread, name="riverpy log", daemon=True
            )
            try:
                self._writer_thread.start()
            except RuntimeError:  # the system allows no more threads, so drop the lines
                self._writer_thread = None
                self._dropped_line_count += len(self._unwritten_lines)
                self._drop_unwritten_lines()
                self._write_lock.release()

    def _run_writer_thread(self) -> None:
        """Write the buffered lines, then log how many lines were dropped. This is the function of
        the writer thread."""
        while not self._write_lines(may_block=True):
            pass
        dropped, self._dropped_line_count = self._dropped_line_count, 0
        self._writer_thread = None
        self._write_lock.release()
        self._write_now_or_in_thread()
        if dropped:
            log = get_logger()
            log.warning(
                LOG_LINES_DROPPED,
                advice="read standard error faster, or raise --log-level",
                lines=dropped,
            )

    def _write_lines(self, *, may_block: bool) -> bool:
        """Write the lines in order. If `may_block` is True, wait for the reader when necessary.
        Return False if a line could not be written completely."""
        while self._unwritten_lines:
            data = self._unwritten_lines[0]
            try:
                length = (
                    os.write(self._descriptor, data) if may_block else self._write_nonblocking(data)
                )
            except BlockingIOError:
                length = 0
                if may_block:
                    # Another process has made the descriptor non-blocking, so wait here until a
                    # write is possible.
                    select.select([], [self._descriptor], [])
            except OSError as error:
                self._drop_lines_after_write_error(error)
                continue
            self._unwritten_bytes -= length
            if length < len(data):
                self._unwritten_lines[0] = data[length:]
                return False
            self._unwritten_lines.popleft()
        self._unwritten_bytes = 0  # other threads also change this number, so it may be inexact
        return True

    def _drop_lines_after_write_error(self, error: OSError) -> None:
        """Handle an error of a write. If the reader has ended, drop all lines, otherwise drop the
        line that failed."""
        if error.errno not in _READER_ENDED_ERRNOS:
            self._dropped_line_count += 1
            self._unwritten_bytes -= len(self._unwritten_lines.popleft())
            return
        self._has_reader_ended = True
        _redirect_to_devnull(self._stream)
        self._drop_unwritten_lines()
        if self.on_reader_ended:
            self.on_reader_ended()

    def _drop_unwritten_lines(self) -> None:
        self._unwritten_lines.clear()
        self._unwritten_bytes = 0


_log_streams: weakref.WeakSet[LogStream] = weakref.WeakSet()


def wait_until_logs_written() -> None:
    """Wait until the buffered lines of all streams are written, for each stream at most
    `LOG_FLUSH_TIMEOUT`. Call this before the process ends."""
    for stream in _log_streams:
        stream.wait_until_written(LOG_FLUSH_TIMEOUT)


def _reset_log_streams_after_fork() -> None:
    for stream in _log_streams:
        stream.reset_after_fork()


atexit.register(wait_until_logs_written)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_log_streams_after_fork)


def _find_file_descriptor(stream: TextIO) -> int:
    """Return the file descriptor of a stream, or -1 if it has none."""
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return -1


def reopen_nonblocking(descriptor: int) -> int:
    """Open the pipe or terminal of a descriptor again, and return a new, non-blocking descriptor.
    The original descriptor must stay blocking, because other processes share it.

    Raises:
        OSError: another user owns the terminal, the descriptor is a socket, or there is no /dev/fd.
    """
    if not hasattr(os, "O_NONBLOCK"):
        raise OSError("Windows has no non-blocking descriptors")
    return os.open(f"/dev/fd/{descriptor}", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY)


def _make_nonblocking_write(descriptor: int, own_descriptors: ExitStack) -> Callable[[bytes], int]:
    """Return a function that writes bytes to a descriptor without blocking, and returns the number
    of written bytes. A write to a file never blocks. For a socket, the function uses the flag
    MSG_DONTWAIT, otherwise a new non-blocking descriptor. If neither works, it writes nothing.
    `own_descriptors` closes the descriptors that this function opens."""
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return partial(os.write, descriptor)
        if stat.S_ISSOCK(mode):
            end = own_descriptors.enter_context(socket.socket(fileno=os.dup(descriptor)))
            return lambda data: end.send(data, socket.MSG_DONTWAIT)
        nonblocking = reopen_nonblocking(descriptor)
        own_descriptors.callback(os.close, nonblocking)
        return partial(os.write, nonblocking)
    except (OSError, AttributeError):
        return lambda _data: 0


def _redirect_to_devnull(stream: TextIO) -> None:
    """Redirect a stream to the null device, and also stdout if it is the same pipe or terminal."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    numbers = {stream.fileno()}
    with suppress(OSError):
        if os.path.sameopenfile(stream.fileno(), 1):
            numbers.add(1)
    for number in numbers:
        os.dup2(devnull, number)
    os.close(devnull)
