"""HeartbeatObserver: whose heartbeat has stopped, by what one observer sees.

The server's clock may be stepped, so it decides nothing here: an observer reads the heartbeats now
and then, and measures on its own clock for how long each stays the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from riverpy._clock import Timer
    from riverpy._postgres.clients import LastHeartbeat


class Silence(NamedTuple):
    """Those whose heartbeat has not changed for too long."""

    heartbeats: dict[str, bytes]
    """The last heartbeat of each."""
    next_in: float
    """Seconds until the next may be one of them; infinite: there is no other."""


class HeartbeatObserver:
    """Observes heartbeats for one purpose."""

    def __init__(self, timer: Timer, contact: Callable[[], float] | None = None) -> None:
        """Make it; nothing is observed yet.

        Args:
            timer: measures how long a heartbeat stays the same.
            contact: seconds of this process's unbroken contact with the server, as its own
                heartbeats prove it: one that could not write a heartbeat cannot judge others.
                None: the reads prove it.
        """
        self._timer, self._contact = timer, contact
        self._seen: dict[str, tuple[LastHeartbeat, float]] = {}
        """The last heartbeat by name, and when it was read first."""
        self.server_start = b""

    def saw(self, heartbeats: Iterable[LastHeartbeat], server_start: bytes = b"") -> None:
        """Take all that were read. No heartbeat could be written while the server was down, so a
        restart begins the observation again."""
        now = self._timer.boottime()
        before = self._seen if server_start == self.server_start else {}
        self.server_start = server_start
        self._seen = {}
        for one in heartbeats:
            last, since = before.get(one.name, (None, now))
            if last is None or last.value != one.value:
                since = now
            self._seen[one.name] = one, since

    def silence(self, limit: float, *, kept: float = 0.0) -> Silence:
        """Those whose heartbeat has been the same for `limit` seconds, or for their own limit if
        that is longer, and for `kept` seconds more."""
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
        return Silence(silent, next_in)
