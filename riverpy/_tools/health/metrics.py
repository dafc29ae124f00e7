"""The metrics of a worker as text for Prometheus, format 0.0.4.

The labels are the names of the worker's kinds, queues and singletons. An id, tag, argument, attempt
or error of a job never creates a series. Each kind has at most 20 series."""

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


class _Metric:
    """Formats one metric: its help text and its samples.

    Args:
        name: the name of the metric, without the prefix `riverpy_`.
        kind: counter, gauge or histogram.
        text: the help text.
    """

    def __init__(self, name: str, kind: str, text: str) -> None:
        self._name = f"riverpy_{name}"
        self.head = f"# HELP {self._name} {text}\n# TYPE {self._name} {kind}\n"
        """The lines before the samples."""

    def sample(self, value: float | None, **labels: str) -> str:
        """Return the line of a sample; empty: the value is None."""
        if value is None:
            return ""
        braces = f"{{{_labels(labels)}}}" if labels else ""
        return f"{self._name}{braces} {_number(value)}\n"

    def histogram(self, values: Histogram, **labels: str) -> str:
        """Return the samples of a histogram."""
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
    """Yield the page of one client in parts of some lines, because making the whole page at once
    could block the event loop.

    Args:
        stats: the stats of the client.
        process_started_at: the start of the process, in seconds since 1970.
        lags: the time for which the oldest due job of each queue has waited; None: not known.
    """
    yield from _process(stats, process_started_at)
    yield from _database(stats)
    yield from _queues(stats.queues.items(), lags)
    yield from _kinds(stats.kinds.items())
    yield from _leases(stats.leases)
    yield from _singletons(stats)


def _process(stats: ClientStats, started_at: float) -> Iterator[str]:
    info = _Metric("info", "gauge", "The version of riverpy.")
    yield info.head + info.sample(1, version=version(DISTRIBUTION))
    yield _one(
        "process_start_time_seconds",
        "gauge",
        "Start of the process, seconds since 1970.",
        started_at,
    )
    state = _Metric("state", "gauge", "1 for the current state of the worker.")
    yield state.head
    for name in ("starting", "working", "stopping", "stopped"):
        yield state.sample(stats.state == name, state=name)
    leader = _Metric("leader", "gauge", "1 while the worker is the leader of its domain.")
    yield leader.head + leader.sample(stats.is_leader, domain=stats.domain)
    lag = _Metric("event_loop_lag_seconds", "histogram", "Delay of the event loop.")
    yield lag.head + lag.histogram(stats.loop_lag)
    yield _one("stuck_services", "gauge", "Services that are stuck.", len(stats.stuck))
    yield _one(
        "stuck_jobs", "gauge", "Jobs that still run after their cancellation.", stats.stuck_jobs
    )
    yield _one(
        "events_dropped_total",
        "counter",
        "Events that were dropped for slow subscribers.",
        stats.dropped_events,
    )


def _database(stats: ClientStats) -> Iterator[str]:
    connection = _Metric("connection_up", "gauge", "1 while the connection works.")
    yield connection.head
    for purpose, is_up in stats.connections.items():
        yield connection.sample(is_up, purpose=purpose)
    yield _one("outages_total", "counter", "Losses of the database.", stats.outages)
    is_proven = None if stats.listener == "off" else stats.listener == "proven"
    yield _one("listener_proven", "gauge", "1 while notifications arrive.", is_proven)
    yield _one(
        "heartbeat_age_seconds", "gauge", "Time since the last heartbeat.", stats.heartbeat_age
    )
    yield from _renewals(
        "lease_renewals_total",
        "Renewals of the leader's lease, by result.",
        stats.lease_renewals,
        stats.lease_renewal_failures,
    )
    yield _one("results_waiting", "gauge", "Results that are not stored yet.", stats.backlog)
    yield _one(
        "results_set_aside",
        "gauge",
        "Results that the database refuses or stores too slowly.",
        len(stats.results_set_aside),
    )
    yield _one(
        "results_refused_total",
        "counter",
        "Results of attempts that the worker no longer owned.",
        stats.results_refused,
    )


