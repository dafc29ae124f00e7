"""ClaimCursor: the position in a queue from which a client claims jobs.

Claims walk an index in the order of priority, time and id. Two things before the first available
job make a claim slow: index entries of jobs that were claimed before, which the server keeps while
a transaction holds an old snapshot, and jobs of kinds that this client does not work. When claims
become slow, they start after the last position they have seen. There is one position per priority,
because new jobs of a higher priority come before older ones. From time to time a claim starts at
the beginning and finds what was skipped: a transaction that committed late, or a row that was
locked.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from riverpy.job import JobColumn

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOW = 0.01
"""Seconds that a claim without rows may take longer than the fastest claim before it counts as
slow."""
SLOW_PER_ROW = 0.00004
"""Additional seconds for each claimed row."""
FULL_SHARE = 0.02
"""The share of time that claims from the beginning may take."""
FULL_INTERVAL_MIN = 0.2
FULL_INTERVAL_MAX = 2.0
"""Seconds between two claims from the beginning, at most. A skipped job waits no longer."""
COMMIT_DELAY_MAX = 1.0
"""Seconds between the time of a job and its commit. A job that is committed later may be
skipped."""
PRIORITIES = range(1, 5)
_order = itemgetter(JobColumn.PRIORITY, JobColumn.SCHEDULED_AT, JobColumn.ID)


class Position(NamedTuple):
    """A position in the order of claims. The time is raw: microseconds since 2000."""

    priority: int
    scheduled_at: int
    id: int


class QueueRange(NamedTuple):
    """A range of the queue, from after a position to the end of a priority."""

    after: Position
    last_priority: int


WHOLE_QUEUE = QueueRange(Position(0, -(2**63), 0), PRIORITIES[-1])


class ClaimCursor:
    """The positions in one queue, as one client knows them. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._positions: dict[int, Position] = {}
        """By priority; empty while claims are fast."""
        self._full_claim_at = 0.0
        """When the next claim from the beginning is due."""
        self._is_overdue = False
        self._fastest = math.inf
        self._was_slow = False

    def ranges(self, now: float) -> Sequence[QueueRange]:
        """Return where to claim, in this order, until enough jobs are found.

        A claim from the beginning comes last, so that it delays no job. It comes first if it was
        due before and the other ranges already had enough jobs.
        """
        if not self._positions or self._is_overdue:
            return (WHOLE_QUEUE,)
        parts = [
            QueueRange(self._positions.get(priority, Position(priority, -(2**63), 0)), priority)
            for priority in PRIORITIES
        ]
        return [*parts, WHOLE_QUEUE] if now >= self._full_claim_at else parts

    def seconds_to_full_claim(self, now: float) -> float | None:
        """Return the seconds until a claim from the beginning is due. None: each claim starts
        there."""
        return max(self._full_claim_at - now, 0.0) if self._positions else None

    def is_slow(self, part: QueueRange, rows: int, took: float) -> bool:
        """Return whether the last two claims from the beginning were slow. Then call
        `start_skipping`. A single claim may be slow for any reason."""
        self._fastest = min(self._fastest, took)
        if part != WHOLE_QUEUE:
            return False
        was_slow = self._was_slow
        self._was_slow = took - self._fastest > SLOW + SLOW_PER_ROW * rows
        return was_slow and self._was_slow

    def start_skipping(
        self, rows: Sequence[Any], *, is_full: bool, seen_at: int, took: float, now: float
    ) -> None:
        """Skip the jobs before the positions that a slow claim from the beginning has reached.

        Args:
            rows: the claimed rows, in any order.
            is_full: as many rows as requested, so there may be more.
            seen_at: a raw server time before the claim. Jobs up to this time were visible.
            took, now: the duration and the end of the claim.
        """
        pause = min(max(took / FULL_SHARE, FULL_INTERVAL_MIN), FULL_INTERVAL_MAX)
        self._full_claim_at, self._is_overdue = now + pause, False
        last = max(map(_order, rows)) if is_full else None
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
        """Record a claim that was not slow."""
        if part == WHOLE_QUEUE:
            self._positions.clear()
            self._is_overdue = False
        elif is_full:
            last = Position(*max(map(_order, rows)))
            self._positions[last.priority] = last
            self._is_overdue = now >= self._full_claim_at
