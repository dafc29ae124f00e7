"""OpenTelemetry: spans and metrics of inserts and attempts, by the conventions for messaging.

Uses the API alone: what is done with spans and metrics is up to the SDK that the program sets up.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
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

from riverpy._work.failure import ending
from riverpy.hooks import JobGetAvailableCount

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, TracerProvider
    from opentelemetry.util.types import AttributeValue

    from riverpy.hooks import Metric
    from riverpy.insert_opts import InsertResult, JobInsertParams
    from riverpy.job import Job
    from riverpy.middleware import InsertInner, WorkInner

NAMES_MAX = 1000
"""Kinds, and queues, that metrics tell apart; those beyond count as `_OTHER`."""
ERROR_TYPES_MAX = 10
"""Types of errors that the metrics of one kind tell apart."""
_OTHER = "_OTHER"
_SYSTEM = {"messaging.system": "river"}
_INSERT = {**_SYSTEM, "messaging.operation.name": "insert", "messaging.operation.type": "send"}
_CLAIM = {**_SYSTEM, "messaging.operation.name": "claim", "messaging.operation.type": "receive"}
_WORK = {**_SYSTEM, "messaging.operation.name": "work", "messaging.operation.type": "process"}
_QUEUE, _ERROR_TYPE = "messaging.destination.name", "error.type"
_KIND, _OUTCOME = "river.job.kind", "river.job.outcome"
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The buckets that the conventions give; seconds."""
_LONG_BOUNDS = (*_BOUNDS, 30.0, 60.0, 300.0, 1800.0, 3600.0)
_propagator = TraceContextTextMapPropagator()


class OpenTelemetryPlugin:
    """Traces and measures: `Config(plugins=[OpenTelemetryPlugin()])`, first in the list, in the
    programs that insert and those that work.

    An insert is a span `insert QUEUE`, whose context goes into the metadata of its jobs
    (`traceparent`, `tracestate`, as River's in Go); a job that has them already keeps them. Each
    attempt is a span `work QUEUE` with a link to the insert's. Its attribute `river.job.outcome` is
    completed, snoozed, cancelled (by its own code), stopped (by a cancel or stop from outside) or
    failed; failed ones have the error and its status. No span has args or tags.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        parent: bool = False,
    ) -> None:
        """
        Args:
            tracer_provider, meter_provider: where spans and metrics go. Default: OpenTelemetry's
                global ones.
            parent: let the span of an attempt also be a child of the insert's, in the same trace.
                Default False: it begins a trace of its own.
        """
        self._parent = parent
        self._tracer = get_tracer("riverpy", tracer_provider=tracer_provider)
        self._metrics = _Metrics(meter_provider)

    async def insert_many(
        self, params: Sequence[JobInsertParams], do_inner: InsertInner, /
    ) -> None:
        """Trace an insert."""
        queues = list(dict.fromkeys(job.queue for job in params))
        kinds = sorted({job.kind for job in params})
        attributes: dict[str, AttributeValue] = {**_INSERT, "river.job.kinds": kinds}
        if len(queues) == 1:
            attributes[_QUEUE] = queues[0]
        if len(params) > 1:
            attributes["messaging.batch.message_count"] = len(params)
        name = f"insert {queues[0]}" if len(queues) == 1 else "insert"
        started = time.monotonic()
        with self._span(name, SpanKind.PRODUCER, attributes) as span:
            carrier: dict[str, str] = {}
            _propagator.inject(carrier)
            for job in params:
                if "traceparent" not in job.metadata:
                    job.metadata.update(carrier)
            error: BaseException | None = None
            sent = params
            try:
                results = await do_inner()
                _tell_results(span, results)
                if results:
                    sent = _inserted(params, results)
            except BaseException as raised:
                error = raised
                _tell_error(span, raised)
                raise
            finally:
                self._metrics.inserted(sent, queues, time.monotonic() - started, error)
                error = None  # it holds this frame

    async def work(self, job: Job[Any], do_inner: WorkInner, /) -> None:
        """Trace an attempt."""
        sent = _propagator.extract(_texts(job.metadata), context=Context())
        context = get_current_span(sent).get_span_context()
        links = [Link(context)] if context.is_valid else []
        attributes: dict[str, AttributeValue] = {
            **_WORK,
            _QUEUE: job.queue,
            "messaging.message.id": str(job.id),
            _KIND: job.kind,
            "river.job.attempt": job.attempt,
            "river.job.priority": job.priority,
        }
        started = time.monotonic()
        parent = sent if self._parent else Context()
        with self._span(
            f"work {job.queue}", SpanKind.CONSUMER, attributes, context=parent, links=links
        ) as span:
            error: BaseException | None = None
            try:
                await do_inner()
            except BaseException as raised:
                error = raised
                if ending(raised) == "failed":
                    _tell_error(span, raised)
                raise
            finally:
                span.set_attribute(_OUTCOME, ending(error))
                self._metrics.worked(job, time.monotonic() - started, error)
                error = None  # it holds this frame

    def metric_emit(self, metric: Metric, /) -> None:
        """Measure a claim."""
        if isinstance(metric, JobGetAvailableCount):
            self._metrics.claimed(metric.queue, metric.count)
        else:
            self._metrics.claim_took(metric.queue, metric.duration.total_seconds())

    @contextmanager
    def _span(
        self,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, AttributeValue],
        *,
        context: Context | None = None,
        links: Sequence[Link] = (),
    ) -> Generator[Span]:
        with self._tracer.start_as_current_span(
            name,
            context=context,
            kind=kind,
            attributes=attributes,
            links=links,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            yield span


def _texts(metadata: Mapping[str, object]) -> dict[str, str]:
    return {key: value for key, value in metadata.items() if isinstance(value, str)}


def _tell_results(span: Span, results: Sequence[InsertResult]) -> None:
    if len(results) == 1:
        span.set_attribute("messaging.message.id", str(results[0].job.id))
    duplicates = sum(result.unique_skipped_as_duplicate for result in results)
    if duplicates:
        span.set_attribute("river.unique_skipped_as_duplicate_count", duplicates)


def _inserted(
    params: Sequence[JobInsertParams], results: Sequence[InsertResult]
) -> list[JobInsertParams]:
    """Those of the jobs that are no duplicates."""
    pairs = zip(params, results, strict=True)
    return [job for job, result in pairs if not result.unique_skipped_as_duplicate]


def _tell_error(span: Span, error: BaseException) -> None:
    with suppress(Exception):  # its text is made by code of the user's
        span.record_exception(error)
    span.set_attribute(_ERROR_TYPE, _type_name(error))
    span.set_status(StatusCode.ERROR, _type_name(error))


def _type_name(error: BaseException) -> str:
    cls = type(error)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"


class _Bounded:
    """Names, up to a number: a value that somebody may choose must not make series without end."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: set[str] = set()

    def __call__(self, name: str) -> str:
        if name not in self._names:
            if len(self._names) >= self._most:
                return _OTHER
            self._names.add(name)
        return name


