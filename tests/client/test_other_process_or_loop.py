"""An open client that is used in another process, event loop or thread."""

from __future__ import annotations

import asyncio
import os
import warnings
from typing import TYPE_CHECKING

import anyio
import asyncpg
import pytest

from riverpy import Client, ClientStateError, Config, RawArgs

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests._database import Schema

JOB = RawArgs("task", "{}")
CHILD_LIMIT = 30.0


async def what_is_said(client: Client) -> str:
    """How each way to use an open client is refused, one line each."""
    said: list[str] = []
    for use in (
        lambda: client.insert(JOB),
        lambda: client.queue_list(),
        client.run,
        client.__aenter__,
    ):
        try:
            await use()
        except ClientStateError as error:
            said.append(str(error))
        else:
            said.append("nothing")
    return "\n".join(said)


async def what_child_says(run: Callable[[], str]) -> str:
    """Fork, run this in the child, and return what it returned or raised."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads
        pid = os.fork()
    if pid == 0:
        text = "died"
        try:
            text = run()
        except BaseException as error:
            text = repr(error)
        finally:
            os.write(writer, text.encode())
            os._exit(0)
    os.close(writer)
    with anyio.fail_after(CHILD_LIMIT), os.fdopen(reader, "rb") as pipe:
        answer = await asyncio.to_thread(pipe.read)
    os.waitpid(pid, 0)
    return answer.decode()


async def backend(client: Client) -> int:
    """The process of the server that serves the client's one connection."""
    async with client._get_open_pool().acquire() as connection:
        pid: int = await connection.fetchval("SELECT pg_backend_pid()")
        return pid


async def test_after_a_fork(schema: Schema) -> None:
    """A forked child cannot use or close its parent's client: each attempt raises ClientStateError,
    and the parent's connection keeps working. A new client in the child works (PB-11)."""
    config = Config(schema=schema.name, pool_size=1)

    async def use() -> str:
        return await what_is_said(client)

    async def leave() -> str:
        await client.__aexit__(None, None, None)
        return f"open: {client.is_open}"

    async def use_own() -> str:
        async with Client(schema.url, config=config) as own:
            return (await own.insert(JOB)).job.kind

    async with Client(schema.url, config=config) as client:
        before = await backend(client)
        refusals = (await what_child_says(lambda: asyncio.run(use()))).split("\n")
        assert len(refusals) == 4
        assert all("opened in another process, before a fork" in text for text in refusals)
        assert await what_child_says(lambda: asyncio.run(leave())) == "open: False"
        assert await what_child_says(lambda: asyncio.run(use_own())) == "task"
        assert (await client.insert(JOB)).job.kind == "task"
        assert await backend(client) == before


@pytest.mark.parametrize("is_given", [False, True], ids=["pool of its own", "pool of the caller"])
async def test_in_another_loop(schema: Schema, *, is_given: bool) -> None:
    """In a thread with another event loop the client raises an error that says what to do. Its
    connections keep working (PB-11)."""
    config = Config(schema=schema.name, pool_size=1)

    async def use() -> str:
        return await what_is_said(client)

    async with (
        asyncpg.create_pool(schema.url, min_size=1, max_size=1) as pool,
        Client(pool if is_given else schema.url, config=config) as client,
    ):
        before = await backend(client)
        refusals = (await asyncio.to_thread(asyncio.run, use())).split("\n")
        assert len(refusals) == 4
        assert all("opened in another event loop" in text for text in refusals)
        assert await backend(client) == before
        loop = asyncio.get_running_loop()

        def from_thread() -> str:
            inserting = asyncio.run_coroutine_threadsafe(client.insert(JOB), loop)
            return inserting.result(CHILD_LIMIT).job.kind

        assert await asyncio.to_thread(from_thread) == "task"


def test_after_the_end_of_its_loop(database_url: str) -> None:
    """A client that is open when its event loop ends is refused in the next loop (PB-11)."""
    client = Client(database_url)
    asyncio.run(client.__aenter__())
    with pytest.raises(ClientStateError, match="opened in another event loop"):
        asyncio.run(client.__aenter__())
    assert client._pool is not None
    client._pool.terminate()
