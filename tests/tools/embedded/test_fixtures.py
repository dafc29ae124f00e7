"""The fixtures that all tests use."""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from tests._database import PREFIX, connected, create_database, drop_orphans

if TYPE_CHECKING:
    from tests._database import Schema, SchemaPool


async def test_event_loop() -> None:
    """Tests run on uvloop unless the environment names asyncio's own loop."""
    on_uvloop = os.environ.get("RIVERPY_TEST_LOOP") != "asyncio"
    assert ("uvloop" in type(asyncio.get_running_loop()).__module__) == on_uvloop


async def test_commit_waits_for_the_log(conn: asyncpg.Connection[Any]) -> None:
    """A commit waits for the server's log, as in production."""
    assert await conn.fetchval("SHOW synchronous_commit") == "on"


async def test_fresh_database_is_empty(fresh_database_url: str, database_url: str) -> None:
    """A fresh database is not the database of the test process."""
    assert fresh_database_url != database_url


@pytest.mark.parametrize("turn", [1, 2])
async def test_schema_is_empty(schema: Schema, turn: int) -> None:
    """The next test starts with empty tables and new ids, and the versions stay."""
    inserted = await schema.fetchval(
        "INSERT INTO river_job (kind, max_attempts, args) VALUES ('k', 1, '{}') RETURNING id"
    )
    assert inserted == 1
    assert len(await schema.jobs()) == 1
    assert await schema.fetchval("SELECT count(*) FROM river_migration") >= 7


async def test_schemas_are_used_again(schema_pool: SchemaPool) -> None:
    """A returned schema is used again, unless it was damaged or a test failed in it."""
    async with schema_pool.schema() as first:
        pass
    async with schema_pool.schema() as second:
        assert second.name == first.name
        await second.execute("DROP TABLE river_queue")
    async with schema_pool.schema() as third:
        assert third.name != first.name
        third.is_spoilt = True
    async with schema_pool.schema() as fourth:
        assert fourth.name != third.name


async def test_schema_with_locked_tables_is_not_used_again(schema_pool: SchemaPool) -> None:
    """An open transaction of a finished test does not delay later tests."""
    async with schema_pool.schema() as first:
        left_behind = await asyncpg.connect(first.url)
        await left_behind.execute(f"BEGIN; LOCK TABLE {first.name}.river_job")
    async with schema_pool.schema() as second:
        assert second.name != first.name
    await left_behind.close()


async def test_orphans_are_dropped(server_url: str, database_url: str) -> None:
    """Databases of ended test runs are dropped. Those of running ones are kept."""
    orphan = f"{PREFIX}_999999999_{secrets.token_hex(4)}"
    await create_database(server_url, orphan)
    await drop_orphans(server_url)
    async with connected(server_url) as connection:
        names = {name for (name,) in await connection.fetch("SELECT datname FROM pg_database")}
    assert orphan not in names
    assert database_url.split("/")[3].split("?")[0] in names
