"""An open client that is used in another process, event loop or thread."""

from __future__ import annotations

import asyncio
import os
import warnings
from typing import TYPE_CHECKING

import anyio
import asyncpg
import pytest

from riverpy import (
    Client,
    ClientStateError,
    Config,
    EventKind,
    Job,
    NotFoundError,
    QueueConfig,
    RawArgs,
)
from riverpy._insert import insert_backlog
from tests.waiting.test_waiter import FUTURE, until_waiting
from tests.work.rig import Rig, Task

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


async def test_in_one_loop_after_the_other(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is closed in one event loop works in the next loop: inserts that wait for room
    in a shared statement, leases, waits, watches and subscriptions, with and without a run."""
    monkeypatch.setattr(insert_backlog, "BACKLOG_JOBS_MAX", 1)
    release: asyncio.Event
    following: asyncio.Event

    @rig.job
    async def work(job: Job[Task]) -> None:
        await release.wait()

    client = Client(
        rig.url,
        workers=rig.workers,
        queues={"default": QueueConfig()},
        config=Config(schema=rig.schema.name),
    )
    used_twice = client.subscribe(EventKind.JOB_COMPLETED)

    async def follow() -> set[int | None]:
        async with client.subscribe(EventKind.JOB_COMPLETED, fleet=True) as events:
            following.set()
            jobs = [(await anext(events)).job for _ in range(2)]
            return {job and job.id for job in jobs}

    async def watch(job_id: int) -> list[str]:
        return [change.job.state async for change in client.watch(job_id)]

    async def use() -> None:
        nonlocal release, following
        release, following = asyncio.Event(), asyncio.Event()
        async with client, asyncio.timeout(CHILD_LIMIT), asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(client.insert(Task(n), FUTURE)) for n in range(5)]
            ids = [(await call).job.id for call in calls]
            async with client.lease("report"):
                wait = tasks.create_task(client.wait_many(ids))
                watching = tasks.create_task(watch(ids[0]))
                await until_waiting(client, len(ids))
            for job_id in ids:
                await client.job_cancel(job_id)
            assert {row.state for row in await wait} == {"cancelled"}
            assert (await watching)[-1] == "cancelled"
            async with client.working():
                followed = tasks.create_task(follow())
                await following.wait()
                waits = [tasks.create_task(client.insert_and_wait(Task(n))) for n in range(2)]
                await until_waiting(client, len(waits))
                release.set()
                assert await followed == {(await wait).id for wait in waits}
            async with used_twice:
                pass

    await asyncio.to_thread(asyncio.run, use())
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.to_thread(asyncio.run, use())
    assert "a subscription is opened once" in repr(raised.value.exceptions)


@pytest.mark.parametrize("is_started", [True, False], ids=["sleeping", "before the first step"])
async def test_cancelled_tasks_of_a_client(rig: Rig, *, is_started: bool) -> None:
    """When other code cancels all tasks of an open client, its waits, watches and subscriptions to
    the fleet end with an error. Later ones work."""
    async with Client(rig.url, config=Config(schema=rig.schema.name)) as client:
        job = (await client.insert(JOB, FUTURE)).job

        async def follow() -> None:
            async with client.subscribe(EventKind.JOB_COMPLETED, fleet=True) as events:
                await anext(events)

        async def watch() -> None:
            async for _ in client.watch(job.id):
                pass

        before = asyncio.all_tasks()
        calls = [asyncio.ensure_future(call) for call in (client.wait(job.id), follow(), watch())]
        own: set[asyncio.Task[object]] = set()
        while not {"riverpy waiter", "riverpy fleet follower"} <= {one.get_name() for one in own}:
            await asyncio.sleep(0)
            own = asyncio.all_tasks() - before - set(calls)
        if is_started:
            await until_waiting(client)
        for task in own:
            task.cancel()
        with anyio.fail_after(CHILD_LIMIT):
            errors = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(error) for error in errors} == {ClientStateError}
            with pytest.raises(NotFoundError):
                await client.wait(0)
            assert (await anext(client.watch(job.id))).job.id == job.id
