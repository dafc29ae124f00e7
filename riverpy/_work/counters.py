"""RunCounters: counts the claims and the ended attempts of a run. MetricEmitter: calls the
`metric_emit` hooks."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from datetime import timedelta
from typing import TYPE_CHECKING

from riverpy._lifecycle import convert_base_exceptions
from riverpy._log import RepeatedFailureLog, get_logger
from riverpy._log_events import METRIC_HOOK_FAILED
from riverpy.events import EventKind
from riverpy.hooks import JobGetAvailableCount, JobGetAvailableDuration
from riverpy.job import JobColumn, JobState
from riverpy.stats import UNKNOWN_KINDS_LABEL, Histogram, KindStats

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from riverpy._work.attempt import Attempt
    from riverpy.hooks import HookMetricEmit, Metric

# A kind may have at most 20 time series in a metrics store (docs/metrics.md). It has 6 for the
# outcomes, one for each of these buckets, and 3 for the largest bucket, the sum and the count of
# the histogram.
RUN_TIME_BUCKET_BOUNDS = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 600.0, 3600.0)
WAIT_TIME_BUCKET_BOUNDS = (
    0.002,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    300,
    3600,
)
CLAIM_TIME_BUCKET_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
CLAIM_SIZE_BUCKET_BOUNDS = (0, 1, 2, 5, 10, 25, 50, 100, 250, 500, 1000)
LOOP_LAG_BUCKET_BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
LOGGED_FAILING_KINDS_MAX = 10
"""The maximum number of job kinds whose failures one log event lists, each with its last error
text."""
_KIND, _QUEUE, _ATTEMPTED_AT = JobColumn.KIND, JobColumn.QUEUE, JobColumn.ATTEMPTED_AT
_CREATED_AT, _SCHEDULED_AT = JobColumn.CREATED_AT, JobColumn.SCHEDULED_AT


class HistogramBuilder:
    """A histogram to which values can be added."""

    __slots__ = ("bucket_bounds", "bucket_counts", "value_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bucket_bounds = bounds
        self.bucket_counts = [0] * (len(bounds) + 1)
        self.value_sum = 0.0

    def add_value(self, value: float) -> None:
        """Count a value."""
        self.bucket_counts[bisect_left(self.bucket_bounds, value)] += 1
        self.value_sum += value

    def add_values_from(self, other: HistogramBuilder) -> None:
        """Add the values of another histogram with the same bounds."""
        self.bucket_counts = [
            one + more for one, more in zip(self.bucket_counts, other.bucket_counts, strict=True)
        ]
        self.value_sum += other.value_sum

    def build_histogram(self) -> Histogram:
        """Return the current histogram."""
        return Histogram(self.bucket_bounds, tuple(self.bucket_counts), self.value_sum)


class KindCounters:
    """Counts the ended attempts of the jobs of one kind."""

    __slots__ = ("completed_count", "discarded_count", "other_outcome_counts", "run_times")

    def __init__(self) -> None:
        self.completed_count = self.discarded_count = 0
        self.other_outcome_counts: dict[str, int] = {}
        self.run_times = HistogramBuilder(RUN_TIME_BUCKET_BOUNDS)

    def stats(self) -> KindStats:
        """Return how many attempts have ended with each outcome so far, and the histogram of their
        run times."""
        counts = self.other_outcome_counts
        return KindStats(
            completed=self.completed_count,
            failed=counts.get(EventKind.JOB_FAILED, 0),
            discarded=self.discarded_count,
            snoozed=counts.get(EventKind.JOB_SNOOZED, 0),
            cancelled=counts.get(EventKind.JOB_CANCELLED, 0),
            interrupted=counts.get(EventKind.JOB_INTERRUPTED, 0),
            runs=self.run_times.build_histogram(),
        )


class QueueCounters:
    """Counts the claims, waiting times and outcomes of one queue."""

    __slots__ = (
        "claim_failure_count",
        "claim_sizes",
        "claim_times",
        "discarded_count",
        "failed_count",
        "longest_wait",
        "not_completed_count",
        "wait_times",
    )

    def __init__(self) -> None:
        self.claim_times = HistogramBuilder(CLAIM_TIME_BUCKET_BOUNDS)
        self.claim_sizes = HistogramBuilder(CLAIM_SIZE_BUCKET_BOUNDS)
        self.wait_times = HistogramBuilder(WAIT_TIME_BUCKET_BOUNDS)
        self.claim_failure_count = 0
        self.not_completed_count = self.failed_count = self.discarded_count = 0
        """`not_completed_count` counts the ended attempts that did not complete. Of these,
        `failed_count` counts the failed attempts, and `discarded_count` the failed attempts after
        which the job was discarded. `wait_times` counts all ended attempts."""
        self.longest_wait = 0.0
        """The longest time, in seconds, from when a job was due until its attempt started, since
        `JobCountCollector.take_counts` last read this value and set it to 0."""

    def count_claim(self, job_count: int, seconds: float) -> None:
        """Count a successful claim, with the number of its jobs and its duration."""
        self.claim_times.add_value(seconds)
        self.claim_sizes.add_value(job_count)


class RunCounters:
    """The counters of one run. All counters start at zero."""

    def __init__(self, kinds: Iterable[str], queues: Iterable[str]) -> None:
        self._unknown_kind_counters = KindCounters()
        self.counters_by_kind = {kind: KindCounters() for kind in kinds} | {
            UNKNOWN_KINDS_LABEL: self._unknown_kind_counters
        }
        self.counters_by_queue = {queue: QueueCounters() for queue in queues}
        self._removed_queue_wait_times = HistogramBuilder(WAIT_TIME_BUCKET_BOUNDS)
        """The waiting times in the queues that were removed during the run."""
        self.loop_lag = HistogramBuilder(LOOP_LAG_BUCKET_BOUNDS)
        self.refused_result_count = 0
        self.failures_by_kind: dict[str, tuple[int, str]] = {}
        """For each kind: the number of failures since the last `pop_failure_counts`, and the last
        error entry as JSON."""
        self.other_failing_kinds: set[str] = set()
        """Further failing kinds. They are not in `failures_by_kind`, because it already has
        `LOGGED_FAILING_KINDS_MAX` kinds."""
        self.failure_counted = asyncio.Event()
        """An event that is set while `failures_by_kind` contains a kind."""

    def count_ended_attempts(self, attempts: list[Attempt]) -> None:
        """Count attempts whose results were stored. Attempts that did not start are ignored."""
        kinds, queues = self.counters_by_kind, self.counters_by_queue
        unknown, place = self._unknown_kind_counters, bisect_left
        for attempt in attempts:
            started = attempt.started_at
            if not started:  # not counted: the job was released before its start
                continue
            row = attempt.claimed_row
            kind = kinds.get(row[_KIND], unknown)
            if attempt.outcome is None:
                kind.completed_count += 1
            else:
                self._count_not_completed_attempt(kind, attempt)
            run = attempt.ended_at - started
            runs = kind.run_times
            runs.bucket_counts[place(RUN_TIME_BUCKET_BOUNDS, run)] += 1
            runs.value_sum += run
            due, created = row[_SCHEDULED_AT], row[_CREATED_AT]
            if created > due:
                due = created
            wait = (row[_ATTEMPTED_AT] - due) * 1e-6 + started - attempt.claimed_at
            if wait < 0.0:
                wait = 0.0
            queue = queues.get(row[_QUEUE])
            if queue is None:  # the queue was removed while the job was running
                continue
            waits = queue.wait_times
            waits.bucket_counts[place(WAIT_TIME_BUCKET_BOUNDS, wait)] += 1
            waits.value_sum += wait
            if wait > queue.longest_wait:
                queue.longest_wait = wait

    def _count_not_completed_attempt(self, kind_counters: KindCounters, attempt: Attempt) -> None:
        event, outcome = attempt.event_kind, attempt.outcome
        kind_counters.other_outcome_counts[event] = (
            kind_counters.other_outcome_counts.get(event, 0) + 1
        )
        queue = self.counters_by_queue.get(attempt.claimed_row[_QUEUE])
        if queue is not None:
            queue.not_completed_count += 1
        if event is not EventKind.JOB_FAILED or outcome is None:
            return
        is_discarded = attempt.stored_state == JobState.DISCARDED
        kind_counters.discarded_count += is_discarded
        if queue is not None:
            queue.failed_count += 1
            queue.discarded_count += is_discarded
        self.failure_counted.set()
        name = attempt.kind
        if name in self.failures_by_kind or len(self.failures_by_kind) < LOGGED_FAILING_KINDS_MAX:
            count = self.failures_by_kind[name][0] if name in self.failures_by_kind else 0
            self.failures_by_kind[name] = count + 1, outcome.error_entry or ""
        else:
            self.other_failing_kinds.add(
                UNKNOWN_KINDS_LABEL if kind_counters is self._unknown_kind_counters else name
            )

    def add_queue(self, queue: str) -> None:
        """Start to count for a queue that was added. Its counters start at zero."""
        self.counters_by_queue[queue] = QueueCounters()

    def remove_queue(self, queue: str) -> None:
        """Stop counting for a removed queue. `build_wait_histogram` still includes its waiting
        times."""
        self._removed_queue_wait_times.add_values_from(self.counters_by_queue.pop(queue).wait_times)

    def build_wait_histogram(self) -> Histogram:
        """Return the waiting times in all queues of the run, including removed queues."""
        waits = HistogramBuilder(WAIT_TIME_BUCKET_BOUNDS)
        for one in self.counters_by_queue.values():
            waits.add_values_from(one.wait_times)
        waits.add_values_from(self._removed_queue_wait_times)
        return waits.build_histogram()

    def pop_failure_counts(self) -> tuple[dict[str, tuple[int, str]], int]:
        """Return `failures_by_kind` and the number of `other_failing_kinds`, and empty both."""
        taken = self.failures_by_kind, len(self.other_failing_kinds)
        self.failures_by_kind, self.other_failing_kinds = {}, set()
        self.failure_counted.clear()
        return taken


class MetricEmitter:
    """Calls the `metric_emit` hooks of one run. Errors of hooks are only logged."""

    def __init__(self, hooks: Sequence[HookMetricEmit]) -> None:
        log = get_logger()
        self._hooks = [(hook, RepeatedFailureLog(log)) for hook in hooks]

    def emit_claim_metrics(self, queue: str, job_count: int, seconds: float) -> None:
        """Call the hooks with the duration of a claim in seconds, and the number of its jobs."""
        if self._hooks:
            duration = timedelta(seconds=seconds)
            self._emit_metric(JobGetAvailableDuration(queue=queue, duration=duration))
            self._emit_metric(JobGetAvailableCount(queue=queue, count=job_count))

    def _emit_metric(self, metric: Metric) -> None:
        for hook, failures in self._hooks:
            try:
                with convert_base_exceptions("metric_emit"):
                    hook.metric_emit(metric)
            except Exception as error:
                failures.log_failure(
                    METRIC_HOOK_FAILED, hook=type(hook).__name__, error=repr(error)
                )
            else:
                failures.log_recovery()
