"""Chancy with its executor for coroutines. It polls again at once while there are jobs."""

from __future__ import annotations

import logging
import time

from chancy import Chancy, Queue, Worker, job

from scripts._bench.callers import call_from_tasks
from scripts._bench.peers._program import WATCH, main


@job(queue="bench")
async def noop() -> None:
    """Do nothing."""
    WATCH.tick()


class ChancyPeer:
    """The program for Chancy; see `Peer`."""

    async def install(self, url: str) -> None:
        async with _chancy(url) as chancy:
            await chancy.migrate()

    async def insert_one(self, url: str, jobs: int) -> float:
        async with _chancy(url) as chancy:
            began = time.perf_counter()
            for _ in range(jobs):
                await chancy.push(noop)
            return time.perf_counter() - began

    async def insert_100_callers(self, url: str, jobs: int) -> float:
        async with _chancy(url) as chancy:
            began = time.perf_counter()
            await call_from_tasks(jobs, lambda _number: chancy.push(noop))
            return time.perf_counter() - began

    async def insert_many(self, url: str, jobs: int) -> float:
        async with _chancy(url) as chancy:
            began = time.perf_counter()
            async for _ in chancy.push_many([noop] * jobs):
                pass
            return time.perf_counter() - began

    async def work(self, url: str, slots: int) -> None:
        async with _chancy(url) as chancy:
            queue = Queue(
                name="bench",
                concurrency=slots,
                executor=Chancy.Executor.Async,
                polling_interval=1,
                eager_polling=True,
            )
            await chancy.declare(queue, upsert=True)
            # Without this, its worker creates an executor of this name that uses processes.
            await chancy.declare(Queue(name="default", executor=Chancy.Executor.Async))
            async with Worker(chancy, register_signal_handlers=False) as worker:
                await worker.wait_for_shutdown()


def _chancy(url: str) -> Chancy:
    log = logging.getLogger("chancy")
    log.setLevel(logging.WARNING)
    return Chancy(url, log=log)


if __name__ == "__main__":
    from scripts._bench.peers import chancy  # a worker finds the job by the name of this module

    main(chancy.ChancyPeer())
