"""FleetOutbox: the queue of events that a client will send to its followers. A follower is a client
that wants to receive them."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from riverpy._fleet.messages import encode_ascii_json
from riverpy._log import get_logger
from riverpy._log_events import EVENT_DROPPED
from riverpy._timestamps import encode_timestamp

if TYPE_CHECKING:
    from collections.abc import Callable
    from enum import StrEnum

    from riverpy._fleet.filters import FollowFilter
    from riverpy._fleet.messages import EventMessage
    from riverpy.job import JobRow

OUTBOX_SIZE_MAX = 2_000
"""The maximum number of events in the outbox. If there are more, the oldest are dropped."""


class FleetOutbox:
    """The queue of events that a client will send to its followers. Use it only in the event
    loop."""

    def __init__(self, wake_sender: Callable[[], None]) -> None:
        """Create an empty outbox. The outbox calls `wake_sender` when an event is added and no
        other event waits."""
        self._wake_sender = wake_sender
        self._waiting_events: deque[tuple[datetime, Callable[[], EventMessage]]] = deque()
        """The time of each event, and the function that makes the event's message when the event is
        sent."""
        self.filters: list[FollowFilter] = []
        """The filters of all followers. An event that matches no filter is not added."""
        self.dropped_count = 0
        """The number of events that were dropped since the last payload was sent."""
        self._log = get_logger().with_rate_limit()

    def __len__(self) -> int:
        return len(self._waiting_events)

    def add_event(
        self,
        event: StrEnum,
        make_message: Callable[[], EventMessage],
        *,
        kind_of_job: str = "",
        queue: str = "",
        job_id: int = 0,
    ) -> None:
        """Add an event if it matches a filter. `make_message` is called when the event is sent, and
        not if the event is dropped."""
        for one in self.filters:
            if one.matches_event(event.value, kind_of_job, queue, job_id):
                break
        else:
            return
        if len(self._waiting_events) >= OUTBOX_SIZE_MAX:
            self._waiting_events.popleft()
            self.dropped_count += 1
        self._waiting_events.append((datetime.now(UTC), make_message))
        if len(self._waiting_events) == 1:
            self._wake_sender()

    def add_job_event(
        self, event: StrEnum, job: JobRow, make_message: Callable[[], EventMessage]
    ) -> None:
        """Add an event of a job if the event matches a filter. `make_message` is called when the
        event is sent."""
        self.add_event(event, make_message, kind_of_job=job.kind, queue=job.queue, job_id=job.id)

    def clear(self) -> None:
        """Drop all events. The publisher calls this when no client follows this client any more."""
        self._waiting_events.clear()
        self.dropped_count = 0

    def take_encoded_events(self, count: int, length_max: int) -> list[str]:
        """Remove up to `count` events, the oldest first, and return them as JSON texts. If a text
        is longer than `length_max` bytes, leave out the error, the progress text and the reason.
        Drop an event that is still too long or that cannot be encoded."""
        lines: list[str] = []
        for _ in range(min(count, len(self._waiting_events))):
            at, make_message = self._waiting_events.popleft()
            try:
                message = make_message()
                message.at = encode_timestamp(at)
                line = encode_ascii_json(message)
                if len(line) > length_max:
                    message.error = message.text = message.reason = ""
                    line = encode_ascii_json(message)
            except Exception:  # drop only the event that cannot be encoded
                self._log.exception(EVENT_DROPPED)
                line = ""
            if not line or len(line) > length_max:
                self.dropped_count += 1
            else:
                lines.append(line)
        return lines
