"""Memory of hooks and middleware."""

from __future__ import annotations

import asyncio
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import JobInsertMiddlewareFunc, JobInsertParams, UniqueConflictError
from riverpy.otel import OpenTelemetryPlugin
from riverpy.sentry import SentryPlugin
from tests.work.rig import Task
from tests.work.test_memory import Heavy, no_collector  # noqa: F401 (a fixture)
from tests.work.test_middleware import Recorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy import InsertInner, Job
    from tests.work.rig import Rig


@pytest.mark.usefixtures("no_collector")
async def test_locals_of_a_job(rig: Rig) -> None:
    """Inside hooks and middleware too, without the cycle collector, the objects of a job are gone
    when its event arrives (ME-02)."""
    held: list[weakref.ref[Heavy]] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        heavy = Heavy()
        held.append(weakref.ref(heavy))
        if job.args.n == 1:
            await asyncio.sleep(3600)
        if job.args.n == 2:
            raise ValueError("holds its frames")

    plugins: list[Any] = [OpenTelemetryPlugin(), SentryPlugin(), Recorder("p", [])]
    async with rig.working(job_timeout=timedelta(milliseconds=50), plugins=plugins) as client:
        for n in range(3):
            await client.insert(Task(n))
            await rig.event()
            for _ in range(3):
                await asyncio.sleep(0)
            assert [reference() for reference in held] == [None] * (n + 1)


@pytest.mark.usefixtures("no_collector")
async def test_locals_of_an_insert(rig: Rig) -> None:
    """A failed insert keeps no objects either, after its error was handled (ME-02)."""
    held: list[weakref.ref[Heavy]] = []

    async def fail(params: Sequence[JobInsertParams], do_inner: InsertInner) -> None:
        heavy = Heavy()
        held.append(weakref.ref(heavy))
        await do_inner()
        raise UniqueConflictError("after all")

    async def catch(params: Sequence[JobInsertParams], do_inner: InsertInner) -> None:
        with pytest.raises(UniqueConflictError):
            await do_inner()

    middleware = [
        OpenTelemetryPlugin(),
        SentryPlugin(),
        JobInsertMiddlewareFunc(catch),
        JobInsertMiddlewareFunc(fail),
    ]
    async with rig.client(middleware=middleware) as client:
        try:
            await client.insert(Task())
        except UniqueConflictError:
            pass
        else:
            pytest.fail("it was caught")
        assert held
        assert [reference() for reference in held] == [None]
