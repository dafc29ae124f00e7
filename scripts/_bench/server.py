"""The one database server of a run: a database for each competitor and each state of the table."""

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
"""Durability is PostgreSQL's own. Statements are counted only in `Database.counted`; checkpoints
are made before the measurements, not in the middle of one."""
STATEMENT_LIMIT = 900.0
_STATEMENTS = read_statements(Path(__file__).with_name("server.sql"))


class Database:
    """A database on the server.

    Args:
        url: where it is.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    @asynccontextmanager
    async def connected(self) -> AsyncGenerator[asyncpg.Connection]:
        """A connection for the block."""
        connection = await asyncpg.connect(self.url, command_timeout=STATEMENT_LIMIT)
        try:
            yield connection
        finally:
            await connection.close()

    def statement(self, name: str) -> str:
        """The text of a statement of server.sql."""
        return _STATEMENTS[name]

    async def fetch(self, name: str, *arguments: object) -> list[asyncpg.Record]:
        """The rows of a statement of server.sql."""
        async with self.connected() as connection:
            return await connection.fetch(_STATEMENTS[name], *arguments)

    async def value(self, name: str, *arguments: object) -> Any:
        """The only value of a statement of server.sql."""
        return (await self.fetch(name, *arguments))[0][0]

    async def empty(self) -> None:
        """Delete all jobs."""
        await self.fetch("empty")

    async def fill(self, jobs: int, state: str = "available") -> None:
        """Add no-op jobs, waiting or finished."""
        await self.fetch(f"fill_{state}", jobs)

    async def settle(self) -> None:
        """Leave no work to autovacuum and the checkpointer that a measurement would pay for."""
        await self.fetch("settle")
        await self.fetch("checkpoint")

    async def counted(self) -> None:
        """Let new connections to this database be counted by pg_stat_statements."""
        await self.fetch("statements_extension")
        name = await self.value("database")
        async with self.connected() as connection:
            await connection.execute(f'alter database "{name}" set pg_stat_statements.track = top')


class Server:
    """The server of a run; its databases are made when first asked for."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._prefix = f"bench_{os.getpid()}_"
        self._databases: dict[str, Database] = {}
        self._making = asyncio.Lock()

    async def database(self, name: str) -> Database:
        """An own database, empty when it is made."""
        async with self._making:
            if name not in self._databases:
                self._databases[name] = await self._create(name)
            return self._databases[name]

    async def river(self, name: str) -> Database:
        """The same with River's tables."""
        is_new = name not in self._databases
        database = await self.database(name)
        if is_new:
            await migrate_all(database.url)
        return database

    async def version(self) -> str:
        """PostgreSQL's."""
        return (await Database(self.url).value("version")).split()[0]

    async def _create(self, name: str) -> Database:
        full = f"{self._prefix}{name}"
        async with Database(self.url).connected() as connection:
            await connection.execute(f'drop database if exists "{full}" with (force)')
            await connection.execute(f'create database "{full}"')
        return Database(urlunsplit(urlsplit(self.url)._replace(path=f"/{full}")))

    async def drop(self) -> None:
        """Drop what this run made, and what runs made that were killed."""
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
    """A server for the block."""
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
