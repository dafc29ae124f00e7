"""A dedicated connection whose users wait for each other."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio
import pytest

from riverpy._db.connection import DedicatedConnection, Outage
from riverpy.drivers.asyncpg import connect

if TYPE_CHECKING:
    from tests._database import Schema


async def test_busy_connection_is_not_cut(schema: Schema) -> None:
    """Who waited for most of the bound gives up, and the connection, which answers, stays."""
    connection = DedicatedConnection(
        "busy", partial(connect, schema.url, application_name="riverpy busy"), Outage()
    )
    await connection.open()
    async with connection.use("asking", 10) as used:
        pid = await used.fetchval("select pg_backend_pid()")
    waiting, release = anyio.Event(), anyio.Event()

    async def hold() -> None:
        async with connection.use("holding", 30):
            waiting.set()
            await release.wait()

    async def wait() -> None:
        release_at = anyio.current_time() + 2.4
        async with anyio.create_task_group() as inner:
            inner.start_soon(_set_at, release, release_at)
            with pytest.raises(TimeoutError, match="waiting its turn waited for another statement"):
                async with connection.use("waiting its turn", 4.0) as late:
                    await late.fetchval("select pg_sleep(1)")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hold)
        await waiting.wait()
        await wait()
    async with connection.use("asking", 10) as used:
        assert await used.fetchval("select pg_backend_pid()") == pid
    await connection.close()


async def _set_at(event: anyio.Event, time: float) -> None:
    await anyio.sleep_until(time)
    event.set()
