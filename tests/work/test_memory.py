"""Memory: nothing of a finished job is kept."""

from __future__ import annotations

import asyncio
import gc
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from riverpy import Job, JobCancel
from tests.work.rig import PATIENCE, Task

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests.work.rig import Rig


class Heavy:
    """An object in a local variable of a job."""


@pytest.fixture
def no_collector() -> Generator[None]:
    """Turn the cycle collector off."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("executor", [None, "thread"])
async def test_locals_of_a_job(rig: Rig, executor: str | None) -> None:
    """Without the cycle collector, the objects of a job are gone when its event arrives, whether it
    returns, fails with one error or several, cancels itself or exceeds its timeout (ME-02)."""
    held: list[weakref.ref[Heavy]] = []

    def body(n: int) -> None:
        heavy = Heavy()
        held.append(weakref.ref(heavy))
        if n == 1:
            raise ValueError("holds its frames")
        if n == 2:
            raise ExceptionGroup("two", [ValueError("a"), OSError("b")])
        if n == 3:
            raise JobCancel("no")

    if executor:

        @rig.job(executor=executor)
        def work(job: Job[Task]) -> None:
            body(job.args.n)

    else:

        @rig.job
        async def work_async(job: Job[Task]) -> None:
            heavy = Heavy()
            held.append(weakref.ref(heavy))
            body(job.args.n)
            if job.args.n == 4:
                await asyncio.sleep(3600)

    async with rig.working(job_timeout=timedelta(milliseconds=50)) as client:
        for n in range(4 if executor else 5):
            held.clear()
            await client.insert(Task(n))
            await rig.event()
            assert held
            async with asyncio.timeout(PATIENCE):  # a thread may have to release its last frame
                while executor and any(reference() for reference in held):
                    await asyncio.sleep(0.001)
            for _ in range(3):
                await asyncio.sleep(0)
            assert [reference() for reference in held] == [None] * len(held), n


async def test_collector_in_a_tight_loop(rig: Rig) -> None:
    """Running tasks are referenced: even with a constantly running collector no task is lost
    (ME-03)."""
    done = asyncio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        await asyncio.sleep(0)
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, None)
        await future

    async def collect() -> None:
        while not done.is_set():
            gc.collect(1)
            await asyncio.sleep(0)

    await rig.insert_rows(60)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(collect())
        async with rig.working(slots=10):
            await rig.take(60)
        done.set()
    assert await rig.states() == {"completed": 60}
