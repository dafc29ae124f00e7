"""Front: where the waiting jobs of a queue begin, in the order of claims.

Claims walk an index, at whose beginning lie the entries of the jobs that were claimed before. The
server removes these soon, unless a transaction holds an old snapshot open: then every claim walks
over all that was claimed since. So once claims have become slow, they start where the last one
ended, and only now and then at the beginning, for what comes before: a higher priority, an earlier
time, a row that somebody had locked.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from riverpy.job import JobColumn

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOW = 0.03
"""Seconds that a claim may take without a single row."""
SLOW_PER_ROW = 0.0001
"""Seconds more for each row that it brings."""
LOOK_SHARE = 10
"""How many times as long as the last claim from the beginning took it is not repeated."""
LOOK_INTERVAL_MIN = 0.2
LOOK_INTERVAL_MAX = 2.0
"""Seconds; how long a job before the front waits at most."""
_order = itemgetter(JobColumn.PRIORITY, JobColumn.SCHEDULED_AT, JobColumn.ID)


class Position(NamedTuple):
    """A place in the order of claims. The time is raw, in microseconds since 2000."""

    priority: int
    scheduled_at: int
    id: int


BEGINNING = Position(0, -(2**63), 0)


class Front:
    """The front of one queue, as one client knows it. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._position = BEGINNING
        self._look_at = 0.0

    def start(self, now: float) -> Position:
        """After which place a claim takes what waits."""
        return BEGINNING if now >= self._look_at else self._position

    def look_in(self, now: float) -> float:
        """Seconds until a claim starts at the beginning again."""
        return max(self._look_at - now, 0.0)

    def claimed(
        self, rows: Sequence[Any], *, start: Position, is_full: bool, took: float, now: float
    ) -> None:
        """A claim that started there brought these rows, as many as asked for or not."""
        last = Position(*_order(max(rows, key=_order))) if rows else BEGINNING
        if start == BEGINNING:
            if took < SLOW + SLOW_PER_ROW * len(rows):
                self._position, self._look_at = BEGINNING, 0.0
                return
            wait = min(max(LOOK_SHARE * took, LOOK_INTERVAL_MIN), LOOK_INTERVAL_MAX)
            self._look_at = now + wait
        # What is left of a full claim comes right after it, even where that is further back.
        self._position = last if is_full else max(last, self._position)
