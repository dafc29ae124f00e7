"""FleetSubscription: an async iterator over the events of all workers of a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from riverpy._log_events import SUBSCRIBER_EVENTS_DROPPED
from riverpy._stream import Stream
from riverpy.events import Event

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy._fleet.filters import FollowFilter
    from riverpy._stream import StreamGroup


class FleetStream(Stream[Event]):
    """The queue of events that one subscription has received and not yet read."""

    def __init__(
        self, owner: StreamGroup[FleetStream], follow_filter: FollowFilter, size: int
    ) -> None:
        super().__init__(owner, size)
        self.follow_filter = follow_filter
        self.dropped_by_workers = 0

    def put(self, event: Event) -> None:
        """Add an event. If the queue is full, drop the event and count it."""
        if self._is_full:
            self._count_dropped_item(SUBSCRIBER_EVENTS_DROPPED)
        else:
            self._append_item(event)

    def take_waiting_events(self, count: int) -> list[Event]:
        """Remove up to `count` events, the oldest first, and return them."""
        return [self._waiting_items.popleft() for _ in range(min(count, len(self._waiting_items)))]

    def add_dropped_by_workers(self, count: int) -> None:
        """Add `count` to the number of events that workers have dropped."""
        self.dropped_by_workers += count
        self.dropped += count


class FleetSubscription:
    """An async iterator over the events of all workers of a database. `async with` opens the
    subscription, and `async for` reads the events.

    Events may be lost, so read the row of a job to know its state. Events that arrive while the
    subscription is full are dropped. The iteration ends when the client closes.
    """

    def __init__(
        self, stream: FleetStream, wait_until_announced: Callable[[], Awaitable[None]]
    ) -> None:
        """Create a subscription that is not open yet. `wait_until_announced` waits until the
        workers know which events the client wants to receive."""
        self._stream, self._wait_until_announced = (
            stream,
            wait_until_announced,
        )

    @property
    def dropped(self) -> int:
        """The number of events that were dropped: those that arrived while the subscription was
        full, and `dropped_by_workers`."""
        return self._stream.dropped

    @property
    def dropped_by_workers(self) -> int:
        """The number of events that workers have dropped, for example because a worker may send
        only a limited number of events per second. The number includes events that only other
        subscriptions would have received."""
        return self._stream.dropped_by_workers

    async def __aenter__(self) -> Self:
        """Open the subscription. Wait for at most 5 seconds until the workers are notified which
        events to send; from then on, they send these events. If the client has no connection to the
        database within this time, the workers are notified later. Workers with `poll_only` receive
        no notifications and send no events.

        Raises:
            ClientStateError: the client is not open.
        """
        await self._stream.__aenter__()
        try:
            await self._wait_until_announced()
        except BaseException:
            await self._stream.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stream.__aexit__(*error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """Return the next event.

        Raises:
            ClientStateError: the subscription was not opened.
        """
        return await anext(self._stream)


def take_waiting_events(subscription: FleetSubscription, count: int) -> list[Event]:
    """Remove up to `count` events from a subscription without waiting, the oldest first, and return
    them."""
    stream = subscription._stream  # noqa: SLF001 (own class)  # pyright: ignore[reportPrivateUsage]
    return stream.take_waiting_events(count)
