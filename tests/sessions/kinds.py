"""The kinds of connections and sessions that callers pass as `tx`, each behind the same methods."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from functools import partial
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
from django.db import DatabaseError, transaction
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

import riverpy.sync
from riverpy import Client
from riverpy._without_loop import run_without_loop
from tests.django import project

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from sqlalchemy.ext.asyncio import AsyncEngine

    from riverpy import Config


project.set_up()


class Caller(ABC):
    """A caller's code with one connection of its library, which is in a transaction."""

    tx: Any
    """What the caller passes as `tx`."""
    is_blocking = False
    """Whether `tx` is for `riverpy.sync.Client`."""
    commits_by_itself = False
    """Whether a call in no transaction commits by itself."""

    @property
    def is_sqlalchemy(self) -> bool:
        """Whether `tx` is SQLAlchemy's, which begins by itself and has no COPY."""
        return any(base.__module__.startswith("sqlalchemy") for base in type(self.tx).__mro__)

    async def call(self, function: Callable[[], Any]) -> Any:
        """Call a blocking function where the caller's code runs."""
        return function()

    def make_client(self, config: Config) -> Any:
        """Return a client for `tx`, whose methods are to be awaited."""
        return AwaitableClient(self, config) if self.is_blocking else Client(config=config)

    @abstractmethod
    async def execute(self, sql: str) -> None:
        """Run a statement in the transaction."""

    @abstractmethod
    async def value(self, sql: str) -> Any:
        """Run a statement, and return the first value of its first row."""

    @abstractmethod
    async def begin(self) -> None:
        """Begin a transaction, after the end of the last one."""

    @abstractmethod
    async def commit(self) -> None:
        """Commit."""

    @abstractmethod
    async def rollback(self) -> None:
        """Roll back."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection or session."""

    @abstractmethod
    def savepoint(self) -> AbstractAsyncContextManager[Any]:
        """Return the library's own savepoint, which is rolled back if the block raises."""


class AwaitableClient:
    """A blocking client with methods that are to be awaited, so that one test serves both
    clients."""

    def __init__(self, caller: Caller, config: Config) -> None:
        self._caller = caller
        self._client = riverpy.sync.Client(config=config)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        async def call(*args: Any, **options: Any) -> Any:
            return await self._caller.call(lambda: method(*args, **options))

        return call

    async def jobs(self, **options: Any) -> AsyncGenerator[Any]:
        """Iterate over jobs."""
        for job in await self._caller.call(lambda: [*self._client.jobs(**options)]):
            yield job

    async def run_once(self, key: str, fn: Any, **options: Any) -> Any:
        """Run a function of a test once. It is async, but does not wait."""
        call = partial(self._client.run_once, key, lambda tx: run_without_loop(fn(tx)), **options)
        return await self._caller.call(call)


class AsyncpgCaller(Caller):
    """A connection of asyncpg."""

    def __init__(self, connection: Any) -> None:
        self.tx = connection
        self._transaction: Any = None

    async def execute(self, sql: str) -> None:
        await self.tx.execute(sql)

    async def value(self, sql: str) -> Any:
        return await self.tx.fetchval(sql)

    async def begin(self) -> None:
        self._transaction = self.tx.transaction()
        await self._transaction.start()

    async def commit(self) -> None:
        await self._transaction.commit()

    async def rollback(self) -> None:
        await self._transaction.rollback()

    async def close(self) -> None:
        await self.tx.close()

    def savepoint(self) -> AbstractAsyncContextManager[Any]:
        return self.tx.transaction()


class PsycopgCaller(Caller):
    """A connection of psycopg, or a cursor of it."""

    def __init__(self, connection: Any, *, is_cursor: bool) -> None:
        self._connection = connection
        self.tx = connection.cursor() if is_cursor else connection

    async def execute(self, sql: str) -> None:
        await self.tx.execute(sql)

    async def value(self, sql: str) -> Any:
        cursor = await self.tx.execute(sql)
        row = await cursor.fetchone()
        return next(iter(row.values())) if isinstance(row, dict) else row[0]

    async def begin(self) -> None:
        await self.tx.execute("show timezone")  # begins, without a snapshot

    async def commit(self) -> None:
        await self._connection.commit()

    async def rollback(self) -> None:
        await self._connection.rollback()

    async def close(self) -> None:
        await self._connection.close()

    def savepoint(self) -> AbstractAsyncContextManager[Any]:
        return self._connection.transaction()


