"""Inserts in the caller's transaction, and on connections with other settings."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import pytest

from riverpy._clock import Clock
from riverpy._insert.inserter import Inserter
from riverpy._plugins import PluginLists
from riverpy.errors import TransactionError, UniqueConflictError
from riverpy.insert_opts import InsertOpts
from riverpy.testing import inserted
from tests._database import connected
from tests.insert.conftest import RULES, inserter_on
from tests.insert.jobs import BY_ARGS, Data, Welcome, many

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from tests._database import Schema

    Send = Callable[[Inserter, Welcome, Any], Awaitable[Any]]

SENDS: dict[str, Send] = {
    "insert": lambda inserter, args, tx: inserter.insert(args, None, tx=tx),
    "many": lambda inserter, args, tx: inserter.insert_many(many(args), tx=tx),
    "fast": lambda inserter, args, tx: inserter.insert_many_fast(many(args), tx=tx),
}


@pytest.fixture(params=SENDS)
def send(request: pytest.FixtureRequest) -> Send:
    """Insert one job in each possible way."""
    return SENDS[request.param]


async def users(schema: Schema) -> list[int]:
    """Return the user ids of the committed jobs."""
    return [job.args.user_id for job in await inserted(Welcome, tx=schema.connection)]


async def test_commit_and_rollback(inserter: Inserter, schema: Schema, send: Send) -> None:
    """Jobs are visible after the commit, and gone after a rollback (TX-01)."""
    async with schema.connected() as tx:
        async with tx.transaction():
            await send(inserter, Welcome(1), tx)
            assert await users(schema) == []
            assert await tx.fetchval("SELECT 1") == 1
        assert await users(schema) == [1]
        with suppress(ZeroDivisionError):
            async with tx.transaction():
                await send(inserter, Welcome(2), tx)
                raise ZeroDivisionError
        assert await users(schema) == [1]


async def test_savepoints(inserter: Inserter, schema: Schema, send: Send) -> None:
    """Rolling back a savepoint removes only the jobs that were inserted in it (TX-01)."""
    async with schema.connected() as tx:
        async with tx.transaction():
            await send(inserter, Welcome(1), tx)
            with suppress(ZeroDivisionError):
                async with tx.transaction():
                    await send(inserter, Welcome(2), tx)
                    raise ZeroDivisionError
            async with tx.transaction():
                await send(inserter, Welcome(3), tx)
            await tx.execute("SAVEPOINT riverpy_insert")
            await send(inserter, Welcome(4), tx)
            await tx.execute("ROLLBACK TO SAVEPOINT riverpy_insert")
            await send(inserter, Welcome(5), tx)
        assert await users(schema) == [1, 3, 5]


async def test_transactions_begun_by_hand(inserter: Inserter, schema: Schema, send: Send) -> None:
    """A transaction that was begun with a BEGIN statement is accepted."""
    async with schema.connected() as tx:
        await tx.execute("BEGIN")
        await send(inserter, Welcome(1), tx)
        await tx.execute("ROLLBACK")
        assert await users(schema) == []
        with pytest.raises(TransactionError, match="in no transaction"):
            await send(inserter, Welcome(2), tx)
        assert await users(schema) == []


async def test_pool_connections(inserter: Inserter, schema: Schema, send: Send) -> None:
    """A connection of the user's pool is accepted."""
    settings = {"search_path": schema.name}
    async with asyncpg.create_pool(
        schema.url, min_size=1, max_size=1, server_settings=settings
    ) as pool:
        async with pool.acquire() as tx, tx.transaction():
            await send(inserter, Welcome(1), tx)
            assert await tx.fetchval("SELECT 1") == 1
        assert await users(schema) == [1]
        with pytest.raises(TransactionError, match="back in its pool"):
            await send(inserter, Welcome(2), tx)


async def test_an_aborted_transaction(inserter: Inserter, schema: Schema, send: Send) -> None:
    """An insert into an aborted transaction raises an error. After a rollback to a savepoint it
    works."""
    async with schema.connected() as tx, tx.transaction():
        await tx.execute("SAVEPOINT before")
        with pytest.raises(asyncpg.DivisionByZeroError):
            await tx.execute("SELECT 1 / 0")
        with pytest.raises(TransactionError, match="is aborted by an earlier error"):
            await send(inserter, Welcome(1), tx)
        await tx.execute("ROLLBACK TO SAVEPOINT before")
        await send(inserter, Welcome(2), tx)
        assert await tx.fetchval("SELECT 1") == 1
    assert await users(schema) == [2]


async def test_a_closed_connection(inserter: Inserter, schema: Schema, send: Send) -> None:
    """An insert on a connection that was closed or killed raises an error that says so."""
    async with schema.connected() as tx:
        await tx.close()
        with pytest.raises(TransactionError, match="is closed"):
            await send(inserter, Welcome(1), tx)
    async with schema.connected() as tx:
        await tx.execute("BEGIN")
        await schema.fetchval("SELECT pg_terminate_backend($1, 5000)", tx.get_server_pid())
        with pytest.raises(TransactionError, match=r"closed|lost"):
            await send(inserter, Welcome(2), tx)
    assert await users(schema) == []


