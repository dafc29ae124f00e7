"""Each language accepts, changes and works with a schema that the other migrated."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import Job, RawArgs
from riverpy.errors import ConfigError
from riverpy.migrate import Migrator, migrate_all
from tests._database import Schema, connected
from tests.interop.river_go import RiverGo, RiverGoError
from tests.migrate.catalog import catalog_vector, read_catalog, without_history
from tests.work.rig import Rig

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    import asyncpg

    Connection = asyncpg.Connection[Any]
    Go = Callable[[str], RiverGo]

VERSIONS = list(range(1, 9))
VALID = [{"ok": True, "messages": None}]
SCHEMAS = ["public", "MixedCase_1"]
LONGEST = "s" * 46
"""The longest name of a schema that fits into a notification channel."""
CHANNELS = ("river_insert", "river_control", "river_leadership")
COUNT_RELATIONS = "SELECT count(*) FROM pg_class WHERE relnamespace = $1::regnamespace"


@pytest.fixture
async def connection(fresh_database_url: str) -> AsyncGenerator[Connection]:
    """A connection to a database of this test alone that has both schemas."""
    async with connected(fresh_database_url) as connection:
        await connection.execute(f'CREATE SCHEMA "{SCHEMAS[1]}"')
        yield connection


@pytest.fixture
def go_on(go_binary: Path, fresh_database_url: str) -> Go:
    """Return Go on a schema of this database, by the schema's name."""
    return lambda schema: RiverGo(go_binary, fresh_database_url, schema)


@pytest.fixture(params=SCHEMAS)
def go_there(request: pytest.FixtureRequest, go_on: Go) -> RiverGo:
    """Go on a schema of an empty database."""
    return go_on(request.param)


async def versions(go: RiverGo, *args: object) -> list[int]:
    """Return the versions that a migration by Go went through."""
    return [line["version"] for line in await go.run("migrate", *args)]


async def recorded(connection: Connection, schema: str) -> list[int]:
    """Return the recorded versions of line `main`."""
    rows = await connection.fetch(
        f"SELECT version FROM \"{schema}\".river_migration WHERE line = 'main' ORDER BY version"
    )
    return [row["version"] for row in rows]


async def current(connection: Connection, schema: str) -> dict[str, Any]:
    """Return the catalog without what a down migration leaves."""
    return without_history(await read_catalog(connection, schema))


@asynccontextmanager
async def notified(url: str, *schemas: str) -> AsyncGenerator[set[str]]:
    """Collect the channels of these schemas that get a notification during the block."""
    async with connected(url) as listener:
        channels: set[str] = set()
        for schema in schemas:
            for name in CHANNELS:
                channel = f"{schema}.{name}"
                await listener.add_listener(channel, lambda *sent: channels.add(sent[2]))
        yield channels
        await listener.execute("SELECT 1")  # earlier notifications arrive with the answer


async def go_works(go: RiverGo) -> None:
    """Insert and work a job by Go, with its notification alone."""
    async with go.worker("--client-id", "go", "--fetch-poll-interval", "1h") as worker:
        request = {"kind": "noop", "args": {}}
        (row,) = await go.run("insert", requests=[request])
        await worker.until("job_completed", id=row["id"])
    (row,) = await go.run("list")
    assert (row["state"], row["attempted_by"]) == ("completed", ["go"])


async def python_works(url: str, schema: str) -> None:
    """Insert and work a job by Python, with its notification alone."""
    async with connected(url, search_path=f'"{schema}"') as connection:
        rig = Rig(Schema(url, schema, connection))

        @rig.workers.job(kind="noop")
        async def noop(job: Job[dict[str, Any]]) -> None:
            pass

        row = await rig.run_one_on_pool(RawArgs("noop", "{}"), id="python")
        assert (row["state"], row["attempted_by"]) == ("completed", ["python"])


async def test_go_accepts_what_python_migrated(
    go_there: RiverGo, connection: Connection, fresh_database_url: str
) -> None:
    """Python migrates down to nothing and up. Go finds nothing to do, works there, goes down and up
    again, and Python finds nothing to do. Below version 5 there are no lines, and Go refuses to go
    there while ours is recorded (MG-07; CF-009, candidate_migrator_reference_runtime; CF-013,
    migration_mixed_case_schema)."""
    schema = go_there.schema
    migrator = Migrator(connection, schema=schema)
    await migrator.up()
    await migrator.down(target=0)
    await migrate_all(connection, schema=schema)
    assert await recorded(connection, schema) == VERSIONS
    assert await go_there.run("migrate", "validate") == VALID
    assert await versions(go_there, "up") == []
    assert await versions(go_there, "--target", 7, "up") == []
    async with notified(fresh_database_url, schema) as channels:
        await go_works(go_there)
    assert f"{schema}.river_insert" in channels
    assert await versions(go_there, "--target", 5, "down") == [8, 7, 6]
    with pytest.raises(RiverGoError, match="non-main"):
        await go_there.run("migrate", "down")
    assert await versions(go_there, "up") == [6, 7, 8]
    for line in ("main", "riverpy"):
        migrator = Migrator(connection, schema=schema, line=line)
        assert (await migrator.validate()).ok
        assert not (await migrator.up()).steps


