"""The web application that the tests start in real servers. Its requests and jobs wait for advisory
locks of the test."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

import asyncpg
import msgspec
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import riverpy
import riverpy.web
from riverpy._work.producer import Producer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request

URL = os.environ["DATABASE_URL"]
workers = riverpy.Workers()


class Order(msgspec.Struct, frozen=True):
    """A job that waits for an advisory lock."""

    kind: ClassVar[str] = "order"
    lock: int


class Show(msgspec.Struct, frozen=True):
    """A job that shows what it does, and waits for an advisory lock."""

    kind: ClassVar[str] = "show"
    lock: int


async def wait_for_lock(lock: int) -> None:
    """Wait until no other session has this lock, on a connection of its own."""
    connection = await asyncpg.connect(URL, server_settings={"application_name": "waiting"})
    await connection.execute("SELECT pg_advisory_lock_shared($1)", lock)
    await connection.close()


@workers.job(timeout=None)
async def work(job: riverpy.Job[Order]) -> None:
    """Wait for the lock."""
    await wait_for_lock(job.args.lock)


@workers.job(timeout=None)
async def show(job: riverpy.Job[Show]) -> None:
    """Report progress, store an output with line ends, and wait for the lock."""
    job.progress(1, 2, "a\nb")
    await job.save_output("a\r\nb\n\nevent: c")
    await wait_for_lock(job.args.lock)


client = riverpy.Client(
    URL, workers=workers, queues={"default": riverpy.QueueConfig(max_workers=5)}
)


@asynccontextmanager
async def own_lifespan(app: object) -> AsyncGenerator[dict[str, object]]:
    """Open the pool of the requests."""
    async with asyncpg.create_pool(URL, min_size=0, max_size=3) as pool:
        yield {"pool": pool}
    print("own lifespan ended", flush=True)


async def order(request: Request) -> PlainTextResponse:
    """Insert an order and its job in one transaction, and wait for a lock before the commit."""
    async with request.state.pool.acquire() as connection, connection.transaction():
        await connection.execute("INSERT INTO orders DEFAULT VALUES")
        args = Order(lock=int(request.query_params["job_lock"]))
        await request.state.riverpy.insert(args, tx=connection)
        await wait_for_lock(int(request.query_params["request_lock"]))
    return PlainTextResponse("ordered", 201)


async def insert_shown(request: Request) -> PlainTextResponse:
    """Insert a job that shows what it does, and return its id."""
    args = Show(lock=int(request.query_params["lock"]))
    return PlainTextResponse(str((await client.insert(args)).job.id), 201)


async def fail_worker(request: Request) -> PlainTextResponse:
    """Cause a fault of riverpy in the worker of this process."""

    async def fail(*_: object) -> None:
        raise ZeroDivisionError("a fault of ours")

    Producer._wait_until_next_claim = fail  # type: ignore[method-assign]
    await request.state.riverpy.insert(Order(lock=1))
    return PlainTextResponse("")


app = Starlette(
    routes=[
        Route("/orders", order, methods=["POST"]),
        Route("/shown", insert_shown, methods=["POST"]),
        Route("/jobs/{id}/events", riverpy.web.events(client, job_id="id")),
        Route("/events", riverpy.web.events(client, kinds=["show"], max_streams=2)),
        Route("/fail", fail_worker, methods=["POST"]),
    ],
    lifespan=riverpy.web.lifespan(client, work=True, inner=own_lifespan),
)
