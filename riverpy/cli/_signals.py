"""Stop a worker process on signals, even if its event loop is blocked.

The first SIGTERM, SIGINT, SIGQUIT or SIGHUP starts a soft stop, the second a hard stop, and the
third ends the process at once. A SIGHUP never starts the hard stop, because a terminal that closes
can send SIGHUP twice.

Python runs a signal handler only when the main thread returns to Python code. A job that blocks the
event loop can prevent this. So a thread reads the byte that the interpreter writes for each signal.
The thread also ends the process when a stop exceeds its time limit. C code that holds the GIL
blocks this thread too. For that case a timer of faulthandler, which needs no GIL, ends the
process.

A forked child is not a worker, so the earlier signal handlers are restored in it.
"""

from __future__ import annotations

import faulthandler
import itertools
import math
import os
import selectors
import signal
import socket
import stat
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from riverpy.cli._log_stream import drain_logs, open_nonblocking
from riverpy.cli._output import print_last_note
from riverpy.cli._run import EXIT_ABANDONED

if TYPE_CHECKING:
    import asyncio
    import types
    from collections.abc import Callable, Generator
    from datetime import timedelta

STOP_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP")  # Windows lacks the last two
    if hasattr(signal, name)
)
HANDLED_SIGNALS_MAX = 2
"""The number of signals that a stop handles. The next one ends the process at once."""
FORCED_END_DELAY = 1.0
"""Seconds from the end of a stop's time limits to the call of `StopPlan.force_end`."""
FORCED_END_TIMEOUT = 2.5
"""The timeout of `StopPlan.force_end`, in seconds. When it expires, the process ends at once."""
FLUSH_TIMEOUT = 0.3
"""The timeout for writing buffered output at the end of the process, in seconds."""
_STDERR = 2
_WAKE_BYTE = 0
"""The byte that makes the thread check the deadline. No signal has this number."""
_STOP_REQUEST_BYTE = 255
"""The byte that requests a stop. No signal has this number."""
_SIGHUP = getattr(signal, "SIGHUP", None)
_SELECT_TIMEOUT_MAX = 3600.0

_handlers_before: dict[signal.Signals, Any] = {}
"""The signal handlers that this module has replaced."""


class StoppedBeforeStart(BaseException):
    """A signal to stop arrived before the worker has started."""


def _raise_stopped(_number: int, _frame: types.FrameType | None) -> NoReturn:
    raise StoppedBeforeStart


@contextmanager
def stopping_before_start() -> Generator[None]:
    """Make signals raise StoppedBeforeStart until `StopSignals` handles them."""
    for number in filter(_stops_worker, STOP_SIGNALS):
        # None means a handler of C code, which Python cannot restore.
        _handlers_before[number] = signal.signal(number, _raise_stopped) or signal.SIG_DFL
    try:
        yield
    finally:
        for number, before in list(_handlers_before.items()):
            if signal.getsignal(number) is _raise_stopped:
                signal.signal(number, before)
                del _handlers_before[number]


def _stops_worker(number: int, *ours: Callable[..., object]) -> bool:
    """Whether this signal stops the worker.

    SIGHUP and SIGQUIT do not stop the worker if the user's code handles them. SIGHUP does not stop
    it if the process ignores SIGHUP, as under `nohup`. A shell makes background processes ignore
    SIGINT and SIGQUIT, but these signals still stop the worker.
    """
    if number in {signal.SIGTERM, signal.SIGINT}:
        return True
    handler = signal.getsignal(number)
    if handler == signal.SIG_IGN:
        return number != _SIGHUP
    return handler in (signal.SIG_DFL, None, _raise_stopped, *ours)


def _can_start_hard_stop(number: int) -> bool:
    """Whether this signal starts the hard stop if the soft stop has started."""
    return number not in {_STOP_REQUEST_BYTE, _SIGHUP}


