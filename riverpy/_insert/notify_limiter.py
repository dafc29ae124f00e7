"""NotifyLimiter: how often the inserts of one client notify a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from riverpy._clock import Clock

NOTIFY_INTERVAL = 0.002
"""Seconds in which the inserts of one client without `tx` notify a queue at most once."""
_QUEUES_MAX = 1000


class NotifyLimiter:
    """Limits the notifications of a queue to one in `NOTIFY_INTERVAL`.

    PostgreSQL commits transactions that notify one after the other. A client that receives a
    notification claims again a few milliseconds later, so it also finds the jobs that are inserted
    shortly after.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._notified_at: dict[str, float] = {}

    def take(self, queues: Iterable[str]) -> list[str]:
        """Return the queues to notify now, and count them as notified."""
        now = self._clock.monotonic()
        taken = [
            queue for queue in queues if now - self._notified_at.get(queue, -1e9) > NOTIFY_INTERVAL
        ]
        if len(self._notified_at) > _QUEUES_MAX:
            self._notified_at.clear()
        self._notified_at.update(dict.fromkeys(taken, now))
        return taken
