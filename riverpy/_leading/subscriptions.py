"""Leadership: tells who asks, inside this process, when its client begins and ceases to lead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from riverpy._log_events import LEADERSHIP_CHANGES_DROPPED
from riverpy._stream import Stream, Streams
from riverpy.events import LeadershipChange

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 10_000
"""Transitions that wait for a subscriber."""


class LeadershipSubscription(Stream[LeadershipChange]):
    """An async iterator over the transitions of one client: `async with` opens it, `async for`
    reads it.

    The first item is how things stand, then each transition follows, in order. It ends when the
    client stops. While 10,000 wait to be read the oldest are dropped and counted in `dropped`: what
    is read last is always how things stand.
    """

    def __init__(self, owner: Leadership) -> None:
        super().__init__(owner, SIZE)
        self._leadership = owner

    async def __aenter__(self) -> Self:
        self.put(self._leadership.current)
        return await super().__aenter__()

    def put(self, change: LeadershipChange) -> None:
        """Take a transition; drop the oldest where there is no room."""
        if self._is_full:
            self._drop(LEADERSHIP_CHANGES_DROPPED)
            self._waiting.popleft()
        self._append(change)


class Leadership(Streams[LeadershipSubscription]):
    """How things stand with one client, and who wants to know."""

    def __init__(self, leader_id: Callable[[], str], domain: Callable[[], str]) -> None:
        """Make it: the client, whose id and domain these tell, does not lead."""
        super().__init__()
        self._leader_id, self._domain = leader_id, domain
        self._last: LeadershipChange | None = None

    @property
    def current(self) -> LeadershipChange:
        """The last transition."""
        return self._last or LeadershipChange(
            is_leader=False, leader_id=self._leader_id(), domain=self._domain()
        )

    def publish(self, change: LeadershipChange) -> None:
        """Tell all of a transition, and wait for nobody."""
        self._last = change
        for subscription in self._open:
            subscription.put(change)
