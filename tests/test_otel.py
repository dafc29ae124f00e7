"""The spans and metrics that OpenTelemetry's SDK exports."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import riverpy
from riverpy import EventKind, InsertManyParams, InsertOpts, Job, JobCancel, JobSnooze, RawArgs
from riverpy.otel import OpenTelemetryPlugin
from tests.work.rig import Task, errors_of, metadata_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from opentelemetry.sdk.trace import ReadableSpan

    from tests.work.rig import Rig


class Telemetry:
    """A plugin with exporters in memory."""

    def __init__(self) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.meters = MeterProvider([self.reader])
        self.tracer = self.tracers.get_tracer("test")

    def plugin(self, **options: Any) -> OpenTelemetryPlugin:
        return OpenTelemetryPlugin(
            tracer_provider=self.tracers, meter_provider=self.meters, **options
        )

    def spans(self, name: str) -> list[ReadableSpan]:
        """Return the spans that ended."""
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def points(self, name: str) -> list[Any]:
        """Return the series of a metric."""
        data = self.reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data is not None else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


@pytest.fixture
def telemetry() -> Generator[Telemetry]:
    """The spans and metrics of one test."""
    telemetry = Telemetry()
    yield telemetry
    telemetry.meters.shutdown()
    telemetry.tracers.shutdown()


async def test_from_insert_to_work(rig: Rig, telemetry: Telemetry) -> None:
    """The insert's span is a child of the current span. The attempt starts a new trace with a link
    to the insert, and its span is current in the job."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        with telemetry.tracer.start_as_current_span("inside"):
            pass

    plugin = telemetry.plugin()
    with telemetry.tracer.start_as_current_span("request"):
        job = (await rig.insert(client=rig.client(plugins=[plugin]))).job
    await rig.work_due_jobs(plugins=[plugin])
    (request,), (insert,) = telemetry.spans("request"), telemetry.spans("insert default")
    (attempt,), (inside,) = telemetry.spans("work default"), telemetry.spans("inside")
    assert insert.parent == request.context
    assert inside.parent == attempt.context
    assert attempt.parent is None
    assert attempt.context.trace_id != insert.context.trace_id
    (link,) = attempt.links
    assert link.context.span_id == insert.context.span_id
    assert (insert.kind, attempt.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert dict(insert.attributes or {}) == {
        "messaging.system": "river",
        "messaging.operation.name": "insert",
        "messaging.operation.type": "send",
        "messaging.destination.name": "default",
        "messaging.message.id": str(job.id),
        "river.job.kinds": ("task",),
    }
    assert dict(attempt.attributes or {}) == {
        "messaging.system": "river",
        "messaging.operation.name": "work",
        "messaging.operation.type": "process",
        "messaging.destination.name": "default",
        "messaging.message.id": str(job.id),
        "river.job.kind": "task",
        "river.job.attempt": 1,
        "river.job.priority": 1,
        "river.job.outcome": "completed",
    }
    _, trace_id, span_id, _ = metadata_of(await rig.row(job.id))["traceparent"].split("-")
    assert trace_id == f"{insert.context.trace_id:032x}"
    assert span_id == f"{insert.context.span_id:016x}"


async def test_parent(rig: Rig, telemetry: Telemetry) -> None:
    """With `parent`, the attempt's span is a child of the insert's span, also for inserts of River
    in Go, and keeps its tracestate."""
    rig.register_task()
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    metadata = {"traceparent": f"00-{trace}-{span}-01", "tracestate": "vendor=x"}
    await rig.run_one(opts=InsertOpts(metadata=metadata), plugins=[telemetry.plugin(parent=True)])
    (attempt,) = telemetry.spans("work default")
    assert attempt.parent is not None
    assert f"{attempt.parent.span_id:016x}" == span
    assert f"{attempt.context.trace_id:032x}" == trace
    assert attempt.links[0].context.trace_state.get("vendor") == "x"


@pytest.mark.parametrize("metadata", [{"traceparent": 7}, {"traceparent": "x"}, {}])
async def test_no_context(rig: Rig, telemetry: Telemetry, metadata: dict[str, Any]) -> None:
    """A job without a valid trace context is traced without a link."""
    rig.register_task()
    await rig.insert_rows(1, metadata=json.dumps(metadata))
    await rig.work_due_jobs(plugins=[telemetry.plugin(parent=True)])
    (attempt,) = telemetry.spans("work default")
    assert (attempt.parent, attempt.links) == (None, ())


async def test_outcomes(rig: Rig, telemetry: Telemetry) -> None:
    """Only a failure has an error and an exception. An unknown kind and undecodable args are
    failures."""

    @rig.job(timeout=timedelta(milliseconds=30))
    async def work(job: Job[Task]) -> None:
        match job.args.n:
            case 1:
                raise JobSnooze(timedelta(hours=1))
            case 2:
                raise JobCancel("enough")
            case 3:
                raise ValueError("bad")
            case 4:
                await anyio.sleep_forever()

    args = [*map(Task, range(5)), RawArgs("nobody", "{}"), RawArgs("task", '{"n":"x"}')]
    await rig.work_in_order(*args, plugins=[telemetry.plugin()], known_kinds_only=False)
    spans = telemetry.spans("work default")
    assert [(span.attributes or {})["river.job.outcome"] for span in spans] == [
        "completed",
        "snoozed",
        "cancelled",
        "failed",
        "failed",
        "failed",
        "failed",
    ]
    types = [None, None, None, "ValueError", "TimeoutError", "LookupError"]
    types.append("msgspec.ValidationError")
    assert [(span.attributes or {}).get("error.type") for span in spans] == types
    for span, name in zip(spans, types, strict=True):
        assert span.status.status_code is (StatusCode.ERROR if name else StatusCode.UNSET)
        assert [event.name for event in span.events] == (["exception"] if name else [])


async def test_unprintable_error(rig: Rig, telemetry: Telemetry) -> None:
    """An error whose text raises does not change the outcome of the job."""

    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    @rig.job
    async def work(job: Job[Task]) -> None:
        raise Unprintable

    row = await rig.run_one(plugins=[telemetry.plugin()])
    assert errors_of(row)[0]["error"] == "<unprintable Unprintable object>"
    (span,) = telemetry.spans("work default")
    assert span.status.status_code is StatusCode.ERROR


async def test_timeout_in_another_task(rig: Rig, telemetry: Telemetry) -> None:
    """A timeout is a failure, even if another middleware runs the job in a task group."""

    @rig.job(timeout=timedelta(milliseconds=20))
    async def work(job: Job[Task]) -> None:
        await anyio.sleep_forever()

    async def beside(job: Job[Any], do_inner: riverpy.WorkInner) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(do_inner)

    await rig.run_one(plugins=[telemetry.plugin(), riverpy.WorkerMiddlewareFunc(beside)])
    (span,) = telemetry.spans("work default")
    assert (span.attributes or {})["error.type"] == "TimeoutError"


@pytest.mark.parametrize("way", ["cancel", "stop"])
async def test_stopped(rig: Rig, telemetry: Telemetry, way: str) -> None:
    """A cancel or stop is not an error."""
    begun = anyio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        begun.set()
        await anyio.sleep_forever()

    async with rig.working(plugins=[telemetry.plugin()]) as client:
        job = (await client.insert(Task())).job
        await begun.wait()
        await client.job_cancel(job.id) if way == "cancel" else client.stop_and_cancel()
        assert (await rig.event()).kind in {EventKind.JOB_CANCELLED, EventKind.JOB_INTERRUPTED}
    (span,) = telemetry.spans("work default")
    assert (span.attributes or {})["river.job.outcome"] == "stopped"
    assert span.status.status_code is StatusCode.UNSET


async def test_batch(rig: Rig, telemetry: Telemetry) -> None:
    """A batch has one span with its size, and all its jobs have the context. A refused batch has an
    error. A duplicate is not counted."""
    params = [
        InsertManyParams(Task(1)),
        InsertManyParams(Task(2), InsertOpts(queue="mail")),
        InsertManyParams(RawArgs("other", "{}")),
    ]
    unique = InsertOpts(unique_opts=riverpy.UniqueOpts(by_args=True))
    async with rig.client(plugins=[telemetry.plugin()]) as client:
        await client.insert_many(params)
        await client.insert_many_fast(params)
        await client.insert(Task(9), unique)
        await client.insert(Task(9), unique)
        with pytest.raises(riverpy.UniqueConflictError):
            await client.insert_many_fast([InsertManyParams(Task(9), unique)])
    first, fast = telemetry.spans("insert")
    for span in (first, fast):
        attributes = span.attributes or {}
        assert attributes["messaging.batch.message_count"] == 3
        assert attributes["river.job.kinds"] == ("other", "task")
        assert "messaging.destination.name" not in attributes
    rows = await rig.schema.jobs()
    contexts = {metadata_of(row)["traceparent"].split("-")[2] for row in rows[:6]}
    assert contexts == {f"{span.context.span_id:016x}" for span in (first, fast)}
    _, duplicate, failed = telemetry.spans("insert default")
    assert (duplicate.attributes or {})["river.unique_skipped_as_duplicate_count"] == 1
    assert failed.status.status_code is StatusCode.ERROR
    sent = {
        (point.attributes["messaging.destination.name"], point.attributes.get("error.type")): (
            point.value
        )
        for point in telemetry.points("messaging.client.sent.messages")
    }
    conflict = "riverpy.errors.UniqueConflictError"
    assert sent == {("default", None): 5, ("mail", None): 2, ("default", conflict): 1}


async def test_metrics_are_bounded(rig: Rig, telemetry: Telemetry) -> None:
    """Jobs with different ids, tags, args and errors create at most 20 series per kind. The wait of
    a job starts when it is due and inserted (OP-06)."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        raise type(f"Error{job.args.n}", (Exception,), {})(f"text {job.args.n}")

    long_ago = datetime.now(UTC) - timedelta(days=1)
    params = [
        InsertManyParams(Task(n), InsertOpts(tags=[f"tag{n}"], scheduled_at=long_ago))
        for n in range(100)
    ]
    async with rig.working(plugins=[telemetry.plugin()]) as client:
        await client.insert_many(params)
        await rig.take(100)
    runs = telemetry.points("messaging.process.duration")
    waits = telemetry.points("river.job.queue_wait.duration")
    assert sum(point.count for point in runs) == sum(point.count for point in waits) == 100
    assert sum(point.sum for point in waits) < timedelta(days=1).total_seconds()
    assert len(runs) + len(waits) <= 20
    assert {point.attributes["river.job.kind"] for point in runs} == {"task"}
    assert any(point.attributes["error.type"] == "_OTHER" for point in runs)
    operations = telemetry.points("messaging.client.operation.duration")
    names = {point.attributes["messaging.operation.name"] for point in operations}
    assert names == {"insert", "claim"}
    (claimed,) = telemetry.points("messaging.client.consumed.messages")
    assert claimed.value == 100


async def test_kinds_are_bounded(
    rig: Rig, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many kinds and queues create a limited number of series (OP-06)."""
    monkeypatch.setattr(riverpy.otel, "METRIC_LABELS_MAX", 2)

    rig.register_task()
    args = [RawArgs(f"kind{n}", "{}") for n in range(5)]
    await rig.work_in_order(*args, plugins=[telemetry.plugin()], known_kinds_only=False)
    points = telemetry.points("messaging.process.duration")
    kinds = {point.attributes["river.job.kind"]: point.count for point in points}
    assert kinds == {"kind0": 1, "kind1": 1, "_OTHER": 3}


@pytest.mark.parametrize(
    ("module", "package"), [("otel", "opentelemetry"), ("sentry", "sentry_sdk")]
)
def test_missing_extra(module: str, package: str) -> None:
    """Without the extra, importing the module raises an error with the install command. riverpy
    itself can be imported."""
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        f"import riverpy\ntry:\n    import riverpy.{module}\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"pip install 'riverpy-queue[{module}]'" in done.stdout
