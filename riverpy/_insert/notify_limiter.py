"""NotifyLimiter: limits how often the inserts of one client notify a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from riverpy._clock import Clock

NOTIFY_INTERVAL = 0.002
"""The minimum seconds between two notifications of one queue by the inserts of one client without
`tx`."""
_QUEUES_MAX = 1000
"""The maximum number of queues that the limiter remembers."""


class NotifyLimiter:
    """Limits the notifications of each queue to one in `NOTIFY_INTERVAL`.

    A transaction that notifies takes a lock at its commit, so two such transactions cannot commit
    at the same time. Fewer notifications are enough: a client that receives a notification claims
    again a few milliseconds later, and then finds the jobs that were inserted after it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._notified_at: dict[str, float] = {}

    def take(self, queues: Iterable[str]) -> list[str]:
        """Return the queues that may be notified now, and record that they are notified."""
        now = self._clock.monotonic()
        taken = [
            queue for queue in queues if now - self._notified_at.get(queue, -1e9) > NOTIFY_INTERVAL
        ]
        if len(self._notified_at) > _QUEUES_MAX:
            self._notified_at.clear()
        self._notified_at.update(dict.fromkeys(taken, now))
        return taken
