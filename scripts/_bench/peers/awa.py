"""awa (Rust, with handlers in Python) with its default settings, on uvloop."""

from __future__ import annotations

import time
from dataclasses import dataclass

import uvloop
from awa import AsyncClient, Job, migrate

from scripts._bench.peers._program import WATCH, main

CONNECTIONS = 20
QUEUE = "default"


@dataclass
class Noop:
    """Args of a job that does nothing."""


class AwaPeer:
    """The program for awa; see `Peer`."""

    async def install(self, url: str) -> None:
        await migrate(_add_host(url))
        client = AsyncClient(_add_host(url), max_connections=CONNECTIONS)
        await client.install_queue_storage(schema="awa")

    async def insert_one(self, url: str, jobs: int) -> float:
        client = AsyncClient(_add_host(url), max_connections=CONNECTIONS)
        began = time.perf_counter()
        for _ in range(jobs):
            await client.insert(Noop(), queue=QUEUE)
        return time.perf_counter() - began

    async def insert_many(self, url: str, jobs: int) -> float:
        client = AsyncClient(_add_host(url), max_connections=CONNECTIONS)
        began = time.perf_counter()
        await client.enqueue_many_copy([Noop() for _ in range(jobs)], queue=QUEUE)
        return time.perf_counter() - began

    async def work(self, url: str, slots: int) -> None:
        client = AsyncClient(_add_host(url), max_connections=CONNECTIONS)

        @client.task(Noop, queue=QUEUE)
        async def noop(_job: Job[Noop]) -> None:
            WATCH.tick()

        await client.start([(QUEUE, slots)])
        await WATCH.rate()


def _add_host(url: str) -> str:
    """Return the URL with a host. awa refuses a URL without one, but uses the socket of its
    parameter `host`."""
    return url.replace("@/", "@localhost/")


if __name__ == "__main__":
    uvloop.install()
    main(AwaPeer())
