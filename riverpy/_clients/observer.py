"""HeartbeatObserver: finds clients and leader domains whose heartbeats have stopped.

Each heartbeat writes a new timestamp to the database. The caller reads the last timestamps of all
clients or domains at intervals, and passes them to the observer. The observer measures with the
clock of this process how long each timestamp has not changed. It does not use the server's clock,
because that clock may be set to another time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from riverpy._clock import Timer
    from riverpy._postgres.clients import LastHeartbeat


class StoppedHeartbeats(NamedTuple):
    """The result of a search for heartbeats that have not changed for too long."""

    heartbeats: dict[str, bytes]
    """The timestamp of each stopped heartbeat. The key is the id of the client. For a heartbeat
    of a leader domain, the key is the name of a queue that the domain owns."""
    seconds_until_next_stop: float
    """The time in seconds until the next heartbeat can count as stopped. Infinity: there is no
    other heartbeat."""


class HeartbeatObserver:
    """Finds clients and leader domains that no longer write heartbeats. For this, it measures how
    long the timestamp of each heartbeat has not changed."""

    def __init__(self, timer: Timer, contact_duration: Callable[[], float] | None = None) -> None:
        """Create the observer. It knows no heartbeats until the first call of `observe`.

        Args:
            contact_duration: returns for how many seconds this process has had contact with the
                server without a break. No heartbeat counts as unchanged for a longer time than
                this, because without contact other processes may not have been able to write
                heartbeats either. None: there is no such limit, because each call of `observe`
                proves contact.
        """
        self._timer, self._contact_duration = timer, contact_duration
        self._observed_heartbeats: dict[str, tuple[LastHeartbeat, float]] = {}
        """The last heartbeat for each client id or queue name, and the time (in seconds since the
        boot) at which this observer first received the timestamp of that heartbeat."""
        self.server_start = b""

    def observe(self, heartbeats: Iterable[LastHeartbeat], server_start: bytes = b"") -> None:
        """Compare all current heartbeats with those of the last call. After a restart of the
        server, all measurements start again at zero, because no client could write a heartbeat
        while the server was down."""
        now = self._timer.seconds_since_boot()
        before = self._observed_heartbeats if server_start == self.server_start else {}
        self.server_start = server_start
        self._observed_heartbeats = {}
        for one in heartbeats:
            last, since = before.get(one.client_or_domain, (None, now))
            if last is None or last.raw_timestamp != one.raw_timestamp:
                since = now
            self._observed_heartbeats[one.client_or_domain] = one, since

    def find_stopped_heartbeats(
        self, stopped_after: float, *, extra_seconds: float = 0.0
    ) -> StoppedHeartbeats:
        """Return the heartbeats that have stopped, i.e. that have not changed for too long. The
        limit of a heartbeat is `stopped_after` or its own `dead_after_seconds`, whichever is
        longer, plus `extra_seconds`. All times are in seconds."""
        now = self._timer.seconds_since_boot()
        contact = math.inf if self._contact_duration is None else self._contact_duration()
        stopped: dict[str, bytes] = {}
        seconds_until_next = math.inf
        for heartbeat, since in self._observed_heartbeats.values():
            wanted = max(stopped_after, heartbeat.dead_after_seconds) + extra_seconds
            left = wanted - min(now - since, contact)
            if left <= 0:
                stopped[heartbeat.client_or_domain] = heartbeat.raw_timestamp
            else:
                seconds_until_next = min(seconds_until_next, left)
        return StoppedHeartbeats(stopped, seconds_until_next)
