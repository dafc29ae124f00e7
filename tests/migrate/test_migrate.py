"""The rules of the migrator: what it applies, undoes, reports and refuses."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from asyncpg.types import ServerVersion

from riverpy.errors import ConfigError, MigrationError, SchemaMissingError, ServerVersionError
from riverpy.migrate import Direction, MigrateResult, Migrator
from tests._database import connected
from tests.migrate.catalog import catalog_vector, read_catalog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Connection = asyncpg.Connection[Any]

NOWHERE = "postgres://nobody@192.0.2.1/nothing"


def versions(result: MigrateResult) -> list[int]:
    """The versions of a result's steps."""
    return [step.version for step in result.steps]


async def applied(connection: Connection, **options: Any) -> list[int]:
    """The versions that a database has."""
    statuses = await Migrator(connection, **options).list()
    return [status.version for status in statuses if status.applied_at is not None]


async def test_up_applies_what_is_outstanding(connection: Connection) -> None:
    """Up applies all, in order, and reports name, direction, text and duration of each step."""
    result = await Migrator(connection, schema="MixedCase_1").up()
    assert versions(result) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert result.schema == "MixedCase_1"
    assert result.notices == []
    first = result.steps[0]
    assert first.name == "create river migration"
    assert first.direction is Direction.UP
    assert 'CREATE TABLE "MixedCase_1".river_migration (' in first.sql
    assert first.duration > timedelta(0)


async def test_up_to_a_target(connection: Connection) -> None:
    """The target is applied too. A target that is reached already is no error (MG-02)."""
    migrator = Migrator(connection)
    assert versions(await migrator.up(target=3)) == [1, 2, 3]
    assert versions(await migrator.up(target=3)) == []
    assert versions(await migrator.up(target=2)) == []
    assert versions(await migrator.up(target=5, max_steps=1)) == [4]
    assert versions(await migrator.up(max_steps=0)) == []
    assert await applied(connection) == [1, 2, 3, 4]


async def test_down(connection: Connection) -> None:
    """Down undoes one step, or as many as asked, or those above the target."""
    migrator = Migrator(connection)
    await migrator.up()
    assert versions(await migrator.down()) == [8]
    assert versions(await migrator.down(max_steps=3)) == [7, 6, 5]
    assert versions(await migrator.down(target=1, max_steps=1)) == [4]
    assert versions(await migrator.down(target=2)) == [3]
    assert versions(await migrator.down(target=2)) == []
    assert versions(await migrator.down(target=0)) == [2, 1]
    assert versions(await migrator.down()) == []


async def test_dry_run_changes_nothing(connection: Connection) -> None:
    """A dry run reports the steps, and the database stays as it is."""
    migrator = Migrator(connection)
    result = await migrator.up(dry_run=True)
    assert versions(result) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(step.sql and not step.duration for step in result.steps)
    assert await applied(connection) == []
    await migrator.up(target=2)
    assert versions(await migrator.down(target=0, dry_run=True)) == [2, 1]
    assert await applied(connection) == [1, 2]


@pytest.mark.parametrize("target", [-1, 0, 9])
async def test_unknown_target_upwards(connection: Connection, target: int) -> None:
    """A version that riverpy does not have is refused by up and by validate."""
    migrator = Migrator(connection)
    with pytest.raises(MigrationError, match=f"no version {target}: riverpy knows 1 to 8"):
        await migrator.up(target=target)
    with pytest.raises(MigrationError, match=f"no version {target}"):
        await migrator.validate(target=target)
    assert await applied(connection) == []


@pytest.mark.parametrize("target", [-1, 4, 9])
async def test_target_downwards_must_be_applied(connection: Connection, target: int) -> None:
    """Down to a version that is not applied is refused."""
    migrator = Migrator(connection)
    await migrator.up(target=3)
    with pytest.raises(MigrationError, match=f"version {target} of line 'main' is not applied"):
        await migrator.down(target=target)
    assert await applied(connection) == [1, 2, 3]


async def test_list(connection: Connection) -> None:
    """List gives every known version with its name, and the time if it is applied."""
    migrator = Migrator(connection)
    await migrator.up(target=6)
    statuses = await migrator.list()
    assert [status.version for status in statuses] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert statuses[3].name == "pending and more"
    now = await connection.fetchval("SELECT now()")
    for status in statuses[:6]:
        assert status.applied_at is not None
        assert status.applied_at.tzinfo is UTC
        assert now - timedelta(minutes=5) < status.applied_at <= now
    assert [status.applied_at for status in statuses[6:]] == [None, None]


