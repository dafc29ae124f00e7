"""Metrics: a worker's stats as text for Prometheus, format 0.0.4.

Labels take their values from the worker's own kinds, queues and singletons, never from jobs: no id,
tag, args, attempt or error makes a series, and a kind has at most 20.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import timedelta

    from riverpy.stats import ClientStats, Histogram, KindStats, QueueStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class _Page:
    """Lines of metrics. A family is opened once, then its samples follow."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._name = ""

    def family(self, name: str, kind: str, text: str) -> None:
        """Open a family of this type: counter, gauge or histogram."""
        self._name = f"riverpy_{name}"
        self._lines += [f"# HELP {self._name} {text}", f"# TYPE {self._name} {kind}"]

    def sample(self, value: float | None, suffix: str = "", **labels: str) -> None:
        """A sample of the family; None is left out."""
        if value is None:
            return
        shown = ",".join(f'{name}="{text.translate(_ESCAPES)}"' for name, text in labels.items())
        braces = f"{{{shown}}}" if shown else ""
        self._lines.append(f"{self._name}{suffix}{braces} {_number(value)}")

    def one(self, name: str, kind: str, text: str, value: float | None) -> None:
        """A family of one sample without labels."""
        self.family(name, kind, text)
        self.sample(value)

    def histogram(self, values: Histogram, **labels: str) -> None:
        """The samples of a histogram."""
        total = 0
        for bound, count in zip(values.bounds, values.counts, strict=False):
            total += count
            self.sample(total, "_bucket", **labels, le=_number(bound))
        self.sample(values.count, "_bucket", **labels, le="+Inf")
        self.sample(values.sum, "_sum", **labels)
        self.sample(values.count, "_count", **labels)

    def text(self) -> str:
        """The whole page."""
        return "".join(f"{line}\n" for line in self._lines)


def render(
    stats: ClientStats, *, process_started_at: float, lags: Mapping[str, timedelta] | None
) -> str:
    """The page of one client.

    Args:
        stats: its stats.
        process_started_at: seconds since 1970.
        lags: how long the oldest due job of each queue has waited; None: it is not known.
    """
    page = _Page()
    _process(page, stats, process_started_at)
    _database(page, stats)
    _queues(page, stats.queues.items(), lags)
    _kinds(page, stats.kinds.items())
    _leases(page, stats)
    return page.text()


def _process(page: _Page, stats: ClientStats, started_at: float) -> None:
    page.family("info", "gauge", "What runs.")
    page.sample(1, version=version("riverpy"))
    page.one(
        "process_start_time_seconds", "gauge", "When the process began, since 1970.", started_at
    )
    page.family("state", "gauge", "1 for the state in which the worker is.")
    for state in ("starting", "working", "stopping", "stopped"):
        page.sample(stats.state == state, state=state)
    page.family("leader", "gauge", "1 while the worker leads its domain.")
    page.sample(stats.is_leader, domain=stats.domain)
    page.family("event_loop_lag_seconds", "histogram", "How late the event loop turned.")
    page.histogram(stats.loop_lag)
    page.one("stuck_services", "gauge", "Services that do not turn any more.", len(stats.stuck))
    page.one("stuck_jobs", "gauge", "Jobs that go on although cancelled.", stats.stuck_jobs)
    page.one(
        "events_dropped_total",
        "counter",
        "Events that subscribers were too slow for.",
        stats.dropped_events,
    )


def _database(page: _Page, stats: ClientStats) -> None:
    page.family("connection_up", "gauge", "1 while the connection for this purpose is up.")
    for purpose, is_up in stats.connections.items():
        page.sample(is_up, purpose=purpose)
    page.one("outages_total", "counter", "How often the database was lost.", stats.outages)
    is_proven = None if stats.listener == "off" else stats.listener == "proven"
    page.one("listener_proven", "gauge", "1 while notifications arrive.", is_proven)
    page.one(
        "heartbeat_age_seconds",
        "gauge",
        "Time since the last sign of life in the database.",
        stats.heartbeat_age,
    )
    page.family("lease_renewals_total", "counter", "Renewals of the lead, by result.")
    page.sample(stats.lease_renewals, result="renewed")
    page.sample(stats.lease_renewal_failures, result="failed")
    page.one("results_waiting", "gauge", "Ends of jobs that wait to be stored.", stats.backlog)
    page.one(
        "results_refused_total",
        "counter",
        "Results of attempts that were no longer the worker's.",
        stats.results_refused,
    )


