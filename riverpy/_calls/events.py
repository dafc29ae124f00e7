"""EventMethods: the methods of a client that subscribe to events."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Literal, overload

from riverpy._calls.job_page import check_job_id
from riverpy._calls.listening import LISTENER_POOL_SIZE_MIN, ListeningMethods
from riverpy._fleet.filters import make_follow_filter
from riverpy._fleet.row_reader import RowReader
from riverpy._fleet.subscription import FleetStream, FleetSubscription
from riverpy._fleet.watch import JobWatch
from riverpy._leading.subscriptions import LeadershipPublisher, LeadershipSubscription
from riverpy._postgres.driver import is_pool
from riverpy._stream import check_stream_size
from riverpy._work.subscriptions import SUBSCRIPTION_SIZE_DEFAULT, Subscription, SubscriptionManager
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

    from riverpy._fleet.follower import FleetFollower
    from riverpy.events import EventKind, FleetEventKind, LeaseEventKind


class EventMethods(ListeningMethods):
    """The methods of a client that subscribe to events."""

    @overload
    def subscribe(
        self,
        *kinds: EventKind | LeaseEventKind,
        size: int = ...,
        fleet: Literal[False] = ...,
    ) -> Subscription: ...
    @overload
    def subscribe(
        self,
        *kinds: EventKind | LeaseEventKind | FleetEventKind,
        size: int = ...,
        fleet: Literal[True],
        job_kinds: Collection[str] | None = ...,
        queues: Collection[str] | None = ...,
        job_ids: Collection[int] | None = ...,
    ) -> FleetSubscription: ...
    def subscribe(
        self,
        *kinds: EventKind | LeaseEventKind | FleetEventKind,
        size: int = SUBSCRIPTION_SIZE_DEFAULT,
        fleet: bool = False,
        job_kinds: Collection[str] | None = None,
        queues: Collection[str] | None = None,
        job_ids: Collection[int] | None = None,
    ) -> Subscription | FleetSubscription:
        """Subscribe to events of this client's jobs, queues and leases: `async with
        client.subscribe(…) as events: async for event in events: …`. With `fleet=True`, subscribe
        to the events of all running clients of the database, in all processes.

        With `fleet=True`, events may be lost, so read the row of a job to know its state. The jobs
        in these events have no args and no metadata: see `Event.job`. Clients with `poll_only`,
        clients that are not running, and River in Go send no such events.

        Args:
            kinds: the kinds of events; at least one. `*EventKind`: all events of jobs and queues;
                `*LeaseEventKind`: all events of leases, singletons and leadership;
                `*FleetEventKind`: starts of attempts, and progress and saved outputs of running
                jobs, only with `fleet=True`.
            size: the maximum number of events that wait for a slow reader. Further events are
                dropped and counted in `events.dropped`. Default 10,000.
            fleet: whether to subscribe to the events of all clients. Default False.
            job_kinds: receive only events of jobs of these kinds. Default None: all events.
                `job_kinds`, `queues` and `job_ids` need `fleet=True`.
            queues: receive only events of these queues. Default None: all events.
            job_ids: receive only events of these jobs. Default None: all events.

        Raises:
            ConfigError: there is no kind, a kind is unknown or needs `fleet=True`, the size is
                below 1, a filter is empty or has a wrong type, or the client's settings do not
                allow notifications.
        """
        if not fleet:
            if any(one is not None for one in (job_kinds, queues, job_ids)):
                raise ConfigError("job_kinds, queues and job_ids filter only with fleet=True")
            return self._subscription_manager.subscribe(kinds, size)
        self._require_notifications_enabled()
        check_stream_size(size)
        follow_filter = make_follow_filter(kinds, job_kinds, queues, job_ids)
        follower = self._fleet_follower
        stream = FleetStream(follower, follow_filter, size)
        return FleetSubscription(stream, follower.wait_until_wanted_events_announced)

    def _require_notifications_enabled(self) -> None:
        """Raise ConfigError if the client's settings do not allow it to receive notifications."""
        config = self._config
        if config.poll_only:
            raise ConfigError("fleet=True needs notifications: set poll_only=False")
        if config.pooler and config.listen_url is None:
            raise ConfigError(
                "fleet=True needs notifications, which a pooler does not deliver: set "
                "Config(listen_url=…) to a URL that bypasses the pooler"
            )
        if (
            is_pool(self._database)
            and config.listen_url is None
            and self._database.get_max_size() < LISTENER_POOL_SIZE_MIN
        ):
            raise ConfigError(
                f"fleet=True needs a pool with at least {LISTENER_POOL_SIZE_MIN} connections, "
                "because it keeps one that listens"
            )

    def watch(self, job_id: int) -> JobWatch:
        """Watch one job until it ends: `async for change in client.watch(job_id): …`. Each item is
        a JobChange.

        The first item is the current state of the job. Another item follows when its state,
        attempt, progress or output changes. The iteration ends after the job is completed,
        cancelled or discarded. A slow reader receives only the newest state. A change by a riverpy
        worker arrives within milliseconds. Any other change, for example by River in Go, arrives
        within a second.

        To end a watch earlier, use `asyncio.timeout`. All watches of a client share one connection.
        Only one task may read a watch, so call `watch` once for each reader.

        Args:
            job_id: the id of the job.

        Raises:
            ConfigError: the id is not an integer of 64 bits.

        The iteration raises `NotFoundError` if the job does not exist or was deleted. It raises
        `ClientStateError` if the client is not open or closes, or if another task reads the watch.
        While the database cannot be reached, the iteration waits.
        """
        check_job_id(job_id)
        return JobWatch(RowReader(self._fleet_follower, job_id))

    @cached_property
    def _fleet_follower(self) -> FleetFollower:
        """The FleetFollower of this client, created at its first use. It reads the events of all
        running clients and the states of watched jobs."""
        from riverpy._fleet.follower import FleetFollower  # most clients do not need it

        return FleetFollower(
            self._get_open_pool,
            self._shared_pool_connection,
            self._listener,
            schema=self._config.schema,
            trace_internal=self._config.trace_internal,
        )

    async def _stop_fleet_follower(self) -> None:
        """End all subscriptions with `fleet=True` and all job watches. Called when the client
        closes."""
        # Forget the follower, because the next one may run in another event loop.
        follower: FleetFollower | None = vars(self).pop("_fleet_follower", None)
        if follower is not None:
            await follower.stop()

    def leadership(self) -> LeadershipSubscription:
        """Subscribe to this client's leadership, i.e. whether the client is the leader of its
        leader domain: `async with client.leadership() as changes: async for change in changes: …`.
        The first item is the current state. Another item follows when the client becomes leader or
        its term ends.

        At most 10,000 changes wait for a slow reader. If there are more, the oldest changes are
        dropped.
        """
        return LeadershipSubscription(self._leadership_publisher)

    @cached_property
    def _subscription_manager(self) -> SubscriptionManager:
        return SubscriptionManager()

    @cached_property
    def _leadership_publisher(self) -> LeadershipPublisher:
        return LeadershipPublisher(lambda: self.id, lambda: self._config.domain)
