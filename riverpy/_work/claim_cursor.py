"""ClaimCursor: where in its queue a client looks for its next jobs.

Claims walk an index in the order of priority, time and id. Two things can stand before the first
job that a claim takes and make it slow: entries of jobs that were claimed before, which the server
keeps while a transaction holds an old snapshot open, and waiting jobs of kinds that this client
does not work. Once claims have become slow, they start behind what they have seen: one place for
each priority, since new jobs of a higher priority stand before older ones. Now and then a claim
starts at the beginning, for what was passed over: a transaction that committed late, a row that
was locked.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from riverpy.job import JobColumn

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOW = 0.01
"""Seconds that a claim without a row may take longer than the fastest claim."""
SLOW_PER_ROW = 0.00004
"""Seconds more for each row that it brings."""
FULL_SHARE = 0.02
"""Share of the time that claims from the beginning may take."""
FULL_INTERVAL_MIN = 0.2
FULL_INTERVAL_MAX = 2.0
"""Seconds; how long a job that was passed over waits at most."""
COMMIT_DELAY_MAX = 1.0
"""Seconds between the time of a job and its commit after which it may be passed over."""
PRIORITIES = range(1, 5)
_order = itemgetter(JobColumn.PRIORITY, JobColumn.SCHEDULED_AT, JobColumn.ID)


class Position(NamedTuple):
    """A place in the order of claims. The time is raw, in microseconds since 2000."""

    priority: int
    scheduled_at: int
    id: int


class QueueRange(NamedTuple):
    """A part of the queue: what comes after a place, up to the end of a priority."""

    after: Position
    last_priority: int


WHOLE_QUEUE = QueueRange(Position(0, -(2**63), 0), PRIORITIES[-1])


class ClaimCursor:
    """The places of one queue, as one client knows them. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._positions: dict[int, Position] = {}
        """By priority; empty while claims are fast."""
        self._full_claim_at = 0.0
        """When a claim from the beginning is wanted again."""
        self._is_overdue = False
        self._fastest = math.inf
        self._was_slow = False

    def ranges(self, now: float) -> Sequence[QueueRange]:
        """Where to claim, in this order, until enough jobs are found.

        A claim from the beginning comes last, so that it holds up no job. It comes first when it
        had no turn, because the others found enough jobs.
        """
        if not self._positions or self._is_overdue:
            return (WHOLE_QUEUE,)
        parts = [
            QueueRange(self._positions.get(priority, Position(priority, -(2**63), 0)), priority)
            for priority in PRIORITIES
        ]
        return [*parts, WHOLE_QUEUE] if now >= self._full_claim_at else parts

    def seconds_to_full_claim(self, now: float) -> float | None:
        """Seconds until a claim from the beginning is wanted; None: all start there."""
        return max(self._full_claim_at - now, 0.0) if self._positions else None

    def is_slow(self, part: QueueRange, rows: int, took: float) -> bool:
        """Whether claims from the beginning are slow, this one and the one before it: then call
        `passed`. A single one may be slow for any reason."""
        self._fastest = min(self._fastest, took)
        if part != WHOLE_QUEUE:
            return False
        was_slow = self._was_slow
        self._was_slow = took - self._fastest > SLOW + SLOW_PER_ROW * rows
        return was_slow and self._was_slow

    def start_skipping(
        self, rows: Sequence[Any], *, is_full: bool, seen_at: int, took: float, now: float
    ) -> None:
        """A slow claim from the beginning brought these rows.

        Args:
            rows: in any order.
            is_full: they are as many as were asked for, so more may wait behind them.
            seen_at: a time of the server before the claim, raw; jobs of this time had been there.
            took, now: how long it took and when it ended.
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

    def claimed(self, part: QueueRange, rows: Sequence[Any], *, is_full: bool, now: float) -> None:
        """A claim that was not slow brought these rows."""
        if part == WHOLE_QUEUE:
            self._positions.clear()
            self._is_overdue = False
        elif is_full:
            last = Position(*max(map(_order, rows)))
            self._positions[last.priority] = last
            self._is_overdue = now >= self._full_claim_at
