"""StopBudget: the deadline of a stop. Each step of the stop uses the time that is left."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    import asyncio
    from datetime import timedelta

STORING_SHARE = 0.4
"""The share of the hard stop timeout that is kept for storing the last results."""
STORING_MIN = 1.0
"""Seconds for storing results, at least, unless the share above is shorter."""


class StopBudget:
    """The time of one run's stop, in seconds."""

    def __init__(self, soft: timedelta | None, hard: timedelta) -> None:
        """Make it. The time does not run yet.

        Args:
            soft: how long jobs may keep running; None: no limit.
            hard: how long cancelled jobs and the storing of results may take.
        """
        self._soft = math.inf if soft is None else soft.total_seconds()
        self._hard = hard.total_seconds()
        self._started_at: float | None = None
        self._deadline = math.inf
        self._waiting: anyio.CancelScope | None = None

    @property
    def is_started(self) -> bool:
        """Whether a stop was requested. A run can also end by a fault or a cancellation."""
        return self._started_at is not None

    def start(self) -> None:
        """Start the time: a stop was requested."""
        self._started_at = time.monotonic()
        self._shorten(self._soft + self._hard)

    def start_hard(self) -> None:
        """Shorten the time: a hard stop was requested."""
        self._shorten(self._hard)

    def soft_left(self) -> float | None:
        """Return how long jobs may keep running; None: no limit. Without a stop request it is 0."""
        if self._started_at is None:
            return 0.0
        left = self._started_at + self._soft - time.monotonic()
        return None if left == math.inf else max(left, 0.0)

    def left_for_jobs(self) -> float:
        """Return how long cancelled jobs may take to end."""
        return max(self.left() - self._hard * STORING_SHARE, 0.0)

    def left(self) -> float:
        """Return the time that is left. If no deadline is set, the hard stop timeout starts now."""
        if self._deadline == math.inf:
            self.start_hard()
        return max(self._deadline - time.monotonic(), 0.0)

    async def wait_stored(self, ended: asyncio.Event) -> None:
        """Wait until the event is set or the time is over. Cancellations are ignored."""
        minimum = min(self._hard * STORING_SHARE, STORING_MIN)
        until = anyio.current_time() + max(self.left(), minimum)
        with anyio.CancelScope(shield=True, deadline=until) as self._waiting:
            await ended.wait()
        self._waiting = None

    def _shorten(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)
        if self._waiting is not None:
            until = anyio.current_time() + seconds
            self._waiting.deadline = min(self._waiting.deadline, until)
