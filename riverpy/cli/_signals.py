"""How signals stop a worker process, whatever its event loop is doing.

The first SIGTERM or SIGINT stops softly, the second hard, the third leaves the process at once.
Python runs a signal handler when the main thread comes back to Python code, which a job that blocks
the event loop may never do. So a thread reads the byte that the interpreter writes at once for each
signal. It also ends the process when a stop takes longer than it may.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn, Self

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Generator
    from datetime import timedelta

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE = 1.0
"""Seconds, after the soft and the hard limit, until the process is ended by force."""
_END = 0


class StoppedBeforeStart(BaseException):
    """A signal came while there was nothing to stop yet."""


@contextmanager
def stopping_before_start() -> Generator[None]:
    """Let a signal raise StoppedBeforeStart, but for the time in which `StopSignals` takes it."""

    def handler(_number: int, _frame: types.FrameType | None) -> NoReturn:
        raise StoppedBeforeStart

    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


class StopPlan:
    """What a stop does and how long it may take.

    Args:
        soft: called in the event loop at the first signal.
        hard: called in the event loop at the second signal.
        soft_limit: after how long the hard stop begins by itself; None: never.
        hard_limit: how long the hard stop may take.
        last_resort: called in the signal thread when the limits and a second have passed; leaves
            the process.
    """

    def __init__(
        self,
        *,
        soft: Callable[[], object],
        hard: Callable[[], object],
        soft_limit: timedelta | None,
        hard_limit: timedelta,
        last_resort: Callable[[], NoReturn],
    ) -> None:
        self.soft, self.hard, self.last_resort = soft, hard, last_resort
        self._soft_limit = math.inf if soft_limit is None else soft_limit.total_seconds()
        self._hard_limit = hard_limit.total_seconds()

    def limit(self, signals: int) -> float:
        """Seconds until the last resort, counted from the signal with this number."""
        soft = self._soft_limit if signals == 1 else 0.0
        return soft + self._hard_limit + GRACE


class StopSignals:
    """Takes the signals of the process while entered, in the event loop of the main thread."""

    def __init__(self, plan: StopPlan) -> None:
        self._plan = plan
        self._signals = 0
        self._deadline = math.inf
        self._loop = asyncio.get_running_loop()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="riverpy signals", daemon=True)
        self._wakeup_before = -1
        self._handlers_before: dict[signal.Signals, object] = {}

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was asked for."""
        return self._signals > 0

    def follow(self, plan: StopPlan) -> None:
        """From now on do what this plan says. Called in the event loop."""
        self._plan = plan

    def request_stop(self) -> None:
        """Do as if SIGTERM had come. May be called from any thread."""
        self._send(signal.SIGTERM)

    def __enter__(self) -> Self:
        self._handlers_before = {
            number: signal.signal(number, self._handler) for number in STOP_SIGNALS
        }
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType] (as it was given)
        self._send(_END)
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _handler(self, number: int, _frame: types.FrameType | None) -> None:
        # The byte has told the thread already, unless other code has put its own descriptor there,
        # as asyncio does when a handler is added to the loop.
        ours = self._writer.fileno()
        current = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        if current != ours:
            signal.set_wakeup_fd(current)
            self._send(number)

    def _send(self, number: int) -> None:
        with suppress(OSError):  # full of signals, or closed: enough was said
            self._writer.send(bytes([number]))

    def _run(self) -> None:
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0:
                self._plan.last_resort()
            self._reader.settimeout(None if left == math.inf else left)
            try:
                number = self._reader.recv(1)[0]
            except TimeoutError:
                continue
            if number == _END:
                return
            if number in STOP_SIGNALS:
                self._stop(number)
            elif self._wakeup_before != -1:
                os.write(self._wakeup_before, bytes([number]))

    def _stop(self, number: int) -> None:
        self._signals += 1
        if self._signals > 2:
            os._exit(128 + number)
        limit = self._plan.limit(self._signals)
        self._deadline = min(self._deadline, time.monotonic() + limit)
        self._loop.call_soon_threadsafe(self._act, self._signals)

    def _act(self, signals: int) -> None:
        (self._plan.soft if signals == 1 else self._plan.hard)()