class _Metrics:
    """The instruments, and the attributes of what is measured."""

    def __init__(self, provider: MeterProvider | None) -> None:
        meter = get_meter("riverpy", meter_provider=provider)

        def seconds(
            name: str, description: str, bounds: Sequence[float] = _BOUNDS
        ) -> Callable[[float, Mapping[str, AttributeValue]], None]:
            return meter.create_histogram(
                name, "s", description, explicit_bucket_boundaries_advisory=bounds
            ).record

        self._operation = seconds(
            "messaging.client.operation.duration", "How long an insert or a claim took."
        )
        self._process = seconds(
            "messaging.process.duration", "How long an attempt took.", _LONG_BOUNDS
        )
        self._wait = seconds(
            "river.job.queue_wait.duration",
            "How long a job waited between being due and being claimed.",
            _LONG_BOUNDS,
        )
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Jobs that were inserted."
        ).add
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Jobs that were claimed."
        ).add
        self._queues, self._kinds = _Bounded(NAMES_MAX), _Bounded(NAMES_MAX)
        self._errors: dict[str, _Bounded] = {}

    def inserted(
        self,
        sent: Sequence[JobInsertParams],
        queues: Sequence[str],
        seconds: float,
        error: BaseException | None,
    ) -> None:
        """An insert ended so.

        Args:
            sent: what was inserted, or was to be.
            queues: of all its jobs.
            seconds: how long it took.
            error: how it failed.
        """
        counts: dict[str, int] = {}
        for job in sent:
            queue = self._queues(job.queue)
            counts[queue] = counts.get(queue, 0) + 1
        attributes: dict[str, AttributeValue] = dict(_INSERT)
        if error is not None:
            attributes[_ERROR_TYPE] = self._error_type("", error)
        for queue, count in counts.items():
            self._sent(count, {**attributes, _QUEUE: queue})
        if len(queues) == 1:
            attributes[_QUEUE] = self._queues(queues[0])
        self._operation(seconds, attributes)

    def claimed(self, queue: str, count: int) -> None:
        """A claim brought so many jobs."""
        if count:
            self._consumed(count, {**_CLAIM, _QUEUE: self._queues(queue)})

    def claim_took(self, queue: str, seconds: float) -> None:
        """A claim took so long."""
        self._operation(seconds, {**_CLAIM, _QUEUE: self._queues(queue)})

    def worked(self, job: Job[Any], seconds: float, error: BaseException | None) -> None:
        """An attempt ended so."""
        kind = self._kinds(job.kind)
        attributes = {**_WORK, _QUEUE: self._queues(job.queue), _KIND: kind}
        if (claimed_at := job.attempted_at) is not None:
            wait = (claimed_at - max(job.scheduled_at, job.created_at)).total_seconds()
            self._wait(max(wait, 0.0), attributes)
        attributes[_OUTCOME] = outcome = ending(error)
        if error is not None and outcome == "failed":
            attributes[_ERROR_TYPE] = self._error_type(kind, error)
        self._process(seconds, attributes)

    def _error_type(self, kind: str, error: BaseException) -> str:
        return self._errors.setdefault(kind, _Bounded(ERROR_TYPES_MAX))(_type_name(error))
