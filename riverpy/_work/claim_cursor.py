"""ClaimCursor: the position in a queue from which a client claims jobs.

A claim reads an index in the order of priority, time and id. A claim is slow if it has to read many
index entries before the first available job. These entries are of two kinds: jobs that were already
claimed, which the server keeps while a transaction holds an old snapshot, and jobs of kinds that
this client does not work. When claims are slow, the next claim starts at the position of the last
one. There is one position per priority, because new jobs of a higher priority come before older
ones. At intervals a claim starts at the beginning. It finds the jobs that were skipped, because
their transaction committed late or because their row was locked.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from riverpy.job import JobColumn

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOW = 0.01
"""Seconds. A claim is slow if it takes this much longer than the fastest claim."""
SLOW_PER_ROW = 0.00004
"""Seconds that are added to `SLOW` for each claimed row."""
FULL_SHARE = 0.02
"""The share of the time that claims from the beginning may take, from 0 to 1."""
FULL_INTERVAL_MIN = 0.2
"""The shortest time between two claims from the beginning, in seconds."""
FULL_INTERVAL_MAX = 2.0
"""The longest time between two claims from the beginning, in seconds. A skipped job waits at most
this long."""
COMMIT_DELAY_MAX = 1.0
"""The longest expected time between `scheduled_at` of a job and its commit, in seconds. The cursor
may skip a job that commits later."""
PRIORITIES = range(1, 5)
_order = itemgetter(JobColumn.PRIORITY, JobColumn.SCHEDULED_AT, JobColumn.ID)


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
    """The positions of one client in one queue. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._positions: dict[int, Position] = {}
        """The position of each priority; empty: claims are fast and start at the beginning."""
        self._full_claim_at = 0.0
        """The time of the next claim from the beginning."""
        self._is_overdue = False
        self._fastest = math.inf
        self._was_slow = False

    def ranges(self, now: float) -> Sequence[QueueRange]:
        """Return the ranges to claim from, in this order, until enough jobs are found.

        The whole queue comes last, because reading it is slow. If the claim from the beginning is
        overdue, because the other ranges had enough jobs, the whole queue is the only range.
        """
        if not self._positions or self._is_overdue:
            return (WHOLE_QUEUE,)
        parts = [
            QueueRange(self._positions.get(priority, Position(priority, -(2**63), 0)), priority)
            for priority in PRIORITIES
        ]
        return [*parts, WHOLE_QUEUE] if now >= self._full_claim_at else parts

    def seconds_to_full_claim(self, now: float) -> float | None:
        """Return the seconds until the next claim from the beginning. None: each claim starts at
        the beginning."""
        return max(self._full_claim_at - now, 0.0) if self._positions else None

    def is_slow(self, part: QueueRange, rows: int, took: float) -> bool:
        """Return whether the last two claims from the beginning were slow. If so, the caller calls
        `start_skipping`. One slow claim is ignored, because it may have any reason."""
        self._fastest = min(self._fastest, took)
        if part != WHOLE_QUEUE:
            return False
        was_slow = self._was_slow
        self._was_slow = took - self._fastest > SLOW + SLOW_PER_ROW * rows
        return was_slow and self._was_slow

    def start_skipping(
        self, rows: Sequence[Any], *, is_full: bool, seen_at: int, took: float, now: float
    ) -> None:
        """Set the positions after a slow claim from the beginning. Later claims skip the jobs
        before these positions.

        Args:
            rows: the claimed rows, in any order.
            is_full: whether the claim returned as many rows as requested. Then the queue may hold
                more jobs.
            seen_at: the server's time before the claim, in microseconds since 2000. The claim saw
                the jobs up to this time.
            took: the duration of the claim, in seconds.
            now: the end of the claim, in monotonic seconds.
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
