"""Clients with very small pools, and servers with few connections."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import riverpy
from riverpy import InsertOpts, Job, UniqueOpts
from riverpy._insert import inserter
from tests.work.rig import Task

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests.work.rig import Rig

JOBS = 30
UNIQUE = InsertOpts(unique_opts=UniqueOpts(by_queue=True))


@contextmanager
def short_waiting() -> Generator[None]:
    """Limit the wait for a connection of the pool."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (inserter, riverpy.client):
            monkeypatch.setattr(module, "ACQUIRE_CONNECTION_TIMEOUT", 0.5)
        yield


@pytest.mark.parametrize("size", [1, 2])
async def test_jobs_share_few_connections(rig: Rig, size: int) -> None:
    """With one or two connections in the pool and many jobs that insert and read at the same time,
    all jobs end: claims and results have connections of their own (PB-09)."""
    together = asyncio.Event()
    running = 0

    @rig.job
    async def work(job: Job[Task]) -> None:
        nonlocal running
        running += 1
        if running == JOBS:
            together.set()
        await together.wait()
        if job.args.n > 0:
            await client.insert(Task(0))
            await client.job_get(job.id)
            await client.insert(Task(0))

    await rig.insert_rows(JOBS)
    client = rig.client(slots=JOBS, pool_size=size)
    async with rig.running(client):
        await rig.take(3 * JOBS)
    assert await rig.states() == {"completed": 3 * JOBS}


async def test_pool_that_user_code_has_filled(rig: Rig) -> None:
    """While user code holds every connection of the pool, jobs are still worked, cancelled and
    stored. Inserts that share a statement need no connection of the pool. A unique insert times out
    with a clear error, and works again when a connection is free (PB-09)."""
    rig.register_task()
    async with rig.working(pool_size=1) as client:
        async with client._get_open_pool().acquire():
            await rig.insert_rows(JOBS)
            await notify(rig)
            await rig.take(JOBS)
            await client.insert(Task())
            await rig.event()
            with short_waiting():
                for call in (client.insert(Task(), UNIQUE), client.job_get(1)):
                    with pytest.raises(TimeoutError, match=r"Config\(pool_size=…\)"):
                        await call
        await client.insert(Task(), UNIQUE)
        await rig.event()
    assert await rig.states() == {"completed": JOBS + 2}


async def notify(rig: Rig) -> None:
    """Notify of an insert."""
    await rig.schema.execute(f'NOTIFY "{rig.schema.name}.river_insert", \'{{"queue": "default"}}\'')
