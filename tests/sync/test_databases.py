"""`riverpy.sync.Client` without `tx`: engines, pools, connections and URLs."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import psycopg
import psycopg_pool
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import riverpy.sync
from riverpy import (
    ClientStateError,
    Config,
    ConfigError,
    ExecutionState,
    InsertError,
    InsertManyParams,
    InsertOpts,
    NotFoundError,
    RawArgs,
    TransactionError,
    UniqueConflictError,
    UniqueOpts,
)
from tests.sessions.kinds import blocking_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from tests._database import Schema

ARGS = RawArgs("task", '{"n": 1}')
UNIQUE = InsertOpts(unique_opts=UniqueOpts(by_args=True))


def _engine(driver: str) -> Callable[[ExitStack, str], Any]:
    return lambda stack, url: stack.enter_context(blocking_engine(url, driver))


DATABASES: dict[str, Callable[[ExitStack, str], Any]] = {
    "engine-psycopg": _engine("psycopg"),
    "engine-psycopg2": _engine("psycopg2"),
    "connection": lambda stack, url: stack.enter_context(psycopg.connect(url)),
    "pool": lambda stack, url: stack.enter_context(
        psycopg_pool.ConnectionPool(url, min_size=1, max_size=2, open=True)
    ),
    "url": lambda _, url: url,
}


@pytest.fixture(params=DATABASES)
def client(request: pytest.FixtureRequest, schema: Schema) -> Generator[riverpy.sync.Client]:
    """An open client on each kind of database."""
    with ExitStack() as stack:
        database = DATABASES[request.param](stack, schema.url)
        with riverpy.sync.Client(database, config=Config(schema=schema.name, pool_size=2)) as made:
            yield made


async def test_calls(client: riverpy.sync.Client, schema: Schema) -> None:
    """A call is committed when it returns. A call that fails stores nothing, and the next one
    works. Calls inside the function of run_once are separate."""
    job = client.insert(ARGS, UNIQUE).job
    assert [row["id"] for row in await schema.jobs()] == [job.id]
    assert client.insert(ARGS, UNIQUE).unique_skipped_as_duplicate
    with pytest.raises(NotFoundError):
        client.job_cancel(0)
    if "engine" in type(client._database).__module__:  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(InsertError, match="uses COPY, which SQLAlchemy does not have"):
            client.insert_many_fast([InsertManyParams(RawArgs("other", "{}"))])
        assert len(await schema.jobs()) == 1
    else:
        assert client.insert_many_fast([InsertManyParams(RawArgs("other", "{}"))] * 2) == 2
        with pytest.raises(UniqueConflictError):
            client.insert_many_fast([InsertManyParams(ARGS, UNIQUE)])
        assert client.job_delete_in_batches(kinds=["other"]).changed == 2
    assert client.job_cancel(job.id).state == "cancelled"
    assert client.job_retry_many(ids=[job.id]).changed == 1
    assert [one.id for one in client.jobs()] == [job.id] == [client.job_list().jobs[0].id]

    def fail(_connection: Any) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        client.run_once("key", fail)
    name = schema.name
    write = f"insert into {name}.river_queue values ('q', now(), '{{}}', null, now())"
    run = client.run_once("key", lambda connection: _execute(connection, write))
    assert run.state is ExecutionState.RAN
    assert client.run_once("key", fail).state is ExecutionState.DONE_BEFORE
    assert [queue.name for queue in client.queue_list()] == ["q"]
    client.queue_pause("q")


def _execute(connection: Any, statement: str) -> None:
    is_sqlalchemy = type(connection).__module__.startswith("sqlalchemy")
    (connection.exec_driver_sql if is_sqlalchemy else connection.execute)(statement)


def in_threads(count: int, function: Callable[[], object]) -> None:
    """Run a function in threads, and raise the first error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


async def test_threads(client: riverpy.sync.Client, schema: Schema) -> None:
    """Threads share a client, even if there are more than connections. None of them has an event
    loop."""
    in_threads(8, lambda: [client.insert(ARGS) for _ in range(5)])
    assert len(await schema.jobs()) == 40


