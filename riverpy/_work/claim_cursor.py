"""ClaimCursor: the position in a queue from which a client claims jobs.

A claim reads an index in the order of priority, time and id. Usually it starts at the beginning of
the index. It then also reads the index entries before the first job that it can claim. These
entries belong to jobs that were already claimed, or whose kind this client does not work. To skip
these entries, the next claim starts where the last claim ended, in two cases:

- The client works through a backlog: two claims in a row were large, and returned as many jobs as
  requested. This case ends with the first claim that returns fewer jobs. The index is then read
  from its beginning at once.
- Claims are slow, because there are many such entries.

There is one position per priority, because new jobs of a higher priority come before older jobs of
a lower priority. At intervals a claim starts at the beginning of the index. Such a claim finds jobs
that were skipped because their transaction was committed late, or because their row was locked.
"""

from __future__ import annotations

import math
from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from riverpy.job import JobColumn

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOW_CLAIM_THRESHOLD = 0.01
"""A claim counts as slow if it takes this many seconds longer than the fastest claim so far."""
SLOW_CLAIM_THRESHOLD_PER_ROW = 0.00004
"""Seconds that are added to `SLOW_CLAIM_THRESHOLD` for each claimed row."""
BACKLOG_CLAIM_ROWS_MIN = 100
"""A claim is a backlog claim if it returns as many jobs as requested, and at least this number
times the largest priority number among the claimed jobs. Then the queue probably holds more jobs.
The priority is a factor because a later claim that starts at positions needs one statement for each
priority up to the largest."""
WHOLE_QUEUE_CLAIM_TIME_FRACTION_MAX = 0.02
"""The maximum fraction of time that the client spends on claims from the beginning of the index."""
WHOLE_QUEUE_CLAIM_INTERVAL_MIN = 0.2
"""The shortest time between two claims from the beginning of the index, in seconds."""
WHOLE_QUEUE_CLAIM_INTERVAL_MAX = 2.0
"""The longest time between two claims from the beginning of the index, in seconds. A skipped job is
claimed within this time."""
INSERT_COMMIT_DELAY_MAX = 1.0
"""If the insert of a job commits more than this many seconds after the job's `scheduled_at`, the
cursor may skip the job."""
COMPARED_CLAIM_DURATIONS_MAX = 64
"""The maximum number of durations that `SlowQueueFinder` compares. Each is the duration of a recent
claim from a single queue."""
CLAIM_DURATION_TOLERANCE_FACTOR = 1.5
"""Separate claims, one for each queue, count as equally fast as one claim of all queues if together
they take less than this many times its duration. Durations vary from claim to claim."""
JOB_PRIORITIES = range(1, 5)
_get_claim_order_key = itemgetter(JobColumn.PRIORITY, JobColumn.SCHEDULED_AT, JobColumn.ID)


class QueuePosition(NamedTuple):
    """A position in the order of claims. `scheduled_at` is in microseconds since 2000, as in the
    database."""

    priority: int
    scheduled_at: int
    job_id: int


class QueueRange(NamedTuple):
    """The jobs of a queue after a position, up to and including `last_priority`."""

    start_after: QueuePosition
    last_priority: int


WHOLE_QUEUE_RANGE = QueueRange(QueuePosition(0, -(2**63), 0), JOB_PRIORITIES[-1])


class SlowClaimDetector:
    """Records the durations of claims, and decides whether claims are slow."""

    def __init__(self) -> None:
        self._fastest_duration = math.inf
        self.was_last_claim_slow = False

    def record_claim_and_check_slow(self, row_count: int, duration: float) -> bool:
        """Record the duration of a claim in seconds. Return whether the last two claims were
        slow."""
        self.record_fast_claim(duration)
        was_slow = self.was_last_claim_slow
        self.was_last_claim_slow = (
            duration - self._fastest_duration
            > SLOW_CLAIM_THRESHOLD + SLOW_CLAIM_THRESHOLD_PER_ROW * row_count
        )
        return was_slow and self.was_last_claim_slow

    def record_fast_claim(self, duration: float) -> None:
        """Record the duration of a claim that is known to be fast."""
        self._fastest_duration = min(self._fastest_duration, duration)