async def test_python_accepts_what_go_migrated(
    go_there: RiverGo, connection: Connection, fresh_database_url: str
) -> None:
    """Go migrates down to nothing and up; Python adds its own tables alone, works there, goes down
    and up again, and Go finds nothing to do
    (MG-07; CF-010, reference_migrator_candidate_runtime; CF-013, migration_mixed_case_schema)."""
    schema = go_there.schema
    migrator = Migrator(connection, schema=schema)
    assert await versions(go_there, "up") == VERSIONS
    assert await versions(go_there, "--target", -1, "down") == VERSIONS[::-1]
    assert await versions(go_there, "up") == VERSIONS
    result = await migrator.validate()
    assert (result.ok, result.messages) == (True, [])
    assert not (await migrator.up()).steps
    main, ours = await migrate_all(connection, schema=schema)
    assert not main.steps
    assert ours.steps
    async with notified(fresh_database_url, schema) as channels:
        await python_works(fresh_database_url, schema)
    assert f"{schema}.river_insert" in channels
    assert [step.version for step in (await migrator.down(target=5)).steps] == [8, 7, 6]
    assert await versions(go_there, "up") == [6, 7, 8]
    assert (await migrator.validate()).ok
    assert await go_there.run("migrate", "validate") == VALID


async def test_version_7(go_on: Go, connection: Connection, fresh_database_url: str) -> None:
    """At version 7, the last one of River before 0.48, both languages work, and both validate it as
    complete up to 7 only."""
    go, migrator = go_on("public"), Migrator(connection)
    assert await versions(go, "--target", 7, "up") == VERSIONS[:-1]
    await Migrator(connection, line="riverpy").up()
    await python_works(fresh_database_url, "public")
    await connection.execute("TRUNCATE river_job")
    await go_works(go)
    assert await go.run("migrate", "--target", 7, "validate") == VALID
    ((result,), ours) = await go.run("migrate", "validate"), await migrator.validate()
    assert (result["ok"], ours.ok, ours.missing) == (False, False, [8])
    assert (await migrator.validate(target=7)).ok


@pytest.mark.parametrize("migrates", ["go", "python"])
async def test_custom_schema(
    go_on: Go, connection: Connection, fresh_database_url: str, migrates: str
) -> None:
    """One language works in a schema off the search path that the other migrated. Nothing is
    created in `public`, and a second schema receives no notification (CF-011,
    custom_schema_candidate_migrate_reference_work; CF-012,
    custom_schema_reference_migrate_candidate_work)."""
    url, schemas = fresh_database_url, ("river_custom_1", LONGEST)
    for schema in schemas:
        await connection.execute(f'CREATE SCHEMA "{schema}"')
        if migrates == "go":
            assert await versions(go_on(schema), "up") == VERSIONS
        else:
            await migrate_all(connection, schema=schema)
    for schema, other in (schemas, schemas[::-1]):
        async with (
            notified(url, schema, other) as channels,
            go_on(other).worker("--fetch-poll-interval", "100ms") as bystander,
        ):
            if migrates == "go":
                await python_works(url, schema)
            else:
                await go_works(go_on(schema))
            bystander.terminate()
            assert (await bystander.line())["event"] == "stopped"
        assert f"{schema}.river_insert" in channels
        assert f"{other}.river_insert" not in channels
    assert await connection.fetchval(COUNT_RELATIONS, "public") == 0


async def test_schema_names(go_on: Go, connection: Connection) -> None:
    """riverpy refuses a name of 47 bytes, or with characters other than letters, digits and `_`,
    before it writes anything. Go's migrator creates tables there, but its clients refuse the name
    (CF-011, custom_schema_candidate_migrate_reference_work; CF-013,
    migration_mixed_case_schema)."""
    for name, refusal in (
        (f"{LONGEST}s", "46 characters"),
        ("a b", "can only contain letters"),
        ("a-b", "can only contain letters"),
    ):
        await connection.execute(f'CREATE SCHEMA "{name}"')
        with pytest.raises(ConfigError, match="schema"):
            Migrator(connection, schema=name)
        assert await connection.fetchval(COUNT_RELATIONS, f'"{name}"') == 0
        assert await versions(go_on(name), "up") == VERSIONS
        with pytest.raises(RiverGoError, match=refusal):
            await go_on(name).run("list")


async def test_each_continues_half_way(go_on: Go, connection: Connection) -> None:
    """One language migrates half-way up, and the other to the top and down again: the catalog is
    the recorded one (MG-07)."""
    schema = SCHEMAS[1]
    go = go_on(schema)
    migrator = Migrator(connection, schema=schema)
    for version in (1, 4, 6):
        await migrator.up(target=version)
        assert await versions(go, "up") == VERSIONS[version:]
        assert await current(connection, schema) == without_history(catalog_vector(8))
        await migrator.down(target=version)
        assert await current(connection, schema) == without_history(catalog_vector(version))
        assert await versions(go, "--target", -1, "down") == VERSIONS[:version][::-1]
        assert not any((await read_catalog(connection, schema)).values())
        assert await versions(go, "--target", version, "up") == VERSIONS[:version]
        await migrator.up()
        assert await go.run("migrate", "validate") == VALID
        await migrator.down(target=0)
