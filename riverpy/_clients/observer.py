"""HeartbeatObserver: finds heartbeats that have stopped.

The server's clock may be set, so it is not used here. The observer reads all heartbeats now and
then, and measures on its own clock for how long each one stays the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from riverpy._clock import Timer
    from riverpy._postgres.clients import LastHeartbeat


class Silent(NamedTuple):
    """The heartbeats that have not changed for too long."""

    heartbeats: dict[str, bytes]
    """The last heartbeat by the name of its writer."""
    next_in: float
    """Seconds until the next heartbeat may be too old. Infinity if there is no other."""


class HeartbeatObserver:
    """Observes heartbeats for one purpose."""

    def __init__(self, timer: Timer, contact: Callable[[], float] | None = None) -> None:
        """Create the heartbeat observer. Nothing is observed yet.

        Args:
            timer: measures how long a heartbeat stays the same.
            contact: returns the seconds of this process's unbroken contact with the server, shown
                by its own heartbeats. A process that could not write a heartbeat itself cannot
                judge others. None: the reads show the contact.
        """
        self._timer, self._contact = timer, contact
        self._seen: dict[str, tuple[LastHeartbeat, float]] = {}
        """The last heartbeat by name, and when it was read first."""
        self.server_start = b""

    def observe(self, heartbeats: Iterable[LastHeartbeat], server_start: bytes = b"") -> None:
        """Take all heartbeats that were read now. After a restart of the server the observation
        begins again, because no client could write a heartbeat while the server was down."""
        now = self._timer.boottime()
        before = self._seen if server_start == self.server_start else {}
        self.server_start = server_start
        self._seen = {}
        for one in heartbeats:
            last, since = before.get(one.name, (None, now))
            if last is None or last.value != one.value:
                since = now
            self._seen[one.name] = one, since

    def silent(self, limit: float, *, kept: float = 0.0) -> Silent:
        """Return the heartbeats that have not changed for `limit` seconds, or for their own limit
        if that is longer, and for another `kept` seconds."""
        now = self._timer.boottime()
        contact = math.inf if self._contact is None else self._contact()
        silent: dict[str, bytes] = {}
        next_in = math.inf
        for heartbeat, since in self._seen.values():
            left = max(limit, heartbeat.limit) + kept - min(now - since, contact)
            if left <= 0:
                silent[heartbeat.name] = heartbeat.value
            else:
                next_in = min(next_in, left)
        return Silent(silent, next_in)
