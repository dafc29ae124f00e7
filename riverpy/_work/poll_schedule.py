"""PollSchedule: decides when idle queues are polled. Queues with the same interval are polled
together, so that one claim is enough for all of them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_JITTER_FRACTION = 0.1
"""The maximum random delay of a poll, as a fraction of the poll interval."""
POLL_JITTER_SECONDS_MIN = 0.01
"""The lower limit for the maximum random delay of a poll, in seconds. It matters for short poll
intervals."""
FIRST_POLL_JITTER_FRACTION = 0.5
"""The first poll after a notification comes earlier by a random time, up to this fraction of the
poll interval. Otherwise all clients that received the notification would poll at the same time."""


class PollGroup:
    """The queues of one run that have the same poll interval."""

    def __init__(self, interval: float) -> None:
        """`interval` is in seconds."""
        self.interval = interval
        self._waiting: dict[object, Callable[[], None]] = {}
        """For each queue that waits for its next poll, the function that polls it."""
        self._choose_random_delays()

    def _choose_random_delays(self) -> None:
        """Choose the random part of the next delays. It is the same for all queues of the group,
        and differs between clients."""
        early = self.interval * random.uniform(1 - FIRST_POLL_JITTER_FRACTION, 1)  # noqa: S311 (no secret)
        jitter = max(self.interval * POLL_JITTER_FRACTION, POLL_JITTER_SECONDS_MIN)
        self._first_delay = early
        self._delay = self.interval + random.uniform(0, jitter)  # noqa: S311

    def seconds_to_next_poll(self, *, is_woken_with_other_clients: bool) -> float:
        """Return the seconds from the last claim of a queue to its next poll. If other clients were
        woken at the same time, the poll comes earlier, by a random time."""
        return self._first_delay if is_woken_with_other_clients else self._delay

    def add_waiting_queue(self, queue: object, poll: Callable[[], None]) -> None:
        """Add a queue that waits for its next poll. `poll` is called when the group is polled."""
        self._waiting[queue] = poll

    def remove_waiting_queue(self, queue: object) -> None:
        """Remove a queue that no longer waits for its next poll, because its producer claims jobs
        now or stops."""
        self._waiting.pop(queue, None)

    def poll_waiting_queues(self) -> None:
        """Poll all waiting queues, because one of them is due for a poll."""
        self._choose_random_delays()
        waiting, self._waiting = self._waiting, {}
        for poll in waiting.values():
            poll()


class PollSchedule:
    """The poll groups of one run, one for each poll interval."""

    def __init__(self) -> None:
        self._groups: dict[float, PollGroup] = {}

    def get_or_create_group(self, interval: float) -> PollGroup:
        """Return the group of the queues with this poll interval, in seconds."""
        return self._groups.setdefault(interval, PollGroup(interval))
