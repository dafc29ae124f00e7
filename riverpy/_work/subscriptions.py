"""Subscriptions: hand events to those who asked, without ever waiting for them."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from riverpy._log import get_logger
from riverpy._log_events import EVENT_DROPPED, SUBSCRIBER_EVENTS_DROPPED
from riverpy._stream import Stream, Streams
from riverpy.errors import ConfigError
from riverpy.events import Event, EventKind, JobStatistics
from riverpy.job import JobColumn, JobRow, JobState, raw_timestamp, timestamp

if TYPE_CHECKING:
    from collections.abc import Iterable

    from riverpy._work.attempt import Attempt

SUBSCRIPTION_SIZE_DEFAULT = 10_000
"""Events that wait for a subscriber; more than one flush of the completer brings."""


class Subscription(Stream[Event]):
    """An async iterator over events of the kinds asked for: `async with` opens it, `async for`
    reads it.

    It ends when the client stops. Events that come while it is full are dropped, and counted in
    `dropped`.
    """

    def __init__(self, owner: Subscriptions, kinds: frozenset[EventKind], size: int) -> None:
        super().__init__(owner, size)
        self.kinds = kinds

    def put(self, event: Event) -> None:
        """Take an event, or drop it where there is no room."""
        if self._is_full:
            self._drop(SUBSCRIBER_EVENTS_DROPPED)
        else:
            self._append(event)


class Subscriptions(Streams[Subscription]):
    """Who is subscribed to the events of a client."""

    def __init__(self) -> None:
        super().__init__()
        self._log = get_logger()
        self._limited_log = self._log.limited()

    def subscribe(self, kinds: Iterable[EventKind | str], size: int) -> Subscription:
        """Make a subscription; entering it opens it.

        Raises:
            ConfigError: no kind, an unknown kind, or a size below 1.
        """
        try:
            wanted = frozenset(EventKind(kind) for kind in kinds)
        except ValueError as error:
            known = ", ".join(EventKind)
            raise ConfigError(f"{error}; the kinds of events are {known}") from None
        if not wanted:
            raise ConfigError("name the kinds of events to subscribe to")
        if size < 1:
            raise ConfigError(f"the size of a subscription is 1 or more, got {size}")
        return Subscription(self, wanted, size)

    def publish_attempts(self, attempts: list[Attempt]) -> None:
        """Tell of attempts whose results were stored. Without a subscriber it costs nothing a
        job."""
        if not self._open:
            return
        for attempt in attempts:
            kind = attempt.event
            takers = [one for one in self._open if kind in one.kinds]
            if takers:
                self._publish(attempt, kind, takers)

    def _publish(self, attempt: Attempt, kind: EventKind, takers: list[Subscription]) -> None:
        try:
            event = _job_event(attempt, kind)
        except Exception:  # a row that cannot be told of harms nothing but its event
            self._limited_log.exception(EVENT_DROPPED, job_id=attempt.id)
            return
        for subscription in takers:
            subscription.put(event)

    def publish_queue(self, kind: EventKind, queue: str) -> None:
        """Tell of a queue that was paused or resumed."""
        for subscription in self._open:
            if kind in subscription.kinds:
                subscription.put(Event(kind, queue=queue))


def _job_event(attempt: Attempt, kind: EventKind) -> Event:
    if attempt.stored_row is not None:
        row = list(attempt.stored_row)
    else:
        row = list(attempt.columns())
        _store_outcome(row, attempt)
    attempted_at = timestamp(row[JobColumn.ATTEMPTED_AT])
    due = max(attempt.scheduled_at, attempt.created_at)
    started = attempt.started or attempt.ended  # one that is given back did not run
    wait = timedelta(0)
    if attempted_at is not None:
        wait = attempted_at - due + timedelta(seconds=started - attempt.claimed)
    statistics = JobStatistics(
        queue_wait=max(wait, timedelta(0)),
        run=timedelta(seconds=attempt.ended - started),
        complete=timedelta(seconds=attempt.stored - attempt.ended),
    )
    return Event(kind, job=JobRow(row), statistics=statistics)


def _store_outcome(row: list[Any], attempt: Attempt) -> None:
    """Bring a claimed row to where the database has it now, but for times, which are this process's
    estimate."""
    outcome = attempt.outcome
    state = attempt.state_stored or attempt.target
    row[JobColumn.STATE] = state
    claimed = raw_timestamp(attempt.attempted_at) if attempt.attempted_at else 0
    is_as_asked = state == attempt.target
    if state in {JobState.COMPLETED, JobState.CANCELLED, JobState.DISCARDED}:
        at = attempt.ended if is_as_asked else attempt.stored
        row[JobColumn.FINALIZED_AT] = claimed + _microseconds(at - attempt.claimed)
    if outcome is not None:
        if outcome.error is not None:
            row[JobColumn.ERRORS] = [*(row[JobColumn.ERRORS] or ()), outcome.error]
        if not outcome.final and is_as_asked:
            row[JobColumn.ATTEMPT] = outcome.attempt
            if outcome.delay is not None:
                delay = attempt.stored - attempt.claimed + outcome.delay
                row[JobColumn.SCHEDULED_AT] = claimed + _microseconds(delay)
    row[JobColumn.METADATA] = attempt.merged_metadata()


def _microseconds(seconds: float) -> int:
    return int(seconds * 1e6)
