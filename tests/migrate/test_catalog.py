"""The migrations leave the catalog that River's leave, at every version, upwards and downwards."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from riverpy._postgres.schema import list_migration_lines, load_migrations
from riverpy._postgres.sql_files import sql_directory
from riverpy.migrate import Migrator
from tests.migrate.catalog import catalog_vector, read_catalog, without_history

if TYPE_CHECKING:
    import asyncpg

VERSIONS = range(1, 9)
SCHEMAS = ["public", "MixedCase_1"]


@pytest.mark.parametrize("line", list_migration_lines())
def test_file_names(line: str) -> None:
    """The loader reads each file of a migration line: two files for each version."""
    files = list(sql_directory().joinpath("migrations", line).iterdir())
    assert len(files) == 2 * len(load_migrations(line))


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_upwards(each_connection: asyncpg.Connection[Any], schema: str) -> None:
    """From empty upwards, the catalog is the one that Go River left at each version (MG-07)."""
    migrator = Migrator(each_connection, schema=schema)
    for version in VERSIONS:
        await migrator.up(target=version)
        assert await read_catalog(each_connection, schema) == catalog_vector(version)


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_downwards(each_connection: asyncpg.Connection[Any], schema: str) -> None:
    """Each step down leaves the catalog of the version below, but for what cannot be undone."""
    migrator = Migrator(each_connection, schema=schema)
    await migrator.up()
    for version in reversed(VERSIONS[:-1]):
        await migrator.down()
        found = without_history(await read_catalog(each_connection, schema))
        assert found == without_history(catalog_vector(version))
    await migrator.down()
    found = await read_catalog(each_connection, schema)
    assert not any(found.values())


@pytest.mark.parametrize("version", VERSIONS)
async def test_up_after_down(connection: asyncpg.Connection[Any], version: int) -> None:
    """Down and up again, from and to any version, leaves the same schema as up alone (MG-02)."""
    migrator = Migrator(connection, schema="public")
    expected = without_history(catalog_vector(version))
    for lower in range(version):
        await migrator.up(target=version)
        await migrator.down(target=lower)
        await migrator.up(target=version)
        assert without_history(await read_catalog(connection, "public")) == expected


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_exported_sql(connection: asyncpg.Connection[Any], schema: str) -> None:
    """The printed SQL makes the same schema, when it is committed version by version (MG-01)."""
    for version in VERSIONS:
        await connection.execute(Migrator.sql(versions=[version], schema=schema))
        assert await read_catalog(connection, schema) == catalog_vector(version)
    assert not (await Migrator(connection, schema=schema).up()).steps


async def test_the_reader_sees_a_difference(connection: asyncpg.Connection[Any]) -> None:
    """The comparison fails for a changed default, a lost constraint, index, trigger or value."""
    migrator = Migrator(connection, schema="public")
    await migrator.up(target=3)
    catalogs = [await read_catalog(connection, "public")]
    for change in (
        "ALTER TABLE river_job ALTER COLUMN attempt SET DEFAULT 1",
        "ALTER TABLE river_job DROP CONSTRAINT queue_length",
        "ALTER INDEX river_job_kind RENAME TO river_job_kind_idx",
        "ALTER TABLE river_leader SET LOGGED",
        "DROP TRIGGER river_notify ON river_job",
        "ALTER TYPE river_job_state RENAME VALUE 'running' TO 'ran'",
        "ALTER FUNCTION river_job_notify() STRICT",
        "ALTER SEQUENCE river_job_id_seq INCREMENT BY 2",
        "DELETE FROM river_migration WHERE version = 2",
    ):
        await connection.execute(change)
        catalogs.append(await read_catalog(connection, "public"))
    assert all(before != after for before, after in pairwise(catalogs))


async def test_bitmask_function(each_connection: asyncpg.Connection[Any]) -> None:
    """`river_job_state_in_bitmask` for every state and mask, and for NULL."""
    await Migrator(each_connection, schema="public").up()
    bits = ["scheduled", "running", "retryable", "pending"]
    bits += ["discarded", "completed", "cancelled", "available"]
    rows = await each_connection.fetch(
        """
        SELECT mask, state::text, river_job_state_in_bitmask(mask::bit(8), state) AS found
        FROM generate_series(0, 255) AS mask, unnest(enum_range(NULL::river_job_state)) AS state
        """
    )
    assert len(rows) == 256 * 8
    for row in rows:
        assert row["found"] is (f"{row['mask']:08b}"[bits.index(row["state"])] == "1"), row
    nulls = await each_connection.fetchrow(
        """
        SELECT river_job_state_in_bitmask(B'11111111', NULL) AS state,
            river_job_state_in_bitmask(NULL, 'available') AS mask
        """
    )
    assert not nulls["state"]
    assert not nulls["mask"]
