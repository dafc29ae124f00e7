"""StopBudget: the deadline of a stop. Each step of the stop uses the remaining time."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    import asyncio
    from datetime import timedelta

STORING_SHARE = 0.4
"""The share of the hard stop timeout that is reserved for storing the last results."""
STORING_MIN = 1.0
"""The minimum time for storing the last results, in seconds. A smaller `STORING_SHARE` of the hard
stop timeout has precedence."""


class StopBudget:
    """Computes the remaining seconds of the steps of one stop."""

    def __init__(self, soft: timedelta | None, hard: timedelta) -> None:
        """Create the stop budget. The time starts with `start`.

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
        """Whether a stop was requested. A run also ends after a fault or a cancellation, without a
        stop request."""
        return self._started_at is not None

    def start(self) -> None:
        """Start the time of a stop request."""
        self._started_at = time.monotonic()
        self._shorten(self._soft + self._hard)

    def start_hard(self) -> None:
        """Shorten the remaining time to the hard stop timeout."""
        self._shorten(self._hard)

    def soft_left(self) -> float | None:
        """Return the seconds that jobs may keep running; None: no limit; 0: no stop was
        requested."""
        if self._started_at is None:
            return 0.0
        left = self._started_at + self._soft - time.monotonic()
        return None if left == math.inf else max(left, 0.0)

    def left_for_jobs(self) -> float:
        """Return the seconds that cancelled jobs may take to end."""
        return max(self.left() - self._hard * STORING_SHARE, 0.0)

    def left(self) -> float:
        """Return the remaining seconds. If there is no deadline, the hard stop timeout starts
        now."""
        if self._deadline == math.inf:
            self.start_hard()
        return max(self._deadline - time.monotonic(), 0.0)

    async def wait_stored(self, ended: asyncio.Event) -> None:
        """Wait until the event is set or the deadline has passed. Cancellations are ignored."""
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
