"""Calls in a caller's transaction of every kind. The job is there exactly if the data is."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy import (
    Client,
    Config,
    ExecutionState,
    InsertError,
    InsertManyParams,
    InsertOpts,
    LeaseLostError,
    LeaseManager,
    NotFoundError,
    TransactionError,
    UniqueConflictError,
    UniqueOpts,
)
from tests.client.test_caller_transactions import CALLS, ClientCall, state
from tests.work.rig import PATIENCE, Task

if TYPE_CHECKING:
    from collections.abc import Callable

    import asyncpg

    from riverpy import Job
    from tests._database import Schema
    from tests.sessions.kinds import Caller
    from tests.work.rig import Rig


@pytest.fixture
def client(caller: Caller, schema: Schema) -> Client:
    """A client for the caller's transactions, which is not open."""
    return caller.make_client(Config(schema=schema.name))


UNIQUE = InsertOpts(unique_opts=UniqueOpts(by_args=True))
SHORT = timedelta(milliseconds=200)


class ExpectedError(Exception):
    """What a block of a test raises."""


async def stored(schema: Schema) -> tuple[list[int], list[int]]:
    """Return the committed data, and the jobs."""
    data = await schema.fetch("select n from data order by n")
    jobs = await schema.fetch("select (args->>'n')::int from river_job order by id")
    return [row[0] for row in data], [row[0] for row in jobs]


async def write(caller: Caller, schema: Schema, n: int) -> None:
    """Write data of the caller."""
    await caller.execute(f"insert into {schema.name}.data values ({n})")


async def write_with_job(caller: Caller, client: Client, schema: Schema, n: int) -> None:
    """Insert a job and write data."""
    await client.insert(Task(n), tx=caller.tx)
    await write(caller, schema, n)


async def test_commit_and_rollback(caller: Caller, client: Client, schema: Schema) -> None:
    """After a commit the job and the data are there. After a rollback neither is, even if the
    insert was the first statement."""
    await write_with_job(caller, client, schema, 1)
    await caller.rollback()
    assert await stored(schema) == ([], [])
    await caller.begin()
    await write_with_job(caller, client, schema, 2)
    text = "a\\b\"c'%s $1 \n é 😀"
    params = [InsertManyParams(Task(n), InsertOpts(metadata={"text": text})) for n in (3, 4)]
    results = await client.insert_many(params, tx=caller.tx)
    assert [result.job.metadata["text"] for result in results] == [text, text]
    assert (await client.job_get(results[0].job.id, tx=caller.tx)).metadata["text"] == text
    await caller.commit()
    assert await stored(schema) == ([2], [2, 3, 4])


async def test_savepoints(caller: Caller, client: Client, schema: Schema) -> None:
    """A savepoint of the library that is rolled back takes its jobs along. One that is kept keeps
    them, until the transaction is rolled back."""
    await write_with_job(caller, client, schema, 1)
    with suppress(ExpectedError):
        async with caller.savepoint():
            await write_with_job(caller, client, schema, 2)
            await client.queue_list(tx=caller.tx)
            raise ExpectedError
    async with caller.savepoint():
        await write_with_job(caller, client, schema, 3)
    await caller.commit()
    assert await stored(schema) == ([1, 3], [1, 3])
    await caller.begin()
    async with caller.savepoint():
        await write_with_job(caller, client, schema, 4)
    await caller.rollback()
    assert await stored(schema) == ([1, 3], [1, 3])


async def test_serializable(
    caller: Caller, client: Client, schema: Schema, conn: asyncpg.Connection[Any]
) -> None:
    """If a serializable transaction conflicts with another one, its end fails, and neither the data
    nor the job is there. The next try stores both."""
    count_data = f"select count(*) from {schema.name}.data"
    await caller.execute("set transaction isolation level serializable")
    await caller.value(count_data)
    async with conn.transaction(isolation="serializable"):
        await conn.fetchval(count_data)
        await write_with_job(caller, client, schema, 1)
        await conn.execute(f"insert into {schema.name}.data values (2)")
    with pytest.raises(Exception, match="could not serialize access"):
        await caller.commit()
    with suppress(Exception):  # some libraries have rolled back already
        await caller.rollback()
    assert await stored(schema) == ([2], [])
    await caller.begin()
    await caller.execute("set transaction isolation level serializable")
    await write_with_job(caller, client, schema, 3)
    await caller.commit()
    assert await stored(schema) == ([2, 3], [3])