async def test_validate(connection: Connection) -> None:
    """Validate names what is missing, up to a target if there is one, and changes nothing."""
    migrator = Migrator(connection)
    await migrator.up(target=5)
    result = await migrator.validate()
    assert (result.ok, result.missing) == (False, [6, 7, 8])
    assert "lacks versions 6, 7, 8" in result.messages[0]
    assert (await migrator.validate(target=5)).ok
    assert not (await migrator.validate(target=6)).ok
    await migrator.up()
    result = await migrator.validate()
    assert (result.ok, result.missing, result.messages) == (True, [], [])


async def test_every_kind_of_database(fresh_database_url: str) -> None:
    """A URL, a pool and a connection are accepted; anything else is a TypeError."""
    assert versions(await Migrator(fresh_database_url).up(max_steps=2)) == [1, 2]
    async with asyncpg.create_pool(fresh_database_url, min_size=0, max_size=1) as pool:
        assert versions(await Migrator(pool).up(max_steps=2)) == [3, 4]
        async with pool.acquire() as connection:
            assert versions(await Migrator(connection).up()) == [5, 6, 7, 8]
    with pytest.raises(TypeError, match="URL, an asyncpg pool or an asyncpg connection, got int"):
        Migrator(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"line": "mian"},
        {"lock_timeout": timedelta(0)},
        {"statement_timeout": timedelta(microseconds=999)},
        {"statement_timeout": timedelta(days=25)},
    ],
)
def test_wrong_options(options: dict[str, Any]) -> None:
    """An unknown line and limits that PostgreSQL would refuse or take for none are refused."""
    with pytest.raises(ConfigError, match=r"unknown migration line|is 1 ms to 24 days"):
        Migrator(NOWHERE, **options)


async def test_negative_max_steps() -> None:
    """A negative number of steps is refused before anything is connected to."""
    with pytest.raises(ConfigError, match="max_steps is 0 or more"):
        await Migrator(NOWHERE).up(max_steps=-1)


@pytest.mark.parametrize("call", [Migrator.up, Migrator.down])
async def test_refused_in_a_transaction(
    connection: Connection, call: Callable[[Migrator], Awaitable[object]]
) -> None:
    """In the caller's transaction nothing is changed, and the transaction lives on (MG-01)."""
    await Migrator(connection).up(target=3)
    before = await read_catalog(connection, "public")
    async with connection.transaction():
        with pytest.raises(MigrationError, match="the connection is in a transaction"):
            await call(Migrator(connection))
        assert await connection.fetchval("SELECT 1") == 1
    assert await read_catalog(connection, "public") == before


@pytest.mark.parametrize(
    "schema",
    ["", "1x", 'we"ird Schéma-1', "a-b", "a b", "a\0b", "a\n", "é", "x" * 47, "pg.public"],
)
def test_schema_names_that_are_refused(schema: str) -> None:
    """Names outside River's rule are refused before there is any SQL (MG-05)."""
    with pytest.raises(ConfigError, match="schema"):
        Migrator(NOWHERE, schema=schema)
    with pytest.raises(ConfigError, match="schema"):
        Migrator.sql(schema=schema)


async def test_empty_search_path(fresh_database_url: str, connection: Connection) -> None:
    """With a named, mixed-case schema everything works although the search path is empty
    (MG-05)."""
    async with connected(fresh_database_url, search_path="") as bare:
        migrator = Migrator(bare, schema="MixedCase_1")
        await migrator.up()
        assert (await migrator.validate()).ok
        assert await read_catalog(connection, "MixedCase_1") == catalog_vector(8)
        await migrator.down(target=0)
        assert not any((await read_catalog(connection, "MixedCase_1")).values())


@pytest.mark.parametrize("search_path", ["", "nope", "$user"])
async def test_search_path_without_schema(fresh_database_url: str, search_path: str) -> None:
    """Without a schema, a search path that leads nowhere is a clear error."""
    async with connected(fresh_database_url, search_path=search_path) as connection:
        with pytest.raises(SchemaMissingError, match="search_path names no schema"):
            await Migrator(connection).up()


async def test_search_path_decides(fresh_database_url: str, connection: Connection) -> None:
    """Without a schema, the search path decides where new tables go; old ones are found (MG-05)."""
    path = '"MixedCase_1", public'
    async with connected(fresh_database_url, search_path=path) as other:
        assert (await Migrator(other).up(target=5)).schema == "MixedCase_1"
    async with connected(fresh_database_url, search_path='public, "MixedCase_1"') as other:
        result = await Migrator(other).up()
        assert (result.schema, versions(result)) == ("MixedCase_1", [6, 7, 8])
    assert await read_catalog(connection, "MixedCase_1") == catalog_vector(8)
    assert not any((await read_catalog(connection, "public")).values())


