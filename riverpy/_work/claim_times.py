"""PlannedClaimTimes: plans further claims of a queue, before which no notification arrives."""

from __future__ import annotations

import heapq
import time

RIVER_FOLLOW_UP_CLAIM_DELAYS = (0.005, 0.1)
"""Seconds after a notification at which the queue is claimed again, if the sender may be River in
Go. River notifies once in 100 ms, so jobs may be committed after the first claim."""
FOLLOW_UP_CLAIM_MARGIN = 0.003
"""Seconds that are added to the time for which a sender inserts jobs without a notification. Then
the queue is claimed again. The last commit may need this time."""
DUE_JOB_CLAIM_DELAY = 0.002
"""Seconds that the producer waits after the due time of a job, because the server's clock may be
behind."""


class PlannedClaimTimes:
    """The planned claims of one queue, as times in monotonic seconds."""

    def __init__(self) -> None:
        self.follow_ups: list[float] = []
        """The times of the claims after a notification, at most two."""
        self.due_jobs: list[float] = []
        """The times of claims for jobs that become due, as a heap."""

    def plan_follow_up_claims(self, notify_interval_ms: float | None) -> None:
        """Plan the claims after a notification. Its sender may insert more jobs without a
        notification for `notify_interval_ms`. None: the sender may be River in Go."""
        if notify_interval_ms is None:
            delays = RIVER_FOLLOW_UP_CLAIM_DELAYS
        elif notify_interval_ms:
            delays = (notify_interval_ms / 1000 + FOLLOW_UP_CLAIM_MARGIN,)
        else:
            return
        # The last claim finds all jobs. The first claim finds most of them early.
        now = time.monotonic()
        times = [*self.follow_ups, *(now + delay for delay in delays)]
        self.follow_ups = sorted({min(times), max(times)})

    def plan_due_job_claim(self, delay: float) -> None:
        """Plan a claim for a job that becomes due in `delay` seconds."""
        heapq.heappush(self.due_jobs, time.monotonic() + delay + DUE_JOB_CLAIM_DELAY)

    def find_earliest_time(self, *others: float) -> float:
        """Return the earliest of the planned times and of `others`."""
        return min([*others, *self.follow_ups, *self.due_jobs[:1]])

    def forget_past_times(self, now: float) -> None:
        """Remove the planned claims before `now`, because a claim starts now."""
        self.follow_ups = [at for at in self.follow_ups if at > now]
        while self.due_jobs and self.due_jobs[0] <= now:
            heapq.heappop(self.due_jobs)