class StopPlan(NamedTuple):
    """The steps of a stop, and their time limits."""

    soft: Callable[[], object]
    """Called in the event loop at the first signal."""
    hard: Callable[[], object]
    """Called in the event loop at the second signal."""
    soft_limit: timedelta | None
    """The time until the hard stop starts by itself. None: it does not start by itself."""
    hard_limit: timedelta
    """The maximum time of the hard stop."""
    force_end: Callable[[], object]
    """Called in a separate thread `FORCED_END_DELAY` after the time limits. It must end the
    process. After `FORCED_END_TIMEOUT` the process ends anyway, with exit code `EXIT_ABANDONED`."""

    def limit(self, signals: int) -> float:
        """Return the seconds from a signal to `force_end`. `signals` counts the signals, including
        this one."""
        limit = self.hard_limit.total_seconds() + FORCED_END_DELAY
        if signals > 1:
            return limit
        return math.inf if self.soft_limit is None else self.soft_limit.total_seconds() + limit


class StopSignals:
    """Handles the signals of the process, from `start` to the end of the process.

    Args:
        plan: the steps of a stop.
        loop: the event loop that calls the steps.
    """

    def __init__(self, plan: StopPlan, loop: asyncio.AbstractEventLoop) -> None:
        self._plan = plan
        self._loop = loop
        # next() is atomic, so a signal handler cannot interrupt it.
        self._stop_requests = itertools.count(1)
        self._stop_steps = itertools.count(1)
        """Counts the signals and requests that start a soft or a hard stop."""
        self._handler_calls = itertools.count(1)
        self._deadline = math.inf
        self._exit_code: int | None = None
        """The exit code at the deadline. None: `force_end` runs at the deadline."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._wakeup_before = -1

    def start(self) -> None:
        """Handle signals from now on, and print a traceback if C code crashes. Called in the main
        thread."""
        try:
            is_socket = stat.S_ISSOCK(os.fstat(_STDERR).st_mode)
        except OSError:  # stderr is closed
            is_socket = False
        # Use a socket, such as systemd's, directly: its buffer has room for the report of a crash.
        faulthandler.enable(_STDERR if is_socket else _nonblocking_stderr())
        for number in filter(_stops_worker, STOP_SIGNALS):
            signal.signal(number, self._handler)
        self.install_wakeup_fd()
        threading.Thread(target=self._run_thread, name="riverpy signals", daemon=True).start()

    def install_wakeup_fd(self) -> None:
        """Make the interpreter send a byte to the thread for each signal. A starting event loop
        installs its own descriptor, so call this after each start, in the main thread."""
        ours = self._writer.fileno()
        before = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        if before != ours:
            self._wakeup_before = before

    def set_plan(self, plan: StopPlan) -> None:
        """Replace the plan. Called in the event loop."""
        self._plan = plan

    def request_stop(self) -> None:
        """Start a soft stop, unless a stop has started. Can be called in any thread."""
        self._send_byte(_STOP_REQUEST_BYTE)

    def finish(self, exit_code: int, limit: float) -> None:
        """End the process with this exit code in `limit` seconds, if it has not ended by then.
        Called in the main thread."""
        self._exit_code = exit_code
        self._set_deadline(time.monotonic() + limit)
        self._send_byte(_WAKE_BYTE)

    def _handler(self, number: int, _frame: types.FrameType | None) -> None:
        # Usually the interpreter has already sent the byte to the thread. It has not sent the byte
        # if other code has installed its own descriptor. asyncio does so when a signal handler is
        # added to the event loop.
        ours = self._writer.fileno()
        current = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        if current != ours:
            signal.set_wakeup_fd(current)
            self._send_byte(number)
        # Some C code, such as `re`, runs signal handlers but lets no other thread run. Then only
        # this handler can count the signals and end the process.
        self._handle_received_bytes()
        if _can_start_hard_stop(number) and next(self._handler_calls) > HANDLED_SIGNALS_MAX:
            os._exit(128 + number)
        self._send_byte(_WAKE_BYTE)

    def _send_byte(self, number: int) -> None:
        with suppress(OSError):  # the buffer is full, so the thread wakes anyway
            self._writer.send(bytes([number]))

    def _run_thread(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._reader, selectors.EVENT_READ)
            while True:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    self._force_end()
                else:
                    selector.select(min(left, _SELECT_TIMEOUT_MAX))
                    self._handle_received_bytes()

    def _handle_received_bytes(self) -> None:
        """Handle all received signals and requests. Called in the thread and in the handler."""
        while True:
            try:
                number = self._reader.recv(1)[0]
            except BlockingIOError:
                return
            if number == _STOP_REQUEST_BYTE or (
                number in STOP_SIGNALS and _stops_worker(number, self._handler)
            ):
                self._handle_stop_signal(number)
            elif number != _WAKE_BYTE and self._wakeup_before != -1:
                with suppress(OSError):  # the buffer is full, so the event loop wakes anyway
                    os.write(self._wakeup_before, bytes([number]))

    def _handle_stop_signal(self, signal_number: int) -> None:
        if next(self._stop_requests) > 1 and not _can_start_hard_stop(signal_number):
            return
        number = next(self._stop_steps)
        if number > HANDLED_SIGNALS_MAX:
            os._exit(128 + signal_number)
        if self._exit_code is not None:  # the process already ends: keep its deadline
            return
        self._set_deadline(min(self._deadline, time.monotonic() + self._plan.limit(number)))
        with suppress(RuntimeError):  # the event loop is closed: no step can run
            # The plan may change before the lambda runs, so only the lambda reads it.
            self._loop.call_soon_threadsafe(
                lambda: self._plan.soft() if number == 1 else self._plan.hard()
            )

    def _set_deadline(self, deadline: float) -> None:
        self._deadline = deadline
        left = max(deadline - time.monotonic(), 0.0) + FORCED_END_TIMEOUT + FORCED_END_DELAY
        if left < threading.TIMEOUT_MAX:
            faulthandler.dump_traceback_later(left, exit=True, file=_nonblocking_stderr())

    def _force_end(self) -> None:
        if self._exit_code is not None:
            exit_process(self._exit_code, f"riverpy: ended although {_running_threads()}")
        self._exit_code = EXIT_ABANDONED
        self._deadline = time.monotonic() + FORCED_END_TIMEOUT
        with suppress(RuntimeError):  # the system allows no more threads
            threading.Thread(
                target=self._plan.force_end, name="riverpy forced end", daemon=True
            ).start()


def _running_threads() -> str:
    """Return a text that names the threads for which the process waits at its end."""
    held = [one.name for one in threading.enumerate() if not one.daemon and one.is_alive()]
    names = ", ".join(name for name in held if name != threading.main_thread().name)
    return f"threads still run: {names}" if names else "something did not end"


def exit_process(exit_code: int, note: str) -> NoReturn:
    """Print a note and end the process at once. Can be called in any thread. Buffered output is
    written first, for at most `FLUSH_TIMEOUT`, because its reader may be slow."""
    with suppress(RuntimeError):  # the system allows no more threads
        flush = threading.Thread(target=_flush_output, daemon=True)
        flush.start()
        flush.join(FLUSH_TIMEOUT)
    print_last_note(note)
    os._exit(exit_code)


def _flush_output() -> None:
    drain_logs()
    for stream in (sys.stdout, sys.stderr):
        # The user's code may set a stream to None.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


@cache
def _nonblocking_stderr() -> int:
    """Return a non-blocking descriptor of stderr, or of the null device."""
    try:
        return open_nonblocking(_STDERR)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


# -- forks


_forking_thread = threading.local()
"""Its attribute `mask` has the signals that the forking thread had blocked before the fork."""


def _before_fork() -> None:
    """Block signals until the child has restored the earlier handlers. Otherwise a signal to the
    child could count as a signal to this process."""
    if _handlers_before:
        _forking_thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _after_fork() -> None:
    mask: set[signal.Signals] | None = vars(_forking_thread).pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    if _handlers_before:
        signal.set_wakeup_fd(-1)
        for number, handler in _handlers_before.items():
            signal.signal(number, handler)
        _handlers_before.clear()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork,
        after_in_child=_after_fork_in_child,
    )
