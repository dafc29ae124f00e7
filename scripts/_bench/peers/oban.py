"""oban-py (Python 3.12 and later) with its default settings, on uvloop and a pool."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import uvloop
from oban import Job, Oban, worker
from oban.schema import install

from scripts._bench.callers import call_from_tasks
from scripts._bench.peers._program import WATCH, main

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from psycopg_pool import AsyncConnectionPool

CONNECTIONS = 20


@worker(queue="default")
class Noop:
    """A job that does nothing."""

    async def process(self, _job: Job) -> None:
        """Count the job."""
        WATCH.tick()


class ObanPeer:
    """The program for oban-py; see `Peer`."""

    async def install(self, url: str) -> None:
        async with _pool(url) as pool:
            await install(pool)

    async def insert_one(self, url: str, jobs: int) -> float:
        async with _pool(url) as pool:
            oban = Oban(pool=pool)
            began = time.perf_counter()
            for _ in range(jobs):
                await oban.enqueue(Noop.new({}))
            return time.perf_counter() - began

    async def insert_100_callers(self, url: str, jobs: int) -> float:
        async with _pool(url) as pool:
            oban = Oban(pool=pool)
            began = time.perf_counter()
            await call_from_tasks(jobs, lambda _number: oban.enqueue(Noop.new({})))
            return time.perf_counter() - began

    async def insert_many(self, url: str, jobs: int) -> float:
        async with _pool(url) as pool:
            oban = Oban(pool=pool)
            began = time.perf_counter()
            await oban.enqueue_many([Noop.new({}) for _ in range(jobs)])
            return time.perf_counter() - began

    async def work(self, url: str, slots: int) -> None:
        async with _pool(url) as pool, Oban(pool=pool, queues={"default": slots}):
            await WATCH.rate()


@asynccontextmanager
async def _pool(url: str) -> AsyncGenerator[AsyncConnectionPool]:
    pool = await Oban.create_pool(url, max_size=CONNECTIONS)
    yield pool
    await pool.close()


if __name__ == "__main__":
    uvloop.install()
    main(ObanPeer())
