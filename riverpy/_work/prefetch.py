"""Prefetch: claimed jobs of one queue that wait in this process for a slot.

After a short job, its slot is empty until the next claim is answered. A few claimed jobs fill this
gap. Only as many are kept as end in a few milliseconds, so there are none where jobs are slow. They
wait for a short time only. Then they are released for other clients.
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
"""Seconds. As many jobs are kept as ended in this time."""
SHARE_MAX = 0.25
"""The share of the slots. More jobs are not kept."""
WAIT_MAX = 0.05
"""Seconds from the answer of its claim for which a job is kept."""


class Prefetch:
    """The claimed jobs that have not started. Use it in one event loop only."""

    def __init__(self, slots: int, release: Callable[[list[Attempt]], None]) -> None:
        """Make it, empty.

        Args:
            slots: of the queue.
            release: called with the jobs that waited too long, or must not start any more.
        """
        self._max = int(slots * SHARE_MAX)
        self._release = release
        self._waiting: deque[tuple[float, Attempt]] = deque()
        """Each with the time until which it is kept; the oldest first."""
        self._timer: asyncio.TimerHandle | None = None
        self._ended = 0
        self._window_began = time.monotonic()
        self._wanted = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def count_end(self) -> None:
        """Count a job of the queue that ended."""
        self._ended += 1

    def extra_room(self) -> int:
        """Return how many more jobs to claim than there are free slots."""
        now = time.monotonic()
        elapsed = now - self._window_began
        if elapsed >= WINDOW:
            self._wanted = min(int(self._ended * WINDOW / elapsed), self._max)
            self._window_began, self._ended = now, 0
        return self._wanted - len(self._waiting)

    def keep(self, attempts: Iterable[Attempt]) -> None:
        """Keep claimed jobs, in the order in which they start."""
        until = time.monotonic() + WAIT_MAX
        self._waiting.extend((until, attempt) for attempt in attempts)
        self._arm()

    def take(self) -> Attempt | None:
        """Remove and return the next job, if one waits."""
        return self._waiting.popleft()[1] if self._waiting else None

    def clear(self) -> None:
        """Release all jobs."""
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
        """Release the jobs that waited too long. There is one timer for all jobs, which is set
        again if it fires too early."""
        self._timer = None
        now = time.monotonic()
        late: list[Attempt] = []
        while self._waiting and self._waiting[0][0] <= now:
            late.append(self._waiting.popleft()[1])
        self._arm()
        if late:
            # Other clients can take these jobs now. Keep none until more jobs have ended.
            self._window_began, self._ended, self._wanted = now, 0, 0
            self._release(late)
