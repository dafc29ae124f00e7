"""The database server of a run, with a database for each competitor and each state of the table."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from riverpy.embedded import EmbeddedPostgres
from riverpy.migrate import migrate_all
from tests.kit.statements import read_statements

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

SETTINGS = {
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.track": "none",
    "max_wal_size": "4GB",
}
"""Durability is PostgreSQL's default. Statements are counted only in `Database.counted`.
Checkpoints are made before the measurements, not during one."""
STATEMENT_LIMIT = 900.0
_STATEMENTS = read_statements(Path(__file__).with_name("server.sql"))


class Database:
    """A database on the server.

    Args: url: its address.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    @asynccontextmanager
    async def connected(self) -> AsyncGenerator[asyncpg.Connection]:
        """Open a connection for the block."""
        connection = await asyncpg.connect(self.url, command_timeout=STATEMENT_LIMIT)
        try:
            yield connection
        finally:
            await connection.close()

    def statement(self, name: str) -> str:
        """Return the text of a statement in server.sql."""
        return _STATEMENTS[name]

    async def fetch(self, name: str, *arguments: object) -> list[asyncpg.Record]:
        """Run a statement of server.sql and return its rows."""
        async with self.connected() as connection:
            return await connection.fetch(_STATEMENTS[name], *arguments)

    async def value(self, name: str, *arguments: object) -> Any:
        """Run a statement of server.sql and return its only value."""
        return (await self.fetch(name, *arguments))[0][0]

    async def empty(self) -> None:
        """Delete all jobs."""
        await self.fetch("empty")

    async def fill(self, jobs: int, state: str = "available") -> None:
        """Insert no-op jobs in this state."""
        await self.fetch(f"fill_{state}", jobs)

    async def settle(self) -> None:
        """Vacuum the tables and make a checkpoint, so that no measurement has to do it."""
        await self.fetch("settle")
        await self.fetch("checkpoint")

    async def counted(self) -> None:
        """Count the statements of new connections to this database by pg_stat_statements."""
        await self.fetch("statements_extension")
        name = await self.value("database")
        async with self.connected() as connection:
            await connection.execute(f'alter database "{name}" set pg_stat_statements.track = top')


class Server:
    """The server of a run. It creates its databases when they are first used."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._prefix = f"bench_{os.getpid()}_"
        self._databases: dict[str, Database] = {}
        self._making = asyncio.Lock()

    async def database(self, name: str) -> Database:
        """Return a database with this name, created empty."""
        async with self._making:
            if name not in self._databases:
                self._databases[name] = await self._create(name)
            return self._databases[name]

    async def river(self, name: str) -> Database:
        """Return a database with this name and River's tables."""
        is_new = name not in self._databases
        database = await self.database(name)
        if is_new:
            await migrate_all(database.url)
        return database

    async def version(self) -> str:
        """Return the version of PostgreSQL."""
        return (await Database(self.url).value("version")).split()[0]

    async def _create(self, name: str) -> Database:
        full = f"{self._prefix}{name}"
        async with Database(self.url).connected() as connection:
            await connection.execute(f'drop database if exists "{full}" with (force)')
            await connection.execute(f'create database "{full}"')
        return Database(urlunsplit(urlsplit(self.url)._replace(path=f"/{full}")))

    async def drop(self) -> None:
        """Drop the databases of this run, and those that killed runs left."""
        async with Database(self.url).connected() as connection:
            for row in await connection.fetch(_STATEMENTS["databases"]):
                pid = int(row["pid"])
                if pid == os.getpid() or not _is_alive(pid):
                    await connection.execute(f'drop database "{row["name"]}" with (force)')


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@asynccontextmanager
async def server() -> AsyncGenerator[Server]:
    """Start a server for the block."""
    postgres = EmbeddedPostgres("bench-compare", settings=SETTINGS)
    url = await asyncio.to_thread(postgres.start)
    made = Server(url)
    try:
        yield made
    finally:
        try:
            await made.drop()
        except (OSError, asyncpg.PostgresError) as error:
            print(f"could not drop the databases of the run: {error}", file=sys.stderr)
        postgres.release()
