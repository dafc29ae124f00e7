"""ClaimCursor: the position in a queue from which a client claims jobs.

A claim reads an index in the order of priority, time and id. A claim is slow if it has to read many
index entries before the first available job. These entries belong to jobs that were already
claimed, or whose kind this client does not work. When claims are slow, the next claim starts at the
position of the last claim. There is one position per priority, because new jobs of a higher
priority come before older jobs of a lower priority. At intervals a claim starts at the beginning of
the index. Such a claim finds jobs that were skipped because their transaction was committed late,
or because their row was locked.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from riverpy.job import JobColumn

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOW_CLAIM_EXTRA_TIME = 0.01
"""Seconds. A claim is slow if it takes longer than the fastest claim of this cursor plus this
time."""
SLOW_CLAIM_EXTRA_TIME_PER_ROW = 0.00004
"""Seconds that are added to `SLOW_CLAIM_EXTRA_TIME` for each claimed row."""
FULL_CLAIM_TIME_SHARE = 0.02
"""The maximum fraction of the time that claims from the beginning of the index may take."""
FULL_CLAIM_INTERVAL_MIN = 0.2
"""The shortest time between two claims from the beginning of the index, in seconds."""
FULL_CLAIM_INTERVAL_MAX = 2.0
"""The longest time between two claims from the beginning of the index, in seconds. A skipped job is
claimed within this time."""
COMMIT_DELAY_MAX = 1.0
"""Seconds. The cursor may skip a job that is committed more than this time after its
`scheduled_at`."""
PRIORITIES = range(1, 5)
_claim_order = itemgetter(JobColumn.PRIORITY, JobColumn.SCHEDULED_AT, JobColumn.ID)


class Position(NamedTuple):
    """A position in the order of claims. `scheduled_at` is in microseconds since 2000, as in the
    database."""

    priority: int
    scheduled_at: int
    id: int


class QueueRange(NamedTuple):
    """The part of a queue after a position, up to and including a priority."""

    after: Position
    last_priority: int


WHOLE_QUEUE = QueueRange(Position(0, -(2**63), 0), PRIORITIES[-1])


class ClaimCursor:
    """The positions after which one client claims jobs of one queue. Times are monotonic
    seconds."""

    def __init__(self) -> None:
        self._positions: dict[int, Position] = {}
        """The position of each priority. If empty, claims are fast and start at the beginning of
        the index."""
        self._full_claim_at = 0.0
        """The time of the next claim from the beginning of the index."""
        self._is_full_claim_overdue = False
        self._fastest_claim_time = math.inf
        self._was_last_claim_slow = False

    def ranges(self, now: float) -> Sequence[QueueRange]:
        """Return the ranges of the queue. The caller claims from them in this order until it has
        enough jobs.

        When it is time for a claim from the beginning of the index, the last range is the whole
        queue. If the ranges before it had enough jobs, the next call returns only the whole queue.
        """
        if not self._positions or self._is_full_claim_overdue:
            return (WHOLE_QUEUE,)
        parts = [
            QueueRange(self._positions.get(priority, Position(priority, -(2**63), 0)), priority)
            for priority in PRIORITIES
        ]
        return [*parts, WHOLE_QUEUE] if now >= self._full_claim_at else parts

    def seconds_to_full_claim(self, now: float) -> float | None:
        """Return the seconds until the next claim from the beginning of the index; None: each claim
        starts at the beginning."""
        return max(self._full_claim_at - now, 0.0) if self._positions else None

    def record_duration(self, part: QueueRange, rows: int, took: float) -> bool:
        """Record the duration of a claim in seconds. Return whether the last two claims of the
        whole queue were slow. If they were, the caller must call `start_skipping`."""
        self._fastest_claim_time = min(self._fastest_claim_time, took)
        if part != WHOLE_QUEUE:
            return False
        was_slow = self._was_last_claim_slow
        self._was_last_claim_slow = (
            took - self._fastest_claim_time
            > SLOW_CLAIM_EXTRA_TIME + SLOW_CLAIM_EXTRA_TIME_PER_ROW * rows
        )
        return was_slow and self._was_last_claim_slow

    def start_skipping(
        self, rows: Sequence[Any], *, is_full: bool, seen_at: int, took: float, now: float
    ) -> None:
        """Set the positions after a slow claim of the whole queue. Later claims skip the jobs
        before these positions.

        Args:
            rows: the claimed rows, in any order.
            is_full: whether the claim returned as many rows as requested. If so, the queue may hold
                more jobs.
            seen_at: the server's time before the claim, in microseconds since 2000. The claim saw
                the jobs up to this time.
            took: the duration of the claim, in seconds.
            now: the end of the claim, in monotonic seconds.
        """
        pause = min(
            max(took / FULL_CLAIM_TIME_SHARE, FULL_CLAIM_INTERVAL_MIN), FULL_CLAIM_INTERVAL_MAX
        )
        self._full_claim_at, self._is_full_claim_overdue = now + pause, False
        last = max(map(_claim_order, rows)) if is_full else None
        for priority in PRIORITIES:
            if last is not None and last[0] <= priority:
                self._positions.setdefault(priority, Position(priority, -(2**63), 0))
            else:
                self._positions[priority] = Position(
                    priority, seen_at - int(COMMIT_DELAY_MAX * 1e6), 0
                )
        if last is not None:
            self._positions[last[0]] = Position(*last)

    def record_claim(
        self, part: QueueRange, rows: Sequence[Any], *, is_full: bool, now: float
    ) -> None:
        """Set the positions after a fast claim."""
        if part == WHOLE_QUEUE:
            self._positions.clear()
            self._is_full_claim_overdue = False
        elif is_full:
            last = Position(*max(map(_claim_order, rows)))
            self._positions[last.priority] = last
            self._is_full_claim_overdue = now >= self._full_claim_at
