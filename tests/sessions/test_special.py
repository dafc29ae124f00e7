"""Callers' transactions that have settings, codecs or objects of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.adapt import Dumper, Loader
from psycopg.rows import dict_row
from psycopg2.extras import NamedTupleCursor
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import riverpy.sync
from riverpy import (
    ArgsError,
    Config,
    ConfigError,
    InsertManyParams,
    InsertOpts,
    RawArgs,
    TransactionError,
    UniqueOpts,
)
from riverpy._without_loop import make_async_context_manager
from tests.kit.pgbouncer import is_installed, pooled
from tests.sessions.kinds import ALL_KINDS, blocking_engine, make_engine
from tests.sessions.test_contract import UNIQUE, stored, write_with_job
from tests.work.rig import Task

if TYPE_CHECKING:
    from riverpy import Client
    from tests._database import Schema

SESSIONS = pytest.mark.parametrize(
    "kind",
    [
        "sqlalchemy-session-asyncpg",
        "sqlalchemy-session-psycopg",
        "blocking-session-psycopg",
        "blocking-session-psycopg2",
    ],
)
DRIVERS = pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
OPTS = InsertOpts(metadata={"a": [1]}, tags=["one", "two"], unique_opts=UNIQUE.unique_opts)


class Base(DeclarativeBase):
    """The base of models."""


class Row(Base):
    """A model for the table `data`."""

    __tablename__ = "data"

    n: Mapped[int] = mapped_column(primary_key=True)


class Refusing(Loader, Dumper):
    """A loader and dumper that must not be used."""

    oid = 0

    def load(self, data: Any) -> Any:
        raise AssertionError(f"a loader of the caller's saw {bytes(data)!r}")

    def dump(self, obj: Any) -> Any:
        raise AssertionError(f"a dumper of the caller's saw {obj!r}")


@pytest.mark.parametrize("kind", ["psycopg", "blocking-psycopg"])
async def test_psycopg_adapters(kind: str, schema: Schema) -> None:
    """The caller's row factory, loaders and dumpers do not apply to riverpy's statements. A
    connection that commits by itself is accepted in a block of `transaction()`."""
    async with ALL_KINDS[kind](
        schema.url, row_factory=dict_row, autocommit=True, prepare_threshold=0
    ) as caller:
        connection, client = caller.tx, caller.make_client(Config(schema=schema.name))
        begin = "with" if caller.is_blocking else "async with"
        with pytest.raises(TransactionError, match=rf"in no transaction.* `{begin} connection"):
            await client.insert(Task(1), tx=connection)
        for name in ("text", "int2", "int4", "int8", "bool", "jsonb", "bytea", "timestamptz"):
            connection.adapters.register_loader(name, Refusing)
        for type_ in (str, int, list):
            connection.adapters.register_dumper(type_, Refusing)
        async with caller.savepoint():
            await caller.execute("set local client_encoding = 'sql_ascii'")
            assert (await client.insert(Task(9), tx=connection)).job.kind == "task"
            await client.job_delete_many(kinds=["task"], tx=connection)
            await caller.execute("set local datestyle = 'sql, dmy'")
            await caller.execute("set local client_encoding = 'latin1'")
            with pytest.raises(ArgsError, match="client_encoding"):
                await client.insert(RawArgs("task", '{"a": "😀"}'), tx=connection)
            result = await client.insert(Task(1), OPTS, tx=connection)
            again = await client.insert(Task(1), OPTS, tx=connection)
            assert again.job.id == result.job.id
            assert result.job.metadata == {"a": [1]}
            job = await client.job_get(result.job.id, tx=connection)
            assert (job.tags, job.metadata) == (["one", "two"], {"a": [1]})
            fast = [InsertManyParams(Task(2), InsertOpts(metadata={"text": "é"}))]
            await client.insert_many_fast(fast, tx=connection)
    assert await stored(schema) == ([], [1, 2])
    assert (await schema.jobs())[1]["metadata"] == '{"text": "é"}'


@pytest.mark.parametrize("kind", ["psycopg", "blocking-psycopg"])
async def test_psycopg_pipeline(kind: str, schema: Schema) -> None:
    """In pipeline mode, a call waits for the statements before it and for its own."""
    async with ALL_KINDS[kind](schema.url) as caller:
        connection, client = caller.tx, caller.make_client(Config(schema=schema.name))
        await caller.rollback()
        async with pipeline(connection):
            await caller.execute(f"insert into {schema.name}.data values (1)")
            result = await client.insert(Task(1), tx=connection)
            await client.job_cancel(result.job.id, tx=connection)
            await client.insert(Task(2), UNIQUE, tx=connection)
            await client.queue_list(tx=connection)
        await caller.commit()
        async with pipeline(connection):
            with pytest.raises(TransactionError, match="in no transaction"):
                await client.insert(Task(3), tx=connection)
    assert await stored(schema) == ([1], [1, 2])


def pipeline(connection: Any) -> Any:
    """Return the pipeline of a connection, for `async with`."""
    pipeline = connection.pipeline()
    return pipeline if hasattr(pipeline, "__aenter__") else make_async_context_manager(pipeline)


@SESSIONS
async def test_sqlalchemy_settings(kind: str, schema: Schema) -> None:
    """The serializers, execution options and cursors of an engine do not apply to riverpy's
    statements."""

    def refuse(value: Any) -> Any:
        raise AssertionError(f"a serializer of the caller's saw {value!r}")

    cursors = {"connect_args": {"cursor_factory": NamedTupleCursor}} if "psycopg2" in kind else {}
    async with ALL_KINDS[kind](
        schema.url,
        **cursors,
        json_serializer=refuse,
        json_deserializer=refuse,
        isolation_level="SERIALIZABLE",
        execution_options={"stream_results": True, "no_parameters": True, "yield_per": 10},
    ) as caller:
        client = caller.make_client(Config(schema=schema.name))
        result = await client.insert(Task(1), OPTS, tx=caller.tx)
        assert result.job.metadata == {"a": [1]}
        assert (await client.job_get(result.job.id, tx=caller.tx)).metadata == {"a": [1]}
        assert await client.job_count(tx=caller.tx) == 1
        if cursors:
            raw_connection = caller.tx.connection().connection.dbapi_connection
            assert raw_connection.cursor_factory is NamedTupleCursor
        await caller.commit()
    assert await stored(schema) == ([], [1])


@SESSIONS
async def test_sqlalchemy_autocommit(kind: str, schema: Schema) -> None:
    """The isolation level AUTOCOMMIT is refused before anything is sent, wherever it was set."""
    async with ALL_KINDS[kind](schema.url, isolation_level="AUTOCOMMIT") as caller:
        client = caller.make_client(Config(schema=schema.name))
        with pytest.raises(TransactionError, match="AUTOCOMMIT"):
            await client.insert(Task(1), tx=caller.tx)
    async with ALL_KINDS[kind](schema.url) as caller:
        options = {"isolation_level": "AUTOCOMMIT"}
        connection = await caller.call(lambda: caller.tx.connection(execution_options=options))
        if not caller.is_blocking:
            await connection
        with pytest.raises(TransactionError, match="AUTOCOMMIT"):
            await client.queue_list(tx=caller.tx)
    assert await stored(schema) == ([], [])


@pytest.mark.parametrize(
    "kind", ["psycopg", "sqlalchemy-session-psycopg", "blocking-session-psycopg", "django"]
)
async def test_encodings(kind: str, schema: Schema) -> None:
    """A character that the client_encoding of the caller's connection lacks is an ArgsError, in the
    args, which are not sent, and in a duplicate that the server cannot return."""
    by_queue = InsertOpts(unique_opts=UniqueOpts(by_queue=True))
    args = RawArgs("task", '{"a": "😀"}')
    async with ALL_KINDS[kind](schema.url) as caller:
        client = caller.make_client(Config(schema=schema.name))
        await client.insert(args, by_queue, tx=caller.tx)
        await caller.execute("set local client_encoding = 'latin1'")
        with pytest.raises(ArgsError, match="client_encoding of the connection given as tx"):
            await client.insert(args, tx=caller.tx)
        await client.insert(Task(1), tx=caller.tx)
        with pytest.raises(ArgsError, match=r"or the client_encoding of the connection, lacks"):
            await client.insert(Task(2), by_queue, tx=caller.tx)
        await caller.rollback()


@DRIVERS
async def test_sqlalchemy_objects(driver: str, client: Client, schema: Schema) -> None:
    """Objects of a session commit with the job. If the function of run_once raises, the session
    forgets the objects that it has added, and keeps those from before."""
    engine = make_engine(schema.url, driver).execution_options(
        schema_translate_map={None: schema.name}
    )
    async with AsyncSession(engine) as session, session.begin():
        rows = [Row(n=1), Row(n=2), Row(n=3)]
        session.add(rows[0])
        await client.insert(Task(1), tx=session)
        assert rows[0] in session.new, "riverpy has written an object of the caller's"

        async def add(session: AsyncSession) -> None:
            session.add(rows[1])
            await session.flush()
            raise LookupError

        session.add(rows[2])
        with pytest.raises(LookupError):
            await client.run_once("key", add, tx=session)
        assert [row in session for row in rows] == [True, False, True]
    assert await stored(schema) == ([1, 3], [1])
    await engine.dispose()


async def test_sqlalchemy_engines(client: Client, schema: Schema) -> None:
    """A session with engines for its models, but no default, is refused. The connection of one of
    them is accepted."""
    engine = make_engine(schema.url, "asyncpg")
    sessions = async_sessionmaker(binds={Row: engine})
    async with sessions() as session:
        with pytest.raises(TransactionError, match=r"session\.connection\(bind_arguments"):
            await client.insert(Task(1), tx=session)
        connection = await session.connection(bind_arguments={"mapper": Row})
        await client.insert(Task(2), tx=connection)
        await session.commit()
    async with sessions(bind=engine) as session:
        await client.insert(Task(3), tx=session)
        await session.commit()
    assert await stored(schema) == ([], [2, 3])
    await engine.dispose()


async def test_blocking_engines(schema: Schema) -> None:
    """A blocking session with engines for its models, but no default, is refused too. Its objects
    commit with the job, and run_once undoes those that its function has added."""
    client = riverpy.sync.Client(config=Config(schema=schema.name))
    with blocking_engine(schema.url, "psycopg") as engine:
        translated = engine.execution_options(schema_translate_map={None: schema.name})
        with Session(binds={Row: translated}) as session:
            with pytest.raises(TransactionError, match=r"session\.connection\(bind_arguments"):
                client.insert(Task(1), tx=session)
            client.insert(Task(2), tx=session.connection(bind_arguments={"mapper": Row}))
            session.commit()
        with Session(translated) as session, session.begin():
            rows = [Row(n=1), Row(n=2)]
            session.add(rows[0])
            client.insert(Task(3), tx=session)

            def add(session: Session) -> None:
                session.add(rows[1])
                session.flush()
                raise LookupError

            with pytest.raises(LookupError):
                client.run_once("key", add, tx=session)
            assert [row in session for row in rows] == [True, False]
    assert await stored(schema) == ([1], [2, 3])


async def test_unfinished_sessions(client: Client, schema: Schema) -> None:
    """A connection that is not open yet, and a session whose block of a transaction has ended, are
    refused with TransactionError."""
    engine = make_engine(schema.url, "asyncpg")
    with pytest.raises(TransactionError, match=r"not open: use `tx = await engine\.connect"):
        await client.insert(Task(1), tx=engine.connect())
    with pytest.raises(TransactionError, match=r"no default engine: make it with bind="):
        await client.insert(Task(1), tx=AsyncSession())
    async with engine.connect() as connection:
        await connection.close()
        with pytest.raises(TransactionError, match="is closed"):
            await client.insert(Task(1), tx=connection)
    async with AsyncSession(engine) as session, session.begin():
        await session.commit()
        with pytest.raises(TransactionError, match="no usable transaction"):
            await client.insert(Task(2), tx=session)
    async with AsyncSession(engine, close_resets_only=False) as session:
        await session.close()
        with pytest.raises(TransactionError, match="no usable transaction"):
            await client.insert(Task(3), tx=session)
    assert await stored(schema) == ([], [])
    await engine.dispose()


async def test_several_engines(client: Client, schema: Schema) -> None:
    """A session whose transaction holds connections of two engines is refused, also in a savepoint.
    One with two engines that has used one of them is accepted, as is the connection of an
    engine."""
    main, other = make_engine(schema.url, "asyncpg"), make_engine(schema.url, "psycopg")
    bound = other.execution_options(schema_translate_map={None: schema.name})
    async with AsyncSession(main, binds={Row: bound}) as session:
        await client.insert(Task(1), tx=session)
        session.add(Row(n=1))
        async with session.begin_nested():
            await session.flush()
            with pytest.raises(TransactionError, match=r"of several engines.*bind_arguments"):
                await client.insert(Task(2), tx=session)
        with pytest.raises(TransactionError, match="of several engines"):
            await client.job_count(tx=session)
        connection = await session.connection(bind_arguments={"mapper": Row})
        await client.insert(Task(3), tx=connection)
        await session.commit()
        await client.insert(Task(4), tx=session)
        await session.commit()
    assert await stored(schema) == ([1], [1, 3, 4])
    blocking_client = riverpy.sync.Client(config=Config(schema=schema.name))
    with (
        blocking_engine(schema.url, "psycopg") as first,
        blocking_engine(schema.url, "psycopg2") as second,
        Session(first, binds={Row: second}) as blocking,
    ):
        blocking.connection(bind_arguments={"mapper": Row})
        with pytest.raises(TransactionError, match="of several engines"):
            blocking_client.insert(Task(5), tx=blocking)
    await main.dispose()
    await other.dispose()


@pytest.mark.parametrize(
    "kind", ["sqlalchemy-connection-asyncpg", "blocking-connection-psycopg", "psycopg-cursor"]
)
async def test_lost_connections(kind: str, schema: Schema) -> None:
    """A connection of SQLAlchemy that was lost connects again after a rollback, as for SQLAlchemy's
    own statements. A closed cursor of psycopg is refused, and says so."""
    async with ALL_KINDS[kind](schema.url) as caller:
        client = caller.make_client(Config(schema=schema.name))
        if not caller.is_sqlalchemy:
            await caller.tx.close()
            with pytest.raises(TransactionError, match="the cursor given as tx is closed"):
                await client.insert(Task(1), tx=caller.tx)
            return
        pid = await caller.value("select pg_backend_pid()")
        await schema.fetchval("select pg_terminate_backend($1, 5000)", pid)
        with pytest.raises(TransactionError, match="was lost"):
            await client.insert(Task(1), tx=caller.tx)
        with pytest.raises(TransactionError, match="no usable transaction: Can't reconnect"):
            await client.insert(Task(2), tx=caller.tx)
        await caller.rollback()
        await client.insert(Task(3), tx=caller.tx)
        await caller.commit()
    assert await stored(schema) == ([], [3])


async def test_near_misses(client: Client, schema: Schema) -> None:
    """An object that is nearly right is refused with a text that says what to pass."""
    engine = make_engine(schema.url, "psycopg")
    wrong: list[tuple[Any, str]] = [
        (engine, "AsyncEngine: open a session"),
        (async_sessionmaker(engine), "async_sessionmaker: make a session"),
        (engine.sync_engine, "Engine: open a session"),
        (AsyncSession(engine).sync_session, "Session, which blocks the event loop"),
        ("postgres://", "got str"),
        (unawaited := AsyncSession(engine).connection(), "coroutine: await it first"),
    ]
    for tx, text in wrong:
        with pytest.raises(TypeError, match=rf"tx must be an asyncpg connection.*{text}"):
            await client.insert(Task(1), tx=tx)
    unawaited.close()
    with (
        psycopg.connect(schema.url) as connection,
        pytest.raises(TypeError, match="Connection, which blocks the event loop"),
    ):
        await client.insert(Task(1), tx=connection)  # pyright: ignore[reportArgumentType]


@pytest.mark.skipif(not is_installed(), reason="needs PgBouncer")
async def test_poolers(schema: Schema) -> None:
    """Each kind works through PgBouncer in transaction mode, if it is set up for it."""
    options: dict[str, dict[str, Any]] = {
        "asyncpg": {"statement_cache_size": 0},
        "psycopg": {"prepare_threshold": None},
        "sqlalchemy-session-asyncpg": {
            "connect_args": {"statement_cache_size": 0, "prepared_statement_cache_size": 0}
        },
        "sqlalchemy-session-psycopg": {"connect_args": {"prepare_threshold": None}},
        "blocking-psycopg": {"prepare_threshold": None},
        "blocking-session-psycopg": {"connect_args": {"prepare_threshold": None}},
        "blocking-session-psycopg2": {},
        "django": {},
    }
    with pooled(schema.url) as url:
        for number, (kind, settings) in enumerate(options.items()):
            async with ALL_KINDS[kind](url, **settings) as caller:
                client = caller.make_client(Config(schema=schema.name))
                for _ in range(7):  # psycopg would prepare the sixth statement
                    await client.insert(Task(number), tx=caller.tx)
                    await caller.rollback()
                    await caller.begin()
                await write_with_job(caller, client, schema, number)
                await caller.commit()
        with pytest.raises(ConfigError, match=r"leads to a pooler.*set Config\(pooler=True\)"):
            riverpy.sync.Client(url).insert(Task(0))
        config = Config(schema=schema.name, pooler=True)
        with riverpy.sync.Client(url, config=config) as own:
            for number in range(8, 15):
                own.insert(Task(number))
    assert await stored(schema) == ([*range(8)], [*range(15)])