async def test_unusable_transactions(caller: Caller, client: Client, schema: Schema) -> None:
    """A call in an aborted transaction, or on a closed connection, raises TransactionError. After a
    rollback the caller can go on."""
    with pytest.raises(Exception, match="division by zero"):
        await caller.execute("select 1 / 0")
    for call in (client.insert(Task(1), tx=caller.tx), client.job_get(1, tx=caller.tx)):
        with pytest.raises(TransactionError, match="is aborted by an earlier error"):
            await call
    await caller.rollback()
    await caller.begin()
    await write_with_job(caller, client, schema, 2)
    await caller.commit()
    if not caller.is_sqlalchemy and not caller.commits_by_itself:
        with pytest.raises(TransactionError, match="in no transaction"):
            await client.insert(Task(3), tx=caller.tx)
    await caller.begin()
    pid = await caller.value("select pg_backend_pid()")
    await schema.fetchval("select pg_terminate_backend($1, 5000)", pid)
    with pytest.raises(TransactionError, match=r"closed|lost"):
        await client.insert(Task(4), tx=caller.tx)
    with pytest.raises(TransactionError, match=r"closed|lost|usable"):
        await client.insert(Task(5), tx=caller.tx)
    assert await stored(schema) == ([2], [2])


async def test_every_call(caller: Caller, client: Client, schema: Schema) -> None:
    """Every method works in the transaction, and leaves it usable. A rollback undoes all."""
    (job_id,) = await schema.fetchrow(
        "insert into river_job (args, kind, max_attempts) values ('{}', 'task', 1) returning id"
    ) or (0,)
    await schema.execute(
        "insert into river_queue (name, created_at, metadata, updated_at)"
        " values ('known', now(), '{}', now());"
        "insert into riverpy_periodic (id, schedule, next_run_at, updated_at)"
        " values ('known', '@daily', now(), now())"
    )
    before = await state(schema)
    for name, client_call in CALLS.items():
        await caller.begin()
        call = client_call.call(client, "known" if client_call.is_named else job_id, caller.tx)
        if name == "run_once":
            call.close()
            call = client.run_once("known", lambda _: caller.execute("select 1"), tx=caller.tx)
        if name == "insert_many_fast" and caller.is_sqlalchemy:
            with pytest.raises(InsertError, match="COPY, which SQLAlchemy does not have"):
                await call
        else:
            await call
        assert await caller.value("select 1") == 1, name
        await caller.rollback()
        assert await state(schema) == before, name


async def test_calls_that_fail(caller: Caller, client: Client, schema: Schema) -> None:
    """A call that raises leaves the transaction as it was before the call."""
    await write_with_job(caller, client, schema, 1)
    missing = ClientCall(lambda c, n, tx: c.job_cancel(n, tx=tx))
    for client_call in (missing, *(call for call in CALLS.values() if call.missing)):
        with pytest.raises(NotFoundError):
            await client_call.call(client, "no" if client_call.is_named else 0, caller.tx)
    await client.insert(Task(2), UNIQUE, tx=caller.tx)
    duplicate = await client.insert(Task(2), UNIQUE, tx=caller.tx)
    assert duplicate.unique_skipped_as_duplicate
    if not caller.is_sqlalchemy:
        with pytest.raises(UniqueConflictError):
            await client.insert_many_fast([InsertManyParams(Task(2), UNIQUE)], tx=caller.tx)
    with pytest.raises(ExpectedError):
        await client.run_once("key", _fail, tx=caller.tx)
    await write(caller, schema, 2)
    await caller.commit()
    assert await stored(schema) == ([1, 2], [1, 2])


async def _fail(_tx: object) -> None:
    raise ExpectedError


