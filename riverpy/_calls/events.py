"""EventMethods: the methods of a client that subscribe to its events."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from riverpy._calls.base import ClientMethods
from riverpy._leading.subscriptions import LeadershipPublisher, LeadershipSubscription
from riverpy._work.subscriptions import SUBSCRIPTION_SIZE_DEFAULT, Subscription, SubscriptionManager

if TYPE_CHECKING:
    from riverpy.events import EventKind, LeaseEventKind


class EventMethods(ClientMethods):
    """The methods of a client that subscribe to its events."""

    def subscribe(
        self, *kinds: EventKind | LeaseEventKind, size: int = SUBSCRIPTION_SIZE_DEFAULT
    ) -> Subscription:
        """Subscribe to events of this client's jobs, queues and leases: `async with
        client.subscribe(…) as events: async for …`.

        Args:
            kinds: the kinds of events; at least one. `*EventKind`: all events of jobs and queues;
                `*LeaseEventKind`: all events of leases, singletons and leadership.
            size: the number of events that may wait for the reader. Further events are dropped and
                counted in `events.dropped`. Default 10,000.

        Raises:
            ConfigError: there is no kind, a kind is unknown, or the size is below 1.
        """
        return self._subscriptions.subscribe(kinds, size)

    def leadership(self) -> LeadershipSubscription:
        """Subscribe to changes of leadership: `async with client.leadership() as changes: async for
        change in changes: …`. The first item is the current state.

        Up to 10,000 changes wait for a slow reader. Then the oldest changes are dropped.
        """
        return LeadershipSubscription(self._leadership)

    @cached_property
    def _subscriptions(self) -> SubscriptionManager:
        return SubscriptionManager()

    @cached_property
    def _leadership(self) -> LeadershipPublisher:
        return LeadershipPublisher(lambda: self.id, lambda: self._config.domain)
