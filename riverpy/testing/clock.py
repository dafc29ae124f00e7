"""FixedClock: a clock for tests of jobs that are unique by period (`UniqueOpts.by_period`)."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta


class FixedClock:
    """A clock whose time changes only when a test moves it: `Config(clock=FixedClock())`. Any
    thread may use it."""

    def __init__(self, now: datetime | None = None) -> None:
        """Create a clock with the time `now`. Default None: the current time of the system.

        Raises:
            ValueError: the time has no time zone.
        """
        self._lock = threading.Lock()
        self._now = _to_utc(datetime.now(UTC) if now is None else now)

    def __call__(self) -> datetime:
        """Return the time of the clock, in UTC."""
        return self._now

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._now!r})"

    def advance(self, duration: timedelta) -> datetime:
        """Move the clock forward by `duration`, or back if it is negative. Return the new time."""
        with self._lock:
            self._now += duration
            return self._now

    def set(self, now: datetime) -> None:
        """Set the clock to the time `now`.

        Raises:
            ValueError: the time has no time zone.
        """
        with self._lock:
            self._now = _to_utc(now)


def _to_utc(time: datetime) -> datetime:
    if time.utcoffset() is None:
        raise ValueError(f"the time {time.isoformat()} has no time zone: add tzinfo=UTC")
    return time.astimezone(UTC)
