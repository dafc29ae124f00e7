"""The home page: sentences about the health of all clients and queues, then a table of the
queues."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlencode

from riverpy._dashboard.cancelling_jobs import describe_ignored_cancellation, read_stuck_jobs
from riverpy._dashboard.database import open_read_transaction
from riverpy._dashboard.health_summary import (
    describe_failed_checks,
    describe_leaders,
    describe_unheld_leases,
    is_silent,
    make_health_summary,
)
from riverpy._dashboard.page import Page
from riverpy._dashboard.paths import make_periodic_job_path, make_queue_path, make_worker_path
from riverpy._dashboard.plots import load_plots, make_sparklines
from riverpy._dashboard.queue_health import (
    LONG_WAIT_SECONDS,
    describe_waiting_jobs,
    find_wait_reason,
    read_queue_facts,
)
from riverpy._dashboard.rendering import format_capped_count, format_duration
from riverpy._dashboard.sentence import HealthSentence, rank_health
from riverpy._postgres.dashboard_reads import periodic_list_entries
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._tools.domain_map import PRIVILEGE_MISSING_SQLSTATE, TABLE_MISSING_SQLSTATE
from riverpy._tools.text import format_count, format_job_ids, format_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from riverpy._dashboard.page import PageRequest
    from riverpy._dashboard.queue_health import QueueFacts, WaitReason
    from riverpy._postgres.dashboard_reads import StuckJob
    from riverpy._tools.top.status import OverallStatus, QueueStatus, WorkerStatus

FINDINGS_AGE_MAX = 120.0
"""The maximum age of the findings of `riverpy doctor` in seconds. While the page is open, the
checks of `riverpy doctor` run again after this time."""
QUEUES_SHOWN_MAX = 200
"""The maximum number of queues in the table. Queues with the longest waits come first."""
QUEUES_NAMED_MAX = 5
"""The maximum number of queues with long waits that have their own sentence. One more sentence
contains the number of the other queues with long waits."""
STUCK_JOBS_NAMED_MAX = 5
"""The maximum number of stuck jobs that the page lists for each worker. A stuck job ignores its
cancellation."""
PERIODIC_JOBS_READ_MAX = 1_000
"""The maximum number of periodic jobs that are read to find the paused ones."""


async def load_home_page(view: PageRequest) -> Mapping[str, object]:
    """Read the status of clients and queues, and return the values of the page."""
    status = await view.site.statuses.read()
    queues = sorted(status.queues, key=_get_queue_sort_key)
    shown = queues[:QUEUES_SHOWN_MAX]
    facts = await read_queue_facts(view.site.client, status)
    stuck_jobs = await read_stuck_jobs(view.site, status)
    paused = await _read_paused_periodic_jobs(view)
    recent = await view.site.job_counts.read_last_hour_counts([queue.name for queue in shown])
    return {
        "status": status,
        "summary": make_health_summary(
            [
                *_describe_status(status, facts, stuck_jobs),
                *_describe_paused_periodic_jobs(paused),
                *_describe_checks(view),
            ]
        ),
        "plots": await load_plots(view, status, PAGE.path),
        "queues": shown,
        "sparklines": make_sparklines(recent, status.at),
        "queues_left_out": max(len(queues) - QUEUES_SHOWN_MAX, 0),
    }


PAGE = Page("home", "/", "home.html", load_home_page, "Home", findings_age_max=FINDINGS_AGE_MAX)


def _describe_status(
    status: OverallStatus, facts: Sequence[QueueFacts], stuck_jobs: Sequence[StuckJob]
) -> list[HealthSentence]:
    """Return the sentences about the health of all clients and queues.

    The leader, the workers, failed attempts, waits and stuck jobs have a sentence even if nothing
    is wrong. Exception: if the sentences about stuck jobs explain all long waits, there is no
    sentence about waits. Other topics, such as paused queues, have a sentence only if there is
    something to report.
    """
    return [
        *describe_leaders(status),
        *_describe_workers(status),
        *_describe_failed_attempts(status),
        *_describe_waiting_queues(facts),
        *_describe_paused_queues(facts),
        *_describe_late_jobs(status),
        *_describe_stuck_jobs(status, stuck_jobs),
        *describe_unheld_leases(status),
    ]


def _describe_checks(view: PageRequest) -> Iterable[HealthSentence]:
    report = view.site.doctor.last
    return () if report is None else describe_failed_checks(report)


def _get_queue_sort_key(queue: QueueStatus) -> tuple[bool, float, str]:
    """Return the sort key of a queue. Queues with due jobs and no worker come first, then the
    queues with the longest waits."""
    waits = queue.due_for or 0.0
    return not (waits and queue.workers == 0), -waits, queue.name


def _describe_workers(status: OverallStatus) -> Iterator[HealthSentence]:
    by_state: dict[str, list[WorkerStatus]] = {}
    for worker in status.workers:
        by_state.setdefault("silent" if is_silent(worker) else worker.state, []).append(worker)
    alive, silent = by_state.get("alive", []), by_state.get("silent", [])
    if alive:
        stopping = by_state.get("stopping")
        also = f", and {len(stopping)} more stop" if stopping else ""
        verb = "is" if len(alive) == 1 else "are"
        yield HealthSentence("ok", f"{format_count(len(alive), 'worker')} {verb} alive{also}.")
    elif status.candidates is None:
        yield HealthSentence("look", "Workers are not known: run `riverpy migrate up`.")
    elif by_state.get("unregistered"):
        yield HealthSentence("look", "No riverpy worker is alive, but other clients run jobs.")
    else:
        yield HealthSentence("act", "No worker is alive: start one with `riverpy worker`.")
    if silent:
        yield _describe_silent_workers(silent)


def _describe_silent_workers(silent: Sequence[WorkerStatus]) -> HealthSentence:
    if len(silent) == 1:
        worker = silent[0]
        return HealthSentence(
            "look",
            f"1 worker sends no heartbeat: {worker.client_id}, for "
            f"{format_duration(worker.silent_for)}. It stopped without a notice, or cannot reach "
            "the database.",
            make_worker_path(worker.client_id),
            f"Worker {worker.client_id}",
        )
    return HealthSentence(
        "look",
        f"{len(silent):,} workers send no heartbeat: "
        f"{format_names(one.client_id for one in silent)}. They stopped without a notice, or "
        "cannot reach the database.",
        "/workers",
        "Workers",
    )


def _describe_failed_attempts(status: OverallStatus) -> Iterator[HealthSentence]:
    failing = [queue for queue in status.queues if queue.failed_per_s]
    over = format_duration(status.rates_over)
    if failing:
        failed = max(round(sum(one.failed_per_s for one in failing) * status.rates_over), 1)
        names = format_names(queue.name for queue in failing)
        has_retries = any(queue.retryable for queue in failing)
        yield HealthSentence(
            "look",
            f"{format_count(failed, 'attempt')} failed in the last {over}, in {names}.",
            "/jobs?state=retryable" if has_retries else None,
            "Jobs waiting for a retry",
        )
    else:
        yield HealthSentence("ok", f"No attempt failed in the last {over}.")
    if discarded := status.totals["discarded"]:
        number = format_capped_count(discarded, status.cap)
        noun = "job" if discarded == 1 else "jobs"
        yield HealthSentence(
            "look",
            f"{number} {noun} failed every attempt.",
            "/jobs?state=discarded",
            "Discarded jobs",
        )


def _describe_waiting_queues(facts: Sequence[QueueFacts]) -> Iterator[HealthSentence]:
    """Yield a sentence for each of the queues with the longest waits, with the reason for the
    waits. If no queue has long waits, yield one sentence that confirms this."""
    behind = [
        (one, reason)
        for one in facts
        if one.status.due_for is not None
        and not one.status.paused
        and (reason := find_wait_reason(one)).health != "ok"
    ]
    if not behind:
        yield HealthSentence(
            "ok",
            f"No due job waits longer than {LONG_WAIT_SECONDS:.0f} seconds in a queue that is not "
            "paused.",
        )
    behind.sort(key=_get_wait_sort_key)
    named = [
        (one, reason) for one, reason in behind if not _is_explained_by_kinds_without_worker(one)
    ]
    for one, reason in named[:QUEUES_NAMED_MAX]:
        waits = describe_waiting_jobs(one, f" in {one.status.name}")
        yield HealthSentence(
            reason.health,
            " ".join(part for part in (f"{waits}.", reason.cause, reason.advice) if part),
            make_queue_path(one.status.name),
            f"Queue {one.status.name}",
        )
    if len(named) > QUEUES_NAMED_MAX:
        more = format_count(len(named) - QUEUES_NAMED_MAX, "more queue")
        yield HealthSentence("look", f"Jobs wait too long in {more}.", "/queues", "Queues")


def _get_wait_sort_key(found: tuple[QueueFacts, WaitReason]) -> tuple[int, float, str]:
    facts, reason = found
    return -rank_health(reason.health), -(facts.status.due_for or 0.0), facts.status.name


def _is_explained_by_kinds_without_worker(facts: QueueFacts) -> bool:
    """Return whether jobs of a queue wait because no worker can run their kinds, and the page
    has a sentence about each of these kinds."""
    if facts.live_worker_count == 0 or not facts.kinds_without_worker:
        return False
    known = {kind.kind for kind in facts.fleet.kinds_without_worker}
    return known.issuperset(facts.kinds_without_worker)


def _describe_paused_queues(facts: Sequence[QueueFacts]) -> Iterator[HealthSentence]:
    paused = [one for one in facts if one.status.paused]
    if len(paused) == 1:
        one = paused[0]
        waits = describe_waiting_jobs(one)
        yield HealthSentence(
            "look",
            f"The queue {one.status.name} is paused. {waits or 'No job waits'}.",
            make_queue_path(one.status.name),
            f"Queue {one.status.name}",
        )
    elif paused:
        cap = paused[0].fleet.cap
        waiting = sum(one.status.available for one in paused)
        subject = (
            "1 job waits" if waiting == 1 else f"{format_capped_count(waiting, cap)} jobs wait"
        )
        names = format_names(one.status.name for one in paused)
        text = f"{len(paused):,} queues are paused: {names}. {subject} in them."
        yield HealthSentence("look", text, "/queues", "Queues")


async def _read_paused_periodic_jobs(view: PageRequest) -> list[str]:
    """Return the ids of the paused periodic jobs. The list is empty if the table is missing, or if
    the database role may not read it."""
    schema = view.site.client.config.schema
    async with open_read_transaction(view.site.client) as tx:
        try:
            async with tx.transaction():
                entries = await periodic_list_entries(tx, schema, limit=PERIODIC_JOBS_READ_MAX)
        except DATABASE_ERRORS as error:
            if getattr(error, "sqlstate", None) not in {
                PRIVILEGE_MISSING_SQLSTATE,
                TABLE_MISSING_SQLSTATE,
            }:
                raise
            return []
    return [entry.id for entry in entries if entry.paused_at is not None]


def _describe_paused_periodic_jobs(ids: Sequence[str]) -> Iterator[HealthSentence]:
    if len(ids) == 1:
        path, name = make_periodic_job_path(ids[0]), f"Periodic job {ids[0]}"
        yield HealthSentence("look", f"The periodic job {ids[0]} is paused.", path, name)
    elif ids:
        text = f"{len(ids):,} periodic jobs are paused: {format_names(ids)}."
        yield HealthSentence("look", text, "/periodic", "Periodic jobs")


def _describe_late_jobs(status: OverallStatus) -> Iterator[HealthSentence]:
    if late := [queue for queue in status.queues if queue.late]:
        number = format_capped_count(sum(queue.late for queue in late), status.cap)
        yield HealthSentence(
            "look",
            f"{number} scheduled jobs or retries in {format_names(one.name for one in late)} are "
            "due, but the leader has not made them available.",
        )


def _describe_stuck_jobs(
    status: OverallStatus, stuck_jobs: Sequence[StuckJob]
) -> Iterator[HealthSentence]:
    is_anything_stuck = False
    for kind in status.kinds_without_worker:
        is_anything_stuck = True
        noun = "job waits" if kind.jobs == 1 else "jobs wait"
        yield HealthSentence(
            "act",
            f"No worker can run kind {kind.kind}: {kind.jobs:,} {noun} in "
            f"{format_names(kind.queues)}.",
            "/jobs?" + urlencode({"state": "available", "kind": kind.kind}),
            f"Jobs of {kind.kind}",
        )
    for worker in status.workers:
        if worker.stuck and worker.state != "silent":  # `silent`: it counts as dead
            is_anything_stuck = True
            is_full = worker.slots is not None and worker.stuck >= worker.slots
            jobs = [one for one in stuck_jobs if one.client_id == worker.client_id]
            yield HealthSentence(
                "act" if is_full else "look",
                _describe_worker_with_stuck_jobs(worker, jobs),
                make_worker_path(worker.client_id),
                f"Worker {worker.client_id}",
            )
    if status.damaged:
        is_anything_stuck = True
        yield HealthSentence(
            "act",
            f"The server cannot read {format_job_ids(status.damaged)}: see docs/faults.md.",
        )
    if not is_anything_stuck:
        yield HealthSentence("ok", "No job is stuck.")


def _describe_worker_with_stuck_jobs(worker: WorkerStatus, jobs: Sequence[StuckJob]) -> str:
    if worker.stuck == len(jobs) == 1:
        return describe_ignored_cancellation(*jobs[0])
    number = format_count(worker.stuck, "job")
    verb = "ignores its" if worker.stuck == 1 else "ignore their"
    names = [f"{one.id} ({one.kind})" for one in jobs[:STUCK_JOBS_NAMED_MAX]]
    more = ", …" if len(jobs) > len(names) else ""
    which = f": {', '.join(names)}{more}" if names else ""
    return f"{number} {verb} cancellation{which}. Restart worker {worker.client_id}."
