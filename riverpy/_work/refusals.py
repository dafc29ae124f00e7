"""Refusals: which rows of a queue the server does not let be claimed, and how many to claim at a
time so that the others are.

One such row fails the claim of all that would be taken with it: a trigger of the user's that
raises, or a text that the connection's encoding cannot carry. So claims shrink to one row, which
names the culprit; it is left alone for a while, and claims grow again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from riverpy.drivers.asyncpg import describe

if TYPE_CHECKING:
    from datetime import timedelta

RETRY = 30.0
"""Seconds, at least, until a row that was refused is tried again."""
SKIPPED_MAX = 1000
"""Rows that are left alone at a time: where more are refused, it is hardly for what they hold."""
NAMED_MAX = 10
"""Rows that are named in warnings, before the rest is named at debug."""


class Refusals:
    """The refused rows of one queue."""

    def __init__(self, most: int, poll_interval: timedelta, log: Any) -> None:
        """Make it.

        Args:
            most: the rows of a full claim.
            poll_interval: the queue's; refused rows are not tried more often.
            log: the producer's.
        """
        self._most = most
        self.retry = max(poll_interval.total_seconds(), RETRY)
        self._log = log
        self._limit: int | None = None
        """What a claim may take until the culprits are found."""
        self._skipped: dict[int, float] = {}
        """Until when each is left alone."""
        self._named: set[int] = set()

    @property
    def is_stepping(self) -> bool:
        """Whether a claim was refused and the culprit is not found yet, or is tried again."""
        return self._limit is not None

    def limit(self, wanted: int) -> int:
        """How many to claim next, and past `skipped`, where `wanted` could be."""
        now = time.monotonic()
        over = [job_id for job_id, until in self._skipped.items() if until <= now]
        if over:
            self._limit = 1
            for job_id in over:
                del self._skipped[job_id]
        return wanted if self._limit is None else min(wanted, self._limit)

    @property
    def skipped(self) -> list[int]:
        """The ids that are left alone now."""
        return list(self._skipped)

    def claimed(self, count: int, limit: int) -> None:
        """A claim succeeded."""
        if self._limit is None:
            return
        self._limit *= 2
        if count < limit or self._limit >= self._most:
            self._limit = None
            if not self._skipped:
                self._named.clear()

    def refused(self, limit: int, culprit: int | None, error: Exception) -> bool:
        """A claim of up to `limit` rows was refused; of this one, if it is known. Returns whether
        to claim again at once."""
        if culprit is not None:
            self._limit = 1
            self._skipped[culprit] = time.monotonic() + self.retry
            self._name(culprit, error)
            return len(self._skipped) < SKIPPED_MAX
        again = limit > 1 or self._limit is None
        self._limit = max(limit // 2, 1)
        return again

    def _name(self, job_id: int, error: Exception) -> None:
        if job_id in self._named:
            return
        self._named.add(job_id)
        say = self._log.warning if len(self._named) <= NAMED_MAX else self._log.debug
        say(
            "job cannot be claimed and is left alone; it is tried again now and then",
            job_id=job_id,
            seconds=self.retry,
            error=describe(error),
        )
        if len(self._named) == NAMED_MAX:
            self._log.warning("more jobs that cannot be claimed are named at debug")