class SqlAlchemyCaller(Caller):
    """A session or connection of SQLAlchemy. It begins by itself."""

    def __init__(self, tx: Any) -> None:
        self.tx = tx

    async def execute(self, sql: str) -> None:
        await self.tx.execute(text(sql))

    async def value(self, sql: str) -> Any:
        return (await self.tx.execute(text(sql))).scalar()

    async def begin(self) -> None:
        """Do nothing: the next statement begins."""

    async def commit(self) -> None:
        await self.tx.commit()

    async def rollback(self) -> None:
        await self.tx.rollback()

    async def close(self) -> None:
        await self.tx.close()

    def savepoint(self) -> AbstractAsyncContextManager[Any]:
        return self.tx.begin_nested()


@asynccontextmanager
async def asyncpg_caller(url: str, **options: Any) -> AsyncGenerator[AsyncpgCaller]:
    """Open a connection of asyncpg."""
    connection = await asyncpg.connect(url, **options)
    caller = AsyncpgCaller(connection)
    await caller.begin()
    try:
        yield caller
    finally:
        connection.terminate()


@asynccontextmanager
async def psycopg_caller(
    url: str, *, is_cursor: bool = False, **options: Any
) -> AsyncGenerator[PsycopgCaller]:
    """Open a connection of psycopg."""
    connection = await psycopg.AsyncConnection.connect(url, **options)
    caller = PsycopgCaller(connection, is_cursor=is_cursor)
    await caller.begin()
    try:
        yield caller
    finally:
        await connection.close()


def make_engine(url: str, driver: str, **options: Any) -> AsyncEngine:
    """Make an engine of SQLAlchemy without a pool, for this database."""
    rest = url.partition("://")[2]
    return create_async_engine(f"postgresql+{driver}://{rest}", poolclass=NullPool, **options)


@asynccontextmanager
async def sqlalchemy_caller(
    url: str, *, driver: str, shape: str, **options: Any
) -> AsyncGenerator[SqlAlchemyCaller]:
    """Open a session or connection of SQLAlchemy."""
    engine = make_engine(url, driver, **options)
    tx: Any
    if shape == "connection":
        tx = await engine.connect()
    elif shape == "session":
        tx = AsyncSession(engine)
    else:
        tx = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: "test")
    try:
        yield SqlAlchemyCaller(tx)
    finally:
        await tx.close()
        await engine.dispose()


class BlockingCaller(Caller):
    """A connection, cursor or session that is not async: psycopg's, or SQLAlchemy's on any
    driver."""

    is_blocking = True

    def __init__(self, tx: Any, *, connection: Any = None) -> None:
        """`connection` ends the transactions of a cursor."""
        self.tx = tx
        self._connection = tx if connection is None else connection
        self._is_inside = False

    async def call(self, function: Callable[[], Any]) -> Any:
        if self._is_inside:
            return function()
        self._is_inside = True
        try:
            return await self._call_outside(function)
        finally:
            self._is_inside = False

    async def _call_outside(self, function: Callable[[], Any]) -> Any:
        """Call a function as code does that is not async: psycopg's in the thread of a running
        event loop, as in a notebook, and SQLAlchemy's in a thread without one."""
        return function() if self._is_psycopg else await asyncio.to_thread(function)

    @property
    def _is_psycopg(self) -> bool:
        return isinstance(self._connection, psycopg.Connection)

    def _execute(self, sql: str) -> Any:
        return self.tx.execute(sql if self._is_psycopg else text(sql))

    async def execute(self, sql: str) -> None:
        await self.call(lambda: self._execute(sql))

    async def value(self, sql: str) -> Any:
        row = await self.call(lambda: self._execute(sql).fetchone())
        return next(iter(row.values())) if isinstance(row, dict) else row[0]

    async def begin(self) -> None:
        if self._is_psycopg:
            await self.execute(
                "show timezone"
            )  # it begins by itself, but riverpy does not begin it

    async def commit(self) -> None:
        await self.call(self._connection.commit)

    async def rollback(self) -> None:
        await self.call(self._connection.rollback)

    async def close(self) -> None:
        await self.call(self._connection.close)

    def _make_savepoint(self) -> AbstractContextManager[Any]:
        if self._is_psycopg:
            return self._connection.transaction()
        return self._connection.begin_nested()

    @asynccontextmanager
    async def savepoint(self) -> AsyncGenerator[None]:
        savepoint = await self.call(lambda: _enter(self._make_savepoint()))
        try:
            yield
        except Exception as error:
            exit_arguments = type(error), error, error.__traceback__
            await self.call(lambda: savepoint.__exit__(*exit_arguments))
            raise
        await self.call(lambda: savepoint.__exit__(None, None, None))


