"""ClaimTimes: the times at which a producer claims again, although no notification arrives."""

from __future__ import annotations

import heapq
import time

RIVER_FOLLOW_UP_DELAYS = (0.005, 0.1)
"""The producer claims again this many seconds after a notification of a sender that may be River in
Go. River notifies once in 100 ms, so jobs may be committed after the first claim."""
FOLLOW_UP_MARGIN = 0.003
"""A sender may state for how long it inserts jobs without a notification. The producer claims again
this many seconds after that time, because the last commit takes time."""
DUE_JOB_CLAIM_DELAY = 0.002
"""Seconds that the producer waits after the due time of a job, because the server's clock may be
behind."""


class ClaimTimes:
    """The planned claims of one queue, in monotonic seconds."""

    def __init__(self) -> None:
        self.follow_ups: list[float] = []
        """The claims after a notification. At most two are planned."""
        self.due_jobs: list[float] = []
        """The claims of jobs that become due, as a heap."""

    def plan_follow_ups(self, notify_interval_ms: float | None) -> None:
        """Plan the claims after a notification. For `notify_interval_ms` its sender may insert more
        jobs without a notification; None: the sender may be River in Go."""
        if notify_interval_ms is None:
            delays = RIVER_FOLLOW_UP_DELAYS
        elif notify_interval_ms:
            delays = (notify_interval_ms / 1000 + FOLLOW_UP_MARGIN,)
        else:
            return
        # The last claim finds all jobs, and the first one is early enough for most of them.
        now = time.monotonic()
        times = [*self.follow_ups, *(now + delay for delay in delays)]
        self.follow_ups = sorted({min(times), max(times)})

    def plan_due_job(self, delay: float) -> None:
        """Plan a claim for a job that becomes due in `delay` seconds."""
        heapq.heappush(self.due_jobs, time.monotonic() + delay + DUE_JOB_CLAIM_DELAY)

    def choose_next(self, *others: float) -> float:
        """Return the time of the next claim, planned here or one of `others`."""
        return min([*others, *self.follow_ups, *self.due_jobs[:1]])

    def forget_past_times(self, now: float) -> None:
        """Remove the planned claims before `now`, because a claim starts now."""
        self.follow_ups = [at for at in self.follow_ups if at > now]
        while self.due_jobs and self.due_jobs[0] <= now:
            heapq.heappop(self.due_jobs)
