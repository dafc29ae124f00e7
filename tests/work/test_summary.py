"""The summary of a run's jobs in the log."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import structlog

from riverpy import ClientStats, EventKind, JobState, QueueStats
from riverpy._lifecycle import StopScope
from riverpy._log_events import JOBS_FAILED, JOBS_WORKED
from riverpy._work import summary as summary_module
from riverpy._work.counters import LOGGED_FAILING_KINDS_MAX, RunCounters
from riverpy._work.summary import JobSummaryLogger
from riverpy.job import JobColumn

if TYPE_CHECKING:
    import pytest

PATIENCE = 20.0


def ended(kind: str, error: str | None = None) -> Any:
    """Return an attempt that ended a moment ago."""
    row: list[Any] = [0] * 18
    row[JobColumn.KIND], row[JobColumn.QUEUE] = kind, "default"
    outcome = None if error is None else SimpleNamespace(error_entry=json.dumps({"error": error}))
    return SimpleNamespace(
        kind=kind,
        claimed_row=row,
        outcome=outcome,
        event_kind=EventKind.JOB_FAILED if outcome else EventKind.JOB_COMPLETED,
        stored_state=JobState.DISCARDED,
        claimed_at=1.0,
        started_at=1.0,
        ended_at=1.5,
    )


class Told:
    """A summary with the counts that a test sets."""

    def __init__(self, kinds: list[str], stuck: int = 0) -> None:
        self.stuck, self.uptime = stuck, 0.0
        self.counters = RunCounters(kinds, ["default"])
        self.summary = JobSummaryLogger(self.counters, self.stats, "c")

    def stats(self) -> ClientStats:
        kinds = {kind: of_kind.stats() for kind, of_kind in self.counters.counters_by_kind.items()}
        counters = self.counters.counters_by_queue["default"]
        queue = QueueStats(
            slots=1,
            running=0,
            paused=False,
            poll_interval=1.0,
            claim_age=0.0,
            claims=counters.claim_times.build_histogram(),
            batches=counters.claim_sizes.build_histogram(),
            claim_failures=0,
            waits=counters.wait_times.build_histogram(),
        )
        return ClientStats(
            client_id="c",
            uptime=self.uptime,
            kinds=kinds,
            queues={"default": queue},
            stuck_jobs=self.stuck,
            results_refused=self.counters.refused_result_count,
        )

    def lines(self) -> list[Any]:
        """Return the events at the end of the run."""
        with structlog.testing.capture_logs() as log:
            self.summary.log_last_summary()
        return log


def test_many_kinds_are_one_event() -> None:
    """A thousand failing kinds are one event, which names a few and counts the others (OP-07)."""
    kinds = [f"kind{n}" for n in range(1000)]
    told = Told(kinds)
    told.counters.count_ended_attempts(
        [ended(kind, f"error of {kind}") for kind in kinds for _ in range(3)]
    )
    fail, worked = told.lines()
    assert (fail["event"], fail["log_level"]) == (JOBS_FAILED, "warning")
    assert len(fail["kinds"]) == LOGGED_FAILING_KINDS_MAX
    assert fail["kinds"]["kind0"] == {"failed": 3, "error": "error of kind0"}
    assert fail["more_kinds"] == 1000 - LOGGED_FAILING_KINDS_MAX
    assert (worked["event"], worked["log_level"]) == (JOBS_WORKED, "info")
    assert (worked["failed"], worked["discarded"], worked["completed"]) == (3000, 3000, 0)


def test_only_new_counts_are_logged() -> None:
    """An event covers what ended since the last one. If nothing ended there is no event (OP-07)."""
    told = Told(["a"])
    assert told.lines() == []
    told.counters.count_ended_attempts([ended("a"), ended("a", "boom")])
    assert [line["event"] for line in told.lines()] == [JOBS_FAILED, JOBS_WORKED]
    assert told.lines() == []
    told.counters.count_ended_attempts([ended("a")])
    (line,) = told.lines()
    assert (line["completed"], line["failed"]) == (1, 0)


def test_rate_is_not_over_idle_hours() -> None:
    """An event after hours in which nothing ended covers only the last minute."""
    told = Told(["a"])
    told.uptime += 3600
    assert told.lines() == []
    told.uptime += 60
    told.counters.count_ended_attempts([ended("a") for _ in range(120)])
    (line,) = told.lines()
    assert (line["seconds"], line["rate"]) == (60.0, 2.0)


def test_stuck_jobs_are_logged_while_nothing_ends() -> None:
    """A run whose slots are held by stuck jobs reports this each minute, even if no job ends."""
    told = Told(["a"], stuck=2)
    for _ in range(2):
        (line,) = told.lines()
        assert (line["event"], line["stuck"], line["completed"]) == (JOBS_WORKED, 2, 0)


def test_unknown_kinds_are_named() -> None:
    """Failing kinds without a worker are named like others. Beyond the limit they count as one."""
    told = Told([])
    told.counters.count_ended_attempts(
        [ended(f"kind{n}", "boom") for n in range(LOGGED_FAILING_KINDS_MAX + 5)]
    )
    fail = told.lines()[0]
    assert list(fail["kinds"]) == [f"kind{n}" for n in range(LOGGED_FAILING_KINDS_MAX)]
    assert fail["more_kinds"] == 1


def test_error_on_one_line_without_password() -> None:
    """The error of a kind is one line, shortened, and without the password of a URL."""
    told = Told(["a"])
    told.counters.count_ended_attempts(
        [ended("a", "no\nluck at postgres://u:s3cret@h/d" + "x" * 10_000)]
    )
    error = told.lines()[0]["kinds"]["a"]["error"]
    assert error.startswith("no luck at postgres://u:***@h/d")
    assert len(error) <= summary_module.LOGGED_ERROR_LENGTH_MAX


async def test_first_failure_is_logged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first failures are logged within moments, not after a minute (OP-07)."""
    monkeypatch.setattr(summary_module, "FAILURE_COLLECTION_TIME", 0.01)
    told = Told(["a"])
    ready = SimpleNamespace(started=lambda: None)
    with structlog.testing.capture_logs() as log:
        running = asyncio.create_task(told.summary.run(StopScope(), task_status=ready))
        told.counters.count_ended_attempts([ended("a", "boom")])
        async with asyncio.timeout(PATIENCE):
            while not log:
                await asyncio.sleep(0.005)
        running.cancel()
        await asyncio.wait([running])
    assert [line["event"] for line in log] == [JOBS_FAILED]


def test_refused_results_are_logged_while_nothing_ends() -> None:
    """Refused results are in the event of the minute once, and cause it even if no job ends."""
    told = Told([])
    told.counters.refused_result_count = 3
    (line,) = told.lines()
    assert (line["event"], line["refused"], line["completed"]) == (JOBS_WORKED, 3, 0)
    assert told.lines() == []
