"""SubscriptionManager: delivers events to subscribers, and never waits for a subscriber."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from riverpy._log import get_logger
from riverpy._log_events import EVENT_DROPPED, SUBSCRIBER_EVENTS_DROPPED
from riverpy._stream import Stream, StreamGroup, check_stream_size
from riverpy._work.attempt_events import (
    make_attempt_end_event,
    make_attempt_end_message_for_clients,
    make_job_ended_by_leader_message,
    make_queue_or_lease_message,
    make_running_job_message,
)
from riverpy.errors import ConfigError
from riverpy.events import Event, EventKind, FleetEventKind, LeaseEventKind
from riverpy.job import JobState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from riverpy._fleet.outbox import FleetOutbox
    from riverpy._postgres.fleet import EndedJob
    from riverpy._work.attempt import Attempt
    from riverpy.job import JobRow

SUBSCRIPTION_SIZE_DEFAULT = 10_000
"""The default size of a subscription, i.e. the maximum number of events that wait in the
subscription until the subscriber reads them. The completer publishes fewer events than this at a
time, so a subscriber that reads all the time loses no events."""


def parse_event_kind(value: EventKind | LeaseEventKind | str) -> EventKind | LeaseEventKind:
    """Return the kind of events that has this value. Raise ConfigError if there is no such kind."""
    for kind in (*EventKind, *LeaseEventKind):
        if kind == value:
            return kind
    if value in list(FleetEventKind):
        raise ConfigError(f"events of the kind {value!r} need fleet=True")
    known = ", ".join((*EventKind, *LeaseEventKind))
    raise ConfigError(f"{value!r} is not a kind of events; the kinds of events are {known}")


class Subscription(Stream[Event]):
    """An async iterator over the events of some kinds. `async with` opens it, and `async for` reads
    the events.

    The iteration ends when the client stops. If the subscription is full, new events are dropped
    and counted in `dropped`.
    """

    def __init__(
        self, owner: SubscriptionManager, kinds: frozenset[EventKind | LeaseEventKind], size: int
    ) -> None:
        super().__init__(owner, size)
        self.kinds = kinds

    def put(self, event: Event) -> None:
        """Add an event. If the subscription is full, drop the event."""
        if self._is_full:
            self._count_dropped_item(SUBSCRIBER_EVENTS_DROPPED)
        else:
            self._append_item(event)


class SubscriptionManager(StreamGroup[Subscription]):
    """The open subscriptions of a client."""

    def __init__(self) -> None:
        super().__init__()
        self._log = get_logger()
        self._limited_log = self._log.with_rate_limit()
        self.fleet_outbox: FleetOutbox | None = None
        """The events that are sent to the clients that follow this client, for example with a
        subscription that has `fleet=True`. None: no client follows it."""

    def subscribe(
        self, kinds: Iterable[EventKind | LeaseEventKind | str], size: int
    ) -> Subscription:
        """Create a subscription for events of these kinds. `async with` opens it. `size` is the
        maximum number of events that wait until the subscriber reads them.

        Raises:
            ConfigError: `kinds` is empty, a kind is unknown, or `size` is below 1.
        """
        wanted = frozenset(map(parse_event_kind, kinds))
        if not wanted:
            raise ConfigError("name the kinds of events to subscribe to")
        check_stream_size(size)
        return Subscription(self, wanted, size)

    def publish_attempt_ends(self, attempts: list[Attempt]) -> None:
        """Publish an event for each attempt that has ended. The results of the attempts must
        already be stored."""
        if self.fleet_outbox is not None:
            for attempt in attempts:
                kind = attempt.event_kind
                make_message = partial(make_attempt_end_message_for_clients, kind, attempt)
                self.fleet_outbox.add_job_event(kind, attempt, make_message)
        if not self._open_streams:
            return
        for attempt in attempts:
            kind = attempt.event_kind
            subscribers = [one for one in self._open_streams if kind in one.kinds]
            if subscribers:
                self._publish_attempt_end(attempt, kind, subscribers)

    def _publish_attempt_end(
        self, attempt: Attempt, kind: EventKind, subscribers: list[Subscription]
    ) -> None:
        try:
            event = make_attempt_end_event(attempt, kind)
        except Exception:  # the row cannot be decoded: drop only this event
            self._limited_log.exception(EVENT_DROPPED, job_id=attempt.id)
            return
        for subscription in subscribers:
            subscription.put(event)

    def publish_queue_event(self, kind: EventKind, queue: str) -> None:
        """Publish the event that a queue was paused or resumed."""
        self.publish_event(Event(kind, queue=queue))

    def publish_event(self, event: Event) -> None:
        """Publish an event of a queue or a lease to all subscriptions for its kind."""
        if self.fleet_outbox is not None:
            self.fleet_outbox.add_event(
                event.kind, partial(make_queue_or_lease_message, event), queue=event.queue or ""
            )
        for subscription in self._open_streams:
            if event.kind in subscription.kinds:
                subscription.put(event)

    # -- events for the clients that follow this client

    def publish_started_jobs(self, jobs: Iterable[JobRow]) -> None:
        """Send an event about each started job to the clients that follow this client."""
        for job in jobs:
            self._send_running_job_event(FleetEventKind.JOB_STARTED, job)

    def publish_saved_output(self, job: JobRow) -> None:
        """Send an event about the stored output of a running job to the clients that follow this
        client."""
        self._send_running_job_event(FleetEventKind.JOB_OUTPUT_SAVED, job)

    def publish_progress(self, job: JobRow, progress_text: str) -> None:
        """Send the progress of a running job to the clients that follow this client.
        `progress_text` is JSON."""
        self._send_running_job_event(FleetEventKind.JOB_PROGRESS, job, progress_text)

    @property
    def has_followers(self) -> bool:
        """Whether any client has asked to receive the events of this client, for example with a
        subscription that has `fleet=True`."""
        return self.fleet_outbox is not None

    def publish_jobs_ended_by_leader(
        self, jobs: Iterable[EndedJob], state_by_id: Mapping[int, str]
    ) -> None:
        """Send an event about each job that this client, as the leader, has ended. The clients that
        follow this client receive the event. `state_by_id` has the new state of each job."""
        if self.fleet_outbox is None:
            return
        for job in jobs:
            state = state_by_id[job.id]
            is_cancelled = state == JobState.CANCELLED
            kind = EventKind.JOB_CANCELLED if is_cancelled else EventKind.JOB_FAILED
            make_message = partial(make_job_ended_by_leader_message, kind, job, state)
            self.fleet_outbox.add_event(
                kind, make_message, kind_of_job=job.kind, queue=job.queue, job_id=job.id
            )

    def count_dropped_events(self, count: int) -> None:
        """Count events that were dropped instead of sent to the clients that follow this client."""
        if self.fleet_outbox is not None:
            self.fleet_outbox.dropped_count += count

    def _send_running_job_event(
        self, kind: FleetEventKind, job: JobRow, progress_text: str | None = None
    ) -> None:
        if self.fleet_outbox is not None:
            make_message = partial(make_running_job_message, kind, job, progress_text)
            self.fleet_outbox.add_job_event(kind, job, make_message)
