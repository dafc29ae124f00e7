"""A timer whose time moves only when a test moves it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 40
"""Turns of the event loop in which all ready tasks run until they wait. No chain of tasks needs
more."""


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(ROUNDS):
        await asyncio.sleep(0)


class VirtualTimer:
    """A timer whose time changes only in `advance`, `stall` and `suspend`.

    Real waits (a database, a thread) do not move it, and it does not wait for them.
    """

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._alarms: dict[object, tuple[float, Callable[[], object]]] = {}

    def seconds_since_boot(self) -> float:
        """Return the virtual seconds."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Return when time has moved by this many seconds."""
        await self.wait_for_event(asyncio.Event(), seconds)

    async def wait_for_event(self, event: asyncio.Event, timeout: float) -> bool:
        """Wait for the event until time has moved by this many seconds."""
        if event.is_set() or timeout <= 0:
            await asyncio.sleep(0)
            return event.is_set()
        with anyio.CancelScope() as scope:
            self._alarms[scope] = self._now + timeout, scope.cancel
            try:
                await event.wait()
            finally:
                del self._alarms[scope]
        return event.is_set()

    async def advance(self, seconds: float) -> None:
        """Move time. Each sleeper wakes at its own time, in order."""
        until = self._now + seconds
        await settle()
        while due := [at for at, _ in self._alarms.values() if at <= until]:
            self._now = max(self._now, min(due))
            await self._ring()
        self._now = until
        await settle()

    async def stall(self, seconds: float) -> None:
        """Move time as for a process that does not run: it wakes late, and then everything due is
        overdue."""
        self._now += seconds
        await self._ring()

    async def suspend(self, seconds: float) -> None:
        """Move time as for a machine that is suspended: waits do not count that time."""
        self._now += seconds
        self._alarms = {key: (at + seconds, ring) for key, (at, ring) in self._alarms.items()}
        await settle()

    @property
    def sleepers(self) -> int:
        """Return the number of sleepers."""
        return len(self._alarms)

    async def _ring(self) -> None:
        for at, ring in sorted(self._alarms.values(), key=lambda alarm: alarm[0]):
            if at <= self._now:
                ring()
        await settle()
