"""Summary: logs a summary of the jobs of a run.

Each minute one event has the counts of the ended jobs, unless there is nothing to report. Another
event has the failures: for each of the first ten kinds, the number of failures and one error. This
event comes one second after the first failure, and then at most once a minute. Events about single
jobs have level debug.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import anyio

from riverpy._attempt_errors import read_error
from riverpy._dsn import mask_url
from riverpy._log import get_logger
from riverpy._log_events import JOBS_FAILED, JOBS_WORKED
from riverpy.stats import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskStatus

    from riverpy._lifecycle import StopScope
    from riverpy._work.counters import Counters
    from riverpy.stats import ClientStats

INTERVAL = 60.0
"""Seconds between two events of the same kind."""
GATHER_TIME = 1.0
"""Seconds after the first failure in which further failures are collected for the same event."""
ERROR_LENGTH_MAX = 200
"""The maximum number of characters of an error in an event."""
OUTCOMES = ("completed", "failed", "discarded", "snoozed", "cancelled", "interrupted")
"""The outcomes of attempts, as in `KindStats`."""


class Summary:
    """Logs the summary of one run."""

    name = "summary"

    def __init__(
        self, counters: Counters, stats: Callable[[], ClientStats], client_id: str
    ) -> None:
        """Create the summary.

        Args:
            counters: the counters of the run.
            stats: returns the current state of the run.
            client_id: the id of the client, for the log events.
        """
        self._counters, self._stats = counters, stats
        self._logged = stats()
        """The state at the last event about ended jobs."""
        self._log = get_logger(client_id=client_id)

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Log until stopped."""
        task_status.started()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_failures)
            while True:
                scope.expect_progress(within=INTERVAL)
                await anyio.sleep(INTERVAL)
                self._log_jobs()

    def end(self) -> None:
        """Log what has happened since the last events, at the end of the run."""
        self._log_failures()
        self._log_jobs()

    async def _watch_failures(self) -> None:
        while True:
            await self._counters.has_failures.wait()
            await anyio.sleep(GATHER_TIME)
            self._log_failures()
            await anyio.sleep(INTERVAL - GATHER_TIME)

    def _log_failures(self) -> None:
        failing, others = self._counters.take_failures()
        if failing:
            self._log.warning(
                JOBS_FAILED,
                kinds={
                    kind: {"failed": count, "error": _error(entry)}
                    for kind, (count, entry) in failing.items()
                },
                more_kinds=others,
            )

    def _log_jobs(self) -> None:
        stats, logged = self._stats(), self._logged
        # Also without an event, so that the next event does not include the idle time.
        self._logged = stats
        counts, logged_counts = _counts(stats), _counts(logged)
        counts = {outcome: count - logged_counts[outcome] for outcome, count in counts.items()}
        ended = sum(counts.values()) - counts["discarded"]  # discarded jobs count as failed too
        refused = stats.results_refused - logged.results_refused
        if not (ended or refused or stats.stuck_jobs):
            return
        seconds = stats.uptime - logged.uptime
        waits = _waits(stats).since(_waits(logged))
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


def _counts(stats: ClientStats) -> dict[str, int]:
    """Return the number of ended attempts of all kinds, by outcome."""
    return {
        outcome: sum(getattr(kind, outcome) for kind in stats.kinds.values())
        for outcome in OUTCOMES
    }


def _waits(stats: ClientStats) -> Histogram:
    """Return the waiting times of the jobs of all queues."""
    waits = [queue.waits for queue in stats.queues.values()]
    return reduce(Histogram.merged, waits) if waits else Histogram((), (0,), 0.0)


def _error(entry: str) -> str:
    """Return the text of an error entry on one line, without passwords."""
    return mask_url(" ".join(read_error(entry).error.split()))[:ERROR_LENGTH_MAX]
