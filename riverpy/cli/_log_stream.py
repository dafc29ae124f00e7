"""LogStream: stderr for log lines, which nobody in the process waits for.

A line is written at once where that does not wait. Where it would, because the reader of a pipe or
terminal is slow or has stopped, it is kept and a thread writes it on; what does not fit into
`KEPT_MAX` is dropped, counted, and told of when the reader is back. When the reader has gone, the
log goes silent and a stop can be asked for.
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
"""Bytes of lines that wait for their reader, at most."""
END_LIMIT = 0.5
"""Seconds that the end of the process waits for that reader, at most."""
_GONE = {errno.EPIPE, errno.ECONNRESET, errno.EIO}
"""Of a pipe or socket without a reader; of a socket whose reader left something unread; of a
terminal that was hung up."""


class LogStream:
    """Where log lines are written. All but the constructor may be called from any thread, and from
    a finalizer that the garbage collector runs while a line is being written.

    Args:
        stream: of the process; one without a descriptor is simply written to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._number = _descriptor(stream)
        self._write_at_once = None if self._number is None else _unwaiting_write(self._number)
        self.on_broken: Callable[[], None] | None = None
        """Called once, from any thread, when the reader has gone."""
        self._is_broken = False
        self.reset()
        _streams.append(self)

    def reset(self) -> None:
        """Begin anew: in a forked child no thread writes on, and what waits is the parent's."""
        self._lock = threading.RLock()
        self._new: deque[bytes] = deque()
        """Lines of which nothing is written yet."""
        self._is_taking = False
        self._kept: deque[bytes] = deque()
        self._size = self._dropped = 0
        self._thread: threading.Thread | None = None
        """Writes on what is kept, while there is any."""

    def write(self, text: str) -> None:
        """Write, now or later, or drop it."""
        if self._number is None:
            self._stream.write(text)
            return
        data = text.encode(self._stream.encoding or "utf-8", "backslashreplace")
        with self._lock:
            self._new.append(data)
            if self._is_taking:  # by this very thread, which has come to a finalizer meanwhile
                return
            self._is_taking = True
            try:
                is_gone = self._take()
            finally:
                self._is_taking = False
        if is_gone and self.on_broken:
            self.on_broken()

    def flush(self) -> None:
        """Nothing: what waits, waits for its reader."""

    def drain(self, seconds: float) -> None:
        """Wait until nothing waits any more, for so many seconds at most."""
        if (thread := self._thread) is not None:
            thread.join(seconds)

    def _take(self) -> bool:
        """Write or keep what is new. Returns whether the reader is found to have gone."""
        is_gone = False
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
                is_gone = self._fails(error)
        return is_gone

    def _keep(self, data: bytes) -> None:
        if self._size + len(data) > KEPT_MAX:
            self._dropped += 1
            return
        self._kept.append(data)
        self._size += len(data)
        if self._thread is None:
            thread = threading.Thread(target=self._write_on, name="riverpy log", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads
                self._forget_kept()
                self._dropped += 1
            else:
                self._thread = thread

    def _write_on(self) -> None:
        """The thread, which lives while something waits."""
        assert self._number is not None  # noqa: S101 (nothing is kept without it)
        while True:
            data = self._kept[0]
            try:
                while data:
                    data = data[_write(self._number, data) :]
            except OSError as error:
                with self._lock:
                    is_gone = self._fails(error)
                if is_gone:
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

    def _fails(self, error: OSError) -> bool:
        """A line could not be written. Returns whether none can be any more."""
        if error.errno not in _GONE:
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
    """Have what waits written, as far as `END_LIMIT` reaches: the process ends."""
    for stream in _streams:
        stream.drain(END_LIMIT)


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
    """As `os.write`, waiting also where somebody has made the descriptor one that does not."""
    try:
        return os.write(number, data)
    except BlockingIOError:
        select.select([], [number], [])
        return 0


def _unwaiting_write(number: int) -> Callable[[bytes], int] | None:
    """A way to write what can be written without waiting. Returns None where there is none.

    The descriptor itself stays as it is, for it is shared with other processes: a pipe or terminal
    is opened once more, a socket has a flag for it, and a file never makes anybody wait.
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
    except (OSError, AttributeError):  # of another user; of another kind of system
        return None
    return lambda data: _count(os.write, again, data)


def _count(write: Callable[..., int], *args: object) -> int:
    try:
        return write(*args)
    except BlockingIOError:
        return 0


def _silence(stream: TextIO) -> None:
    """Let stderr, and stdout if it is the same pipe, lead nowhere: nobody's write fails."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    numbers = {stream.fileno()}
    with suppress(OSError):
        if os.path.sameopenfile(stream.fileno(), 1):
            numbers.add(1)
    for number in numbers:
        os.dup2(devnull, number)
    os.close(devnull)