class SlowQueueFinder:
    """Finds out which of several queues makes a claim of all these queues slow.

    For this, the client claims from each queue separately, and this class compares the durations.
    A queue counts as slow in two cases. First, its claim takes longer than the claims of other
    queues. Second, the separate claims together take no longer than one claim of all queues (see
    `CLAIM_DURATION_TOLERANCE_FACTOR`): then all queues count as slow, because separate claims cost
    no more time. If neither is the case for any queue, the whole machine is busy, and separate
    claims do not help.
    """

    def __init__(self) -> None:
        self._queue_count, self._seconds = 0, 0.0
        self._durations_alone = deque[float](maxlen=COMPARED_CLAIM_DURATIONS_MAX)
        """The durations of the last claims of single queues, in seconds."""

    def start_comparison(self, queue_count: int, seconds: float) -> None:
        """Forget the recorded durations. The next ones are compared with each other, and with a
        claim of `queue_count` queues together that took `seconds` seconds."""
        self._queue_count, self._seconds = queue_count, seconds
        self._durations_alone.clear()

    def record_single_queue_claim(self, seconds: float) -> None:
        """Record the duration of a claim of one queue, in seconds."""
        self._durations_alone.append(seconds)

    def is_queue_slow(self, seconds: float) -> bool:
        """Return whether a queue is slow, if a claim of this queue alone took `seconds` seconds."""
        durations = sorted(self._durations_alone)
        usual = durations[len(durations) // 4]
        return (
            seconds > usual + SLOW_CLAIM_THRESHOLD
            or usual * self._queue_count < self._seconds * CLAIM_DURATION_TOLERANCE_FACTOR
        )


class ClaimCursor:
    """The positions in one queue after which a client claims jobs. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._position_by_priority: dict[int, QueuePosition] = {}
        """The position for each priority. A priority without a position is read from its beginning.
        If the dict is empty, claims start at the beginning of the index."""
        self._next_whole_queue_claim_at = 0.0
        """The time of the next claim from the beginning of the index."""
        self._is_whole_queue_claim_overdue = False
        self._was_last_claim_of_backlog = False
        """Whether the last claim of the whole queue was a backlog claim: see
        `BACKLOG_CLAIM_ROWS_MIN`."""
        self._is_whole_queue_read_last = False
        """Whether each claim also reads the index from its beginning if there are not enough jobs
        after the positions. True if claims from the beginning are not slow."""
        self._slow_claim_detector = SlowClaimDetector()
        self.is_speed_check_due = False
        """Whether the next claim must be for this queue alone, to measure its duration, because a
        claim of several queues was slow."""

    @property
    def must_claim_alone(self) -> bool:
        """Whether the next claim must be for this queue alone. This is so if claims start at
        positions, if the last claim was slow or a backlog claim (the next one then decides whether
        to start using positions), or if the speed of a claim must be measured."""
        return (
            bool(self._position_by_priority)
            or self._slow_claim_detector.was_last_claim_slow
            or self._was_last_claim_of_backlog
            or self.is_speed_check_due
        )

    def choose_claim_ranges(self, now: float) -> Sequence[QueueRange]:
        """Return the ranges of the queue to claim from. The caller claims from them in this order
        until it has enough jobs.

        The last range is the whole queue if claims of the whole queue are not slow, or if the next
        claim of the whole queue is due. If it is due, but the other ranges have enough jobs, the
        next call returns only the whole queue.
        """
        if not self._position_by_priority or self._is_whole_queue_claim_overdue:
            return (WHOLE_QUEUE_RANGE,)
        ranges: list[QueueRange] = []
        for priority in JOB_PRIORITIES:
            if position := self._position_by_priority.get(priority):
                ranges.append(QueueRange(position, priority))
            else:  # priority 1 always has a position, so `ranges` is not empty
                ranges[-1] = ranges[-1]._replace(last_priority=priority)
        if self._is_whole_queue_read_last or now >= self._next_whole_queue_claim_at:
            ranges.append(WHOLE_QUEUE_RANGE)
        return ranges

    def seconds_until_whole_queue_claim(self, now: float) -> float | None:
        """Return the seconds until the next claim from the beginning of the index. Return None if
        every claim starts there."""
        return (
            max(self._next_whole_queue_claim_at - now, 0.0) if self._position_by_priority else None
        )

    def record_claim_and_check_slow(
        self, claimed_range: QueueRange, row_count: int, duration: float
    ) -> bool:
        """Record the duration of a claim in seconds. Return whether the last two claims of the
        whole queue were slow. If they were, the caller must call `start_using_positions`, or
        `forget_slow_claims` if this queue is not the cause."""
        self.is_speed_check_due = False
        if claimed_range != WHOLE_QUEUE_RANGE:
            self._slow_claim_detector.record_fast_claim(duration)
            return False
        return self._slow_claim_detector.record_claim_and_check_slow(row_count, duration)

    def record_claim_and_check_backlog(
        self, claimed_range: QueueRange, claimed_rows: Sequence[Any], limit: int
    ) -> bool:
        """Record the rows that a claim of up to `limit` jobs returned. Return whether the last two
        claims of the whole queue were backlog claims (see `BACKLOG_CLAIM_ROWS_MIN`). If they were,
        the caller must call `start_using_positions`."""
        if claimed_range != WHOLE_QUEUE_RANGE:
            return False
        was_backlog = self._was_last_claim_of_backlog
        row_count = len(claimed_rows)
        self._was_last_claim_of_backlog = row_count >= limit and (
            row_count
            >= BACKLOG_CLAIM_ROWS_MIN * max(row[JobColumn.PRIORITY] for row in claimed_rows)
        )
        return was_backlog and self._was_last_claim_of_backlog

    def forget_slow_claims(self) -> None:
        """Forget that the last claims were slow, because this queue is not the cause."""
        self._slow_claim_detector.was_last_claim_slow = False

    def start_using_positions(
        self,
        claimed_rows: Sequence[Any],
        *,
        is_slow: bool,
        is_limit_reached: bool,
        server_time: int,
        duration: float,
        now: float,
    ) -> None:
        """Let later claims start at positions, and skip the jobs before the positions. Call this
        after a claim of the whole queue, if the last two such claims were slow or were backlog
        claims.

        Args:
            claimed_rows: the rows of this last claim, in any order.
            is_slow: whether claims from the beginning of the index are slow.
            is_limit_reached: whether the claim returned as many rows as requested. If so, the queue
                may hold more jobs.
            server_time: the server's time before the claim, in microseconds since 2000. The claim
                saw the jobs up to this time.
            duration: the duration of the claim, in seconds.
            now: the end of the claim, in monotonic seconds.
        """
        pause = min(
            max(duration / WHOLE_QUEUE_CLAIM_TIME_FRACTION_MAX, WHOLE_QUEUE_CLAIM_INTERVAL_MIN),
            WHOLE_QUEUE_CLAIM_INTERVAL_MAX,
        )
        self._next_whole_queue_claim_at, self._is_whole_queue_claim_overdue = now + pause, False
        self._is_whole_queue_read_last = not is_slow
        last = _find_last_position(claimed_rows) if is_limit_reached else None
        for priority in JOB_PRIORITIES:
            if last is None or priority < last.priority:
                self._position_by_priority[priority] = QueuePosition(
                    priority, server_time - int(INSERT_COMMIT_DELAY_MAX * 1e6), 0
                )
        if last is not None:
            self._position_by_priority[last.priority] = last

    def update_positions(
        self,
        claimed_range: QueueRange,
        claimed_rows: Sequence[Any],
        *,
        is_limit_reached: bool,
        now: float,
    ) -> None:
        """Update the positions after a claim for which `start_using_positions` is not called. After
        a claim of the whole queue, the next claim starts at the beginning of the index."""
        if claimed_range == WHOLE_QUEUE_RANGE:
            self._position_by_priority.clear()
            self._is_whole_queue_claim_overdue = False
        elif is_limit_reached:
            last = _find_last_position(claimed_rows)
            self._position_by_priority[last.priority] = last
            self._is_whole_queue_claim_overdue = now >= self._next_whole_queue_claim_at


def _find_last_position(claimed_rows: Sequence[Any]) -> QueuePosition:
    return QueuePosition(*max(map(_get_claim_order_key, claimed_rows)))
