"""Procrastinate, with as many connections as its worker can use at once."""

from __future__ import annotations

import time

from procrastinate import App, PsycopgConnector

from scripts._bench.callers import call_from_tasks
from scripts._bench.peers._program import WATCH, main

CONNECTIONS = 20


class ProcrastinatePeer:
    """The program for Procrastinate; see `Peer`."""

    async def install(self, url: str) -> None:
        async with _app(url).open_async() as app:
            await app.schema_manager.apply_schema_async()

    async def insert_one(self, url: str, jobs: int) -> float:
        async with _app(url).open_async() as app:
            began = time.perf_counter()
            for _ in range(jobs):
                await app.tasks["noop"].defer_async()
            return time.perf_counter() - began

    async def insert_100_callers(self, url: str, jobs: int) -> float:
        async with _app(url).open_async() as app:
            began = time.perf_counter()
            await call_from_tasks(jobs, lambda _number: app.tasks["noop"].defer_async())
            return time.perf_counter() - began

    async def insert_many(self, url: str, jobs: int) -> float:
        async with _app(url).open_async() as app:
            params: list[dict[str, object]] = [{}] * jobs
            began = time.perf_counter()
            await app.tasks["noop"].batch_defer_async(*params)
            return time.perf_counter() - began

    async def work(self, url: str, slots: int) -> None:
        async with _app(url).open_async() as app:
            await app.run_worker_async(concurrency=slots)


def _app(url: str) -> App:
    app = App(connector=PsycopgConnector(conninfo=url, min_size=1, max_size=CONNECTIONS))

    @app.task(name="noop")
    async def noop() -> None:
        WATCH.tick()

    return app


if __name__ == "__main__":
    main(ProcrastinatePeer())