async def test_other_objects_are_refused(inserter: Inserter, send: Send) -> None:
    """An object of another type is refused. The error says what is accepted (TX-02)."""
    for tx in ("postgres://", object(), 0):
        with pytest.raises(TypeError, match=f"asyncpg connection.*got {type(tx).__name__}"):
            await send(inserter, Welcome(1), tx)


async def test_a_conflict_of_the_fast_insert(inserter: Inserter, schema: Schema) -> None:
    """UniqueConflictError leaves the transaction as it was before the call."""
    async with schema.connected() as tx, tx.transaction():
        await inserter.insert(Welcome(1), BY_ARGS, tx=tx)
        with pytest.raises(UniqueConflictError):
            await inserter.insert_many_fast(many(Welcome(2), Welcome(1), opts=BY_ARGS), tx=tx)
        assert await tx.fetchval("SELECT 1") == 1
        await inserter.insert_many_fast(many(Welcome(3), opts=BY_ARGS), tx=tx)
    assert await users(schema) == [1, 3]


async def test_cancelled_fast_insert(inserter: Inserter, schema: Schema) -> None:
    """After a cancelled insert_many_fast the transaction is usable and has none of its jobs."""
    async with schema.connected() as rival, schema.connected() as tx:
        await rival.execute("BEGIN")
        await inserter.insert(Welcome(1), BY_ARGS, tx=rival)
        async with tx.transaction():
            await inserter.insert(Welcome(2), None, tx=tx)
            with anyio.move_on_after(0.2) as scope:
                await inserter.insert_many_fast(many(Welcome(1), opts=BY_ARGS), tx=tx)
            assert scope.cancelled_caught
            assert await tx.fetchval("SELECT 1") == 1
        await rival.execute("ROLLBACK")
    assert await users(schema) == [2]


CODECS = (
    *("bool", "bytea", "bit", "char", "varchar", "text", "name", "int2", "int4", "int8", "oid"),
    *("xid", "float4", "float8", "numeric", "json", "jsonb", "uuid"),
    *("timestamptz", "timestamp", "date", "time", "interval"),
)


@pytest.mark.parametrize("form", ["text", "binary"])
async def test_connection_with_codecs(
    inserter: Inserter, schema: Schema, send: Send, form: Any
) -> None:
    """Inserts work on a connection with its own codecs for all types."""

    def refuse(value: Any) -> Any:
        raise AssertionError(f"a codec of the user's saw {value!r}")

    async with schema.connected() as tx:
        for name in CODECS:
            await tx.set_type_codec(
                name, schema="pg_catalog", encoder=refuse, decoder=refuse, format=form
            )
        await tx.reload_schema_state()
        async with tx.transaction():
            opts = InsertOpts(
                metadata={"a": 1},
                tags=["one", "two"],
                scheduled_at=datetime(2027, 1, 1, tzinfo=UTC),
                unique_opts=BY_ARGS.unique_opts,
            )
            for _ in range(2):
                job = (await inserter.insert(Welcome(7), opts, tx=tx)).job
                assert (job.metadata, job.tags) == ({"a": 1}, ["one", "two"])
                assert job.scheduled_at == opts.scheduled_at
                assert job.unique_key is not None
            results = await inserter.insert_many(
                [*many(Welcome(8)), *many(Welcome(9), opts=opts)], tx=tx
            )
            assert len({result.job.id for result in results}) == 2
            await inserter.insert_many_fast(many(Welcome(10), opts=opts), tx=tx)
            await send(inserter, Welcome(11), tx)
            await tx.execute("SELECT 1")
    assert await users(schema) == [7, 8, 9, 10, 11]


async def test_pooler_in_transaction_mode(schema: Schema) -> None:
    """Inserts work through a pooler in transaction mode, without named statements."""
    connection = await asyncpg.connect(schema.url, statement_cache_size=0)
    try:
        async with inserter_on(schema.url, schema.name) as inserter, connection.transaction():
            for send in SENDS.values():
                await send(inserter, Welcome(1), connection)
    finally:
        await connection.close()
    assert await users(schema) == [1, 1, 1]


async def test_serializable_by_default(schema: Schema) -> None:
    """An insert that the server rolls back for a conflict is retried without an error (TX-06)."""
    async with inserter_on(
        schema.url, schema.name, size=8, default_transaction_isolation="serializable"
    ) as inserter:

        async def insert(number: int) -> None:
            await inserter.insert(Welcome(number % 4), BY_ARGS, tx=None)
            await inserter.insert_many(
                many(Welcome(100 + number), Welcome(number % 4), opts=BY_ARGS), tx=None
            )
            await inserter.insert_many_fast(many(Welcome(200 + number)), tx=None)

        await asyncio.gather(*map(insert, range(40)))
    expected = [*range(4), *range(100, 140), *range(200, 240)]
    assert sorted(await users(schema)) == expected


