"""JobSummaryLogger: logs a summary of the jobs of a run.

Once a minute it logs how many jobs have ended, if jobs have ended or are stuck. It logs failures in
a separate event, one second after the first failure, and then at most once a minute. For each of
the first ten kinds of jobs that have failed, this event has the number of failures and the last
error. For further kinds, it has only the number of these kinds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from riverpy._attempt_errors import parse_error_entry
from riverpy._dsn import mask_passwords
from riverpy._log import get_logger
from riverpy._log_events import JOBS_FAILED, JOBS_WORKED

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskStatus

    from riverpy._lifecycle import StopScope
    from riverpy._work.counters import RunCounters
    from riverpy.stats import ClientStats

SUMMARY_INTERVAL = 60.0
"""Seconds between two log events of the same type."""
FAILURE_COLLECTION_TIME = 1.0
"""Seconds from the first failure until the event about failures is logged. The event includes all
failures in this time."""
LOGGED_ERROR_LENGTH_MAX = 200
"""The maximum length of an error text in a log event, in characters."""
ATTEMPT_OUTCOMES = ("completed", "failed", "discarded", "snoozed", "cancelled", "interrupted")
"""The possible outcomes of an attempt. `KindStats` has a count with the same name for each of
them."""


class JobSummaryLogger:
    """Logs the summaries of one run."""

    name = "summary"

    def __init__(
        self, counters: RunCounters, get_stats: Callable[[], ClientStats], client_id: str
    ) -> None:
        """`get_stats` returns the current state of the run."""
        self._counters, self._get_stats = counters, get_stats
        self._last_logged_stats, self._last_waits = get_stats(), counters.build_wait_histogram()
        """The statistics and the waiting times at the last log event about ended jobs."""
        self._log = get_logger(client_id=client_id)

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Log summaries until stopped."""
        task_status.started()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._log_failures_periodically)
            while True:
                scope.set_progress_deadline(within=SUMMARY_INTERVAL)
                await anyio.sleep(SUMMARY_INTERVAL)
                self._log_ended_jobs()

    def log_last_summary(self) -> None:
        """Log the jobs that have ended since the last summary. Call this at the end of the run."""
        self._log_failures()
        self._log_ended_jobs()

    async def _log_failures_periodically(self) -> None:
        """Log failures soon after they occur, at most once per `SUMMARY_INTERVAL`."""
        while True:
            await self._counters.failure_counted.wait()
            await anyio.sleep(FAILURE_COLLECTION_TIME)
            self._log_failures()
            await anyio.sleep(SUMMARY_INTERVAL - FAILURE_COLLECTION_TIME)

    def _log_failures(self) -> None:
        failing, others = self._counters.pop_failure_counts()
        if failing:
            self._log.warning(
                JOBS_FAILED,
                kinds={
                    kind: {"failed": count, "error": _decode_error_text(entry)}
                    for kind, (count, entry) in failing.items()
                },
                more_kinds=others,
            )

    def _log_ended_jobs(self) -> None:
        stats, logged = self._get_stats(), self._last_logged_stats
        all_waits, logged_waits = self._counters.build_wait_histogram(), self._last_waits
        # Set this even if nothing is logged, so that the next event does not include the idle time.
        self._last_logged_stats, self._last_waits = stats, all_waits
        counts, logged_counts = (
            _count_attempts_by_outcome(stats),
            _count_attempts_by_outcome(logged),
        )
        counts = {outcome: count - logged_counts[outcome] for outcome, count in counts.items()}
        ended = sum(counts.values()) - counts["discarded"]  # discarded jobs count as failed too
        refused = stats.results_refused - logged.results_refused
        if not (ended or refused or stats.stuck_jobs):
            return
        seconds = stats.uptime - logged.uptime
        waits = all_waits.since(logged_waits)
        self._log.info(
            JOBS_WORKED,
            **counts,
            seconds=round(seconds, 1),
            rate=round(ended / max(seconds, 0.001), 1),
            wait_p50=waits.quantile(0.5),
            wait_p95=waits.quantile(0.95),
            running=sum(queue.running for queue in stats.queues.values()),
            slots=sum(queue.slots for queue in stats.queues.values()),
            stuck=stats.stuck_jobs,
            refused=refused,
            backlog=stats.backlog,
            leader=stats.is_leader,
            listener=stats.listener,
        )


def _count_attempts_by_outcome(stats: ClientStats) -> dict[str, int]:
    """Return the number of ended attempts for each outcome, for all kinds together."""
    return {
        outcome: sum(getattr(kind, outcome) for kind in stats.kinds.values())
        for outcome in ATTEMPT_OUTCOMES
    }


def _decode_error_text(error_entry: str) -> str:
    """Return the shortened text of an error entry on one line, without passwords."""
    return mask_passwords(" ".join(parse_error_entry(error_entry).error.split()))[
        :LOGGED_ERROR_LENGTH_MAX
    ]
