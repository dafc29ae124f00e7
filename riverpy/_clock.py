"""The clock and the timer, which tests replace, and the delays between retries."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import anyio

from riverpy.errors import ConfigError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_BOOTTIME_CLOCK_ID: int | None = getattr(time, "CLOCK_BOOTTIME", None)
"""The id of the system clock that also runs while the machine is suspended. None: the system has no
such clock."""


class Clock:
    """The system's clock. Tests replace it."""

    def now(self) -> datetime:
        """Return the current time, timezone-aware and in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return the time in seconds from a clock that never goes back."""
        return time.monotonic()


class ConfiguredClock(Clock):
    """A clock that calls the user's function `Config.clock` for the time."""

    def __init__(self, get_time: Callable[[], object]) -> None:
        self._get_time = get_time

    def now(self) -> datetime:
        """Return the time that the user's function returns, in UTC.

        Raises:
            ConfigError: the function did not return a datetime with a time zone.
        """
        time = self._get_time()
        if not isinstance(time, datetime) or time.utcoffset() is None:
            raise ConfigError(
                "Config.clock must return a datetime with a time zone, as datetime.now(UTC), got "
                f"{time!r}"
            )
        return time.astimezone(UTC)


class Timer:
    """Measures time and waits. Tests replace it with a timer that they control."""

    def seconds_since_boot(self) -> float:
        """Return the time in seconds from a clock that never goes back. On Linux it includes the
        time while the machine is suspended, because leases expire in that time too."""
        return (
            time.monotonic()
            if _BOOTTIME_CLOCK_ID is None
            else time.clock_gettime(_BOOTTIME_CLOCK_ID)
        )

    async def sleep(self, seconds: float) -> None:
        """Sleep for this many seconds."""
        await anyio.sleep(seconds)

    async def wait_for_event(self, event: asyncio.Event, timeout: float) -> bool:
        """Wait for an event for at most `timeout` seconds. Return whether the event is set."""
        with anyio.move_on_after(timeout):
            await event.wait()
        return event.is_set()


class Backoff:
    """The delays between retries. They double from `minimum` up to `maximum`, with 10 % of
    jitter."""

    def __init__(self, minimum: timedelta, maximum: timedelta) -> None:
        self._minimum, self._maximum = minimum.total_seconds(), maximum.total_seconds()
        self._failure_count = 0

    def next_delay(self) -> float:
        """Record a failure. Return the delay before the retry in seconds."""
        delay = min(self._minimum * 2.0 ** min(self._failure_count, 30), self._maximum)
        self._failure_count += 1
        return delay * random.uniform(0.9, 1.1)  # noqa: S311 (not a secret)

    def reset(self) -> None:
        """Start again with `minimum`. Call this after a success."""
        self._failure_count = 0
