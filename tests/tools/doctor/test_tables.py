"""What doctor reports of the versions of the tables."""

from __future__ import annotations

from riverpy.migrate import Migrator, migrate_all
from tests._database import connected
from tests.tools.doctor.conftest import (
    run_doctor,
)


async def test_tables_are_missing_or_old(fresh_database_url: str) -> None:
    """Missing tables, old tables, versions of a newer riverpy and tables without a record of
    versions are reported with the command that helps. Version 8 of `main` changes nothing and
    may be missing."""
    arguments = ("--database-url", fresh_database_url)
    report = await run_doctor(*arguments)
    assert "has no tables of River" in report.one("schema", "fail")["text"]
    assert "riverpy migrate up" in report.one("schema", "fail")["fix"]
    assert report.named("leader") == []
    await Migrator(fresh_database_url).up(target=6)
    old = (await run_doctor(*arguments)).one("schema", "fail")
    assert old["text"] == 'River\'s tables in "public" lack version 7, which this riverpy needs'
    await Migrator(fresh_database_url).up(target=7)
    await Migrator(fresh_database_url, line="riverpy").up()
    report = await run_doctor(*arguments)
    river, _own = report.named("schema", "ok")
    assert "river 7 of 8" in river["text"]
    assert "version 8 changes nothing on PostgreSQL" in river["text"]
    assert river["data"]["missing"] == [8]
    assert report.named("leader") != []
    await migrate_all(fresh_database_url)
    async with connected(fresh_database_url) as connection:
        await connection.execute(
            "INSERT INTO river_migration (line, version) VALUES ('main', 99), ('riverpy', 99)"
        )
        report = await run_doctor(*arguments)
        assert [one["data"]["unknown"] for one in report.named("schema", "warn")] == [[99], [99]]
        assert {one["fix"] for one in report.named("schema", "warn")} == {"update riverpy"}
        assert report.named("leader") != []
        await connection.execute("DELETE FROM river_migration WHERE version IN (3, 99)")
        found = (await run_doctor(*arguments)).one("schema", "fail")
        assert "but not 3 below it" in found["text"]
        await connection.execute("DELETE FROM river_migration")
        found = (await run_doctor(*arguments)).one("schema", "fail")
        assert "records no version" in found["text"]
    report = await run_doctor(*arguments, "--schema", "nowhere")
    assert "does not exist" in report.one("schema", "fail")["text"]


async def test_only_river_tables(fresh_database_url: str) -> None:
    """With River's tables alone, doctor reports which features are off and runs the other
    checks."""
    await Migrator(fresh_database_url).up()
    report = await run_doctor("--database-url", fresh_database_url)
    assert {one["name"] for one in report.problems()} == {"schema", "leader"}
    found = report.one("schema", "warn")
    assert "periodic jobs" in found["text"]
    assert "riverpy migrate up" in found["fix"]
    assert report.one("clients", "ok")["data"] == {"clients": None}
    assert report.one("periodic", "ok")["text"].startswith("off")


async def test_dropped_table(fresh_database_url: str) -> None:
    """A table that was dropped after its migration is a failure, and the fix creates it again. The
    checks that need it are named in one finding."""
    await migrate_all(fresh_database_url)
    arguments = ("--database-url", fresh_database_url)
    async with connected(fresh_database_url) as connection:
        await connection.execute("DROP TABLE riverpy_client")
        report = await run_doctor(*arguments)
        found = report.one("schema", "fail")
        assert found["data"]["missing_tables"] == ["riverpy_client"]
        assert {"leader", "clients"} <= set(report.one("skipped", "warn")["data"]["checks"])
        assert {one["name"] for one in report.problems()} == {"schema", "skipped"}
        await connection.execute(found["fix"].partition("data: ")[2].partition(" then ")[0])
        await migrate_all(fresh_database_url)
        report = await run_doctor(*arguments)
        assert report.named("schema", "fail") == report.named("skipped") == []
        await connection.execute("DROP TABLE river_job CASCADE")
        found = (await run_doctor(*arguments)).one("schema", "fail")
        assert found["data"]["missing_tables"] == ["river_job"]
        assert found["fix"] == "restore the missing tables from a backup"