async def test_run_once(caller: Caller, client: Client, schema: Schema) -> None:
    """The function of run_once gets the caller's own object. A call that waited for another
    transaction with the key leaves the caller's transaction usable."""
    seen: list[Any] = []

    async def effect(tx: Any) -> int:
        seen.append(tx)
        await write(caller, schema, 7)
        return 5

    await caller.execute("set local lock_timeout = '6s'")
    execution = await client.run_once("key", effect, tx=caller.tx)
    assert (execution.state, execution.value) == (ExecutionState.RAN, 5)
    assert await caller.value("show lock_timeout") == "6s"
    assert seen == [caller.tx]
    await caller.commit()
    await caller.begin()
    execution = await client.run_once("key", effect, tx=caller.tx)
    assert execution.state is ExecutionState.DONE_BEFORE
    async with schema.connected() as rival:
        await rival.execute("begin")
        await Client(config=Config(schema=schema.name)).run_once(
            "busy", lambda tx: tx.execute("select 1"), tx=rival
        )
        await caller.execute("set local lock_timeout = '7s'")
        execution = await client.run_once("busy", effect, wait=SHORT, tx=caller.tx)
        assert execution.state is ExecutionState.IN_PROGRESS
        assert await caller.value("show lock_timeout") == "7s"
        await write(caller, schema, 8)
        await caller.commit()
    assert await stored(schema) == ([7, 8], [])


async def test_cancelled_insert(async_caller: Caller, schema: Schema) -> None:
    """An insert that is cancelled while it waits stores nothing, whatever the caller does then."""
    caller, client = async_caller, Client(config=Config(schema=schema.name))
    async with schema.connected() as rival:
        await rival.execute("begin")
        await client.insert(Task(1), UNIQUE, tx=rival)
        await write(caller, schema, 1)
        with anyio.move_on_after(0.1) as scope:
            await client.insert(Task(1), UNIQUE, tx=caller.tx)
        assert scope.cancelled_caught
        try:
            await write(caller, schema, 2)
            await caller.commit()
        except Exception:  # the transaction is aborted, or its connection is closed
            await caller.close()
        else:
            pytest.fail("the transaction is usable after a cancelled statement")
        await rival.execute("rollback")
    assert await stored(schema) == ([], [])


async def call_with(caller: Caller, method: Callable[[Any], Any]) -> Any:
    """Call a method with the caller's session. A blocking session gets the result at once."""
    if caller.is_blocking:
        return await caller.call(lambda: method(caller.tx))
    return await method(caller.tx)


async def test_fence(caller: Caller, client: Client, schema: Schema) -> None:
    """A lease's fence binds the transaction to the lease. It is refused in a savepoint, and after
    another process has taken the lease."""
    async with LeaseManager(schema.url, schema=schema.name) as manager:
        lease = await manager.try_acquire("lock")
        assert lease is not None
        await call_with(caller, lease.fence)
        await write_with_job(caller, client, schema, 1)
        await caller.commit()
        await caller.begin()
        async with caller.savepoint():
            await write(caller, schema, 2)
            with pytest.raises(TransactionError, match="savepoint"):
                await call_with(caller, lease.fence)
        await caller.rollback()
        await caller.begin()
        await schema.execute("update riverpy_lease set epoch = epoch + 1")
        with pytest.raises(LeaseLostError, match="the database refused its fence"):
            await call_with(caller, lease.fence)
        assert not lease.is_held
    await caller.rollback()
    assert await stored(schema) == ([1], [1])


async def test_jobs(caller: Caller, client: Client, rig: Rig) -> None:
    """A running worker is woken by the commit. The job completes itself in the caller's
    transaction, and stores the progress of a step there."""
    schema = rig.schema
    committed, done = anyio.Event(), anyio.Event()

    @rig.job
    async def job(job: Job[Task]) -> None:
        await committed.wait()  # the worker may be woken before `commit` returns to the caller

        async def step() -> None:
            assert await call_with(caller, job.checkpoint)

        await caller.begin()
        await job.step("step", step)
        await caller.commit()
        await caller.begin()
        await write(caller, schema, job.args.n)
        completed = await call_with(caller, job.complete_tx)
        assert completed.state == "completed"
        await caller.commit()
        done.set()

    async with rig.client().working():
        await client.insert(Task(1), tx=caller.tx)
        await caller.rollback()
        await caller.begin()
        await client.insert(Task(2), tx=caller.tx)
        assert await schema.jobs() == []
        await caller.commit()
        committed.set()
        with anyio.fail_after(PATIENCE):
            await done.wait()
    (row,) = await schema.jobs()
    assert row["state"] == "completed"
    assert await stored(schema) == ([2], [2])
