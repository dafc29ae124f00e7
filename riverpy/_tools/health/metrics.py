"""Metrics: a worker's stats as text for Prometheus, format 0.0.4.

Labels take their values from the worker's own kinds, queues and singletons, never from jobs: no id,
tag, args, attempt or error makes a series, and a kind has at most 20.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from riverpy._names import DISTRIBUTION

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from datetime import timedelta

    from riverpy.stats import ClientStats, Histogram, KindStats, LeaseStats, QueueStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_OUTCOMES = ("completed", "failed", "snoozed", "cancelled", "interrupted")


class _Family:
    """Samples of one name."""

    def __init__(self, name: str, kind: str, text: str) -> None:
        """Of this type: counter, gauge or histogram."""
        self._name = f"riverpy_{name}"
        self.head = f"# HELP {self._name} {text}\n# TYPE {self._name} {kind}\n"
        """Comes before its samples."""

    def sample(self, value: float | None, **labels: str) -> str:
        """A sample; None is left out."""
        if value is None:
            return ""
        braces = f"{{{_labels(labels)}}}" if labels else ""
        return f"{self._name}{braces} {_number(value)}\n"

    def histogram(self, values: Histogram, **labels: str) -> str:
        """The samples of a histogram."""
        name, shown = self._name, _labels(labels)
        bucket = f'{name}_bucket{{{shown}{"," if shown else ""}le="'
        total, lines = 0, list[str]()
        for bound, count in zip(_bounds(values.bounds), values.counts, strict=False):
            total += count
            lines.append(f'{bucket}{bound}"}} {total}\n')
        braces = f"{{{shown}}}" if shown else ""
        lines.append(
            f'{bucket}+Inf"}} {values.count}\n'
            f"{name}_sum{braces} {_number(values.sum)}\n"
            f"{name}_count{braces} {values.count}\n"
        )
        return "".join(lines)


def render(
    stats: ClientStats, *, process_started_at: float, lags: Mapping[str, timedelta] | None
) -> Iterator[str]:
    """The page of one client, in pieces of some lines each: of many kinds and queues the whole
    would hold the event loop for long.

    Args:
        stats: its stats.
        process_started_at: seconds since 1970.
        lags: how long the oldest due job of each queue has waited; None: it is not known.
    """
    yield from _process(stats, process_started_at)
    yield from _database(stats)
    yield from _queues(stats.queues.items(), lags)
    yield from _kinds(stats.kinds.items())
    yield from _leases(stats.leases)
    yield from _singletons(stats)


def _process(stats: ClientStats, started_at: float) -> Iterator[str]:
    info = _Family("info", "gauge", "What runs.")
    yield info.head + info.sample(1, version=version(DISTRIBUTION))
    yield _one(
        "process_start_time_seconds", "gauge", "When the process began, since 1970.", started_at
    )
    state = _Family("state", "gauge", "1 for the state in which the worker is.")
    yield state.head
    for name in ("starting", "working", "stopping", "stopped"):
        yield state.sample(stats.state == name, state=name)
    leader = _Family("leader", "gauge", "1 while the worker leads its domain.")
    yield leader.head + leader.sample(stats.is_leader, domain=stats.domain)
    lag = _Family("event_loop_lag_seconds", "histogram", "How late the event loop turned.")
    yield lag.head + lag.histogram(stats.loop_lag)
    yield _one("stuck_services", "gauge", "Services that do not turn any more.", len(stats.stuck))
    yield _one("stuck_jobs", "gauge", "Jobs that go on although cancelled.", stats.stuck_jobs)
    yield _one(
        "events_dropped_total",
        "counter",
        "Events that subscribers were too slow for.",
        stats.dropped_events,
    )


def _database(stats: ClientStats) -> Iterator[str]:
    connection = _Family("connection_up", "gauge", "1 while the connection for this purpose is up.")
    yield connection.head
    for purpose, is_up in stats.connections.items():
        yield connection.sample(is_up, purpose=purpose)
    yield _one("outages_total", "counter", "How often the database was lost.", stats.outages)
    is_proven = None if stats.listener == "off" else stats.listener == "proven"
    yield _one("listener_proven", "gauge", "1 while notifications arrive.", is_proven)
    yield _one(
        "heartbeat_age_seconds",
        "gauge",
        "Time since the last sign of life in the database.",
        stats.heartbeat_age,
    )
    renewals = _Family("lease_renewals_total", "counter", "Renewals of the lead, by result.")
    yield renewals.head
    yield renewals.sample(stats.lease_renewals, result="renewed")
    yield renewals.sample(stats.lease_renewal_failures, result="failed")
    yield _one("results_waiting", "gauge", "Ends of jobs that wait to be stored.", stats.backlog)
    yield _one(
        "results_set_aside",
        "gauge",
        "Ends of jobs that the database refuses, or takes too long for.",
        len(stats.results_set_aside),
    )
    yield _one(
        "results_refused_total",
        "counter",
        "Results of attempts that were no longer the worker's.",
        stats.results_refused,
    )


def _queues(
    queues: Collection[tuple[str, QueueStats]], lags: Mapping[str, timedelta] | None
) -> Iterator[str]:
    lag = _Family("queue_lag_seconds", "gauge", "How long the oldest due job has waited.")
    yield lag.head
    for queue, waited in (lags or {}).items():
        yield lag.sample(waited.total_seconds(), queue=queue)
    for name, kind, text, value in (
        ("queue_paused", "gauge", "1 while the queue is paused.", "paused"),
        ("queue_slots", "gauge", "Jobs that may run at once.", "slots"),
        ("queue_running", "gauge", "Slots that are taken.", "running"),
        (
            "queue_claim_age_seconds",
            "gauge",
            "Time since the last claim that succeeded.",
            "claim_age",
        ),
        ("claim_failures_total", "counter", "Claims that failed.", "claim_failures"),
    ):
        yield from _samples(_Family(name, kind, text), attrgetter(value), "queue", queues)
    aside = _Family("queue_jobs_set_aside", "gauge", "Jobs that cannot be claimed.")
    yield from _samples(aside, lambda queue: len(queue.set_aside), "queue", queues)
    for name, text, value in (
        ("claim_seconds", "How long claims took.", "claims"),
        ("claim_jobs", "Jobs that a claim brought.", "batches"),
        ("wait_seconds", "From due, or inserted, to the start of the attempt.", "waits"),
    ):
        family = _Family(name, "histogram", text)
        yield from _histograms(family, attrgetter(value), "queue", queues)


def _kinds(kinds: Collection[tuple[str, KindStats]]) -> Iterator[str]:
    attempts = _Family("attempts_total", "counter", "Attempts whose end was stored, by outcome.")
    yield attempts.head
    for kind, stats in kinds:
        for outcome in _OUTCOMES:
            yield attempts.sample(getattr(stats, outcome), kind=kind, outcome=outcome)
    discarded = _Family("jobs_discarded_total", "counter", "Jobs whose last attempt failed.")
    yield from _samples(discarded, attrgetter("discarded"), "kind", kinds)
    runs = _Family("run_seconds", "histogram", "How long attempts ran.")
    yield from _histograms(runs, attrgetter("runs"), "kind", kinds)


def _leases(leases: LeaseStats) -> Iterator[str]:
    yield _one("leases_held", "gauge", "Leases of user code that are held.", leases.held)
    renewals = _Family("leases_renewals_total", "counter", "Renewals of these leases, by result.")
    yield renewals.head
    yield renewals.sample(leases.renewals, result="renewed")
    yield renewals.sample(leases.renewal_failures, result="failed")
    yield _one(
        "leases_renewal_seconds",
        "gauge",
        "How long their last renewal took.",
        leases.renewal_seconds,
    )


def _singletons(stats: ClientStats) -> Iterator[str]:
    for name, kind, text, value in (
        ("running", "gauge", "1 while the singleton runs here.", "running"),
        ("epoch", "gauge", "The epoch under which it runs here.", "epoch"),
        ("terms_total", "counter", "How often it began here.", "terms"),
        ("failures_total", "counter", "How often it failed here.", "failures"),
        ("losses_total", "counter", "How often its lease was lost here.", "losses"),
        ("wait_seconds", "gauge", "How long it stood by before it began last.", "waited"),
    ):
        family = _Family(f"singleton_{name}", kind, text)
        yield from _samples(family, attrgetter(value), "singleton", stats.singletons.items())


def _one(name: str, kind: str, text: str, value: float | None) -> str:
    """A family of one sample without labels."""
    family = _Family(name, kind, text)
    return family.head + family.sample(value)


def _samples(
    family: _Family,
    value: Callable[[Any], float | None],
    label: str,
    items: Collection[tuple[str, Any]],
) -> Iterator[str]:
    """One sample of each of the named items."""
    yield family.head
    for name, stats in items:
        yield family.sample(value(stats), **{label: name})


def _histograms(
    family: _Family,
    values: Callable[[Any], Histogram],
    label: str,
    items: Collection[tuple[str, Any]],
) -> Iterator[str]:
    """One histogram of each of the named items."""
    yield family.head
    for name, stats in items:
        yield family.histogram(values(stats), **{label: name})


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{text.translate(_ESCAPES)}"' for name, text in labels.items())


@lru_cache(maxsize=16)
def _bounds(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return tuple(map(_number, bounds))


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