async def test_schemas_do_not_see_each_other(connection: Connection) -> None:
    """Two schemas in one database have records of their own (MG-05)."""
    await Migrator(connection, schema="public").up()
    assert await applied(connection, schema="MixedCase_1") == []
    await Migrator(connection, schema="MixedCase_1").up(target=2)
    await Migrator(connection, schema="public").down(target=0)
    assert await applied(connection, schema="MixedCase_1") == [1, 2]


async def test_missing_schema(connection: Connection) -> None:
    """A schema is never made: the error has the command that makes it."""
    for call in (Migrator.up, Migrator.down, Migrator.list, Migrator.validate):
        with pytest.raises(SchemaMissingError, match='create it with CREATE SCHEMA "Absent_1"'):
            await call(Migrator(connection, schema="Absent_1"))


async def test_old_server(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL 12 is refused before anything is changed."""
    old = ServerVersion(12, 22, 0, "final", 0)
    with monkeypatch.context() as patch:
        patch.setattr(asyncpg.Connection, "get_server_version", lambda _: old)
        with pytest.raises(ServerVersionError, match="PostgreSQL 13 or newer"):
            await Migrator(connection).up()
    assert await applied(connection) == []


@pytest.mark.parametrize("damage", ["DELETE FROM river_migration", "DROP TABLE river_migration"])
async def test_tables_without_record(connection: Connection, damage: str) -> None:
    """Tables that no row accounts for stay; the text has a way out that works (MG-06)."""
    migrator = Migrator(connection, schema="public")
    await migrator.up()
    await connection.execute(damage)
    with pytest.raises(MigrationError, match="records no version of them") as caught:
        await migrator.up()
    result = await migrator.validate()
    assert not result.ok
    assert result.messages == [str(caught.value)]
    way_out = str(caught.value).partition("record it: ")[2].partition(". Otherwise")[0]
    await connection.execute(way_out)
    assert (await migrator.validate()).ok
    assert versions(await migrator.up()) == []


async def test_newer_version(connection: Connection) -> None:
    """A version that only a newer riverpy knows is reported, and nothing below it undone
    (MG-06)."""
    migrator = Migrator(connection)
    await migrator.up()
    await connection.execute("INSERT INTO river_migration (line, version) VALUES ('main', 9)")
    notice = "line 'main' has version 9, which this riverpy does not know"
    result = await migrator.up()
    assert result.steps == []
    assert notice in result.notices[0]
    validation = await migrator.validate()
    assert validation.ok
    assert notice in validation.messages[0]
    newest = (await migrator.list())[-1]
    assert (newest.version, newest.name) == (9, None)
    assert newest.applied_at is not None
    for target in (None, 0, 6):
        with pytest.raises(MigrationError, match="versions 9, which this riverpy cannot undo"):
            await migrator.down(target=target)
    assert await applied(connection) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


async def test_foreign_line(connection: Connection) -> None:
    """A line of others is reported and kept, and nothing that it needs is undone."""
    migrator = Migrator(connection)
    await migrator.up()
    await connection.execute("INSERT INTO river_migration (line, version) VALUES ('pro', 3)")
    notice = "line 'pro' is not one of riverpy's"
    assert notice in (await migrator.up()).notices[0]
    assert notice in (await migrator.validate()).messages[0]
    with pytest.raises(MigrationError, match="cannot be undone while the lines pro"):
        await migrator.down(target=4)
    assert await applied(connection) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert versions(await migrator.down(target=5)) == [8, 7, 6]
    assert versions(await migrator.up()) == [6, 7, 8]
    assert await connection.fetchval("SELECT version FROM river_migration WHERE line = 'pro'") == 3


async def test_foreign_line_guarded_by_the_sql(connection: Connection) -> None:
    """Run by another tool too, version 5 is not undone while another line has rows."""
    await Migrator(connection).up(target=5)
    await connection.execute("INSERT INTO river_migration (line, version) VALUES ('pro', 3)")
    with pytest.raises(asyncpg.RaiseError, match="rows of other lines than main"):
        await connection.execute(Migrator.sql(versions=[5], direction=Direction.DOWN))


async def test_adopts_a_database_of_go_river(connection: Connection) -> None:
    """What River recorded, in the old form too, is taken over and gone on from (MG-07)."""
    await connection.execute(Migrator.sql(versions=[1, 2, 3], schema="MixedCase_1"))
    await connection.execute(Migrator.sql(versions=[4], schema="MixedCase_1"))
    long_ago = datetime(2024, 2, 29, 12, 30, 15, 123456, UTC)
    await connection.execute('UPDATE "MixedCase_1".river_migration SET created_at = $1', long_ago)
    migrator = Migrator(connection, schema="MixedCase_1")
    assert [status.applied_at for status in await migrator.list()] == [long_ago] * 4 + [None] * 4
    assert versions(await migrator.up()) == [5, 6, 7, 8]
    assert await read_catalog(connection, "MixedCase_1") == catalog_vector(8)
    assert [status.applied_at for status in await migrator.list()][:4] == [long_ago] * 4


async def test_version_5_without_record_table(connection: Connection) -> None:
    """Version 5 runs both ways where another tool keeps the record and River's table is absent."""
    await connection.execute(Migrator.sql(versions=[1, 2, 3], schema="public"))
    await connection.execute(Migrator.sql(versions=[4], schema="public"))
    await connection.execute("DROP TABLE river_migration")
    for direction in (Direction.UP, Direction.DOWN):
        text = Migrator.sql(versions=[5], direction=direction, schema="public")
        await connection.execute(text[: text.rindex("\n\n")])
    assert not await connection.fetchval("SELECT to_regclass('river_migration') IS NOT NULL")


async def test_rows_survive(connection: Connection) -> None:
    """Jobs of version 2 reach the newest version with what later versions require filled in."""
    migrator = Migrator(connection)
    await migrator.up(target=2)
    await connection.execute(
        """
        INSERT INTO river_job (kind, max_attempts, tags, args) VALUES
            ('empty', 5, NULL, NULL), ('full', 5, '{a,b}', '{"n": 1}')
        """
    )
    await migrator.up()
    rows = await connection.fetch("SELECT kind, tags, args, unique_key FROM river_job ORDER BY id")
    assert [tuple(row) for row in rows] == [
        ("empty", [], "{}", None),
        ("full", ["a", "b"], '{"n": 1}', None),
    ]


async def test_invalid_index(connection: Connection) -> None:
    """An index whose concurrent build failed is not taken for a migrated one (MG-03)."""
    migrator = Migrator(connection)
    await migrator.up(target=5)
    await connection.execute(
        """
        INSERT INTO river_job (kind, max_attempts, args, unique_key) VALUES
            ('one', 5, '{}', 'key'), ('two', 5, '{}', 'key')
        """
    )
    with pytest.raises(asyncpg.UniqueViolationError):
        await connection.execute(
            "CREATE UNIQUE INDEX CONCURRENTLY river_job_unique_idx ON river_job (unique_key)"
        )
    with pytest.raises(MigrationError, match=r"'river_job_unique_idx' .* is invalid"):
        await migrator.up()
    result = await migrator.validate(target=5)
    assert not result.ok
    assert "'river_job_unique_idx' in schema 'public' is invalid" in result.messages[0]
    await connection.execute("DROP INDEX river_job_unique_idx")
    assert versions(await migrator.up()) == [6, 7, 8]
    assert (await migrator.validate()).ok


async def test_column_and_index_made_ahead(connection: Connection) -> None:
    """The unique index of a big table can be built ahead, without blocking its writers (MG-08)."""
    migrator = Migrator(connection, schema="public")
    await migrator.up(target=5)
    text = Migrator.sql(versions=[6], schema="public")
    function, rest = text.split("ALTER TABLE")
    column, index = rest.split("CREATE UNIQUE INDEX")
    await connection.execute(function)
    await connection.execute(f"ALTER TABLE {column}")
    index = index.partition(";")[0]
    await connection.execute(f"CREATE UNIQUE INDEX CONCURRENTLY {index}")
    before = await connection.fetchval("SELECT 'river_job_unique_idx'::regclass::oid")
    await migrator.up()
    assert await connection.fetchval("SELECT 'river_job_unique_idx'::regclass::oid") == before
    assert await read_catalog(connection, "public") == catalog_vector(8)


async def test_connection_with_codecs(connection: Connection) -> None:
    """The caller's own codecs for timestamps and arrays of text do not disturb the migrator."""
    for name in ("timestamptz", "text"):
        await connection.set_type_codec(
            name, schema="pg_catalog", encoder=str, decoder=lambda value: value, format="text"
        )
    migrator = Migrator(connection)
    await migrator.up()
    assert (await migrator.list())[0].applied_at is not None


def test_exported_sql_is_ordered_and_explained() -> None:
    """The printed SQL says line, number and direction, and not to wrap it (MG-01)."""
    up = Migrator.sql()
    assert "Do not run these migrations in one transaction" in up
    assert [up.index(f"-- Line main, version {version:03} (") for version in range(1, 9)] == sorted(
        up.index(f"-- Line main, version {version:03} (") for version in range(1, 9)
    )
    down = Migrator.sql(direction=Direction.DOWN, versions=[2, 3], schema="s")
    assert down.index("version 003") < down.index("version 002")
    assert 'DROP TABLE "s".river_job;' in down
    assert "schema */" not in up + down
    with pytest.raises(MigrationError, match="no version 9"):
        Migrator.sql(versions=[9])
