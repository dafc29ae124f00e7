"""The databases and schemas that tests use: made, handed out, emptied and dropped here."""

from __future__ import annotations

import asyncio
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

PREFIX = "riverpy_test"

T = TypeVar("T")


def run_apart(function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Run a coroutine function on a loop of its own in a thread: for fixtures that outlive a test's loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(function(*args))).result()


def with_database(url: str, database: str) -> str:
    """The URL of another database on the same server."""
    return urlunsplit(urlsplit(url)._replace(path=f"/{database}"))


@asynccontextmanager
async def connected(url: str, **settings: str) -> AsyncGenerator[asyncpg.Connection[Any]]:
    """A connection with these server settings; terminated, not closed, when the block fails."""
    connection = await asyncpg.connect(
        url, server_settings=settings, timeout=20, command_timeout=40
    )
    try:
        yield connection
    except BaseException:
        connection.terminate()
        raise
    await connection.close(timeout=10)


def new_database_name() -> str:
    """A name that no other run and no other worker uses; it tells whose it is."""
    return f"{PREFIX}_{os.getpid()}_{secrets.token_hex(4)}"


async def create_database(server_url: str, name: str) -> str:
    """Make an empty database and return its URL."""
    async with connected(server_url) as connection:
        await connection.execute(f'CREATE DATABASE "{name}" TEMPLATE template0')
    return with_database(server_url, name)


async def drop_database(server_url: str, name: str) -> None:
    """Drop a database, whoever is connected to it."""
    async with connected(server_url) as connection:
        await connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


async def drop_orphans(server_url: str) -> None:
    """Drop the databases of runs that were killed. For a server of this machine: it looks at process ids."""
    async with connected(server_url) as connection:
        rows = await connection.fetch(
            "SELECT datname FROM pg_database WHERE datname ~ $1", rf"^{PREFIX}_\d+_[0-9a-f]+$"
        )
        for (name,) in rows:
            if not Path(f"/proc/{name.split('_')[2]}").exists() and Path("/proc/self").exists():
                await connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


class Schema:
    """A River schema of its own, at the newest version, empty at the start of each test.

    `name` is unquoted and needs no quotes. The methods use a connection of the fixture's, whose search path is this schema.
    """

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name
        self.connection: asyncpg.Connection[Any] | None = None

    @asynccontextmanager
    async def connected(self, **settings: str) -> AsyncGenerator[asyncpg.Connection[Any]]:
        """A new connection whose search path is this schema."""
        async with connected(self.url, search_path=self.name, **settings) as connection:
            yield connection

    async def fetch(self, sql: str, *args: object) -> list[asyncpg.Record]:
        return await self._own.fetch(sql, *args)

    async def fetchrow(self, sql: str, *args: object) -> asyncpg.Record | None:
        return await self._own.fetchrow(sql, *args)

    async def fetchval(self, sql: str, *args: object) -> Any:
        return await self._own.fetchval(sql, *args)

    async def execute(self, sql: str, *args: object) -> str:
        return await self._own.execute(sql, *args)

    async def jobs(self) -> list[asyncpg.Record]:
        """All jobs, in the order of their ids."""
        return await self.fetch("SELECT * FROM river_job ORDER BY id")

    @property
    def _own(self) -> asyncpg.Connection[Any]:
        assert self.connection is not None
        return self.connection


class SchemaPool:
    """Migrated schemas of one database: made when there is none left, emptied before each use."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._free: list[str] = []

    @asynccontextmanager
    async def schema(self) -> AsyncGenerator[Schema]:
        """An empty River schema. A test that fails does not give its schema back: it may be in any state."""
        name = self._free.pop() if self._free else await self._create()
        schema = Schema(self._url, name)
        async with schema.connected() as connection:
            schema.connection = connection
            yield schema
        await self._give_back(schema)

    async def _create(self) -> str:
        from riverpy.migrate import Migrator

        name = f"t_{secrets.token_hex(4)}"
        async with connected(self._url) as connection:
            await connection.execute(f'CREATE SCHEMA "{name}"')
            await Migrator(connection, schema=name).up()
        return name

    async def _give_back(self, schema: Schema) -> None:
        """Empty it, unless the test left somebody behind who holds its locks."""
        try:
            async with schema.connected(lock_timeout="2s") as connection:
                tables = await connection.fetch(
                    "SELECT c.oid::regclass::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
                    " WHERE n.nspname = $1 AND c.relkind = 'r' AND c.relname !~ 'migration$'",
                    schema.name,
                )
                await connection.execute(
                    f"TRUNCATE {', '.join(table for (table,) in tables)} RESTART IDENTITY CASCADE"
                )
        except (asyncpg.LockNotAvailableError, asyncpg.PostgresSyntaxError):
            return
        self._free.append(schema.name)
