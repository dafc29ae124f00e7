"""What the instrumentation of the driver sees of a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import asyncpg
import pytest
from opentelemetry.instrumentation.asyncpg import AsyncPGInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import riverpy
from riverpy import EventKind
from riverpy._insert import shared_statement
from riverpy.otel import OpenTelemetryPlugin
from tests.work.rig import Task

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests._database import Schema

PATIENCE = 30.0


@pytest.fixture
def tracers() -> Generator[TracerProvider]:
    """Spans in memory, with asyncpg instrumented."""
    provider = TracerProvider()
    instrumentor = AsyncPGInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    yield provider
    instrumentor.uninstrument()


def make_client(schema: Schema, tracers: TracerProvider, *, trace_internal: bool) -> riverpy.Client:
    """A client whose one job makes a statement of its own."""
    workers = riverpy.Workers()

    @workers.job
    async def task(_job: riverpy.Job[Task]) -> None:
        connection = await asyncpg.connect(schema.url)
        try:
            await connection.fetchval("SELECT 42")
        finally:
            await connection.close()

    assert task
    return riverpy.Client(
        schema.url,
        workers=workers,
        queues={"default": riverpy.QueueConfig()},
        config=riverpy.Config(
            schema=schema.name,
            trace_internal=trace_internal,
            plugins=[OpenTelemetryPlugin(tracer_provider=tracers)],
        ),
    )


async def until_idle(client: riverpy.Client) -> None:
    """Wait until the client leads, receives its notifications and has claimed."""
    with anyio.fail_after(PATIENCE):
        while not (
            (stats := client.stats()).is_leader
            and stats.listener == "proven"
            and all(queue.claims for queue in stats.queues.values())
        ):
            await anyio.sleep(0.01)


async def test_own_statements_make_no_spans(schema: Schema, tracers: TracerProvider) -> None:
    """A worker that starts, is elected and waits makes no span. Of one job there are its insert,
    its attempt, and below this the statements of its code (FR-16). The statement of the insert has
    no span, because calls share it."""
    exporter = InMemorySpanExporter()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    client = make_client(schema, tracers, trace_internal=False)
    async with client, client.working(), client.subscribe(EventKind.JOB_COMPLETED) as events:
        await until_idle(client)
        assert [span.name for span in exporter.get_finished_spans()] == []
        await client.insert(Task())
        with anyio.fail_after(PATIENCE):
            await anext(aiter(events))
    spans = exporter.get_finished_spans()
    roots = {span.name: span.context.span_id for span in spans if span.parent is None}
    assert sorted(roots) == ["insert default", "work default"]
    below = [span for span in spans if span.parent is not None]
    assert [span.attributes["db.statement"] for span in below] == ["SELECT 42"]
    assert below[0].parent.span_id == roots["work default"]


async def test_a_lone_insert_makes_no_span(
    schema: Schema, tracers: TracerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement of an insert that is sent in the task of its caller has no span, and the code
    after it has its spans."""
    monkeypatch.setattr(shared_statement, "SINGLE_CALL_STATEMENTS_BEFORE_DIRECT_CALL", 0)
    exporter = InMemorySpanExporter()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    config = riverpy.Config(schema=schema.name)
    async with riverpy.Client(schema.url, config=config) as client, schema.connected() as other:
        exporter.clear()
        for _ in range(2):
            await client.insert(Task())
        await other.fetchval("SELECT 43")
    statements = [span.attributes["db.statement"] for span in exporter.get_finished_spans()]
    assert [text for text in statements if "river_job" in text or "43" in text] == ["SELECT 43"]


async def test_setting_shows_own_statements(schema: Schema, tracers: TracerProvider) -> None:
    """`trace_internal` lets the instrumentation see riverpy's own statements (FR-16)."""
    exporter = InMemorySpanExporter()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    client = make_client(schema, tracers, trace_internal=True)
    async with client, client.working():
        await until_idle(client)
        assert exporter.get_finished_spans()
