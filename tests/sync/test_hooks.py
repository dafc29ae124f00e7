"""Hooks and middleware of inserts by `riverpy.sync.Client`: those that wait are refused."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy.orm import Session

import riverpy.sync
from riverpy import Config, ConfigError, RawArgs
from riverpy.otel import OpenTelemetryPlugin
from riverpy.sentry import SentryPlugin
from tests.sessions.kinds import blocking_engine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from riverpy import InsertInner, JobInsertParams
    from tests._database import Schema

ARGS = RawArgs("task", "{}")
WAITS: list[Callable[[], Awaitable[Any]]] = [
    lambda: asyncio.sleep(0),
    lambda: anyio.sleep(9),
    lambda: asyncio.Event().wait(),
]
"""Functions that wait."""


class WaitingHook:
    """A hook that waits."""

    def __init__(self, wait: Callable[[], Awaitable[Any]]) -> None:
        self._wait = wait

    async def insert_begin(self, params: JobInsertParams, /) -> None:
        """Wait."""
        await self._wait()


class WaitingMiddleware(WaitingHook):
    """A middleware that waits after the insert."""

    insert_begin = None  # type: ignore[assignment]

    async def insert_many(
        self, params: Sequence[JobInsertParams], do_inner: InsertInner, /
    ) -> None:
        """Insert, and wait."""
        await do_inner()
        await self._wait()


class Counter:
    """A hook and middleware that does not wait."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def insert_begin(self, params: JobInsertParams, /) -> None:
        """Change the job."""
        self.calls.append("hook")
        params.tags.append("seen")

    async def insert_many(
        self, params: Sequence[JobInsertParams], do_inner: InsertInner, /
    ) -> None:
        """Insert."""
        results = await do_inner()
        self.calls.append(f"middleware {len(results)}")


@pytest.mark.parametrize("has_event_loop", [True, False])
async def test_waiting(schema: Schema, has_event_loop: bool) -> None:
    """A hook or middleware that waits is refused with its name, with or without an event loop in
    the thread. Nothing is stored, and the transaction stays usable."""

    def insert() -> None:
        with blocking_engine(schema.url, "psycopg") as engine:
            for wait in (
                lambda: asyncio.sleep(0),
                lambda: asyncio.sleep(9),
                lambda: anyio.sleep(9),
            ):
                for name, settings in (
                    ("the hook WaitingHook", {"hooks": [WaitingHook(wait)]}),
                    ("the middleware Waiting", {"middleware": [WaitingMiddleware(wait)]}),
                ):
                    config = Config(schema=schema.name, **settings)  # type: ignore[arg-type]
                    client = riverpy.sync.Client(engine, config=config)
                    with pytest.raises(ConfigError, match=f"{name}.* waits"):
                        client.insert(ARGS)
                    with Session(engine) as session, session.begin():
                        with pytest.raises(ConfigError, match=f"{name}.* waits"):
                            client.insert(ARGS, tx=session)
                        assert client.job_count(tx=session) == 0

    if has_event_loop:
        insert()
    else:
        await asyncio.to_thread(insert)
    assert await schema.jobs() == []


async def test_plugins(schema: Schema) -> None:
    """Hooks and middleware that do not wait run: those of the user, of OpenTelemetry and of
    Sentry."""
    spans, counter = InMemorySpanExporter(), Counter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    config = Config(
        schema=schema.name,
        plugins=[OpenTelemetryPlugin(tracer_provider=provider), SentryPlugin(), counter],
    )
    with blocking_engine(schema.url, "psycopg2") as engine:
        client = riverpy.sync.Client(engine, config=config)
        assert client.insert(ARGS).job.tags == ["seen"]
        with Session(engine) as session, session.begin():
            client.insert(ARGS, tx=session)
    assert counter.calls == ["hook", "middleware 1"] * 2
    assert len(spans.get_finished_spans()) == 2
    assert [job["tags"] for job in await schema.jobs()] == [["seen"], ["seen"]]
