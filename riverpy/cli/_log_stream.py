"""Writes log lines to stderr without blocking the process.

A line is written at once if the write does not block. If it would, because the reader of a pipe or
terminal is slow, the line is buffered and a thread writes it. Lines that do not fit into `KEPT_MAX`
are dropped, and their number is logged later. If the reader ends, all further lines are dropped,
and `on_broken` is called.
"""

from __future__ import annotations

import atexit
import errno
import os
import select
import socket
import stat
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from riverpy._log import get_logger
from riverpy._log_events import LOG_LINES_DROPPED

if TYPE_CHECKING:
    from collections.abc import Callable

KEPT_MAX = 4 * 2**20
"""Maximum number of buffered bytes."""
DRAIN_TIMEOUT = 0.5
"""The longest time that the process waits at its end for buffered lines to be written, in
seconds."""
_BROKEN_ERRORS = {errno.EPIPE, errno.ECONNRESET, errno.EIO}
"""The errors of a pipe, socket or terminal whose reader has ended."""


class LogStream:
    """A stream for log lines. The methods can be called from any thread, and from a finalizer that
    runs while a line is written.

    Args:
        stream: the target. Writes to a target without a file descriptor may block.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._number = _descriptor(stream)
        self._write_at_once = None if self._number is None else _nonblocking_write(self._number)
        self.on_broken: Callable[[], None] | None = None
        """Called once, in any thread, when the reader has ended."""
        self._is_broken = False
        self.reset()
        _streams.append(self)

    def reset(self) -> None:
        """Drop the buffered lines in a forked child, because the parent writes them."""
        self._lock = threading.RLock()
        self._new: deque[bytes] = deque()
        """Lines that are not yet written or buffered."""
        self._is_taking = False
        self._kept: deque[bytes] = deque()
        self._size = self._dropped = 0
        self._thread: threading.Thread | None = None
        """The thread that writes the buffered lines. None: no line is buffered."""

    def write(self, text: str) -> None:
        """Write a text now or later, or drop it."""
        if self._number is None:
            self._stream.write(text)
            return
        data = text.encode(self._stream.encoding or "utf-8", "backslashreplace")
        with self._lock:
            self._new.append(data)
            if self._is_taking:  # by this thread, which is running a finalizer
                return
            self._is_taking = True
            try:
                is_broken = self._take()
            finally:
                self._is_taking = False
        if is_broken and self.on_broken:
            self.on_broken()

    def flush(self) -> None:
        """Do nothing. Buffered lines are written by the thread."""

    def drain(self, seconds: float) -> None:
        """Wait until the buffered lines are written, for at most `seconds`."""
        if (thread := self._thread) is not None:
            thread.join(seconds)

    def _take(self) -> bool:
        """Write or buffer the new lines. Return whether the reader has ended."""
        is_broken = False
        while self._new:
            data = self._new.popleft()
            if self._is_broken:
                continue
            try:
                if self._thread is None and self._write_at_once is not None:
                    data = data[self._write_at_once(data) :]
                if data:
                    self._keep(data)
            except OSError as error:
                is_broken = self._handle_error(error)
        return is_broken

    def _keep(self, data: bytes) -> None:
        if self._size + len(data) > KEPT_MAX:
            self._dropped += 1
            return
        self._kept.append(data)
        self._size += len(data)
        if self._thread is None:
            thread = threading.Thread(target=self._write_buffered, name="riverpy log", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads
                self._forget_kept()
                self._dropped += 1
            else:
                self._thread = thread

    def _write_buffered(self) -> None:
        """Write the buffered lines. This is the body of the thread, which ends when all are
        written."""
        assert self._number is not None  # noqa: S101 (nothing is buffered without it)
        while True:
            data = self._kept[0]
            try:
                while data:
                    data = data[_write(self._number, data) :]
            except OSError as error:
                with self._lock:
                    is_broken = self._handle_error(error)
                if is_broken:
                    if self.on_broken:
                        self.on_broken()
                    return
            with self._lock:
                length = len(self._kept.popleft())
                self._size -= length
                if not self._kept:
                    self._thread = None
                    dropped, self._dropped = self._dropped, 0
                    break
        if dropped:
            log = get_logger()
            log.warning(
                LOG_LINES_DROPPED,
                advice="read standard error faster, or raise --log-level",
                lines=dropped,
            )

    def _handle_error(self, error: OSError) -> bool:
        """Handle an error of a write. Return whether the reader has ended."""
        if error.errno not in _BROKEN_ERRORS:
            self._dropped += 1
            return False
        self._is_broken = True
        _silence(self._stream)
        self._forget_kept()
        return True

    def _forget_kept(self) -> None:
        self._kept.clear()
        self._size = 0
        self._thread = None


_streams: list[LogStream] = []


def drain_logs() -> None:
    """Wait until buffered lines are written, for at most `DRAIN_TIMEOUT`, before the process
    ends."""
    for stream in _streams:
        stream.drain(DRAIN_TIMEOUT)


def _reset_logs() -> None:
    for stream in _streams:
        stream.reset()


atexit.register(drain_logs)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_logs)


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _write(number: int, data: bytes) -> int:
    """Write all data to the descriptor. If it is non-blocking, wait until it accepts data."""
    try:
        return os.write(number, data)
    except BlockingIOError:
        select.select([], [number], [])
        return 0


def _nonblocking_write(number: int) -> Callable[[bytes], int] | None:
    """Return a function that writes without blocking; None if that is not possible.

    The descriptor is shared with other processes, so it must not be made non-blocking. A pipe or
    terminal is opened a second time, a socket has a flag for each write, and a file never blocks.
    """
    mode = os.fstat(number).st_mode
    try:
        if stat.S_ISREG(mode):
            return lambda data: os.write(number, data)
        if stat.S_ISSOCK(mode):
            end, flags = socket.socket(fileno=os.dup(number)), socket.MSG_DONTWAIT
            return lambda data: _count(end.send, data, flags)
        flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
        again = os.open(f"/dev/fd/{number}", flags)
    except (OSError, AttributeError):  # another user owns the terminal, or there is no /dev/fd
        return None
    return lambda data: _count(os.write, again, data)


def _count(write: Callable[..., int], *args: object) -> int:
    try:
        return write(*args)
    except BlockingIOError:
        return 0


def _silence(stream: TextIO) -> None:
    """Redirect stderr, and stdout if it is the same pipe, to the null device."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    numbers = {stream.fileno()}
    with suppress(OSError):
        if os.path.sameopenfile(stream.fileno(), 1):
            numbers.add(1)
    for number in numbers:
        os.dup2(devnull, number)
    os.close(devnull)
