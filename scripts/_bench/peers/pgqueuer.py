"""PgQueuer on uvloop and one asyncpg connection. It claims half the slots at a time, its
maximum."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job  # noqa: TC002 (it reads the annotations)
from pgqueuer.queries import Queries

from scripts._bench.callers import call_from_tasks
from scripts._bench.peers._program import WATCH, main

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class PgQueuerPeer:
    """The program for PgQueuer; see `Peer`."""

    async def install(self, url: str) -> None:
        async with _queries(url) as queries:
            await queries.install()

    async def insert_one(self, url: str, jobs: int) -> float:
        async with _queries(url) as queries:
            began = time.perf_counter()
            for _ in range(jobs):
                await queries.enqueue("noop", b"{}")
            return time.perf_counter() - began

    async def insert_100_callers(self, url: str, jobs: int) -> float:
        async with _queries(url) as queries:
            began = time.perf_counter()
            await call_from_tasks(jobs, lambda _number: queries.enqueue("noop", b"{}"))
            return time.perf_counter() - began

    async def insert_many(self, url: str, jobs: int) -> float:
        async with _queries(url) as queries:
            began = time.perf_counter()
            await queries.enqueue(["noop"] * jobs, [b"{}"] * jobs, [0] * jobs)
            return time.perf_counter() - began

    async def work(self, url: str, slots: int) -> None:
        pgq = PgQueuer(AsyncpgDriver(await asyncpg.connect(url)))

        @pgq.entrypoint("noop")
        async def noop(_job: Job) -> None:
            WATCH.tick()

        await pgq.run(
            batch_size=slots // 2,
            max_concurrent_tasks=slots,
            dequeue_timeout=timedelta(seconds=1),
        )


@asynccontextmanager
async def _queries(url: str) -> AsyncGenerator[Queries]:
    connection = await asyncpg.connect(url)
    yield Queries(AsyncpgDriver(connection))
    await connection.close()


if __name__ == "__main__":
    uvloop.install()
    main(PgQueuerPeer())
