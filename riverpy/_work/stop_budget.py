"""StopBudget: the time that a stop may take, as one deadline of which each phase takes what is
left."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    import asyncio
    from datetime import timedelta

STORING_SHARE = 0.4
"""Of the hard stop's time so much is kept from the jobs: the results of those that end last have to
be stored."""
STORING_MIN = 1.0
"""Seconds for storing results, at least, unless the share above is shorter."""


class StopBudget:
    """The time of one run's stop. All in seconds."""

    def __init__(self, soft: timedelta | None, hard: timedelta) -> None:
        """Make it; the time does not run yet.

        Args:
            soft: how long jobs may go on; None: for any time.
            hard: how long they may take to end when they are cancelled, and results to be stored.
        """
        self._soft = math.inf if soft is None else soft.total_seconds()
        self._hard = hard.total_seconds()
        self._started_at: float | None = None
        self._deadline = math.inf
        self._waiting: anyio.CancelScope | None = None

    @property
    def is_started(self) -> bool:
        """Whether a stop was asked for; a run may also end by a fault, or be cancelled."""
        return self._started_at is not None

    def start(self) -> None:
        """A stop was asked for, for the first time."""
        self._started_at = time.monotonic()
        self._shorten(self._soft + self._hard)

    def start_hard(self) -> None:
        """A hard stop was asked for."""
        self._shorten(self._hard)

    def soft_left(self) -> float | None:
        """How long jobs may go on; None: for any time. Nothing without a request to stop."""
        if self._started_at is None:
            return 0.0
        left = self._started_at + self._soft - time.monotonic()
        return None if left == math.inf else max(left, 0.0)

    def left_for_jobs(self) -> float:
        """How long cancelled jobs may take to end."""
        return max(self.left() - self._hard * STORING_SHARE, 0.0)

    def left(self) -> float:
        """What is left of the whole. Where nothing has limited it, the hard stop's time begins."""
        if self._deadline == math.inf:
            self.start_hard()
        return max(self._deadline - time.monotonic(), 0.0)

    async def wait_stored(self, ended: asyncio.Event) -> None:
        """Wait for this event until the time is over, whatever is cancelled."""
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
