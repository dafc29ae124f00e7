"""A schema that one language migrated is one that the other accepts, changes and works with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from riverpy.migrate import Migrator, migrate_all
from tests._database import connected
from tests.interop.river_go import RiverGo, RiverGoError
from tests.migrate.catalog import catalog_vector, read_catalog, without_history

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    import asyncpg

VERSIONS = list(range(1, 8))
VALID = [{"ok": True, "messages": None}]
SCHEMAS = ["public", "MixedCase_1"]


@pytest.fixture
async def connection(fresh_database_url: str) -> AsyncGenerator[asyncpg.Connection[Any]]:
    """A connection to a database of this test alone, that has both schemas."""
    async with connected(fresh_database_url) as connection:
        await connection.execute(f'CREATE SCHEMA "{SCHEMAS[1]}"')
        yield connection


@pytest.fixture(params=SCHEMAS)
def go_there(request: pytest.FixtureRequest, go_binary: Path, fresh_database_url: str) -> RiverGo:
    """Go on a schema of an empty database."""
    return RiverGo(go_binary, fresh_database_url, request.param)


async def versions(go: RiverGo, *args: object) -> list[int]:
    """The versions that a migration by Go went through."""
    return [line["version"] for line in await go.run("migrate", *args)]


async def current(connection: asyncpg.Connection[Any], schema: str) -> dict[str, Any]:
    """The catalog, without what going down leaves behind."""
    return without_history(await read_catalog(connection, schema))


async def test_go_accepts_what_python_migrated(
    go_there: RiverGo, connection: asyncpg.Connection[Any]
) -> None:
    """MG-07: Go finds nothing to do, goes down and up again, and we find nothing to do.
    Below version 5 there are no lines: it refuses to go there while ours is recorded."""
    schema = go_there.schema
    await migrate_all(connection, schema=schema)
    assert await go_there.run("migrate", "validate") == VALID
    assert await versions(go_there, "up") == []
    assert await versions(go_there, "--target", 5, "down") == [7, 6]
    with pytest.raises(RiverGoError, match="non-main"):
        await go_there.run("migrate", "down")
    assert await versions(go_there, "up") == [6, 7]
    for line in ("main", "riverpy"):
        migrator = Migrator(connection, schema=schema, line=line)
        assert (await migrator.validate()).ok
        assert not (await migrator.up()).steps


async def test_python_accepts_what_go_migrated(
    go_there: RiverGo, connection: asyncpg.Connection[Any]
) -> None:
    """MG-07: we add our tables alone, go down and up again, and Go finds nothing to do."""
    schema = go_there.schema
    migrator = Migrator(connection, schema=schema)
    assert await versions(go_there, "up") == VERSIONS
    assert (await migrator.validate()).ok
    assert not (await migrator.up()).steps
    main, ours = await migrate_all(connection, schema=schema)
    assert not main.steps
    assert ours.steps
    assert [step.version for step in (await migrator.down(target=5)).steps] == [7, 6]
    assert await versions(go_there, "up") == [6, 7]
    assert (await migrator.validate()).ok
    assert await go_there.run("migrate", "validate") == VALID


async def test_each_takes_over_half_way(
    go_binary: Path, fresh_database_url: str, connection: asyncpg.Connection[Any]
) -> None:
    """MG-07: half-way up by one language, on to the top and down again by the other: the catalog
    is the recorded one."""
    schema = SCHEMAS[1]
    go = RiverGo(go_binary, fresh_database_url, schema)
    migrator = Migrator(connection, schema=schema)
    for version in (1, 4, 6):
        await migrator.up(target=version)
        assert await versions(go, "up") == VERSIONS[version:]
        assert await current(connection, schema) == without_history(catalog_vector(7))
        await migrator.down(target=version)
        assert await current(connection, schema) == without_history(catalog_vector(version))
        assert await versions(go, "--target", -1, "down") == VERSIONS[:version][::-1]
        assert not any((await read_catalog(connection, schema)).values())
        assert await versions(go, "--target", version, "up") == VERSIONS[:version]
        await migrator.up()
        assert await go.run("migrate", "validate") == VALID
        await migrator.down(target=0)
