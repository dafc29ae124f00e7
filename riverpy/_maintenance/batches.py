"""Batches: how a service goes through many rows in statements that are short."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from riverpy._maintenance.mandate import FenceBusyError
from riverpy.drivers.asyncpg import is_statement_timeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy._clock import Timer

BATCH_SIZE = 10_000
"""Rows of a statement."""
REDUCED_SIZE = 1_000
"""Rows of a statement once `TIMEOUTS_MAX` of them ran into their limit one after the other."""
TIMEOUTS_MAX = 3
TIMEOUT_WINDOW = 600.0
"""Seconds within which those count as one after the other."""
PAUSE_MIN = 0.05
PAUSE_MAX = 1.0
"""Seconds between two batches: up to as long as the last one took, so that the database has as much
time for the workers."""


class Batches:
    """The batches of one service in one term. The size stays reduced until the term ends."""

    def __init__(self, timer: Timer, log: Any) -> None:
        self.size = BATCH_SIZE
        self._timer, self._log = timer, log
        self._timeouts: list[float] = []

    async def run(self, step: Callable[[int], Awaitable[int]]) -> None:
        """Let `step` handle up to so many rows again and again, until it found fewer.

        A batch that takes too long is tried again, so that each pass gets on: with fewer rows where
        that has happened too often.

        Raises:
            Exception: what `step` raises, but for the timeouts that are tried again.
        """
        while True:
            size, began = self.size, self._timer.boottime()
            try:
                found = await step(size)
            except Exception as error:
                if not _is_timeout(error) or size == REDUCED_SIZE:
                    raise
                self._timed_out()
            else:
                self._timeouts.clear()
                if found < size:
                    return
            took = self._timer.boottime() - began
            most = max(PAUSE_MIN, min(took, PAUSE_MAX))
            await self._timer.sleep(random.uniform(PAUSE_MIN, most))  # noqa: S311 (no secret)

    def _timed_out(self) -> None:
        now = self._timer.boottime()
        self._timeouts = [at for at in self._timeouts if now - at < TIMEOUT_WINDOW] + [now]
        if len(self._timeouts) >= TIMEOUTS_MAX:
            self.size = REDUCED_SIZE
            self._log.warning("statements take too long, batches are smaller now", rows=self.size)


def _is_timeout(error: Exception) -> bool:
    """Whether the server or we ended a statement for its time. Waiting for the fence is not the
    batch's fault."""
    return is_statement_timeout(error) or (
        isinstance(error, TimeoutError) and not isinstance(error, FenceBusyError)
    )
