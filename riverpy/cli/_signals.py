"""Stops a worker process on signals, even if its event loop is blocked.

The first SIGTERM, SIGINT, SIGQUIT or SIGHUP starts a soft stop, the second one starts a hard stop,
and the third one ends the process at once. A SIGHUP never starts the hard stop, because a terminal
that closes can send SIGHUP twice.

Python runs a signal handler only when the main thread executes Python code. A job that blocks the
event loop can prevent this. So the interpreter also writes a byte to a socket for each signal, and
a separate thread, the signal thread, reads these bytes. This thread ends the process when a stop
exceeds its time limit. C code that holds the GIL blocks this thread too. Then a timer of
faulthandler, which does not need the GIL, ends the process.

A forked child process is not a worker, so it gets back the signal handlers from before the worker
started.
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

from riverpy.cli._log_stream import reopen_nonblocking, wait_until_logs_written
from riverpy.cli._output import print_note_before_exit
from riverpy.cli._run import EXIT_UNCLEAN_STOP

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
"""The number of signals that the process handles: the first one starts the soft stop, the second
one the hard stop. The next signal ends the process at once."""
FORCED_EXIT_DELAY = 1.0
"""Seconds that a stop may take in addition to its timeouts. After that, `StopPlan.force_exit` is
called."""
FORCED_EXIT_TIMEOUT = 2.5
"""Seconds that `StopPlan.force_exit` may take. After that, the process ends at once."""
OUTPUT_FLUSH_TIMEOUT = 0.3
"""The maximum number of seconds for which the process waits at its end until buffered output is
written. Output that is not written by then is lost."""
_STDERR_FD = 2
_WAKE_THREAD_BYTE = 0
"""The byte that wakes the signal thread without a stop request, for example after a change of the
deadline. No signal has this number."""
_STOP_REQUEST_BYTE = 255
"""The byte that requests a stop. No signal has this number."""
_UNCOUNTED_STOP_REQUEST_BYTE = 254
"""The byte that requests a stop but does not count as a signal. No signal has this number."""
_HARD_STOP_REQUEST_BYTE = 253
"""The byte that requests a hard stop but does not count as a signal. No signal has this number."""
_STOP_REQUEST_BYTES = (_STOP_REQUEST_BYTE, _UNCOUNTED_STOP_REQUEST_BYTE)
_SIGHUP = getattr(signal, "SIGHUP", None)
_SELECTOR_TIMEOUT_MAX = 3600.0

_replaced_handlers: dict[signal.Signals, Any] = {}
"""The signal handlers that this module has replaced, by signal. They are restored later."""


class StoppedBeforeStartError(BaseException):
    """A stop signal arrived before the worker had started."""


def _raise_stopped_before_start(_number: int, _frame: types.FrameType | None) -> NoReturn:
    raise StoppedBeforeStartError


@contextmanager
def raise_on_stop_signals() -> Generator[None]:
    """Make stop signals raise StoppedBeforeStartError during the `with` block, until a
    `StopSignalHandler` handles them."""
    for number in filter(_should_stop_worker, STOP_SIGNALS):
        # `signal.signal` returns None if C code has installed the previous handler. Python cannot
        # restore that handler, so the default one is restored later.
        _replaced_handlers[number] = (
            signal.signal(number, _raise_stopped_before_start) or signal.SIG_DFL
        )
    try:
        yield
    finally:
        for number, before in list(_replaced_handlers.items()):
            if signal.getsignal(number) is _raise_stopped_before_start:
                signal.signal(number, before)
                del _replaced_handlers[number]


def _should_stop_worker(signal_number: int, *own_handlers: Callable[..., object]) -> bool:
    """Return whether this signal stops the worker.

    SIGHUP and SIGQUIT do not stop the worker if the code of the user handles them. SIGHUP also does
    not stop it if the process ignores SIGHUP, for example under `nohup`. SIGINT and SIGQUIT stop
    the worker even if the process ignores them, because a shell makes its background processes
    ignore them.
    """
    if signal_number in {signal.SIGTERM, signal.SIGINT}:
        return True
    handler = signal.getsignal(signal_number)
    if handler == signal.SIG_IGN:
        return signal_number != _SIGHUP
    return handler in (signal.SIG_DFL, None, _raise_stopped_before_start, *own_handlers)


def _can_start_hard_stop(signal_number: int) -> bool:
    """Return whether this signal starts the hard stop if a soft stop has already started."""
    return signal_number not in {*_STOP_REQUEST_BYTES, _SIGHUP}


class StopPlan(NamedTuple):
    """The functions that start the soft stop, start the hard stop and end the process, and the
    timeouts of both stops."""

    soft_stop: Callable[[], object]
    """Starts the soft stop. The event loop calls it after the first signal."""
    hard_stop: Callable[[], object]
    """Starts the hard stop. The event loop calls it after the second signal."""
    soft_stop_timeout: timedelta | None
    """The time from the first signal until the hard stop starts without a second signal. None: only
    a second signal or `request_hard_stop` starts the hard stop."""
    hard_stop_timeout: timedelta
    """The maximum duration of the hard stop."""
    force_exit: Callable[[], object]
    """Ends the process. A separate thread calls it if the process is still running
    `FORCED_EXIT_DELAY` after the timeout of the stop. This timeout is the soft plus the hard stop
    timeout after the first signal, and the hard stop timeout after the second signal. If the call
    takes longer than `FORCED_EXIT_TIMEOUT`, the process ends with the exit code
    `EXIT_UNCLEAN_STOP`."""

    def seconds_to_forced_exit(self, signal_count: int) -> float:
        """Return how many seconds after a signal `force_exit` is called. `signal_count` is the
        number of signals so far, including this one."""
        limit = self.hard_stop_timeout.total_seconds() + FORCED_EXIT_DELAY
        if signal_count > 1:
            return limit
        soft_stop = self.soft_stop_timeout
        return math.inf if soft_stop is None else soft_stop.total_seconds() + limit


class StopSignalHandler:
    """Handles the signals of the process, from the call of `start` until the process ends.

    Args:
        plan: the functions to call during a stop, and the timeouts.
        loop: the event loop in which the soft and the hard stop are started.
    """

    def __init__(self, plan: StopPlan, loop: asyncio.AbstractEventLoop) -> None:
        self._stop_plan = plan
        self._loop = loop
        # next() is atomic, so a signal handler cannot interrupt it.
        self._stop_request_counter = itertools.count(1)
        self._stop_step_counter = itertools.count(1)
        """Counts the steps of a stop: step 1 is the soft stop, step 2 the hard stop. Each handled
        stop signal is a step. A call of `request_soft_stop` is a step only if it starts the soft
        stop."""
        self._handler_calls = itertools.count(1)
        self._exit_deadline = math.inf
        self._exit_code: int | None = None
        """The exit code with which the signal thread ends the process at `_exit_deadline`. None:
        the thread calls `StopPlan.force_exit` instead."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous_wakeup_fd = -1
        self._is_closed = False

    def start(self) -> None:
        """Start to handle signals, and print a traceback if C code crashes. Call this in the main
        thread."""
        try:
            is_socket = stat.S_ISSOCK(os.fstat(_STDERR_FD).st_mode)
        except OSError:  # stderr is closed
            is_socket = False
        # A crash report must not block. A pipe or terminal is opened again as non-blocking. A
        # socket, such as that of systemd, is used as it is: its buffer can hold a crash report.
        faulthandler.enable(_STDERR_FD if is_socket else _open_nonblocking_stderr())
        for number in filter(_should_stop_worker, STOP_SIGNALS):
            signal.signal(number, self._handle_signal)
        self.install_wakeup_fd()
        threading.Thread(
            target=self._run_signal_thread, name="riverpy signals", daemon=True
        ).start()

    def install_wakeup_fd(self) -> None:
        """Make the interpreter send a byte to the signal thread for each signal. An event loop
        replaces the file descriptor for these bytes when it starts, so call this after each start
        of the event loop, in the main thread."""
        ours = self._writer.fileno()
        before = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        if before != ours:
            self._previous_wakeup_fd = before

    def set_stop_plan(self, plan: StopPlan) -> None:
        """Replace the stop plan. Call this in the event loop."""
        self._stop_plan = plan

    def request_soft_stop(self) -> None:
        """Start a soft stop if no stop has started yet. Any thread may call this."""
        self._send_byte_to_thread(_STOP_REQUEST_BYTE)

    def request_uncounted_soft_stop(self) -> None:
        """Start a soft stop if no stop has started yet. The request does not count as a signal: the
        first signal after it changes nothing, and the second one starts the hard stop. Any thread
        may call this."""
        self._send_byte_to_thread(_UNCOUNTED_STOP_REQUEST_BYTE)

    def request_hard_stop(self) -> None:
        """Start a hard stop if no hard stop has started yet. The request does not count as a
        signal. Any thread may call this."""
        self._send_byte_to_thread(_HARD_STOP_REQUEST_BYTE)

    def exit_within(self, exit_code: int, timeout: float) -> None:
        """End the process with this exit code if it is still running after `timeout` seconds. Call
        this in the main thread."""
        self._exit_code = exit_code
        self._set_exit_deadline(time.monotonic() + timeout)
        self._send_byte_to_thread(_WAKE_THREAD_BYTE)

    def close(self) -> None:
        """Restore the signal handlers, and end the signal thread. Only a process that continues
        after the worker needs this. Call it in the main thread, after the event loop is closed."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) == self._handle_signal:
                signal.signal(number, _replaced_handlers.pop(number, signal.SIG_DFL))
        signal.set_wakeup_fd(-1)
        self._is_closed = True
        self._send_byte_to_thread(_WAKE_THREAD_BYTE)

    def _handle_signal(self, signal_number: int, _frame: types.FrameType | None) -> None:
        # Usually the interpreter has already sent the byte to the thread. But other code may have
        # replaced our descriptor: asyncio does this when the user adds a signal handler to the
        # event loop. Then send the byte here.
        ours = self._writer.fileno()
        current = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        if current != ours:
            signal.set_wakeup_fd(current)
            self._send_byte_to_thread(signal_number)
        # Some C code, such as `re`, runs signal handlers but keeps the GIL, so the thread cannot
        # run. Then only this handler can count the signals and end the process.
        self._stop_or_forward_received_signals()
        if _can_start_hard_stop(signal_number) and next(self._handler_calls) > HANDLED_SIGNALS_MAX:
            os._exit(128 + signal_number)
        self._send_byte_to_thread(_WAKE_THREAD_BYTE)

    def _send_byte_to_thread(self, byte_value: int) -> None:
        """Send a byte to the signal thread. The byte wakes the thread, which then handles the
        byte."""
        with suppress(OSError):  # the buffer is full, so the thread wakes anyway
            self._writer.send(bytes([byte_value]))

    def _run_signal_thread(self) -> None:
        """Handle the received signals until `close` is called. When `_exit_deadline` has passed,
        force the exit of the process. This is the function of the signal thread."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._reader, selectors.EVENT_READ)
            while not self._is_closed:
                left = self._exit_deadline - time.monotonic()
                if left <= 0:
                    self._force_exit()
                else:
                    selector.select(min(left, _SELECTOR_TIMEOUT_MAX))
                    self._stop_or_forward_received_signals()
        self._reader.close()
        self._writer.close()

    def _stop_or_forward_received_signals(self) -> None:
        """Handle all received stop signals and stop requests, and forward other signals to the
        event loop. Both the signal thread and the signal handler call this."""
        while True:
            try:
                number = self._reader.recv(1)[0]
            except BlockingIOError:
                return
            if number in (*_STOP_REQUEST_BYTES, _HARD_STOP_REQUEST_BYTE) or (
                number in STOP_SIGNALS and _should_stop_worker(number, self._handle_signal)
            ):
                self._handle_stop_signal(number)
            elif number != _WAKE_THREAD_BYTE and self._previous_wakeup_fd != -1:
                with suppress(OSError):  # the buffer is full, so the event loop wakes anyway
                    os.write(self._previous_wakeup_fd, bytes([number]))

    def _handle_stop_signal(self, signal_number: int) -> None:
        if next(self._stop_request_counter) > 1 and not _can_start_hard_stop(signal_number):
            return
        if signal_number == _HARD_STOP_REQUEST_BYTE:
            number = 2  # start the hard stop, as the second signal does
        elif signal_number == _UNCOUNTED_STOP_REQUEST_BYTE:
            number = 1
        else:
            number = next(self._stop_step_counter)
        if number > HANDLED_SIGNALS_MAX:
            os._exit(128 + signal_number)
        if self._exit_code is not None:  # the process is already ending: keep its deadline
            return
        exit_at = time.monotonic() + self._stop_plan.seconds_to_forced_exit(number)
        self._set_exit_deadline(min(self._exit_deadline, exit_at))
        with suppress(RuntimeError):  # the event loop is closed: no step can run
            # The plan may change before the lambda runs, so only the lambda reads it.
            self._loop.call_soon_threadsafe(
                lambda: self._stop_plan.soft_stop() if number == 1 else self._stop_plan.hard_stop()
            )

    def _set_exit_deadline(self, deadline: float) -> None:
        self._exit_deadline = deadline
        left = max(deadline - time.monotonic(), 0.0) + FORCED_EXIT_TIMEOUT + FORCED_EXIT_DELAY
        if left < threading.TIMEOUT_MAX:
            faulthandler.dump_traceback_later(left, exit=True, file=_open_nonblocking_stderr())

    def _force_exit(self) -> None:
        if self._exit_code is not None:
            exit_process(self._exit_code, f"riverpy: ended although {_describe_running_threads()}")
        self._exit_code = EXIT_UNCLEAN_STOP
        self._exit_deadline = time.monotonic() + FORCED_EXIT_TIMEOUT
        with suppress(RuntimeError):  # the system allows no more threads
            threading.Thread(
                target=self._stop_plan.force_exit, name="riverpy forced end", daemon=True
            ).start()


