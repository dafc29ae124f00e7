"""OpenTelemetryPlugin: creates spans and metrics of inserts and attempts. They follow
OpenTelemetry's conventions for messaging.

riverpy uses only OpenTelemetry's API. Your program sets up the SDK, which exports the data.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

try:
    from opentelemetry.context import Context
    from opentelemetry.metrics import get_meter
    from opentelemetry.trace import (
        Link,
        SpanKind,
        StatusCode,
        get_current_span,
        get_tracer,
    )
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ImportError(
        "riverpy.otel needs the OpenTelemetry API: pip install 'riverpy-queue[otel]'"
    ) from error

from riverpy._work.failure import classify_attempt_ending
from riverpy.hooks import JobGetAvailableCount

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opentelemetry.metrics import Histogram, MeterProvider
    from opentelemetry.trace import Span, TracerProvider
    from opentelemetry.util.types import AttributeValue

    from riverpy.hooks import Metric
    from riverpy.insert_opts import InsertResult, JobInsertParams
    from riverpy.job import Job
    from riverpy.middleware import InsertInner, WorkInner

METRIC_LABELS_MAX = 1000
"""The maximum number of kinds, and of queues, in metrics. All further names become `_OTHER`."""
KIND_ERROR_TYPES_MAX = 10
"""The maximum number of error types in the metrics of one kind. Further types become `_OTHER`."""
_OTHER_LABEL = "_OTHER"
_INSERT_ATTRIBUTES, _CLAIM_ATTRIBUTES, _WORK_ATTRIBUTES = (
    {
        "messaging.system": "river",
        "messaging.operation.name": name,
        "messaging.operation.type": operation_type,
    }
    for name, operation_type in (("insert", "send"), ("claim", "receive"), ("work", "process"))
)
_QUEUE_KEY, _ERROR_TYPE_KEY = "messaging.destination.name", "error.type"
_KIND_KEY, _OUTCOME_KEY = "river.job.kind", "river.job.outcome"
_BUCKET_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The limits of the histogram buckets in OpenTelemetry's conventions, in seconds."""
_LONG_BUCKET_SECONDS = (*_BUCKET_SECONDS, 30.0, 60.0, 300.0, 1800.0, 3600.0)
_trace_propagator = TraceContextTextMapPropagator()


