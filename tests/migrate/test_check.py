"""What a client checks of the schema at its start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from riverpy._postgres.schema import (
    FEATURES_BY_MIGRATION,
    RIVERPY_MIGRATION_LINE,
    check_schema,
    load_migrations,
    warn_of_missing_features,
)
from riverpy.errors import MigrationError, SchemaMissingError
from riverpy.migrate import Migrator
from tests.migrate.catalog import catalog_vector, read_catalog, without_history

if TYPE_CHECKING:
    import asyncpg

    Connection = asyncpg.Connection[Any]


async def test_complete(connection: Connection) -> None:
    """A schema at the newest version passes, without a word."""
    await Migrator(connection).up()
    with capture_logs() as logs:
        await check_schema(connection, None)
        await check_schema(connection, "public")
    assert logs == []


async def test_no_tables(connection: Connection) -> None:
    """Without River's tables the error has the command that makes them, and no password."""
    url = "postgres://app:top-secret@db.example/shop"
    with pytest.raises(SchemaMissingError) as caught:
        await check_schema(connection, "MixedCase_1", url=url)
    assert str(caught.value) == (
        "schema 'MixedCase_1' does not have River's tables: run `riverpy migrate up "
        "--database-url 'postgres://app:***@db.example/shop' --schema MixedCase_1`"
    )
    with pytest.raises(SchemaMissingError, match="run `riverpy migrate up --database-url URL`"):
        await check_schema(connection, None)


@pytest.mark.parametrize("target", [1, 4, 6])
async def test_too_old(connection: Connection, target: int) -> None:
    """Below the newest version the error names what is missing."""
    await Migrator(connection).up(target=target)
    missing = ", ".join(str(version) for version in range(target + 1, 9))
    found = f"lacks River's migrations {missing}" if target > 1 else "does not have River's tables"
    with pytest.raises(SchemaMissingError, match=f"schema 'public' {found}: run `riverpy migrate"):
        await check_schema(connection, None)


async def test_version_8_is_not_needed(connection: Connection) -> None:
    """A schema at version 7 passes without a word, because version 8 changes nothing on PostgreSQL.
    Validate reports it as missing, as River's does."""
    migrator = Migrator(connection)
    await migrator.up(target=7)
    with capture_logs() as logs:
        await check_schema(connection, "public")
    assert logs == []
    result = await migrator.validate()
    assert (result.ok, result.missing) == (False, [8])
    assert (await migrator.validate(target=7)).ok


async def test_no_schema(connection: Connection) -> None:
    """A schema that does not exist is named, with the command that makes it."""
    with pytest.raises(SchemaMissingError, match='CREATE SCHEMA "absent"'):
        await check_schema(connection, "absent")


async def test_no_record(connection: Connection) -> None:
    """Tables whose version nothing tells are not worked on (MG-06)."""
    await Migrator(connection).up()
    await connection.execute("DELETE FROM river_migration")
    with pytest.raises(SchemaMissingError, match="records no version of them"):
        await check_schema(connection, None)


async def test_newer_than_the_code(connection: Connection) -> None:
    """A database that is newer than the code is worked on, with a warning (MG-06)."""
    await Migrator(connection).up()
    await connection.execute("INSERT INTO river_migration (line, version) VALUES ('main', 9)")
    with capture_logs() as logs:
        await check_schema(connection, "public")
    assert [(entry["log_level"], entry["unknown_versions"]) for entry in logs] == [("warning", [9])]


@pytest.mark.parametrize("gap", [[5], [2, 3], [1]])
async def test_gap(connection: Connection, gap: list[int]) -> None:
    """A version that is not recorded below an applied one is not applied out of order (MG-06)."""
    migrator = Migrator(connection)
    await migrator.up()
    rows = "SELECT line, version FROM river_migration ORDER BY version"
    await connection.execute("DELETE FROM river_migration WHERE version = any($1)", gap)
    before = await connection.fetch(rows)
    text = f"records version 8 of line 'main', but not {', '.join(map(str, gap))} below it"
    with pytest.raises(MigrationError, match=text):
        await migrator.up()
    assert await connection.fetch(rows) == before
    with pytest.raises(SchemaMissingError, match=text):
        await check_schema(connection, None)
    result = await migrator.validate()
    assert not result.ok
    assert result.missing == gap
    assert text in result.messages[0]


async def test_version_8_above_undone_ones(connection: Connection) -> None:
    """River before 0.48 does not know version 8: its `migrate down` undoes version 7 and leaves 8
    recorded. That is no gap, because 8 changes nothing: `up` applies what was undone."""
    migrator = Migrator(connection)
    await migrator.up()
    await migrator.down(target=5)
    await connection.execute("INSERT INTO river_migration (line, version) VALUES ('main', 8)")
    with pytest.raises(SchemaMissingError, match="lacks River's migrations 6, 7: run"):
        await check_schema(connection, None)
    assert "lacks versions 6, 7: run" in (await migrator.validate()).messages[0]
    assert [step.version for step in (await migrator.up()).steps] == [6, 7]
    assert (await migrator.validate()).ok
    catalog = await read_catalog(connection, "public")
    assert without_history(catalog) == without_history(catalog_vector(8))


async def test_no_record_is_told(connection: Connection) -> None:
    """Tables without a record are neither listed as missing nor undone (MG-06)."""
    migrator = Migrator(connection)
    await migrator.up()
    await connection.execute("DELETE FROM river_migration")
    for verb in (migrator.list, migrator.down, migrator.up):
        with pytest.raises(MigrationError, match="records no version"):
            await verb()


async def test_missing_versions_are_counted(connection: Connection) -> None:
    """One missing version is one, more are many."""
    migrator = Migrator(connection)
    await migrator.up(target=5)
    assert "lacks versions 6, 7, 8: run" in (await migrator.validate()).messages[0]
    await migrator.up(target=7)
    assert "lacks version 8: run" in (await migrator.validate()).messages[0]


async def test_without_our_tables(connection: Connection) -> None:
    """A database with River's tables alone can be worked; one warning says what is off and has the
    command that makes it work, without the password. Nothing is said of a complete one."""
    url = "postgres://app:top-secret@db.example/shop"
    await Migrator(connection).up()
    with capture_logs() as logs:
        state = await check_schema(connection, "public", url=url)
        warn_of_missing_features(state, "public", url=url)
    (entry,) = logs
    assert entry["log_level"] == "warning"
    assert entry["off"] == [
        FEATURES_BY_MIGRATION[version] for version in load_migrations(RIVERPY_MIGRATION_LINE)
    ]
    assert entry["command"] == (
        "riverpy migrate up --line riverpy --database-url 'postgres://app:***@db.example/shop'"
        " --schema public"
    )
    await Migrator(connection, line=RIVERPY_MIGRATION_LINE).up(target=1)
    with capture_logs() as logs:
        warn_of_missing_features(await check_schema(connection, None), None, url=None)
    assert [entry["off"] for entry in logs] == [
        [FEATURES_BY_MIGRATION[version] for version in FEATURES_BY_MIGRATION][1:]
    ]
    await Migrator(connection, line=RIVERPY_MIGRATION_LINE).up()
    with capture_logs() as logs:
        warn_of_missing_features(await check_schema(connection, None), None, url=None)
    assert logs == []
