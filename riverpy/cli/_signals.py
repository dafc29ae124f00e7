"""How signals stop a worker process, whatever its event loop is doing.

The first SIGTERM, SIGINT, SIGQUIT or SIGHUP stops softly, the second hard, the third leaves the
process at once. But a SIGHUP hurries no stop that has begun: a terminal that closes may send two of
them, and takes the reader of the log away as well.
Python runs a signal handler when the main thread comes back to Python code, which a job that blocks
the event loop may never do. So a thread reads the byte that the interpreter writes at once for each
signal. It also ends the process when a stop takes longer than it may. C code that holds the GIL
stops that thread too: the bound then is a timer of faulthandler's, which needs no GIL.

A forked child is no worker: it gets the handlers back that were there before.
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
from typing import TYPE_CHECKING, Any, NoReturn

from riverpy.cli._log_stream import drain_logs
from riverpy.cli._output import print_last_note

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
SIGNALS_MAX = 2
"""Signals that a stop takes; the next one leaves the process at once."""
GRACE = 1.0
"""Seconds, after the soft and the hard limit, until the last resort begins."""
LAST_RESORT = 2.5
"""Seconds that the last resort may take; then the process is left without it."""
FLUSH = 0.3
"""Seconds."""
_STDERR = 2
_WAKE = 0
"""No signal: makes the thread look at the deadline."""
_ASK = 255
"""No signal: a stop is requested."""
_LONGEST_WAIT = 3600.0

_handlers_before: dict[signal.Signals, Any] = {}
"""What this module's handlers stand in for, while they do."""


class StoppedBeforeStart(BaseException):
    """A signal came while there was nothing to stop yet."""


def _raise_stopped(_number: int, _frame: types.FrameType | None) -> NoReturn:
    raise StoppedBeforeStart


@contextmanager
def stopping_before_start() -> Generator[None]:
    """Let a signal raise StoppedBeforeStart, until `StopSignals` takes it."""
    for number in filter(_is_free, STOP_SIGNALS):
        # None: a handler that is not Python's, which Python cannot set again.
        _handlers_before[number] = signal.signal(number, _raise_stopped) or signal.SIG_DFL
    try:
        yield
    finally:
        for number, before in list(_handlers_before.items()):
            if signal.getsignal(number) is _raise_stopped:
                signal.signal(number, before)
                del _handlers_before[number]


def _is_free(number: int, *ours: Callable[..., object]) -> bool:
    """Whether a stop may take the signal. `nohup` has SIGHUP ignored, and code of the user's may
    have a handler of its own for SIGHUP and SIGQUIT. A shell has SIGINT and SIGQUIT ignored in what
    it runs in the background: these still stop."""
    if number in {signal.SIGTERM, signal.SIGINT}:
        return True
    handler = signal.getsignal(number)
    is_ignored_quit = handler == signal.SIG_IGN and number != getattr(signal, "SIGHUP", None)
    return handler in (signal.SIG_DFL, None, _raise_stopped, *ours) or is_ignored_quit


def _hurries(number: int) -> bool:
    """Whether the signal makes a stop that has begun a hard one."""
    return number not in {_ASK, getattr(signal, "SIGHUP", None)}


class StopPlan:
    """What a stop does and how long it may take.

    Args:
        soft: called in the event loop at the first signal.
        hard: called in the event loop at the second signal.
        soft_limit: after how long the hard stop begins by itself; None: never.
        hard_limit: how long the hard stop may take.
        last_resort: called in a thread of its own when the limits and `GRACE` have passed; has
            `LAST_RESORT` to leave the process.
        exit_code: for a last resort that does not.
    """

    def __init__(
        self,
        *,
        soft: Callable[[], object],
        hard: Callable[[], object],
        soft_limit: timedelta | None,
        hard_limit: timedelta,
        last_resort: Callable[[], object],
        exit_code: int,
    ) -> None:
        self.soft, self.hard, self.last_resort = soft, hard, last_resort
        self.exit_code = exit_code
        self._soft_limit = math.inf if soft_limit is None else soft_limit.total_seconds()
        self._hard_limit = hard_limit.total_seconds()

    def limit(self, signals: int) -> float:
        """Seconds until the last resort, counted from the signal with this number."""
        soft = self._soft_limit if signals == 1 else 0.0
        return soft + self._hard_limit + GRACE


