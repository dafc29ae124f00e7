"""Time that can be replaced in tests, and delays that grow."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Protocol

import anyio

if TYPE_CHECKING:
    import asyncio

_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)
"""Linux has it. Elsewhere the monotonic clock is the best there is."""


class Clock(Protocol):
    """Where a service reads the time of this process."""

    def now(self) -> datetime:
        """The wall clock, aware and in UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go backwards."""
        ...


class SystemClock:
    """The clock of the machine."""

    def now(self) -> datetime:
        """The wall clock, aware and in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds that never go backwards."""
        return time.monotonic()


class Timer(Protocol):
    """What leading measures and waits by, replaced in tests by one that only moves when told to."""

    def boottime(self) -> float:
        """Seconds that never go backwards and, where the system can, count while the machine is
        suspended: a lease expires in that time too."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after so many seconds."""
        ...

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait for the event, for so many seconds at most. Returns whether it is set."""
        ...


class SystemTimer:
    """The timer of the machine."""

    def boottime(self) -> float:
        """Seconds since the machine was started, on Linux suspended ones included."""
        return time.monotonic() if _BOOTTIME is None else time.clock_gettime(_BOOTTIME)

    async def sleep(self, seconds: float) -> None:
        """Return after so many seconds."""
        await anyio.sleep(seconds)

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait for the event, for so many seconds at most. Returns whether it is set."""
        with anyio.move_on_after(seconds):
            await event.wait()
        return event.is_set()


class Backoff:
    """Delays that double from `first` up to `most`, each with 10 % of jitter either way."""

    def __init__(self, first: timedelta, most: timedelta) -> None:
        self._first, self._most = first.total_seconds(), most.total_seconds()
        self._failures = 0

    def next(self) -> float:
        """The delay after one more failure, in seconds."""
        delay = min(self._first * 2.0 ** min(self._failures, 30), self._most)
        self._failures += 1
        return delay * random.uniform(0.9, 1.1)  # noqa: S311 (jitter, no secret)

    def reset(self) -> None:
        """Start again from `first`: the thing works."""
        self._failures = 0