class OpenTelemetryPlugin:
    """A plugin that creates spans and metrics: `Config(plugins=[OpenTelemetryPlugin()])`. Put it
    first in the list, both in programs that insert jobs and in programs that work them.

    Each insert has a span `insert QUEUE`. The context of this span is stored in the metadata of the
    jobs (`traceparent` and `tracestate`, as in River), if they have no `traceparent` yet.

    Each attempt has a span `work QUEUE` with a link to the span of the insert. The attribute
    `river.job.outcome` of this span is completed, snoozed, cancelled (by the job's own code),
    stopped (by `job_cancel` or a stop of the client) or failed. The span of a failed attempt has
    the error and the status ERROR. Spans never contain args or tags.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        parent: bool = False,
    ) -> None:
        """Create the plugin.

        Args:
            tracer_provider: creates the tracer. Default: OpenTelemetry's global provider.
            meter_provider: creates the meter. Default: OpenTelemetry's global provider.
            parent: whether the span of an attempt is a child of the insert's span, in the same
                trace. Default False: each attempt starts a new trace.
        """
        self._should_make_child_spans = parent
        self._start_span = partial(
            get_tracer("riverpy", tracer_provider=tracer_provider).start_as_current_span,
            record_exception=False,
            set_status_on_exception=False,
        )
        meter = get_meter("riverpy", meter_provider=meter_provider)

        def create_histogram(name: str, description: str, bounds: Sequence[float]) -> Histogram:
            return meter.create_histogram(
                name, "s", description, explicit_bucket_boundaries_advisory=bounds
            )

        self._operation_duration = create_histogram(
            "messaging.client.operation.duration",
            "How long an insert or a claim took.",
            _BUCKET_SECONDS,
        )
        self._attempt_duration = create_histogram(
            "messaging.process.duration", "How long an attempt took.", _LONG_BUCKET_SECONDS
        )
        self._queue_wait_duration = create_histogram(
            "river.job.queue_wait.duration",
            "How long a job waited from its due time to its claim.",
            _LONG_BUCKET_SECONDS,
        )
        self._inserted_job_counter = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Inserted jobs."
        )
        self._claimed_job_counter = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Claimed jobs."
        )
        self._queue_labels = _LabelLimiter(METRIC_LABELS_MAX)
        self._kind_labels = _LabelLimiter(METRIC_LABELS_MAX)
        self._error_labels_by_kind: dict[str, _LabelLimiter] = {}
        """The error types in metrics, by job kind. The key `""` is for errors of inserts."""

    async def insert_many(
        self, params: Sequence[JobInsertParams], do_inner: InsertInner, /
    ) -> None:
        """Insert the jobs in a new span, and record the metrics of the insert."""
        queues = list(dict.fromkeys(job.queue for job in params))
        kinds = sorted({job.kind for job in params})
        attributes: dict[str, AttributeValue] = {**_INSERT_ATTRIBUTES, "river.job.kinds": kinds}
        if len(queues) == 1:
            attributes[_QUEUE_KEY] = queues[0]
        if len(params) > 1:
            attributes["messaging.batch.message_count"] = len(params)
        name = f"insert {queues[0]}" if len(queues) == 1 else "insert"
        started = time.monotonic()
        with self._start_span(name, kind=SpanKind.PRODUCER, attributes=attributes) as span:
            carrier: dict[str, str] = {}
            _trace_propagator.inject(carrier)
            for job in params:
                if "traceparent" not in job.metadata:
                    job.metadata.update(carrier)
            error: BaseException | None = None
            inserted = params
            try:
                results = await do_inner()
                _set_insert_result_attributes(span, results)
                if results:
                    inserted = _remove_skipped_duplicates(params, results)
            except BaseException as raised:
                error = raised
                _set_error_status(span, raised)
                raise
            finally:
                self._record_insert(inserted, queues, time.monotonic() - started, error)
                error = None  # the traceback of the error would keep this frame alive

    async def work(self, job: Job[Any], do_inner: WorkInner, /) -> None:
        """Run the attempt in a new span, and record the metrics of the attempt."""
        insert_context = _trace_propagator.extract(
            _select_string_values(job.metadata), context=Context()
        )
        insert_span = get_current_span(insert_context).get_span_context()
        attributes: dict[str, AttributeValue] = {
            **_WORK_ATTRIBUTES,
            _QUEUE_KEY: job.queue,
            "messaging.message.id": str(job.id),
            _KIND_KEY: job.kind,
            "river.job.attempt": job.attempt,
            "river.job.priority": job.priority,
        }
        started = time.monotonic()
        with self._start_span(
            f"work {job.queue}",
            context=insert_context if self._should_make_child_spans else Context(),
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=[Link(insert_span)] if insert_span.is_valid else [],
        ) as span:
            error: BaseException | None = None
            try:
                await do_inner()
            except BaseException as raised:
                error = raised
                if classify_attempt_ending(raised) == "failed":
                    _set_error_status(span, raised)
                raise
            finally:
                span.set_attribute(_OUTCOME_KEY, classify_attempt_ending(error))
                self._record_attempt(job, time.monotonic() - started, error)
                error = None  # the traceback of the error would keep this frame alive

    def metric_emit(self, metric: Metric, /) -> None:
        """Record the duration of a claim, or the number of jobs that a claim returned."""
        attributes = {**_CLAIM_ATTRIBUTES, _QUEUE_KEY: self._queue_labels(metric.queue)}
        if not isinstance(metric, JobGetAvailableCount):
            self._operation_duration.record(metric.duration.total_seconds(), attributes)
        elif metric.count:
            self._claimed_job_counter.add(metric.count, attributes)

    def _record_insert(
        self,
        inserted_jobs: Sequence[JobInsertParams],
        queues: Sequence[str],
        seconds: float,
        error: BaseException | None,
    ) -> None:
        """Record the metrics of an insert.

        `inserted_jobs` does not contain duplicates, except after an error: then it contains all
        jobs. `queues` has the queues of all jobs.
        """
        attributes: dict[str, AttributeValue] = dict(_INSERT_ATTRIBUTES)
        if error is not None:
            attributes[_ERROR_TYPE_KEY] = self._choose_error_label("", error)
        for queue, count in Counter(self._queue_labels(job.queue) for job in inserted_jobs).items():
            self._inserted_job_counter.add(count, {**attributes, _QUEUE_KEY: queue})
        if len(queues) == 1:
            attributes[_QUEUE_KEY] = self._queue_labels(queues[0])
        self._operation_duration.record(seconds, attributes)

    def _record_attempt(self, job: Job[Any], seconds: float, error: BaseException | None) -> None:
        kind = self._kind_labels(job.kind)
        attributes = {
            **_WORK_ATTRIBUTES,
            _QUEUE_KEY: self._queue_labels(job.queue),
            _KIND_KEY: kind,
        }
        if (claimed_at := job.attempted_at) is not None:
            wait = (claimed_at - max(job.scheduled_at, job.created_at)).total_seconds()
            self._queue_wait_duration.record(max(wait, 0.0), attributes)
        attributes[_OUTCOME_KEY] = outcome = classify_attempt_ending(error)
        if error is not None and outcome == "failed":
            attributes[_ERROR_TYPE_KEY] = self._choose_error_label(kind, error)
        self._attempt_duration.record(seconds, attributes)

    def _choose_error_label(self, kind: str, error: BaseException) -> str:
        """Return the type name of the error, or a common label after too many names."""
        labels = self._error_labels_by_kind.setdefault(kind, _LabelLimiter(KIND_ERROR_TYPES_MAX))
        return labels(_get_type_name(error))


def _select_string_values(metadata: Mapping[str, object]) -> dict[str, str]:
    return {key: value for key, value in metadata.items() if isinstance(value, str)}


def _set_insert_result_attributes(span: Span, results: Sequence[InsertResult]) -> None:
    if len(results) == 1:
        span.set_attribute("messaging.message.id", str(results[0].job.id))
    duplicates = sum(result.unique_skipped_as_duplicate for result in results)
    if duplicates:
        span.set_attribute("river.unique_skipped_as_duplicate_count", duplicates)


def _remove_skipped_duplicates(
    params: Sequence[JobInsertParams], results: Sequence[InsertResult]
) -> list[JobInsertParams]:
    pairs = zip(params, results, strict=True)
    return [job for job, result in pairs if not result.unique_skipped_as_duplicate]


def _set_error_status(span: Span, error: BaseException) -> None:
    with suppress(Exception):  # the error's text comes from user code, which may fail
        span.record_exception(error)
    span.set_attribute(_ERROR_TYPE_KEY, _get_type_name(error))
    span.set_status(StatusCode.ERROR, _get_type_name(error))


def _get_type_name(error: BaseException) -> str:
    cls = type(error)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"


class _LabelLimiter:
    """Limits how many different values a label of a metric has, because too many values make
    metrics expensive. A call with a name, for example of a queue, returns this name. After
    `maximum` different names, a call with a new name returns the label `_OTHER`."""

    def __init__(self, maximum: int) -> None:
        self._labels_max = maximum
        self._labels: set[str] = set()

    def __call__(self, name: str) -> str:
        if name not in self._labels:
            if len(self._labels) >= self._labels_max:
                return _OTHER_LABEL
            self._labels.add(name)
        return name
