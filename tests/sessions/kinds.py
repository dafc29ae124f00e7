"""The kinds of connections and sessions that callers pass as `tx`, each behind the same methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
from sqlalchemy import text
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.pool import NullPool

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from sqlalchemy.ext.asyncio import AsyncEngine


class Caller(ABC):
    """A caller's code with one connection of its library, which is in a transaction."""

    tx: Any
    """What the caller passes as `tx`."""

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
        await self.tx.execute("select 1")  # psycopg begins by itself

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