def _queues(
    queues: Collection[tuple[str, QueueStats]], lags: Mapping[str, timedelta] | None
) -> Iterator[str]:
    lag = _Metric("queue_lag_seconds", "gauge", "Wait of the oldest due job.")
    yield lag.head
    for queue, wait in (lags or {}).items():
        yield lag.sample(wait.total_seconds(), queue=queue)
    for name, kind, text, value in (
        ("queue_paused", "gauge", "1 while the queue is paused.", "paused"),
        ("queue_slots", "gauge", "Jobs that may run at once.", "slots"),
        ("queue_running", "gauge", "Slots in use.", "running"),
        ("queue_claim_age_seconds", "gauge", "Time since the last successful claim.", "claim_age"),
        ("claim_failures_total", "counter", "Failed claims.", "claim_failures"),
    ):
        yield from _samples(_Metric(name, kind, text), attrgetter(value), "queue", queues)
    set_aside = _Metric("queue_jobs_set_aside", "gauge", "Jobs that cannot be claimed.")
    yield from _samples(set_aside, lambda queue: len(queue.set_aside), "queue", queues)
    for name, text, value in (
        ("claim_seconds", "Duration of claims.", "claims"),
        ("claim_jobs", "Jobs per claim.", "batches"),
        ("wait_seconds", "From due, or inserted, to the start of the attempt.", "waits"),
    ):
        metric = _Metric(name, "histogram", text)
        yield from _histograms(metric, attrgetter(value), "queue", queues)


def _kinds(kinds: Collection[tuple[str, KindStats]]) -> Iterator[str]:
    attempts = _Metric("attempts_total", "counter", "Attempts with a stored result, by outcome.")
    yield attempts.head
    for kind, stats in kinds:
        for outcome in _OUTCOMES:
            yield attempts.sample(getattr(stats, outcome), kind=kind, outcome=outcome)
    discarded = _Metric("jobs_discarded_total", "counter", "Jobs whose last attempt failed.")
    yield from _samples(discarded, attrgetter("discarded"), "kind", kinds)
    runs = _Metric("run_seconds", "histogram", "Duration of attempts.")
    yield from _histograms(runs, attrgetter("runs"), "kind", kinds)


def _leases(leases: LeaseStats) -> Iterator[str]:
    yield _one("leases_held", "gauge", "Leases of user code that are held.", leases.held)
    yield from _renewals(
        "leases_renewals_total",
        "Renewals of these leases, by result.",
        leases.renewals,
        leases.renewal_failures,
    )
    yield _one(
        "leases_renewal_seconds",
        "gauge",
        "Duration of their last renewal.",
        leases.renewal_seconds,
    )


def _singletons(stats: ClientStats) -> Iterator[str]:
    for name, kind, text, value in (
        ("running", "gauge", "1 while the singleton runs here.", "running"),
        ("epoch", "gauge", "The epoch of its lease.", "epoch"),
        ("terms_total", "counter", "Starts in this process.", "terms"),
        ("failures_total", "counter", "Failures in this process.", "failures"),
        ("losses_total", "counter", "Losses of its lease in this process.", "losses"),
        ("wait_seconds", "gauge", "Wait before its last start.", "waited"),
    ):
        metric = _Metric(f"singleton_{name}", kind, text)
        yield from _samples(metric, attrgetter(value), "singleton", stats.singletons.items())


def _one(name: str, kind: str, text: str, value: float | None) -> str:
    """Return a metric with one sample without labels."""
    metric = _Metric(name, kind, text)
    return metric.head + metric.sample(value)


def _renewals(name: str, text: str, renewed: int, failed: int) -> Iterator[str]:
    metric = _Metric(name, "counter", text)
    yield metric.head
    yield metric.sample(renewed, result="renewed")
    yield metric.sample(failed, result="failed")


def _samples(
    metric: _Metric,
    value: Callable[[Any], float | None],
    label: str,
    items: Collection[tuple[str, Any]],
) -> Iterator[str]:
    """Yield the head of a metric and one sample for each item."""
    yield metric.head
    for name, stats in items:
        yield metric.sample(value(stats), **{label: name})


def _histograms(
    metric: _Metric,
    values: Callable[[Any], Histogram],
    label: str,
    items: Collection[tuple[str, Any]],
) -> Iterator[str]:
    """Yield the head of a metric and one histogram for each item."""
    yield metric.head
    for name, stats in items:
        yield metric.histogram(values(stats), **{label: name})


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{text.translate(_ESCAPES)}"' for name, text in labels.items())


@lru_cache(maxsize=16)
def _bounds(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return tuple(map(_number, bounds))


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
