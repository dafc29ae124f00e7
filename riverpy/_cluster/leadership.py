"""Leadership: tells who asks, inside this process, when its client begins and ceases to lead."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Self

import structlog

from riverpy.events import LeadershipChange

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

SIZE = 10_000
"""Transitions that wait for a subscriber."""


class LeadershipSubscription:
    """An async iterator over the transitions of one client: `async with` opens it, `async for`
    reads it.

    The first item is how things stand, then each transition follows, in order. It ends when the
    client stops. While 10,000 wait to be read the oldest are dropped and counted in `dropped`: what
    is read last is always how things stand.
    """

    def __init__(self, owner: Leadership) -> None:
        self._owner = owner
        self._waiting: deque[LeadershipChange] = deque()
        self._ready = asyncio.Event()
        self._closed = False
        self._log: Any = structlog.get_logger("riverpy").bind()
        self.dropped = 0
        """How many transitions were dropped unread."""

    async def __aenter__(self) -> Self:
        self.put(self._owner.current)
        self._owner.add(self)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._owner.remove(self)
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> LeadershipChange:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return self._waiting.popleft()

    def put(self, change: LeadershipChange) -> None:
        """Take a transition; drop the oldest where there is no room."""
        if len(self._waiting) == SIZE:
            if self.dropped == 0:
                self._log.warning("subscriber is full; the oldest transitions are dropped")
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(change)
        self._ready.set()

    def close(self) -> None:
        """End the iteration after the transitions that wait."""
        self._closed = True
        self._ready.set()


class Leadership:
    """How things stand with one client, and who wants to know."""

    def __init__(self, leader_id: Callable[[], str]) -> None:
        """Make it: the client, whose id this tells, does not lead."""
        self._leader_id = leader_id
        self._last: LeadershipChange | None = None
        self._open: list[LeadershipSubscription] = []

    @property
    def current(self) -> LeadershipChange:
        """The last transition."""
        return self._last or LeadershipChange(is_leader=False, leader_id=self._leader_id())

    def add(self, subscription: LeadershipSubscription) -> None:
        """Open a subscription."""
        self._open.append(subscription)

    def remove(self, subscription: LeadershipSubscription) -> None:
        """Forget it."""
        if subscription in self._open:
            self._open.remove(subscription)

    def publish(self, change: LeadershipChange) -> None:
        """Tell all of a transition, and wait for nobody."""
        self._last = change
        for subscription in self._open:
            subscription.put(change)

    def close(self) -> None:
        """End all subscriptions: the client stopped."""
        for subscription in self._open:
            subscription.close()
        self._open = []