def _describe_running_threads() -> str:
    """Return a text with the names of the threads that prevent the end of the process."""
    held = [one.name for one in threading.enumerate() if not one.daemon and one.is_alive()]
    names = ", ".join(name for name in held if name != threading.main_thread().name)
    return f"threads still run: {names}" if names else "something did not end"


def exit_process(exit_code: int, note: str) -> NoReturn:
    """Write the buffered output, print a note, and end the process at once. The output is written
    for at most `OUTPUT_FLUSH_TIMEOUT`, because its reader may be slow. Any thread may call this."""
    with suppress(RuntimeError):  # the system allows no more threads
        flush = threading.Thread(target=_flush_output, daemon=True)
        flush.start()
        flush.join(OUTPUT_FLUSH_TIMEOUT)
    print_note_before_exit(note)
    os._exit(exit_code)


def _flush_output() -> None:
    wait_until_logs_written()
    for stream in (sys.stdout, sys.stderr):
        # The user's code may set a stream to None.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


@cache
def _open_nonblocking_stderr() -> int:
    """Return a non-blocking descriptor of stderr or, if that fails, of the null device."""
    try:
        return reopen_nonblocking(_STDERR_FD)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


# -- forks


_signal_mask_before_fork = threading.local()
"""The signal mask that a forking thread had before the fork, in the attribute `mask`. Each thread
has its own value."""


def _block_signals_before_fork() -> None:
    """Block the stop signals before a fork. The parent unblocks them after the fork, and the child
    after it has restored the earlier signal handlers. Otherwise a signal to the child could count
    as a signal to this process."""
    if _replaced_handlers:
        _signal_mask_before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _unblock_signals_after_fork() -> None:
    mask: set[signal.Signals] | None = vars(_signal_mask_before_fork).pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _restore_handlers_in_child() -> None:
    if _replaced_handlers:
        signal.set_wakeup_fd(-1)
        for number, handler in _replaced_handlers.items():
            signal.signal(number, handler)
        _replaced_handlers.clear()
    _unblock_signals_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_block_signals_before_fork,
        after_in_parent=_unblock_signals_after_fork,
        after_in_child=_restore_handlers_in_child,
    )
