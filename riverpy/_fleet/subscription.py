"""FleetSubscription: an async iterator over the events of all workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from riverpy._log_events import SUBSCRIBER_EVENTS_DROPPED
from riverpy._stream import Stream
from riverpy.events import Event

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy._fleet.filters import FollowFilter
    from riverpy._stream import StreamGroup


class FleetSubscription(Stream[Event]):
    """An async iterator over the events of all workers of the database: `async with` opens it, and
    `async for` reads the events.

    Events may be missed: read the row of a job to know its state. The iteration ends when the
    client closes. Events that arrive while the subscription is full are dropped.
    """

    def __init__(
        self,
        owner: StreamGroup[FleetSubscription],
        follow_filter: FollowFilter,
        size: int,
        wait_until_announced: Callable[[], Awaitable[None]],
    ) -> None:
        """`wait_until_announced` waits until the workers know what the owner follows."""
        super().__init__(owner, size)
        self._wait_until_announced = wait_until_announced
        self.follow_filter = follow_filter
        self.dropped_by_workers = 0
        """The number of events that workers have dropped, because there were more than they may
        send. It counts events of all followers, and also those that this subscription would not
        have matched. They are part of `dropped`."""

    async def __aenter__(self) -> Self:
        """Start to follow. Workers that listen now send all events after this.

        Raises:
            ClientStateError: the client is not open.
        """
        await super().__aenter__()
        try:
            await self._wait_until_announced()
        except BaseException:
            await super().__aexit__()
            raise
        return self

    def put(self, event: Event) -> None:
        """Add an event, or drop it if there is no room."""
        if self._is_full:
            self._count_dropped_item(SUBSCRIBER_EVENTS_DROPPED)
        else:
            self._append_item(event)

    def add_dropped_by_workers(self, count: int) -> None:
        """Count events that a worker has dropped."""
        self.dropped_by_workers += count
        self.dropped += count
