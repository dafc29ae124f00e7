"""Summary: logs a summary of the jobs of a run.

Each minute one event has the counts of the ended jobs, unless there is nothing to report. Another
event has the failures: for each of the first ten kinds, the number of failures and one error. This
event comes one second after the first failure, and then at most once a minute. Events about single
jobs have level debug.
"""

from __future__ import annotations

import time
from functools import reduce
from typing import TYPE_CHECKING

import anyio
import msgspec

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
        self._logged = _Totals.of(stats())
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
        stats = self._stats()
        totals, logged = _Totals.of(stats), self._logged
        # Also without an event, so that the next event does not include the idle time.
        self._logged = totals
        counts = {name: count - logged.ends[name] for name, count in totals.ends.items()}
        ended = sum(counts.values()) - counts["discarded"]  # discarded jobs count as failed too
        refused = totals.refused - logged.refused
        if not (ended or refused or stats.stuck_jobs):
            return
        seconds = totals.at - logged.at
        waits = totals.waits.since(logged.waits)
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


class _Totals(msgspec.Struct, frozen=True):
    """The totals since the start of the run, at one time."""

    at: float
    """The time of the totals, in monotonic seconds."""
    ends: dict[str, int]
    """The number of ended attempts by outcome."""
    refused: int
    """The number of results whose attempt no longer belonged to the client."""
    waits: Histogram

    @classmethod
    def of(cls, stats: ClientStats) -> _Totals:
        """Return the totals over all kinds and queues."""
        kinds = list(stats.kinds.values())
        waits = [queue.waits for queue in stats.queues.values()]
        return cls(
            time.monotonic(),
            {
                "completed": sum(kind.completed for kind in kinds),
                "failed": sum(kind.failed for kind in kinds),
                "discarded": sum(kind.discarded for kind in kinds),
                "snoozed": sum(kind.snoozed for kind in kinds),
                "cancelled": sum(kind.cancelled for kind in kinds),
                "interrupted": sum(kind.interrupted for kind in kinds),
            },
            stats.results_refused,
            reduce(Histogram.merged, waits) if waits else Histogram((), (0,), 0.0),
        )


class _Entry(msgspec.Struct):
    """The part of an error entry that is logged."""

    error: str = ""


def _error(entry: str) -> str:
    """Return the text of an error entry on one line, without passwords."""
    try:
        text = msgspec.json.decode(entry, type=_Entry).error
    except msgspec.DecodeError:  # the entry is empty
        return ""
    return mask_url(" ".join(text.split()))[:ERROR_LENGTH_MAX]
