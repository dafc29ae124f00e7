"""Calls of a client that are cancelled while the server runs their statement."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import msgspec
import pytest

from riverpy import Client, Config, InsertManyParams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests._database import Schema

LOCKED = """
SELECT count(*) FROM pg_stat_activity
WHERE application_name ~ '^riverpy' AND wait_event_type = 'Lock'
  AND $1 = ANY (pg_blocking_pids(pid))
"""


class Task(msgspec.Struct):
    """Args of the jobs here."""

    kind: ClassVar[str] = "task"


async def _cancel(client: Client) -> None:
    await client.job_cancel(1)


async def _insert_fast(client: Client) -> None:
    await client.insert_many_fast([InsertManyParams(Task())])


async def _insert(client: Client) -> None:
    await client.insert(Task())


@pytest.mark.parametrize("call", [_cancel, _insert_fast, _insert])
async def test_cancelled_call_leaves_nothing(
    schema: Schema, call: Callable[[Client], Awaitable[None]]
) -> None:
    """A cancelled call leaves no open transaction and no lock, even if another session holds a lock
    that the call waits for."""
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    config = Config(schema=schema.name, pool_size=1)
    async with Client(schema.url, config=config) as client:
        async with schema.connected() as connection, connection.transaction():
            await connection.execute("LOCK TABLE river_job")
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(call, client)
                    while not await schema.fetchval(LOCKED, connection.get_server_pid()):
                        await anyio.sleep(0.01)
                    scope.cancel()
        result = await client.insert(Task())
        assert await schema.fetchval("SELECT count(*) FROM river_job") == 1
        assert (await client.job_get(result.job.id)).kind == "task"
    assert told == []
