"""JobCountWriter: once a minute, adds the job counts of a run to the counts of the queues in the
database. The dashboard shows these counts as plots.

The counts are approximate. A write that may have been committed is not repeated.
"""

from __future__ import annotations

import random
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import anyio

from riverpy._log import RepeatedFailureLog, get_logger
from riverpy._log_events import JOB_COUNTS_NOT_STORED, JOB_COUNTS_STORED_AGAIN
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error, is_certain_rollback
from riverpy._postgres.job_counts import (
    ALL_QUEUES_NAME,
    OTHER_QUEUES_NAME,
    QUEUES_PER_PERIOD_MAX,
    WAIT_BOUNDS_SECONDS,
    JobCounts,
    job_count_write,
    sum_counts,
)
from riverpy._work.counters import WAIT_TIME_BUCKET_BOUNDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anyio.abc import TaskStatus

    from riverpy._lifecycle import StopScope
    from riverpy._work.counters import QueueCounters, RunCounters
    from riverpy._work.run_context import RunContext

SECONDS_PER_MINUTE = 60.0
DELAY_AFTER_MINUTE_MAX = 10.0
"""The maximum delay of a write after the start of a minute, in seconds. Clients choose different
delays, so that they do not all wait for the same rows."""
WRITE_TIMEOUT = 2.0
"""The timeout of one write, in seconds."""
LAST_WRITE_TIMEOUT = 1.0
"""The timeout of the write at the end of a run, in seconds."""
LOCK_TIMEOUT = timedelta(seconds=1)
"""The `lock_timeout` of a write: how long it may wait for a locked row or table."""
_FIRST_BUCKETS_ABOVE_WAIT_BOUNDS = [
    WAIT_TIME_BUCKET_BOUNDS.index(bound) + 1 for bound in WAIT_BOUNDS_SECONDS
]
"""For each bound of `WAIT_BOUNDS_SECONDS`: the index of the first histogram bucket whose waits are
longer than this bound."""


class JobCountCollector:
    """Finds what a run has counted since the last call of `take_counts`. The collector compares
    the totals of the counters with their totals at that call, so a job causes no extra work."""

    def __init__(self, counters: RunCounters) -> None:
        self._counters = counters
        self._seen: dict[QueueCounters, tuple[str, list[int], tuple[float, ...]]] = {}
        """For each queue: its name, and what the last `take_counts` read from its counters. These
        values are the buckets of the waiting times, and a tuple of totals: attempts that did not
        complete, failed attempts, discarded attempts, and seconds of waiting. After a queue is
        removed, the next call reads its counters once more and deletes its entry."""

    def take_counts(self) -> list[JobCounts]:
        """Return the counts of each queue in which attempts have ended since the last call."""
        current = self._counters.counters_by_queue
        removed = [
            (seen[0], of_queue)
            for of_queue, seen in self._seen.items()
            if current.get(seen[0]) is not of_queue
        ]
        taken: list[JobCounts] = []
        for queue, of_queue in (*removed, *current.items()):
            buckets = of_queue.wait_times.bucket_counts
            seen = self._seen.get(of_queue)
            if buckets == seen[1] if seen else not any(buckets):
                continue
            sums = (
                of_queue.not_completed_count,
                of_queue.failed_count,
                of_queue.discarded_count,
                of_queue.wait_times.value_sum,
            )
            _, last_buckets, last_sums = seen or ("", [0] * len(buckets), (0,) * len(sums))
            self._seen[of_queue] = queue, buckets.copy(), sums
            added = [now - then for now, then in zip(buckets, last_buckets, strict=True)]
            not_completed, failed, discarded, waited = (
                now - then for now, then in zip(sums, last_sums, strict=True)
            )
            attempts = sum(added)
            taken.append(
                JobCounts(
                    queue,
                    attempts,
                    attempts - int(not_completed),
                    int(failed),
                    int(discarded),
                    waited,
                    of_queue.longest_wait,
                    *(sum(added[first:]) for first in _FIRST_BUCKETS_ABOVE_WAIT_BOUNDS),
                )
            )
            of_queue.longest_wait = 0.0
        for _, of_queue in removed:
            del self._seen[of_queue]
        return taken