def _enter(context: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    context.__enter__()
    return context


class RunSyncCaller(BlockingCaller):
    """The blocking session under an async session of SQLAlchemy, in `run_sync`."""

    def __init__(self, session: AsyncSession) -> None:
        super().__init__(session.sync_session)
        self._session = session

    async def _call_outside(self, function: Callable[[], Any]) -> Any:
        return await self._session.run_sync(lambda _: function())


@asynccontextmanager
async def run_sync_caller(url: str, *, driver: str, **options: Any) -> AsyncGenerator[Caller]:
    """Open the blocking session under an async session of SQLAlchemy."""
    engine = make_engine(url, driver, **options)
    async with AsyncSession(engine) as session:
        yield RunSyncCaller(session)
    await engine.dispose()


@asynccontextmanager
async def blocking_psycopg_caller(
    url: str, *, is_cursor: bool = False, **options: Any
) -> AsyncGenerator[BlockingCaller]:
    """Open a blocking connection of psycopg."""
    connection: Any = psycopg.Connection.connect(url, **options)
    tx: Any = connection.cursor() if is_cursor else connection
    caller = BlockingCaller(tx, connection=connection)
    await caller.begin()
    try:
        yield caller
    finally:
        connection.close()


@contextmanager
def blocking_engine(url: str, driver: str, **options: Any) -> Iterator[Any]:
    """Make a blocking engine of SQLAlchemy without a pool, for this database."""
    rest = url.partition("://")[2]
    engine = create_engine(f"postgresql+{driver}://{rest}", poolclass=NullPool, **options)
    try:
        yield engine
    finally:
        engine.dispose()


@asynccontextmanager
async def blocking_sqlalchemy_caller(
    url: str, *, driver: str, shape: str, **options: Any
) -> AsyncGenerator[BlockingCaller]:
    """Open a blocking session or connection of SQLAlchemy."""
    with blocking_engine(url, driver, **options) as engine:
        tx: Any
        if shape == "connection":
            tx = engine.connect()
        elif shape == "session":
            tx = Session(engine)
        else:
            tx = scoped_session(sessionmaker(engine), scopefunc=lambda: "test")
        try:
            yield BlockingCaller(tx)
        finally:
            tx.close()


class DjangoCaller(BlockingCaller):
    """A connection of Django's, in the only thread of a pool."""

    commits_by_itself = True

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        super().__init__(thread.submit(transaction.get_connection, "contract").result())
        self._block: Any = None

    async def _call_outside(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def _execute(self, sql: str) -> Any:
        cursor = self.tx.cursor()
        cursor.execute(sql)
        return cursor

    async def begin(self) -> None:
        if self._block is None:
            self._block = self._make_savepoint()
            await self.call(self._block.__enter__)

    async def commit(self) -> None:
        block, self._block = self._block, None
        await self.call(lambda: block.__exit__(None, None, None))

    async def rollback(self) -> None:
        if self._block is not None:
            await self.call(lambda: self.tx.set_rollback(True))
            await self.commit()

    async def close(self) -> None:
        with suppress(DatabaseError):
            await self.rollback()
        await self.call(self.tx.close)

    def _make_savepoint(self) -> AbstractContextManager[Any]:
        return transaction.atomic(using="contract")


@asynccontextmanager
async def django_caller(url: str) -> AsyncGenerator[DjangoCaller]:
    """Open a connection of Django's."""
    project.use_database(url, "contract")
    with ThreadPoolExecutor(1) as thread:
        caller = DjangoCaller(thread)
        await caller.begin()
        try:
            yield caller
        finally:
            await caller.close()


BLOCKING_KINDS: dict[str, Any] = {
    "django": django_caller,
    "blocking-psycopg": blocking_psycopg_caller,
    "blocking-psycopg-cursor": lambda url, **options: blocking_psycopg_caller(
        url, is_cursor=True, **options
    ),
    **{
        f"blocking-{shape}-{driver}": lambda url, shape=shape, driver=driver, **options: (
            blocking_sqlalchemy_caller(url, driver=driver, shape=shape, **options)
        )
        for shape, driver in (
            ("session", "psycopg"),
            ("connection", "psycopg"),
            ("session", "psycopg2"),
            ("scoped", "psycopg2"),
        )
    },
    "run-sync-asyncpg": lambda url, **options: run_sync_caller(url, driver="asyncpg", **options),
}
"""A function that opens a caller, for each kind that is not async."""
KINDS: dict[str, Any] = {
    "asyncpg": asyncpg_caller,
    "psycopg": psycopg_caller,
    "psycopg-cursor": lambda url, **options: psycopg_caller(url, is_cursor=True, **options),
    **{
        f"sqlalchemy-{shape}-{driver}": lambda url, shape=shape, driver=driver, **options: (
            sqlalchemy_caller(url, driver=driver, shape=shape, **options)
        )
        for driver in ("asyncpg", "psycopg")
        for shape in ("session", "connection", "scoped")
    },
}
"""A function that opens a caller, for each kind."""
ALL_KINDS = {**KINDS, **BLOCKING_KINDS}
