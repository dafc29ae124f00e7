"""The metrics of a worker as text for Prometheus, format 0.0.4.

The label values are the names of the worker's kinds, queues, singletons and leases. An id, tag,
argument, attempt or error of a job never creates a series. Each kind has at most 20 series.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from riverpy._version import VERSION
from riverpy.stats import Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import timedelta

    from riverpy.stats import ClientStats, KindStats, LeaseStats, QueueStats

SampleValue: TypeAlias = float | Histogram | None
"""The value of a Prometheus sample. None: the value is not known, and the sample is omitted."""
Sample: TypeAlias = "tuple[Mapping[str, str], SampleValue]"
"""The labels and the value of a Prometheus sample."""

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LAG_METRIC_LEASES_MAX = 20
"""The maximum number of user leases (from `client.lease`) that have metrics. A program may create
lease names while it runs, so their number has no other limit. The leases of singletons are not
counted."""
_LABEL_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_ATTEMPT_OUTCOMES = ("completed", "failed", "snoozed", "cancelled", "interrupted")


def render_metrics(
    stats: ClientStats, *, process_started_at: float, queue_lags: Mapping[str, timedelta] | None
) -> Iterator[str]:
    """Yield the metrics page of one client in parts of a few lines. Building the whole page at once
    could block the event loop.

    `process_started_at` is in seconds since 1970. `queue_lags` contains how long the oldest due job
    of each queue has waited. None: not known.
    """
    yield from _process_metrics(stats, process_started_at)
    yield from _database_metrics(stats)
    waits = {queue: wait.total_seconds() for queue, wait in (queue_lags or {}).items()}
    yield from _labelled_metric(
        "queue_lag_seconds", "gauge", "Wait of the oldest due job.", "queue", waits
    )
    yield from _queue_metrics(stats.queues)
    yield from _kind_metrics(stats.kinds)
    yield from _lease_summary_metrics(stats.leases)
    yield from _singleton_metrics(stats)
    yield from _per_lease_metrics(stats)


def _process_metrics(stats: ClientStats, process_started_at: float) -> Iterator[str]:
    info = {VERSION: 1}
    yield from _labelled_metric("info", "gauge", "The version of riverpy.", "version", info)
    states = {name: stats.state == name for name in ("starting", "working", "stopping", "stopped")}
    text = "1 for the current state of the worker."
    yield from _labelled_metric("state", "gauge", text, "state", states)
    text = "1 while the worker is the leader of its domain."
    yield from _labelled_metric("leader", "gauge", text, "domain", {stats.domain: stats.is_leader})
    text = "1 while the worker would become leader if there was none."
    standby = {stats.domain: stats.is_leader_standby}
    yield from _labelled_metric("leader_standby", "gauge", text, "domain", standby)
    text = "Start of the process, seconds since 1970."
    yield from _unlabelled_metric("process_start_time_seconds", "gauge", text, process_started_at)
    text = "Delay of the event loop."
    yield from _unlabelled_metric("event_loop_lag_seconds", "histogram", text, stats.loop_lag)
    yield from _unlabelled_metric(
        "stuck_services", "gauge", "Services that are stuck.", len(stats.stuck)
    )
    text = "Jobs that still run after their cancellation."
    yield from _unlabelled_metric("stuck_jobs", "gauge", text, stats.stuck_jobs)
    text = "Events that were dropped for slow subscribers."
    yield from _unlabelled_metric("events_dropped_total", "counter", text, stats.dropped_events)


def _database_metrics(stats: ClientStats) -> Iterator[str]:
    text = "1 while the connection works."
    yield from _labelled_metric("connection_up", "gauge", text, "purpose", stats.connections)
    renewals = {"renewed": stats.lease_renewals, "failed": stats.lease_renewal_failures}
    text = "Renewals of the leader's lease, by result."
    yield from _labelled_metric("lease_renewals_total", "counter", text, "result", renewals)
    is_proven = None if stats.listener == "off" else stats.listener == "proven"
    yield from _unlabelled_metric(
        "listener_proven", "gauge", "1 while notifications arrive.", is_proven
    )
    text = "Time since the last heartbeat."
    yield from _unlabelled_metric("heartbeat_age_seconds", "gauge", text, stats.heartbeat_age)
    yield from _unlabelled_metric(
        "outages_total", "counter", "Losses of the database.", stats.outages
    )
    text = "Results that are not stored yet."
    yield from _unlabelled_metric("results_waiting", "gauge", text, stats.backlog)
    text = "Results that the database refuses or stores too slowly."
    yield from _unlabelled_metric("results_set_aside", "gauge", text, len(stats.results_set_aside))
    text = "Results of attempts that the worker no longer owned."
    yield from _unlabelled_metric("results_refused_total", "counter", text, stats.results_refused)


def _queue_metrics(queues: Mapping[str, QueueStats]) -> Iterator[str]:
    for name, kind, text, attribute in (
        ("queue_paused", "gauge", "1 while the queue is paused.", "paused"),
        ("queue_slots", "gauge", "Jobs that may run at once.", "slots"),
        ("queue_running", "gauge", "Slots in use.", "running"),
        ("queue_claim_age_seconds", "gauge", "Time since the last successful claim.", "claim_age"),
        ("claim_failures_total", "counter", "Failed claims.", "claim_failures"),
        ("claim_seconds", "histogram", "Duration of claims.", "claims"),
        ("claim_jobs", "histogram", "Jobs per claim.", "batches"),
        (
            "wait_seconds",
            "histogram",
            "From due, or inserted, to the start of the attempt.",
            "waits",
        ),
    ):
        values = {queue: getattr(stats, attribute) for queue, stats in queues.items()}
        yield from _labelled_metric(name, kind, text, "queue", values)
    numbers = {queue: len(stats.set_aside) for queue, stats in queues.items()}
    text = "Jobs that cannot be claimed."
    yield from _labelled_metric("queue_jobs_set_aside", "gauge", text, "queue", numbers)


def _kind_metrics(kinds: Mapping[str, KindStats]) -> Iterator[str]:
    attempts = (
        ({"kind": kind, "outcome": outcome}, getattr(stats, outcome))
        for kind, stats in kinds.items()
        for outcome in _ATTEMPT_OUTCOMES
    )
    text = "Attempts with a stored result, by outcome."
    yield from metric_lines("attempts_total", "counter", text, attempts)
    discarded = {kind: stats.discarded for kind, stats in kinds.items()}
    text = "Jobs whose last attempt failed."
    yield from _labelled_metric("jobs_discarded_total", "counter", text, "kind", discarded)
    runs = {kind: stats.runs for kind, stats in kinds.items()}
    yield from _labelled_metric("run_seconds", "histogram", "Duration of attempts.", "kind", runs)


def _lease_summary_metrics(leases: LeaseStats) -> Iterator[str]:
    text = "Leases of user code that are held."
    yield from _unlabelled_metric("leases_held", "gauge", text, leases.held)
    renewals = {"renewed": leases.renewals, "failed": leases.renewal_failures}
    text = "Renewals of these leases, by result."
    yield from _labelled_metric("leases_renewals_total", "counter", text, "result", renewals)
    text = "Duration of their last renewal."
    yield from _unlabelled_metric("leases_renewal_seconds", "gauge", text, leases.renewal_seconds)


def _per_lease_metrics(stats: ClientStats) -> Iterator[str]:
    """Yield the metrics of user leases: the lease of each singleton, and up to
    `LAG_METRIC_LEASES_MAX` other leases. The other leases are those that this worker holds and for
    which it has reported a lag."""
    singletons = stats.singletons
    others = sorted(stats.leases.lags.keys() - singletons.keys())[:LAG_METRIC_LEASES_MAX]
    lags = {name: one.lag for name, one in singletons.items()}
    lags |= {name: stats.leases.lags[name] for name in others}
    held: dict[str, SampleValue] = {name: one.held for name, one in singletons.items()}
    held |= dict.fromkeys(others, 1)
    text = "1 while this worker holds the lease."
    yield from _labelled_metric("lease_held", "gauge", text, "lease", held)
    text = "1 while this worker would acquire the lease if it was free."
    standby = {name: one.standby for name, one in singletons.items()}
    yield from _labelled_metric("lease_standby", "gauge", text, "lease", standby)
    text = "Time until the held lease ends, if it is not renewed."
    valid = {name: one.valid_for for name, one in singletons.items()}
    yield from _labelled_metric("lease_valid_seconds", "gauge", text, "lease", valid)
    for name, text, attribute in (
        ("items", "Items that are not handled, as last reported.", "count"),
        ("seconds", "Age of the oldest of these items, as last reported.", "age"),
        ("report_age_seconds", "Time since this report.", "reported_ago"),
    ):
        values: dict[str, SampleValue] = {
            lease: getattr(lag, attribute, None) for lease, lag in lags.items()
        }
        yield from _labelled_metric(f"lease_lag_{name}", "gauge", text, "lease", values)


def _singleton_metrics(stats: ClientStats) -> Iterator[str]:
    for name, kind, text, attribute in (
        ("running", "gauge", "1 while the singleton runs here.", "running"),
        ("epoch", "gauge", "The epoch of its lease.", "epoch"),
        ("terms_total", "counter", "Starts in this process.", "terms"),
        ("failures_total", "counter", "Failures in this process.", "failures"),
        ("losses_total", "counter", "Losses of its lease in this process.", "losses"),
        ("wait_seconds", "gauge", "Wait before its last start.", "waited"),
    ):
        values = {key: getattr(one, attribute) for key, one in stats.singletons.items()}
        yield from _labelled_metric(f"singleton_{name}", kind, text, "singleton", values)


def _unlabelled_metric(
    name: str, metric_type: str, help_text: str, value: SampleValue
) -> Iterator[str]:
    """Yield a metric with one sample without labels."""
    return metric_lines(name, metric_type, help_text, [({}, value)])


def _labelled_metric(
    name: str, metric_type: str, help_text: str, label_name: str, values: Mapping[str, SampleValue]
) -> Iterator[str]:
    """Yield a metric with one label and several samples. `values` has the value of each sample,
    keyed by its label value."""
    samples = (({label_name: key}, value) for key, value in values.items())
    return metric_lines(name, metric_type, help_text, samples)


def metric_lines(
    name: str, metric_type: str, help_text: str, samples: Iterable[Sample]
) -> Iterator[str]:
    """Yield the lines of one metric: its help text and its type, then its samples with labels."""
    name = f"riverpy_{name}"
    yield f"# HELP {name} {help_text}\n# TYPE {name} {metric_type}\n"
    for labels, value in samples:
        shown = ",".join(
            f'{label}="{key.translate(_LABEL_ESCAPES)}"' for label, key in labels.items()
        )
        if isinstance(value, Histogram):
            yield "".join(_histogram_lines(name, shown, value))
        elif value is not None:
            yield (
                f"{name}{{{shown}}} {_format_number(value)}\n"
                if shown
                else f"{name} {_format_number(value)}\n"
            )


def _histogram_lines(name: str, labels: str, histogram: Histogram) -> Iterator[str]:
    bucket = f'{name}_bucket{{{labels}{"," if labels else ""}le="'
    total = 0
    for bound, count in zip(
        _format_bucket_bounds(histogram.bounds), histogram.counts, strict=False
    ):
        total += count
        yield f'{bucket}{bound}"}} {total}\n'
    braces = f"{{{labels}}}" if labels else ""
    yield f'{bucket}+Inf"}} {histogram.count}\n'
    yield f"{name}_sum{braces} {_format_number(histogram.sum)}\n"
    yield f"{name}_count{braces} {histogram.count}\n"


@lru_cache(maxsize=16)
def _format_bucket_bounds(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return tuple(map(_format_number, bounds))


def _format_number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