def make_job_count_rows(counts: Sequence[JobCounts]) -> list[JobCounts]:
    """Return the rows to write: one for each of the `QUEUES_PER_PERIOD_MAX` busiest queues, one for
    all queues together, and one for the remaining queues together. `counts` may contain a queue
    several times."""
    by_queue: dict[str, list[JobCounts]] = {}
    for one in counts:
        by_queue.setdefault(one.queue, []).append(one)
    busiest_first = sorted(
        (sum_counts(queue, same) for queue, same in by_queue.items()),
        key=lambda one: -one.attempts,
    )
    rows = busiest_first[:QUEUES_PER_PERIOD_MAX]
    if counts:
        rows.append(sum_counts(ALL_QUEUES_NAME, counts))
    if others := busiest_first[QUEUES_PER_PERIOD_MAX:]:
        rows.append(sum_counts(OTHER_QUEUES_NAME, others))
    return rows


class JobCountWriter:
    """Writes the counts of one run each minute, if attempts have ended. The server's clock decides
    to which minute the counts belong. The clock of this machine only decides when the client
    writes."""

    name = "job count writer"

    def __init__(self, context: RunContext) -> None:
        self._connection, self._schema = context.connections.reserved, context.schema
        self._collector = JobCountCollector(context.counters)
        self._unwritten: list[JobCounts] = []
        """The counts of the last write, if that write certainly failed. Only the next write
        includes these counts. If that write fails too, these counts are lost, so that the first
        write after an outage does not add the counts of many minutes to one minute."""
        self._taken_at = time.monotonic()
        self._delay_after_minute = random.uniform(0, DELAY_AFTER_MINUTE_MAX)  # noqa: S311 (no secret)
        self._is_running = False
        self._failure_log = RepeatedFailureLog(get_logger())

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Write each minute until stopped. Afterwards, the caller must call `write_last_counts`."""
        self._is_running = True
        task_status.started()
        while True:
            scope.set_progress_deadline(within=SECONDS_PER_MINUTE + WRITE_TIMEOUT)
            seconds = (self._delay_after_minute - time.time()) % SECONDS_PER_MINUTE
            await anyio.sleep(max(seconds, 1.0))
            with anyio.CancelScope(shield=True):  # a stop during a write would lose its counts
                await self.write_counts(WRITE_TIMEOUT)

    async def write_last_counts(self) -> None:
        """Write what was counted since the last write, at the end of the run. During an outage,
        these counts are lost."""
        if self._is_running and not self._connection.outage_tracker.is_outage_logged:
            with anyio.CancelScope(shield=True):
                await self.write_counts(LAST_WRITE_TIMEOUT)

    async def write_counts(self, timeout: float) -> None:
        """Write what was counted since the last write. Do nothing if there is nothing to write. The
        write takes at most `timeout` seconds."""
        counts, now = self._collector.take_counts(), time.monotonic()
        # The counts are stored for the minute that contains the middle of the time since the last
        # write. `age` is the time from this middle until now.
        age = min(now - self._taken_at, SECONDS_PER_MINUTE) / 2
        self._taken_at = now
        rows = make_job_count_rows([*self._unwritten, *counts])
        self._unwritten = []
        if not rows:
            return
        is_sent = False
        try:
            async with (
                self._connection.acquire("storing counts of jobs", timeout) as connection,
                connection.transaction(),
            ):
                is_sent = True
                await job_count_write(
                    connection,
                    self._schema,
                    counts=rows,
                    age_seconds=age,
                    lock_timeout=LOCK_TIMEOUT,
                )
        except DATABASE_ERRORS as error:
            if not is_sent or is_certain_rollback(error):
                self._unwritten = counts
            self._failure_log.log_failure(
                JOB_COUNTS_NOT_STORED,
                cause=type(error).__name__,
                effect="the plots of the dashboard lack jobs of this client",
                error=describe_error(error),
                is_cause_logged=self._connection.outage_tracker.is_outage_logged,
            )
        else:
            self._failure_log.log_recovery(JOB_COUNTS_STORED_AGAIN)