async def test_url(schema: Schema) -> None:
    """A client with a URL connects at its first call, and is closed by `close` or `with`. Its
    connections are used again, until the server has closed them. A forked child makes connections
    of its own."""
    config = Config(schema=schema.name, pool_size=3)
    url = f"{schema.url}{'&' if '?' in schema.url else '?'}lock_timeout=7s"
    client = riverpy.sync.Client(url, config=config)
    client.insert(ARGS)
    client.close()
    with pytest.raises(ClientStateError, match="is closed: use `with client:`"):
        client.insert(ARGS)
    client.open()
    client.insert(ARGS)
    client.close()
    seen: list[Any] = []

    def look(connection: Any) -> None:
        query = "select pg_backend_pid(), current_setting('lock_timeout')"
        seen.append(connection.execute(query).fetchone())

    with client:
        with pytest.raises(ClientStateError, match="open already"), client:
            pass
        for key in ("1", "2"):
            client.run_once(key, look)
        assert seen[0] == seen[1] == (seen[0][0], "7s")
        await schema.fetchval("select pg_terminate_backend($1, 5000)", seen[0][0])
        client.run_once("3", look)
        assert seen[2][0] != seen[0][0]
        child = os.fork()
        if not child:
            with_error = 1
            try:
                client.open()  # as in a hook of a server after its fork
                client.run_once("4", look)
                with_error = int(seen[3][0] == seen[2][0])
            finally:
                os._exit(with_error)
        assert os.waitpid(child, 0)[1] == 0
        client.run_once("5", look)
        assert seen[3] == seen[2], "the child has ended a connection of its parent"
    with pytest.raises(ClientStateError):
        client.insert(ARGS)
    query = "select count(*) from pg_stat_activity where pid = $1"
    assert await schema.fetchval(query, seen[3][0]) == 0


async def test_unreachable_databases(schema: Schema) -> None:
    """A database that cannot be reached is an OSError whose text has the server, and no
    password."""
    url = "postgres://riverpy:secret@127.0.0.1:1/none"
    for client in (
        riverpy.sync.Client(url),
        riverpy.sync.Client(create_engine(url.replace("postgres:", "postgresql+psycopg:"))),
    ):
        with pytest.raises(ConnectionError, match=r"127\.0\.0\.1") as caught, client:
            client.queue_list()
        assert "secret" not in str(caught.value)


async def test_passwords(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function for the password is called for each connection, async or not. Its failure is a
    ConnectionError without its text. An insert with a wrong password fails at once."""
    calls: list[int] = []

    async def fetch() -> str:
        calls.append(1)
        return "any"

    def fail() -> str:
        raise LookupError("secret")

    config = Config(schema=schema.name)
    with riverpy.sync.Client(schema.url, config=config, password=fetch) as client:
        client.insert(ARGS)
    assert calls == [1]
    with (
        pytest.raises(ConnectionError, match="the password function raised LookupError") as caught,
        riverpy.sync.Client(schema.url, password=fail),
    ):
        pass
    assert "secret" not in str(caught.value)
    refused = psycopg.OperationalError('FATAL:  password authentication failed for user "ann"')
    monkeypatch.setattr(psycopg.Connection, "connect", Mock(side_effect=refused))
    with pytest.raises(ConnectionError, match="authentication failed"):
        riverpy.sync.Client(schema.url, password=lambda: "any").insert(ARGS)
    assert psycopg.Connection.connect.call_count == 1  # pyright: ignore


async def test_wrong_databases(schema: Schema) -> None:
    """What is no database is refused when the client is made, with what to pass instead."""
    engine = create_async_engine(schema.url.replace("postgresql:", "postgresql+psycopg:"))
    wrong: list[tuple[Any, str]] = [
        (engine, "AsyncEngine, which is async: use riverpy.Client"),
        (Session(engine.sync_engine), "Session: pass it as tx="),
        (1, "got int"),
        ("mysql://", "must start with postgres://"),
    ]
    for database, text in wrong:
        with pytest.raises(ConfigError, match=text):
            riverpy.sync.Client(database)
    with pytest.raises(ConfigError, match="give the client a database"), riverpy.sync.Client():
        pass
    with pytest.raises(ClientStateError, match="has no database"):
        riverpy.sync.Client().insert(ARGS)
    with psycopg.connect(schema.url) as connection:
        connection.execute("select 1")
        with pytest.raises(TransactionError, match="is in a transaction"):
            riverpy.sync.Client(connection).queue_list()


async def test_locked_keys(client: riverpy.sync.Client, schema: Schema) -> None:
    """run_once waits for another transaction with the key for as long as `wait` says."""
    async with schema.connected() as rival:
        await rival.execute("begin")
        rivals = riverpy.Client(config=Config(schema=schema.name))
        await rivals.run_once("busy", lambda tx: tx.execute("select 1"), tx=rival)
        run = client.run_once("busy", lambda _: None, wait=timedelta(milliseconds=50))
        assert run.state is ExecutionState.IN_PROGRESS
