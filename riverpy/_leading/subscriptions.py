"""LeadershipPublisher: informs subscribers in this process when the client becomes leader, and when
its term (its time as leader) ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from riverpy._log_events import LEADERSHIP_CHANGES_DROPPED
from riverpy._stream import Stream, StreamGroup
from riverpy.events import LeadershipChange

if TYPE_CHECKING:
    from collections.abc import Callable

UNREAD_LEADERSHIP_CHANGES_MAX = 10_000
"""The maximum number of unread changes that are kept for one subscriber."""


class LeadershipSubscription(Stream[LeadershipChange]):
    """An async iterator over the changes of one client's leadership: `async with` opens it, `async
    for` reads it.

    The first item is the current state, then each change follows in order. The iterator ends when
    the client stops. If 10,000 changes wait to be read, the oldest are dropped and counted in
    `dropped`, so that the last item is always the current state.
    """

    def __init__(self, owner: LeadershipPublisher) -> None:
        super().__init__(owner, UNREAD_LEADERSHIP_CHANGES_MAX)
        self._leadership = owner

    async def __aenter__(self) -> Self:
        self.put(self._leadership.latest_change)
        return await super().__aenter__()

    def put(self, change: LeadershipChange) -> None:
        """Add a change to the unread changes. If there are too many of them, drop the oldest
        one."""
        if self._is_full:
            self._count_dropped_item(LEADERSHIP_CHANGES_DROPPED)
            self._waiting_items.popleft()
        self._append_item(change)


class LeadershipPublisher(StreamGroup[LeadershipSubscription]):
    """Keeps the leadership state of one client, and sends each change to the subscribers."""

    def __init__(self, leader_id: Callable[[], str], domain: Callable[[], str]) -> None:
        """Create the publisher of a client that is not the leader yet. `leader_id` and `domain`
        return the client's leader id and domain."""
        super().__init__()
        self._leader_id, self._domain = leader_id, domain
        self._last_change: LeadershipChange | None = None

    @property
    def latest_change(self) -> LeadershipChange:
        """The last change of the leadership. Before the first change: a change that says that the
        client is not the leader."""
        return self._last_change or LeadershipChange(
            is_leader=False, leader_id=self._leader_id(), domain=self._domain()
        )

    def publish(self, change: LeadershipChange) -> None:
        """Send a change to all subscribers, without waiting for them."""
        self._last_change = change
        for subscription in self._open_streams:
            subscription.put(change)