async def test_cancelled_inserts(schema: Schema) -> None:
    """A cancelled insert always releases its connection and leaves no transaction open (TX-07,
    SC-12)."""
    returned = unknown = 0
    rng = random.Random(7)
    async with inserter_on(
        schema.url, schema.name, size=4, application_name="cancelled"
    ) as inserter:
        await inserter.insert(Welcome(0), None, tx=None)

        async def insert(number: int) -> None:
            nonlocal returned, unknown
            task = asyncio.ensure_future(
                list(SENDS.values())[number % 3](inserter, Welcome(1), None)
            )
            for _ in range(rng.randrange(40)):
                await asyncio.sleep(0)
            await asyncio.sleep(rng.random() * 0.003)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                unknown += 1
            else:
                returned += 1

        for start in range(0, 1000, 20):
            await asyncio.gather(*map(insert, range(start, start + 20)))
        await inserter.insert(Welcome(0), None, tx=None)
        with anyio.fail_after(20, reason="a transaction is left open"):
            while await schema.fetch(  # the last connections may still be released
                "SELECT state, query FROM pg_stat_activity WHERE application_name = 'cancelled'"
                " AND datname = current_database() AND state <> 'idle'"
            ):
                await anyio.sleep(0.01)
    stored = (await users(schema)).count(1)
    assert returned <= stored <= returned + unknown
    assert returned
    assert unknown


@asynccontextmanager
async def flaky(schema: Schema, failures: list[Exception]) -> AsyncGenerator[Any]:
    if failures:
        raise failures.pop()
    async with schema.connected() as connection:
        yield connection


async def test_acquire_is_retried(schema: Schema, send: Send) -> None:
    """Acquiring a connection is retried, because nothing was sent."""
    failures: list[Exception] = [
        ConnectionRefusedError("refused"),
        asyncpg.CannotConnectNowError("the database system is starting up"),
        asyncpg.TooManyConnectionsError("too many clients"),
    ]
    inserter = Inserter(
        lambda: flaky(schema, failures),
        schema=schema.name,
        insert_settings=RULES,
        plugins=PluginLists(),
        clock=Clock(),
    )
    await send(inserter, Welcome(1), None)
    assert not failures
    assert await users(schema) == [1]


async def test_acquire_error_without_retry(schema: Schema, send: Send) -> None:
    """An error that a retry cannot solve is raised at once."""
    failures: list[Exception] = [asyncpg.InvalidPasswordError("wrong password")]
    inserter = Inserter(
        lambda: flaky(schema, failures),
        schema=schema.name,
        insert_settings=RULES,
        plugins=PluginLists(),
        clock=Clock(),
    )
    with pytest.raises(asyncpg.InvalidPasswordError):
        await send(inserter, Welcome(1), None)
    assert await users(schema) == []


async def test_no_retry_after_a_lost_connection(schema: Schema) -> None:
    """If the connection is lost after sending, the insert raises an error and is not retried: the
    job may be stored."""
    async with (
        schema.connected() as blocker,
        blocker.transaction(),
        inserter_on(schema.url, schema.name, size=1, application_name="lost") as inserter,
    ):
        await inserter.insert(Welcome(1), BY_ARGS, tx=blocker)
        task = asyncio.ensure_future(inserter.insert(Welcome(1), BY_ARGS, tx=None))
        find = (
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'lost'"
            " AND wait_event_type = 'Lock' AND datname = current_database()"
        )
        while (pid := await schema.fetchval(find)) is None:
            await asyncio.sleep(0.01)
        await schema.execute("SELECT pg_terminate_backend($1, 5000)", pid)
        with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
            await task
        assert await inserter.insert(Data(x=timedelta(seconds=1)), None, tx=None)
    assert len(await schema.jobs()) == 2


async def test_callers_connection_is_not_changed(schema: Schema, database_url: str) -> None:
    """riverpy changes no setting of the caller's connection, and begins or ends no transaction."""
    async with connected(database_url) as tx, inserter_on(schema.url, schema.name) as inserter:
        show = "SELECT name, setting FROM pg_settings ORDER BY name"
        before = await tx.fetch(show)
        sent: list[str] = []
        tx.add_query_logger(lambda record: sent.append(record.query.split()[0].lower()))
        await tx.execute("BEGIN")
        for send in SENDS.values():
            await send(inserter, Welcome(1), tx)
        assert tx.is_in_transaction()
        await tx.execute("COMMIT")
        assert await tx.fetch(show) == before
        statements = {"insert", "with", "savepoint", "release", "copy", "select"}
        assert set(sent) <= {"begin", *statements, "commit"}
        assert sent.count("begin") == sent.count("commit") == 1
