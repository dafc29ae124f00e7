"""The effect of each call on the transaction that its caller passes as `tx`."""

from __future__ import annotations

import inspect
from contextlib import asynccontextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import asyncpg
import msgspec
import pytest

from riverpy import (
    Client,
    Config,
    InsertManyParams,
    InsertOpts,
    JobRow,
    NotFoundError,
    RiverError,
    TransactionError,
    UniqueConflictError,
    UniqueOpts,
)
from riverpy._calls import batched_change

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from tests._database import Schema

    Call = Callable[[Client, int | str, Any], Awaitable[Any]]

SHORT = timedelta(milliseconds=150)
KEY = UniqueOpts(by_args=True)


class Task(msgspec.Struct):
    """Args of the jobs here."""

    kind: ClassVar[str] = "task"
    n: int = 0


class ClientCall(NamedTuple):
    """How a method of the client is called, and what it raises if the job or name does not
    exist."""

    call: Call
    is_named: bool = False
    missing: type[RiverError] | None = None


async def _effect(connection: Any) -> None:
    await connection.execute("select 1")


UNIQUE = [InsertManyParams(Task(), InsertOpts(unique_opts=KEY))]


async def _read_all(jobs: AsyncGenerator[JobRow]) -> list[JobRow]:
    return [job async for job in jobs]


CALLS = {
    "insert": ClientCall(lambda c, _, tx: c.insert(Task(), tx=tx)),
    "insert_many": ClientCall(lambda c, _, tx: c.insert_many([InsertManyParams(Task())], tx=tx)),
    "insert_many_fast": ClientCall(lambda c, _, tx: c.insert_many_fast(UNIQUE, tx=tx)),
    "job_get": ClientCall(lambda c, n, tx: c.job_get(n, tx=tx), missing=NotFoundError),
    "job_cancel": ClientCall(lambda c, n, tx: c.job_cancel(n, tx=tx), missing=NotFoundError),
    "job_retry": ClientCall(lambda c, n, tx: c.job_retry(n, tx=tx), missing=NotFoundError),
    "job_update": ClientCall(
        lambda c, n, tx: c.job_update(n, output=1, tx=tx), missing=NotFoundError
    ),
    "job_delete": ClientCall(lambda c, n, tx: c.job_delete(n, tx=tx), missing=NotFoundError),
    "job_list": ClientCall(lambda c, n, tx: c.job_list(ids=[n], tx=tx)),
    "jobs": ClientCall(lambda c, n, tx: _read_all(c.jobs(ids=[n], tx=tx))),
    "job_count": ClientCall(lambda c, n, tx: c.job_count(ids=[n], tx=tx)),
    "job_delete_many": ClientCall(lambda c, n, tx: c.job_delete_many(ids=[n], tx=tx)),
    "job_retry_many": ClientCall(lambda c, n, tx: c.job_retry_many(ids=[n], tx=tx)),
    "job_cancel_many": ClientCall(lambda c, n, tx: c.job_cancel_many(ids=[n], tx=tx)),
    "job_delete_in_batches": ClientCall(lambda c, n, tx: c.job_delete_in_batches(ids=[n], tx=tx)),
    "queue_get": ClientCall(lambda c, name, tx: c.queue_get(name, tx=tx), True, NotFoundError),
    "queue_list": ClientCall(lambda c, _, tx: c.queue_list(tx=tx)),
    "queue_lags": ClientCall(lambda c, name, tx: c.queue_lags([name], tx=tx), True),
    "queue_update": ClientCall(
        lambda c, name, tx: c.queue_update(name, metadata={"a": 1}, tx=tx), True, NotFoundError
    ),
    "queue_pause": ClientCall(lambda c, name, tx: c.queue_pause(name, tx=tx), True, NotFoundError),
    "queue_resume": ClientCall(
        lambda c, name, tx: c.queue_resume(name, tx=tx), True, NotFoundError
    ),
    "periodic_pause": ClientCall(
        lambda c, name, tx: c.periodic_pause(name, tx=tx), True, NotFoundError
    ),
    "periodic_resume": ClientCall(
        lambda c, name, tx: c.periodic_resume(name, tx=tx), True, NotFoundError
    ),
    "periodic_run": ClientCall(
        lambda c, name, tx: c.periodic_run(name, tx=tx), True, NotFoundError
    ),
    "request_resign": ClientCall(lambda c, _, tx: c.request_resign(tx=tx)),
    "run_once": ClientCall(lambda c, name, tx: c.run_once(name, _effect, wait=SHORT, tx=tx), True),
}


def test_every_call_is_tested() -> None:
    """CALLS lists every method of the client that has `tx=`."""
    found = {
        name
        for name, member in inspect.getmembers(Client, inspect.isfunction)
        if not name.startswith("_") and "tx" in inspect.signature(member).parameters
    }
    assert found == CALLS.keys()


@pytest.fixture
async def client(schema: Schema) -> AsyncGenerator[Client]:
    """A client whose schema has one job, one queue and one periodic job."""
    async with Client(schema.url, config=Config(schema=schema.name)) as client:
        await client.insert(Task(n=1))
        await schema.execute(
            "insert into river_queue (name, created_at, metadata, updated_at)"
            " values ('known', now(), '{}', now());"
            "insert into riverpy_periodic (id, schedule, next_run_at, updated_at)"
            " values ('known', '@daily', now(), now());"
            "create table mark (n int)"
        )
        yield client
        await schema.execute("drop table mark")


