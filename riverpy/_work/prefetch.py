"""Prefetch: claimed jobs of one queue that wait in this process for a slot.

The slot of a job that ended is empty until the client receives the next claim. A job that waits in
this process can start in this slot at once. The number of jobs to keep is the number of jobs that
end within `ENDED_JOBS_WINDOW`, so a queue with slow jobs keeps no jobs. A kept job that does not
start within `JOB_WAIT_MAX` is released for other clients.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from riverpy._work.attempt import Attempt

ENDED_JOBS_WINDOW = 0.005
"""Seconds. The number of jobs to keep is the number of jobs that ended in this time."""
KEPT_JOBS_SHARE_MAX = 0.25
"""The maximum number of kept jobs, as a fraction of the number of slots."""
JOB_WAIT_MAX = 0.05
"""The maximum time that a claimed job is kept, in seconds."""


class Prefetch:
    """The claimed jobs of one queue that have not started. Use the object in one event loop."""

    def __init__(self, slots: int, release: Callable[[list[Attempt]], None]) -> None:
        """`slots` is the number of slots of the queue. `release` is called with kept jobs that will
        not start."""
        self._kept_jobs_max = int(slots * KEPT_JOBS_SHARE_MAX)
        self._release = release
        self._waiting: deque[tuple[float, Attempt]] = deque()
        """The kept jobs, the oldest first, each with the monotonic time at which it is released."""
        self._timer: asyncio.TimerHandle | None = None
        self._ended_count = 0
        self._window_start = time.monotonic()
        self._wanted_count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def count_end(self) -> None:
        """Count an ended job of the queue."""
        self._ended_count += 1

    def extra_claim_count(self) -> int:
        """Return how many jobs to claim in addition to one job for each free slot."""
        now = time.monotonic()
        elapsed = now - self._window_start
        if elapsed >= ENDED_JOBS_WINDOW:
            self._wanted_count = min(
                int(self._ended_count * ENDED_JOBS_WINDOW / elapsed), self._kept_jobs_max
            )
            self._window_start, self._ended_count = now, 0
        return self._wanted_count - len(self._waiting)

    def keep(self, attempts: Iterable[Attempt]) -> None:
        """Keep claimed jobs, in the order in which they will start."""
        until = time.monotonic() + JOB_WAIT_MAX
        self._waiting.extend((until, attempt) for attempt in attempts)
        self._start_timer()

    def pop_next_job(self) -> Attempt | None:
        """Remove and return the next job; None: no job waits."""
        return self._waiting.popleft()[1] if self._waiting else None

    def release_all(self) -> None:
        """Release all kept jobs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        attempts = [attempt for _, attempt in self._waiting]
        self._waiting.clear()
        if attempts:
            self._release(attempts)

    def _start_timer(self) -> None:
        if self._waiting and self._timer is None:
            delay = self._waiting[0][0] - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(
                max(delay, 0.0), self._release_expired
            )

    def _release_expired(self) -> None:
        """Release the jobs that waited too long, and start the timer again for the other jobs."""
        self._timer = None
        now = time.monotonic()
        late: list[Attempt] = []
        while self._waiting and self._waiting[0][0] <= now:
            late.append(self._waiting.popleft()[1])
        self._start_timer()
        if late:
            # No slot became free in time, so keep no jobs until more jobs have ended.
            self._window_start, self._ended_count, self._wanted_count = now, 0, 0
            self._release(late)
