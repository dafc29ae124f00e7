"""SubscriptionManager: deliver events to subscribers, without waiting for the subscribers."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from riverpy._log import get_logger
from riverpy._log_events import EVENT_DROPPED, SUBSCRIBER_EVENTS_DROPPED
from riverpy._stream import Stream, StreamGroup
from riverpy._timestamps import decode_timestamp, encode_timestamp
from riverpy.errors import ConfigError
from riverpy.events import Event, EventKind, JobStatistics, LeaseEventKind
from riverpy.job import JobColumn, JobRow, JobState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from riverpy._work.attempt import Attempt

SUBSCRIPTION_SIZE_DEFAULT = 10_000
"""The default number of events that may wait for a subscriber. The completer publishes fewer events
than this at a time, so a subscriber that reads all the time loses no events."""


def parse_event_kind(value: EventKind | LeaseEventKind | str) -> EventKind | LeaseEventKind:
    """Return the kind of events with this value.

    Raises:
        ConfigError: there is no such kind.
    """
    for kind in (*EventKind, *LeaseEventKind):
        if kind == value:
            return kind
    known = ", ".join((*EventKind, *LeaseEventKind))
    raise ConfigError(f"{value!r} is not a kind of events; the kinds of events are {known}")


class Subscription(Stream[Event]):
    """An async iterator over events of some kinds: `async with` opens it, and `async for` reads the
    events.

    The iteration ends when the client stops. Events that arrive while the subscription is full are
    dropped and counted in `dropped`.
    """

    def __init__(
        self, owner: SubscriptionManager, kinds: frozenset[EventKind | LeaseEventKind], size: int
    ) -> None:
        super().__init__(owner, size)
        self.kinds = kinds

    def put(self, event: Event) -> None:
        """Add an event, or drop it if there is no room."""
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

    def subscribe(
        self, kinds: Iterable[EventKind | LeaseEventKind | str], size: int
    ) -> Subscription:
        """Create a subscription. `async with` opens it.

        Raises:
            ConfigError: there is no kind, a kind is unknown, or the size is below 1.
        """
        wanted = frozenset(map(parse_event_kind, kinds))
        if not wanted:
            raise ConfigError("name the kinds of events to subscribe to")
        if size < 1:
            raise ConfigError(f"the size of a subscription is 1 or more, got {size}")
        return Subscription(self, wanted, size)

    def publish_attempts(self, attempts: list[Attempt]) -> None:
        """Publish the events of attempts whose results were stored."""
        if not self._open_streams:
            return
        for attempt in attempts:
            kind = attempt.event_kind
            subscribers = [one for one in self._open_streams if kind in one.kinds]
            if subscribers:
                self._publish_attempt(attempt, kind, subscribers)

    def _publish_attempt(
        self, attempt: Attempt, kind: EventKind, subscribers: list[Subscription]
    ) -> None:
        try:
            event = _make_job_event(attempt, kind)
        except Exception:  # the row cannot be read: drop only this event
            self._limited_log.exception(EVENT_DROPPED, job_id=attempt.id)
            return
        for subscription in subscribers:
            subscription.put(event)

    def publish_queue_event(self, kind: EventKind, queue: str) -> None:
        """Publish that a queue was paused or resumed."""
        self.publish(Event(kind, queue=queue))

    def publish(self, event: Event) -> None:
        """Publish one event to the subscriptions of its kind."""
        for subscription in self._open_streams:
            if event.kind in subscription.kinds:
                subscription.put(event)


def _make_job_event(attempt: Attempt, kind: EventKind) -> Event:
    if attempt.stored_row is not None:
        row = list(attempt.stored_row)
    else:
        row = list(attempt.columns())
        _apply_outcome_to_row(row, attempt)
    attempted_at = decode_timestamp(row[JobColumn.ATTEMPTED_AT])
    due = max(attempt.scheduled_at, attempt.created_at)
    started = attempt.started_at or attempt.ended_at  # 0 if the job was released before its start
    wait = timedelta(0)
    if attempted_at is not None:
        wait = attempted_at - due + timedelta(seconds=started - attempt.claimed_at)
    statistics = JobStatistics(
        queue_wait=max(wait, timedelta(0)),
        run=timedelta(seconds=attempt.ended_at - started),
        complete=timedelta(seconds=attempt.stored_at - attempt.ended_at),
    )
    return Event(kind, job=JobRow(row), statistics=statistics)


def _apply_outcome_to_row(row: list[Any], attempt: Attempt) -> None:
    """Change a claimed row in the same way as the database changed it to store the outcome. The
    times are estimates."""
    outcome = attempt.outcome
    state = attempt.stored_state or attempt.target_state
    row[JobColumn.STATE] = state
    claimed = encode_timestamp(attempt.attempted_at) if attempt.attempted_at else 0
    is_target_state = state == attempt.target_state
    if state in {JobState.COMPLETED, JobState.CANCELLED, JobState.DISCARDED}:
        at = attempt.ended_at if is_target_state else attempt.stored_at
        row[JobColumn.FINALIZED_AT] = claimed + _to_microseconds(at - attempt.claimed_at)
    if outcome is not None:
        if outcome.error_entry is not None:
            row[JobColumn.ERRORS] = [*(row[JobColumn.ERRORS] or ()), outcome.error_entry]
        if not outcome.is_final and is_target_state:
            row[JobColumn.ATTEMPT] = outcome.attempt_to_store
            if outcome.seconds_until_due is not None:
                delay = attempt.stored_at - attempt.claimed_at + outcome.seconds_until_due
                row[JobColumn.SCHEDULED_AT] = claimed + _to_microseconds(delay)
    row[JobColumn.METADATA] = attempt.encode_merged_metadata()


def _to_microseconds(seconds: float) -> int:
    return int(seconds * 1e6)
