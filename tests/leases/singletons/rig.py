"""Clients that compete for singletons, and functions that a test controls."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio

from riverpy import Client, Config

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from anyio.abc import TaskStatus

    from riverpy import Lease, StopReport
    from tests._database import Schema

TTL = timedelta(seconds=3)
INTERVAL = timedelta(milliseconds=250)
LONG = timedelta(seconds=60)
"""The ttl of a lease that must not end while a test runs."""


def make_client(
    schema: Schema,
    client_id: str,
    *,
    ttl: timedelta = LONG,
    interval: timedelta = INTERVAL,
    max_leases: int | None = None,
) -> Client:
    """Create a client that only runs singletons and takes no part in leader election."""
    config = Config(
        schema=schema.name,
        id=client_id,
        candidate=False,
        leader_ttl=ttl,
        elect_interval=interval,
        max_leases=max_leases,
        soft_stop_timeout=timedelta(0),
        hard_stop_timeout=timedelta(seconds=2),
    )
    return Client(schema.url, config=config)


class Task:
    """A function of a singleton. Records its leases, and ends as a test configures."""

    def __init__(self) -> None:
        self.leases: list[Lease] = []
        self.began: asyncio.Queue[Lease] = asyncio.Queue()
        self.ended: asyncio.Queue[Lease] = asyncio.Queue()
        self.ended_at = 0.0
        """When it ended last, by the monotonic clock."""
        self.may_end = anyio.Event()
        self.error: Exception | None = None
        self.is_deaf = False
        """Whether it ignores its cancellation."""

    async def __call__(self, lease: Lease) -> None:
        self.leases.append(lease)
        self.began.put_nowait(lease)
        try:
            while not self.may_end.is_set():
                try:
                    await self.may_end.wait()
                except asyncio.CancelledError:
                    if not self.is_deaf:
                        raise
            if self.error is not None:
                raise self.error
        finally:
            self.ended_at = time.monotonic()
            self.ended.put_nowait(lease)


async def soon(queue: asyncio.Queue[Any]) -> Any:
    """Return the next item. Fails after 30 s."""
    with anyio.fail_after(30):
        return await queue.get()


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until a condition holds. Fails after 30 s."""
    with anyio.fail_after(30):
        while not is_so():
            await anyio.sleep(0.01)


@asynccontextmanager
async def running(*clients: Client) -> AsyncGenerator[list[StopReport]]:
    """Run clients. Adds the results of their stops as they end."""
    reports: list[StopReport] = []

    async def run(client: Client, *, task_status: TaskStatus[None]) -> None:
        reports.append(await client.run(task_status=task_status))

    async with anyio.create_task_group() as tasks:
        for client in clients:
            await tasks.start(run, client)
        yield reports
        for client in clients:
            client.stop()
