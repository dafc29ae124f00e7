"""PlannedClaimTimes: the times at which jobs of a queue may become available without a
notification. The producer claims at these times, and does not wait for the next poll."""

from __future__ import annotations

import heapq
import time

RIVER_FOLLOW_UP_CLAIM_DELAYS = (0.005, 0.1)
"""Seconds from a notification to each follow-up claim, if River in Go may have sent the
notification. River sends at most one notification in 100 ms. Follow-up claims find the jobs that
are committed after the first claim."""
FOLLOW_UP_CLAIM_MARGIN = 0.003
"""Seconds from the end of the notify interval to the follow-up claim. In the notify interval after
a notification, its sender may insert more jobs without a further notification. The last commit may
come shortly after the interval."""
DUE_JOB_CLAIM_DELAY = 0.002
"""Seconds that the producer waits after a job is due, because the server's clock may be behind."""


class PlannedClaimTimes:
    """The planned claims of one queue, as times in monotonic seconds."""

    def __init__(self) -> None:
        self.follow_ups: list[float] = []
        """The times of the follow-up claims after a notification, at most two."""
        self.due_jobs: list[float] = []
        """The times of claims for jobs that become due, as a heap."""

    def plan_follow_up_claims(self, notify_interval_ms: float | None) -> None:
        """Plan the follow-up claims after a notification. `notify_interval_ms` is the time in
        which the sender may insert more jobs without a notification, in milliseconds; None: the
        sender may be River in Go."""
        if notify_interval_ms is None:
            delays = RIVER_FOLLOW_UP_CLAIM_DELAYS
        elif notify_interval_ms:
            delays = (notify_interval_ms / 1000 + FOLLOW_UP_CLAIM_MARGIN,)
        else:
            return
        # Keep only the earliest and the latest follow-up claim. The latest finds all jobs. The
        # earliest finds most of them sooner.
        now = time.monotonic()
        times = [*self.follow_ups, *(now + delay for delay in delays)]
        self.follow_ups = sorted({min(times), max(times)})

    def plan_due_job_claim(self, delay: float) -> None:
        """Plan a claim for a job that becomes due in `delay` seconds."""
        heapq.heappush(self.due_jobs, time.monotonic() + delay + DUE_JOB_CLAIM_DELAY)

    def find_earliest_time(self, *others: float) -> float:
        """Return the earliest time among the planned times and the times in `others`."""
        return min([*others, *self.follow_ups, *self.due_jobs[:1]])

    def forget_past_times(self, now: float) -> None:
        """Remove the planned claims before `now`, because a claim starts now."""
        self.follow_ups = [at for at in self.follow_ups if at > now]
        while self.due_jobs and self.due_jobs[0] <= now:
            heapq.heappop(self.due_jobs)
