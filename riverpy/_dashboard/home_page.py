"""The home page: whether all is well, in sentences, then queue by queue."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlencode

from riverpy._dashboard.health_summary import (
    describe_failures,
    describe_leaders,
    describe_leases,
    summarize,
)
from riverpy._dashboard.page import Page
from riverpy._dashboard.paths import make_queue_path
from riverpy._dashboard.plots import load_plots, make_sparklines
from riverpy._dashboard.rendering import format_count as format_number
from riverpy._dashboard.rendering import format_duration, format_rate
from riverpy._dashboard.sentence import Sentence
from riverpy._tools.text import format_count, format_job_ids, format_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from riverpy._dashboard.page import PageView
    from riverpy._dashboard.sentence import Health
    from riverpy._tools.top.status import FleetStatus, QueueStatus

LONG_WAIT_SECONDS = 60.0
"""A due job that waits longer than this is mentioned."""
FINDINGS_AGE_MAX = 120.0
"""Seconds after which the checks of doctor run again while this page is open."""
QUEUES_SHOWN_MAX = 200
"""The maximum number of queues in the table. Those that wait longest come first."""


async def load_home(view: PageView) -> Mapping[str, object]:
    """Read the status, and describe it."""
    status = await view.site.statuses.read()
    queues = sorted(status.queues, key=_get_urgency)
    shown = queues[:QUEUES_SHOWN_MAX]
    recent = await view.site.job_counts.read_queues([queue.name for queue in shown])
    return {
        "status": status,
        "summary": summarize([*describe_status(status), *_describe_checks(view)]),
        "plots": await load_plots(view, status, PAGE.path),
        "queues": shown,
        "sparklines": make_sparklines(recent, status.at),
        "queues_left_out": max(len(queues) - QUEUES_SHOWN_MAX, 0),
    }


PAGE = Page("home", "/", "home.html", load_home, "Home", findings_age_max=FINDINGS_AGE_MAX)


def describe_status(status: FleetStatus) -> list[Sentence]:
    """Return the sentences about a status. There is always one about the leader, the workers,
    failures, waits and stuck jobs."""
    return [
        *describe_leaders(status),
        *_describe_workers(status),
        *_describe_failures(status),
        *_describe_waits(status),
        *_describe_stuck_jobs(status),
        *describe_leases(status),
    ]


def _describe_checks(view: PageView) -> Iterable[Sentence]:
    report = view.site.doctor.last
    return () if report is None else describe_failures(report)


def _get_urgency(queue: QueueStatus) -> tuple[bool, float, str]:
    """Return the sort key of a queue: first the queues without workers, then the longest waits."""
    waits = queue.due_for or 0.0
    return not (waits and queue.workers == 0), -waits, queue.name


def _describe_workers(status: FleetStatus) -> Iterator[Sentence]:
    by_state: dict[str, list[str]] = {}
    for worker in status.workers:
        by_state.setdefault(worker.state, []).append(worker.client_id)
    alive, stopping = by_state.get("alive", []), by_state.get("stopping", [])
    if alive:
        also = f", and {len(stopping)} more stop" if stopping else ""
        verb = "is" if len(alive) == 1 else "are"
        yield Sentence("ok", f"{format_count(len(alive), 'worker')} {verb} alive{also}.")
    elif status.candidates is None:
        yield Sentence("look", "Workers are not known: run `riverpy migrate up`.")
    elif by_state.get("unregistered"):
        yield Sentence("look", "No riverpy worker is alive, but other clients run jobs.")
    else:
        yield Sentence("act", "No worker is alive: start one with `riverpy worker`.")
    if silent := by_state.get("silent"):
        yield Sentence(
            "look",
            f"{format_count(len(silent), 'worker')} stopped without a notice, or cannot reach the "
            f"database: {format_names(silent)}.",
        )


def _describe_failures(status: FleetStatus) -> Iterator[Sentence]:
    failing = [queue for queue in status.queues if queue.failed_per_s]
    if failing:
        rate = format_rate(sum(queue.failed_per_s for queue in failing))
        names = format_names(queue.name for queue in failing)
        yield Sentence(
            "look",
            f"{rate} attempts per second fail in {names}.",
            "/jobs?state=retryable",
            "Jobs that are tried again",
        )
    else:
        yield Sentence("ok", f"No attempt failed in the last {status.rates_over:.0f} seconds.")
    if discarded := status.totals["discarded"]:
        number = format_number(discarded, status.cap)
        noun = "job has" if discarded == 1 else "jobs have"
        yield Sentence(
            "look",
            f"{number} {noun} failed in all attempts.",
            "/jobs?state=discarded",
            "Discarded jobs",
        )


def _describe_waits(status: FleetStatus) -> Iterator[Sentence]:
    slow = [queue for queue in status.queues if (queue.due_for or 0) > LONG_WAIT_SECONDS]
    for queue in sorted(slow, key=_get_urgency)[:5]:
        wait = format_duration(queue.due_for)
        number = format_number(queue.available, status.cap)
        reason = ""
        health: Health = "look"
        if queue.paused:
            reason = " The queue is paused."
        elif queue.workers == 0:
            reason, health = " No worker works this queue.", "act"
        noun = "job waits" if queue.available == 1 else "jobs wait"
        yield Sentence(
            health,
            f"{number} {noun} in {queue.name}, the oldest for {wait}.{reason}",
            make_queue_path(queue.name),
            "The queue",
        )
    if len(slow) > 5:
        yield Sentence("look", f"Jobs wait too long in {len(slow) - 5:,} more queues.")
    if not slow:
        yield Sentence("ok", f"No due job waits longer than {LONG_WAIT_SECONDS:.0f} seconds.")
    if late := [queue for queue in status.queues if queue.late]:
        number = format_number(sum(queue.late for queue in late), status.cap)
        yield Sentence(
            "look",
            f"{number} scheduled jobs or retries in {format_names(one.name for one in late)} are "
            "due, but the leader has not made them available.",
        )


def _describe_stuck_jobs(status: FleetStatus) -> Iterator[Sentence]:
    is_anything_stuck = False
    for kind in status.kinds_without_worker:
        is_anything_stuck = True
        noun = "job waits" if kind.jobs == 1 else "jobs wait"
        yield Sentence(
            "act",
            f"No running worker has the kind {kind.kind}: {kind.jobs:,} {noun} in "
            f"{format_names(kind.queues)}.",
            "/jobs?" + urlencode({"state": "available", "kind": kind.kind}),
            "Its jobs",
        )
    for worker in status.workers:
        if worker.stuck:
            is_anything_stuck = True
            is_full = worker.slots is not None and worker.stuck >= worker.slots
            noun = "job still runs" if worker.stuck == 1 else "jobs still run"
            yield Sentence(
                "act" if is_full else "look",
                f"{worker.stuck:,} {noun} in {worker.client_id} after the cancellation.",
                "/jobs?state=running",
                "Running jobs",
            )
    if status.damaged:
        is_anything_stuck = True
        yield Sentence(
            "act",
            f"The server cannot read {format_job_ids(status.damaged)}: see docs/faults.md.",
        )
    if not is_anything_stuck:
        yield Sentence("ok", "No job is stuck.")