class StopSignals:
    """Takes the signals of the process, from `start` to the end of the process.

    Args:
        plan: what a stop does.
        loop: where it does it.
    """

    def __init__(self, plan: StopPlan, loop: asyncio.AbstractEventLoop) -> None:
        self._plan = plan
        self._loop = loop
        # next() is atomic: a handler may come in between.
        self._requests = itertools.count(1)
        self._numbers = itertools.count(1)
        """Of the requests that count: see `_hurries`."""
        self._handled = itertools.count(1)
        self._deadline = math.inf
        self._exit_code: int | None = None
        """The code to leave with at the deadline; None: the last resort comes first."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._wakeup_before = -1

    def start(self) -> None:
        """Take the signals. Called in the main thread. A crash in C code, which nothing can take,
        tells where it was."""
        faulthandler.enable(_STDERR if _is_socket(_STDERR) else _unwaiting_stderr())
        for number in filter(_is_free, STOP_SIGNALS):
            signal.signal(number, self._handler)
        self.take_wake_ups()
        threading.Thread(target=self._run, name="riverpy signals", daemon=True).start()

    def take_wake_ups(self) -> None:
        """Have the interpreter tell the thread of each signal. A loop that begins to run takes that
        for itself. Called in the main thread."""
        ours = self._writer.fileno()
        before = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        if before != ours:
            self._wakeup_before = before

    def follow(self, plan: StopPlan) -> None:
        """From now on do what this plan says. Called in the event loop."""
        self._plan = plan

    def request_stop(self) -> None:
        """Stop softly, unless a stop has begun. May be called from any thread."""
        self._send(_ASK)

    def finish(self, exit_code: int, limit: float) -> None:
        """The run has ended: if the process has not, it is left with this code in `limit` seconds.

        Called in the main thread.
        """
        self._exit_code = exit_code
        self._set_deadline(time.monotonic() + limit)
        self._send(_WAKE)

    def _handler(self, number: int, _frame: types.FrameType | None) -> None:
        # The byte has told the thread already, unless other code has put its own descriptor there,
        # as asyncio does when a handler is added to the loop.
        ours = self._writer.fileno()
        current = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        if current != ours:
            signal.set_wakeup_fd(current)
            self._send(number)
        # C code as that of `re` lets handlers run, but no other thread: what that thread had read
        # when it began is not acted on, so handlers are counted too.
        self._take_all()
        if _hurries(number) and next(self._handled) > SIGNALS_MAX:
            os._exit(128 + number)
        self._send(_WAKE)

    def _send(self, number: int) -> None:
        with suppress(OSError):  # full of signals: enough was said
            self._writer.send(bytes([number]))

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._reader, selectors.EVENT_READ)
            while True:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    self._force()
                else:
                    selector.select(min(left, _LONGEST_WAIT))
                    self._take_all()

    def _take_all(self) -> None:
        """Act on each signal that has come: in the thread or in the handler, whichever is first."""
        while True:
            try:
                number = self._reader.recv(1)[0]
            except BlockingIOError:
                return
            if number == _ASK or (number in STOP_SIGNALS and _is_free(number, self._handler)):
                self._stop(number)
            elif number != _WAKE and self._wakeup_before != -1:
                with suppress(OSError):  # full: then it wakes up anyway
                    os.write(self._wakeup_before, bytes([number]))

    def _stop(self, signal_number: int) -> None:
        if next(self._requests) > 1 and not _hurries(signal_number):
            return
        number = next(self._numbers)
        if number > SIGNALS_MAX:
            os._exit(128 + signal_number)
        if self._exit_code is not None:  # it is being left
            return
        self._set_deadline(min(self._deadline, time.monotonic() + self._plan.limit(number)))
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._act, number)

    def _act(self, number: int) -> None:
        (self._plan.soft if number == 1 else self._plan.hard)()

    def _set_deadline(self, deadline: float) -> None:
        self._deadline = deadline
        left = max(deadline - time.monotonic(), 0.0) + LAST_RESORT + GRACE
        if left < threading.TIMEOUT_MAX:
            faulthandler.dump_traceback_later(left, exit=True, file=_unwaiting_stderr())

    def _force(self) -> None:
        if self._exit_code is not None:
            leave(self._exit_code, f"riverpy: left while {_what_holds()}")
        self._exit_code = self._plan.exit_code
        self._deadline = time.monotonic() + LAST_RESORT
        with suppress(RuntimeError):  # no more threads
            threading.Thread(
                target=self._plan.last_resort, name="riverpy last resort", daemon=True
            ).start()


def _what_holds() -> str:
    """What a process that does not end waits for, as far as can be seen."""
    held = [one.name for one in threading.enumerate() if not one.daemon and one.is_alive()]
    names = ", ".join(name for name in held if name != threading.main_thread().name)
    return f"threads went on: {names}" if names else "something did not end"


def leave(exit_code: int, note: str) -> NoReturn:
    """End the process, whatever runs in it or waits for whom. Called in any thread.

    Whoever reads stdout or stderr may be slow or stuck: it has `FLUSH` for what is buffered.
    """
    with suppress(RuntimeError):  # no more threads
        flush = threading.Thread(target=_flush, daemon=True)
        flush.start()
        flush.join(FLUSH)
    print_last_note(note)
    os._exit(exit_code)


def _flush() -> None:
    drain_logs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # None: user code took it away
            stream.flush()


def _is_socket(number: int) -> bool:
    """Whether it is one, as that of systemd, which cannot be opened once more. What a crash says
    finds room there."""
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:  # closed
        return False


def _unwaiting_stderr() -> int:
    """A descriptor for stderr to which nothing waits to be written, or one that leads nowhere."""
    global _unwaiting
    if _unwaiting is None:
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK
            _unwaiting = os.open("/dev/fd/2", flags)
        except (OSError, AttributeError):
            _unwaiting = os.open(os.devnull, os.O_WRONLY)
    return _unwaiting


_unwaiting: int | None = None


# -- forks


class _Mask(threading.local):
    """The signals that a thread that forks blocked before."""

    before: set[Any] | None = None


_mask = _Mask()


def _before_fork() -> None:
    """Until the child has its own handlers, a signal to it must not count as one to us."""
    if _handlers_before:
        _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _after_fork() -> None:
    if _mask.before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)
        _mask.before = None


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