async def known(schema: Schema, client_call: ClientCall) -> int | str:
    """The id or name that exists in the database."""
    return "known" if client_call.is_named else await schema.fetchval("select id from river_job")


TABLES = ("river_job", "river_queue", "riverpy_periodic", "riverpy_exec")


async def state(schema: Schema) -> list[Any]:
    """Every row that a client_call may change."""
    return [await schema.fetch(f"select * from {table} order by 1") for table in TABLES]


async def outcome(
    client_call: ClientCall, client: Client, thing: int | str, tx: Any
) -> BaseException | None:
    """What a call raises."""
    try:
        await client_call.call(client, thing, tx)
    except (RiverError, asyncpg.PostgresError) as error:
        return error
    return None


async def test_no_transaction(client: Client, schema: Schema) -> None:
    """Every call refuses a connection that is not in a transaction, even if it was in one
    before."""
    before = await state(schema)
    async with schema.connected() as tx:
        for statements in ("select 1", "begin; commit"):
            await tx.execute(statements)
            for client_call in CALLS.values():
                with pytest.raises(TransactionError, match="in no transaction"):
                    await client_call.call(client, await known(schema, client_call), tx)
    assert await state(schema) == before


async def test_transaction_begun_by_a_statement(client: Client, schema: Schema) -> None:
    """A transaction that was begun with a BEGIN statement works like one of asyncpg's."""
    before = await state(schema)
    async with schema.connected() as tx:
        for name, client_call in CALLS.items():
            await tx.execute("begin")
            error = await outcome(client_call, client, await known(schema, client_call), tx)
            await tx.execute("rollback")
            assert error is None, name
    assert await state(schema) == before


@asynccontextmanager
async def refusing(schema: Schema) -> AsyncGenerator[None]:
    """A trigger refuses every row."""
    await schema.execute(
        "create function refuse() returns trigger language plpgsql as"
        " $$ begin raise exception sqlstate '22P02'; end $$"
    )
    for table in TABLES:
        await schema.execute(
            f"create trigger refuse before insert or update on {table} execute function refuse()"
        )
    try:
        yield
    finally:
        await schema.execute("drop function refuse cascade")


@asynccontextmanager
async def locked(schema: Schema) -> AsyncGenerator[None]:
    """Another session locks the tables."""
    async with schema.connected() as other, other.transaction():
        await other.execute(f"lock table {', '.join(TABLES)}")
        yield


@pytest.mark.parametrize("fault", ["missing thing", "missing tables", "locked", "refused rows"])
async def test_after_an_error(
    client: Client, schema: Schema, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an exception of riverpy, the transaction is usable and has its earlier writes, or the
    exception says that the transaction has ended."""
    monkeypatch.setattr(batched_change, "LOCKED_JOB_RETRY_DELAYS", ())
    things = {name: await known(schema, client_call) for name, client_call in CALLS.items()}
    if fault == "missing thing":
        things = {name: "missing" if CALLS[name].is_named else 0 for name in CALLS}
    if fault == "missing tables":
        client = Client(config=Config(schema="nowhere"))
    setting: Any = {"locked": locked, "refused rows": refusing}.get(fault, nullcontext)
    arguments = (schema,) if fault in {"locked", "refused rows"} else ()
    async with schema.connected(lock_timeout="50ms") as tx, setting(*arguments):
        for name, client_call in CALLS.items():
            await tx.execute("begin; insert into mark values (1)")
            error = await outcome(client_call, client, things[name], tx)
            is_usable = await usable(tx)
            await tx.execute("rollback")
            if fault == "missing thing" and client_call.missing is not None:
                assert isinstance(error, client_call.missing), name
            if name not in {"insert", "insert_many"}:
                assert is_usable, (name, error)
            elif isinstance(error, RiverError):
                assert is_usable != ("aborted" in str(error)), (name, error)
            else:
                assert is_usable == (error is None), (name, error)


async def usable(tx: Any) -> bool:
    """Whether the transaction goes on, with what it wrote before."""
    try:
        return await tx.fetchval("select n from mark") == 1
    except asyncpg.InFailedSQLTransactionError:
        return False


async def test_aborted_transaction(client: Client, schema: Schema) -> None:
    """In an aborted transaction every call raises TransactionError and does nothing."""
    before = await state(schema)
    async with schema.connected() as tx:
        await tx.execute("begin")
        with pytest.raises(asyncpg.DivisionByZeroError):
            await tx.execute("select 1 / 0")
        for client_call in CALLS.values():
            with pytest.raises(TransactionError, match="is aborted by an earlier error"):
                await client_call.call(client, await known(schema, client_call), tx)
        await tx.execute("rollback")
    assert await state(schema) == before


async def test_unique_conflicts(client: Client, schema: Schema) -> None:
    """A conflict of unique keys raises UniqueConflictError and leaves the transaction usable."""
    first = (await client.insert(Task(), InsertOpts(unique_opts=KEY))).job
    await client.job_cancel(first.id)
    await client.insert(Task(), InsertOpts(unique_opts=KEY))
    async with schema.connected() as tx:
        async with tx.transaction():
            await tx.execute("insert into mark values (1)")
            with pytest.raises(UniqueConflictError, match="cannot be retried"):
                await client.job_retry(first.id, tx=tx)
            with pytest.raises(UniqueConflictError, match="no job was inserted"):
                await client.insert_many_fast(UNIQUE, tx=tx)
            assert await tx.fetchval("select n from mark") == 1
        assert await tx.fetchval("select n from mark") == 1
