"""Creates, lends, empties and drops the databases and schemas of the tests."""

from __future__ import annotations

import asyncio
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from riverpy.migrate import migrate_all

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable

PREFIX = "riverpy_test"
DROP_TRIES = 10

ResultT = TypeVar("ResultT")


def run_apart(function: Callable[..., Coroutine[Any, Any, ResultT]], *args: Any) -> ResultT:
    """Run a coroutine function on a loop of its own, for fixtures that outlive a test's loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(function(*args))).result()


def with_database(url: str, database: str) -> str:
    """Return the URL of another database on the same server."""
    return urlunsplit(urlsplit(url)._replace(path=f"/{database}"))


class _Connection(asyncpg.Connection):
    """Reads the types of each database once. On a new connection this query takes longer than most
    tests."""

    _known: ClassVar[dict[object, Any]] = {}

    async def _introspect_types(self, typeoids: Iterable[int], timeout: float) -> tuple[Any, Any]:
        place = (self._addr, self._params.database, frozenset(typeoids))
        if place in self._known:
            return self._known[place], SimpleNamespace(name="nothing was sent")
        types, statement = await super()._introspect_types(typeoids, timeout)
        self._known[place] = types
        return types, statement


@asynccontextmanager
async def connected(url: str, **settings: str) -> AsyncGenerator[asyncpg.Connection[Any]]:
    """Open a connection with these server settings. It is terminated if it cannot be closed
    soon."""
    connection = await asyncpg.connect(
        url, server_settings=settings, timeout=60, connection_class=_Connection
    )
    try:
        yield connection
        await connection.close(timeout=30)
    finally:
        connection.terminate()


# --- databases


def new_database_name() -> str:
    """Return a name that no other run and no other worker uses. It contains its process id."""
    return f"{PREFIX}_{os.getpid()}_{secrets.token_hex(4)}"


async def create_database(server_url: str, name: str, options: str = "") -> str:
    """Create an empty database and return its URL."""
    async with connected(server_url) as connection:
        await connection.execute(f'CREATE DATABASE "{name}" TEMPLATE template0 {options}')
    return with_database(server_url, name)


async def drop_database(server_url: str, name: str) -> None:
    """Drop a database with all its connections. Each try waits five seconds for them to close."""
    async with connected(server_url) as connection:
        for tries_left in reversed(range(DROP_TRIES)):
            try:
                await connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
            except asyncpg.ObjectInUseError:
                if not tries_left:
                    raise
            else:
                return


async def drop_orphans(server_url: str) -> None:
    """Drop the databases of killed runs. This works for servers on this machine, by process ids."""
    async with connected(server_url) as connection:
        rows = await connection.fetch(
            "SELECT datname FROM pg_database WHERE datname ~ $1", rf"^{PREFIX}_\d+_[0-9a-f]+$"
        )
        for (name,) in rows:
            if not _process_exists(int(name.split("_")[2])):
                with suppress(asyncpg.PostgresError):  # another worker drops it too
                    await connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# --- schemas


class Schema:
    """A schema with all tables at the newest version, empty at the start of each test.

    `name` needs no quotes. The methods share one connection, whose search path is this schema.
    """

    def __init__(self, url: str, name: str, connection: asyncpg.Connection[Any]) -> None:
        self.url = url
        self.name = name
        self.is_spoilt = False
        """Whether a test failed in it, so that its triggers, constraints or settings may be
        left."""
        self._connection = connection

    @property
    def connection(self) -> asyncpg.Connection[Any]:
        """The shared connection, for assertions on inserted jobs."""
        return self._connection

    @asynccontextmanager
    async def connected(self, **settings: str) -> AsyncGenerator[asyncpg.Connection[Any]]:
        """Open a connection whose search path is this schema."""
        async with connected(self.url, search_path=self.name, **settings) as connection:
            yield connection

    async def fetch(self, sql: str, *args: object) -> list[asyncpg.Record]:
        return await self._connection.fetch(sql, *args)

    async def fetchrow(self, sql: str, *args: object) -> asyncpg.Record | None:
        return await self._connection.fetchrow(sql, *args)

    async def fetchval(self, sql: str, *args: object) -> Any:
        return await self._connection.fetchval(sql, *args)

    async def execute(self, sql: str, *args: object) -> str:
        return await self._connection.execute(sql, *args)

    async def jobs(self) -> list[asyncpg.Record]:
        """Return all jobs, ordered by id."""
        return await self.fetch("SELECT * FROM river_job ORDER BY id")


_LARGE = 128 * 1024
"""Tables of at least this many bytes are truncated. Smaller ones are emptied by DELETE, since
TRUNCATE makes new files for the table and each index, which takes longer than most tests."""
_TABLES = """
SELECT array_agg(oid::regclass::text ORDER BY oid) FROM pg_class
WHERE relnamespace = $1::regnamespace AND relkind = 'r' AND relname !~ 'migration$'
"""
_SEQUENCES = """
SELECT array_agg(oid::regclass::text) FROM pg_class
WHERE relnamespace = $1::regnamespace AND relkind = 'S' AND relname !~ 'migration'
"""
_EMPTY = """
DO $$
DECLARE
    name text;
BEGIN
    PERFORM set_config('lock_timeout', '2s', true);
    LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE;
    FOREACH name IN ARRAY string_to_array('{tables}', ', ') LOOP
        IF pg_table_size(name::regclass) > {large} THEN
            EXECUTE format('TRUNCATE %s CASCADE', name);
        ELSIF pg_relation_size(name::regclass) > 0 THEN
            EXECUTE format('DELETE FROM %s', name);
        END IF;
    END LOOP;
    PERFORM setval(sequence, 1, false)
    FROM unnest(string_to_array('{sequences}', ', ')::regclass[]) AS sequence;
END
$$
"""


class SchemaPool:
    """Migrated schemas of one database. They are created when none is free, and emptied after
    use."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._free: list[str] = []
        self._emptying: dict[str, str] = {}

    @asynccontextmanager
    async def schema(self) -> AsyncGenerator[Schema]:
        """Lend an empty River schema for the block."""
        name = self._free.pop() if self._free else await self._create()
        async with connected(self._url, search_path=name) as connection:
            schema = Schema(self._url, name, connection)
            yield schema
            if schema.is_spoilt:
                return
            if not connection.is_closed():
                await self._give_back(name, connection)
                return
        async with connected(self._url) as connection:
            await self._give_back(name, connection)

    async def _create(self) -> str:
        name = f"t_{secrets.token_hex(4)}"
        async with connected(self._url) as connection:
            await connection.execute(f'CREATE SCHEMA "{name}"')
            await migrate_all(connection, schema=name)
            tables = ", ".join(await connection.fetchval(_TABLES, name))
            sequences = ", ".join(await connection.fetchval(_SEQUENCES, name))
        self._emptying[name] = _EMPTY.format(tables=tables, sequences=sequences, large=_LARGE)
        return name

    async def _give_back(self, name: str, connection: asyncpg.Connection[Any]) -> None:
        """Empty the schema. If its tables are gone, or locked by a leftover of the test, it is not
        used again."""
        with suppress(asyncpg.PostgresError, asyncpg.InterfaceError):
            for statement in ("ROLLBACK", "DISCARD ALL", self._emptying[name]):
                await connection.execute(statement)
            self._free.append(name)
