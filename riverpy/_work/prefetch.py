"""Prefetch: the claimed jobs of one queue that wait in this process for a slot.

Between two short jobs a slot is empty for the way to the database and back. A small store of
claimed jobs fills that gap. It holds what ends in a few milliseconds, so nothing where jobs are
slow, and nothing for long: what another client could work meanwhile is given back.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from riverpy._work.attempt import Attempt

WINDOW = 0.005
"""Seconds: as many jobs are kept as ended in this time."""
SHARE_MAX = 0.25
"""Of the slots: more are not kept."""
WAIT_MAX = 0.05
"""Seconds that a job is kept, from its claim's answer."""


class Prefetch:
    """Jobs that are claimed and have not begun. Not for two event loops."""

    def __init__(self, slots: int, release: Callable[[list[Attempt]], None]) -> None:
        """Make it, empty.

        Args:
            slots: of the queue.
            release: called with what waited too long, or must not begin any more.
        """
        self._max = int(slots * SHARE_MAX)
        self._release = release
        self._waiting: deque[tuple[float, Attempt]] = deque()
        """With the time until which each is kept; the oldest first."""
        self._timer: asyncio.TimerHandle | None = None
        self._ended = 0
        self._window_began = time.monotonic()
        self._wanted = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def ended(self) -> None:
        """A job of the queue ended."""
        self._ended += 1

    def room(self) -> int:
        """How many more jobs to claim than there are free slots."""
        now = time.monotonic()
        elapsed = now - self._window_began
        if elapsed >= WINDOW:
            self._wanted = min(int(self._ended * WINDOW / elapsed), self._max)
            self._window_began, self._ended = now, 0
        return self._wanted - len(self._waiting)

    def keep(self, attempts: Iterable[Attempt]) -> None:
        """Keep claimed jobs, in the order of their turn."""
        until = time.monotonic() + WAIT_MAX
        self._waiting.extend((until, attempt) for attempt in attempts)
        self._arm()

    def take(self) -> Attempt | None:
        """The job whose turn it is, if one waits."""
        return self._waiting.popleft()[1] if self._waiting else None

    def clear(self) -> None:
        """Give all back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        attempts = [attempt for _, attempt in self._waiting]
        self._waiting.clear()
        if attempts:
            self._release(attempts)

    def _arm(self) -> None:
        if self._waiting and self._timer is None:
            delay = self._waiting[0][0] - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(delay, 0.0), self._expire)

    def _expire(self) -> None:
        """Give back what waited too long. A timer that finds nothing so old is set again: one for
        each job would cost more than it."""
        self._timer = None
        now = time.monotonic()
        late: list[Attempt] = []
        while self._waiting and self._waiting[0][0] <= now:
            late.append(self._waiting.popleft()[1])
        self._arm()
        if late:
            # What others are offered is not claimed ahead again before jobs ended anew.
            self._window_began, self._ended, self._wanted = now, 0, 0
            self._release(late)
