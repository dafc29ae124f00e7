"""Databases with a large table of jobs, for the tests of query plans."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from riverpy.migrate import migrate_all
from tests._database import connected, create_database, drop_database, new_database_name, run_apart

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator

    import asyncpg

PLAN_MODES = ["force_custom_plan", "force_generic_plan"]


@contextmanager
def large_database(server_url: str, fill: Callable[[str], Awaitable[None]]) -> Generator[str]:
    """Yield the URL of a database of its own, filled by `await fill(url)`."""
    name = new_database_name()
    url = run_apart(create_database, server_url, name)
    try:
        run_apart(fill, url)
        yield url
    finally:
        run_apart(drop_database, server_url, name)


@asynccontextmanager
async def filling(url: str) -> AsyncGenerator[asyncpg.Connection[Any]]:
    """Yield a connection that fills the tables quickly: it creates the indexes of jobs
    afterwards."""
    async with connected(url) as connection:
        await migrate_all(connection)
        indexes = await connection.fetch(
            "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'river_job'"
            " AND indexname <> 'river_job_pkey'"
        )
        for name, _ in indexes:
            await connection.execute(f"DROP INDEX {name}")
        await connection.execute("ALTER TABLE river_job SET UNLOGGED")
        yield connection
        for _, definition in indexes:
            await connection.execute(definition)
        await connection.execute("VACUUM ANALYZE river_job, river_queue, riverpy_exec")
