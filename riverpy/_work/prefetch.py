"""PrefetchBuffer: claimed jobs of one queue that wait in this process for a slot.

When a job has ended, its slot is empty until the client receives the next claim. A job that already
waits in this process can start in this slot at once. The buffer keeps as many jobs as usually end
within `ENDED_JOBS_COUNTING_WINDOW` seconds. So a queue with slow jobs keeps no jobs. A kept job
that does not start within `PREFETCHED_JOB_WAIT_MAX` is released for other clients.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from riverpy._work.attempt import Attempt

ENDED_JOBS_COUNTING_WINDOW = 0.005
"""The time window, in seconds, that limits the buffer: it keeps as many jobs as usually end in this
time."""
PREFETCHED_JOBS_PER_SLOT_MAX = 0.25
"""The maximum number of kept jobs, as a fraction of the number of slots."""
PREFETCHED_JOB_WAIT_MAX = 0.05
"""The longest time that a claimed job waits for a slot, in seconds. Then it is released."""


class PrefetchBuffer:
    """The claimed jobs of one queue that wait for a slot. Use the object in one event loop."""

    def __init__(self, slot_count: int, release_attempts: Callable[[list[Attempt]], None]) -> None:
        """`slot_count` is the number of slots of the queue. `release_attempts` is called with kept
        jobs that will not start."""
        self.set_slot_count(slot_count)
        self._release_attempts = release_attempts
        self._waiting_attempts: deque[tuple[float, Attempt]] = deque()
        """The kept jobs, the oldest first, each with the monotonic time at which it is released."""
        self._release_timer: asyncio.TimerHandle | None = None
        self._ended_job_count = 0
        self._counting_window_start = time.monotonic()
        self._wanted_job_count = 0

    def __len__(self) -> int:
        return len(self._waiting_attempts)

    def set_slot_count(self, slot_count: int) -> None:
        """Set the number of slots of the queue."""
        self._prefetched_jobs_max = int(slot_count * PREFETCHED_JOBS_PER_SLOT_MAX)

    def count_ended_job(self) -> None:
        """Count an ended job of the queue."""
        self._ended_job_count += 1

    def count_extra_jobs_to_claim(self) -> int:
        """Return how many jobs to claim in addition to one job for each free slot."""
        now = time.monotonic()
        elapsed = now - self._counting_window_start
        if elapsed >= ENDED_JOBS_COUNTING_WINDOW:
            self._wanted_job_count = min(
                int(self._ended_job_count * ENDED_JOBS_COUNTING_WINDOW / elapsed),
                self._prefetched_jobs_max,
            )
            self._counting_window_start, self._ended_job_count = now, 0
        return self._wanted_job_count - len(self._waiting_attempts)

    def add_attempts(self, attempts: Iterable[Attempt]) -> None:
        """Keep claimed jobs, in the order in which they will start."""
        until = time.monotonic() + PREFETCHED_JOB_WAIT_MAX
        self._waiting_attempts.extend((until, attempt) for attempt in attempts)
        self._start_release_timer()

    def pop_next_attempt(self) -> Attempt | None:
        """Remove and return the next job, or return None if no job waits."""
        return self._waiting_attempts.popleft()[1] if self._waiting_attempts else None

    def release_all_attempts(self) -> None:
        """Release all kept jobs."""
        if self._release_timer is not None:
            self._release_timer.cancel()
            self._release_timer = None
        attempts = [attempt for _, attempt in self._waiting_attempts]
        self._waiting_attempts.clear()
        if attempts:
            self._release_attempts(attempts)

    def _start_release_timer(self) -> None:
        if self._waiting_attempts and self._release_timer is None:
            delay = self._waiting_attempts[0][0] - time.monotonic()
            self._release_timer = asyncio.get_running_loop().call_later(
                max(delay, 0.0), self._release_expired_attempts
            )

    def _release_expired_attempts(self) -> None:
        """Release the jobs that waited too long, and start the timer again for the other jobs."""
        self._release_timer = None
        now = time.monotonic()
        late: list[Attempt] = []
        while self._waiting_attempts and self._waiting_attempts[0][0] <= now:
            late.append(self._waiting_attempts.popleft()[1])
        self._start_release_timer()
        if late:
            # No slot became free in time, so keep no jobs until more jobs have ended.
            self._counting_window_start, self._ended_job_count, self._wanted_job_count = now, 0, 0
            self._release_attempts(late)