def _queues(
    page: _Page,
    queues: Iterable[tuple[str, QueueStats]],
    lags: Mapping[str, timedelta] | None,
) -> None:
    queues = list(queues)
    page.family("queue_paused", "gauge", "1 while the queue is paused.")
    for queue, stats in queues:
        page.sample(stats.paused, queue=queue)
    page.family("queue_slots", "gauge", "Jobs that may run at once.")
    for queue, stats in queues:
        page.sample(stats.slots, queue=queue)
    page.family("queue_running", "gauge", "Slots that are taken.")
    for queue, stats in queues:
        page.sample(stats.running, queue=queue)
    page.family("queue_claim_age_seconds", "gauge", "Time since the last claim that succeeded.")
    for queue, stats in queues:
        page.sample(stats.claim_age, queue=queue)
    page.family("queue_lag_seconds", "gauge", "How long the oldest due job has waited.")
    for queue, lag in (lags or {}).items():
        page.sample(lag.total_seconds(), queue=queue)
    page.family("claim_failures_total", "counter", "Claims that failed.")
    for queue, stats in queues:
        page.sample(stats.claim_failures, queue=queue)
    page.family("claim_seconds", "histogram", "How long claims took.")
    for queue, stats in queues:
        page.histogram(stats.claims, queue=queue)
    page.family("claim_jobs", "histogram", "Jobs that a claim brought.")
    for queue, stats in queues:
        page.histogram(stats.batches, queue=queue)
    page.family("wait_seconds", "histogram", "From due, or inserted, to the start of the attempt.")
    for queue, stats in queues:
        page.histogram(stats.waits, queue=queue)


def _kinds(page: _Page, kinds: Iterable[tuple[str, KindStats]]) -> None:
    kinds = list(kinds)
    page.family("attempts_total", "counter", "Attempts whose end was stored, by outcome.")
    for kind, stats in kinds:
        page.sample(stats.completed, kind=kind, outcome="completed")
        page.sample(stats.failed, kind=kind, outcome="failed")
        page.sample(stats.snoozed, kind=kind, outcome="snoozed")
        page.sample(stats.cancelled, kind=kind, outcome="cancelled")
        page.sample(stats.interrupted, kind=kind, outcome="interrupted")
    page.family("jobs_discarded_total", "counter", "Jobs whose last attempt failed.")
    for kind, stats in kinds:
        page.sample(stats.discarded, kind=kind)
    page.family("run_seconds", "histogram", "How long attempts ran.")
    for kind, stats in kinds:
        page.histogram(stats.runs, kind=kind)


def _leases(page: _Page, stats: ClientStats) -> None:
    leases = stats.leases
    page.one("leases_held", "gauge", "Leases of user code that are held.", leases.held)
    page.family("leases_renewals_total", "counter", "Renewals of these leases, by result.")
    page.sample(leases.renewals, result="renewed")
    page.sample(leases.renewal_failures, result="failed")
    page.one(
        "leases_renewal_seconds",
        "gauge",
        "How long their last renewal took.",
        leases.renewal_seconds,
    )
    singletons = stats.singletons.items()
    page.family("singleton_running", "gauge", "1 while the singleton runs here.")
    for name, one in singletons:
        page.sample(one.running, singleton=name)
    page.family("singleton_epoch", "gauge", "The epoch under which it runs here.")
    for name, one in singletons:
        page.sample(one.epoch, singleton=name)
    page.family("singleton_terms_total", "counter", "How often it began here.")
    for name, one in singletons:
        page.sample(one.terms, singleton=name)
    page.family("singleton_failures_total", "counter", "How often it failed here.")
    for name, one in singletons:
        page.sample(one.failures, singleton=name)
    page.family("singleton_losses_total", "counter", "How often its lease was lost here.")
    for name, one in singletons:
        page.sample(one.losses, singleton=name)
    page.family("singleton_wait_seconds", "gauge", "How long it stood by before it began last.")
    for name, one in singletons:
        page.sample(one.waited, singleton=name)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
