"""River's tables by Django's migrations, by riverpy's, and by one after the other."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from django.core.management import call_command
from django.db import connection
from django.db.migrations.loader import MigrationLoader
from django.test import override_settings

import riverpy.django.migrations
from riverpy._postgres.migration_step import Direction
from riverpy._postgres.schema import list_migration_lines, load_migrations
from riverpy.django.operations import RunRiverMigration
from riverpy.django.schema import run_migration
from riverpy.errors import MigrationError
from riverpy.migrate import Migrator, migrate_all
from tests._database import run_apart

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSIONS = [(line, version) for line in list_migration_lines() for version in load_migrations(line)]


def run_command(*arguments: str, **options: Any) -> str:
    """Run a command of `manage.py`, and return its output."""
    output = StringIO()
    call_command(*arguments, stdout=output, **options)
    return output.getvalue()


def read_applied() -> int:
    """Return the number of recorded versions in River's table. 0: there is no table."""
    with connection.cursor() as cursor:
        cursor.execute("select to_regclass('river_migration') is not null")
        if not cursor.fetchone()[0]:
            return 0
        cursor.execute("select count(*) from river_migration")
        return cursor.fetchone()[0]


def test_every_version_has_a_migration() -> None:
    """Each version of both lines is one migration of Django's, in their order, and the models are
    as in the migrations."""
    loader = MigrationLoader(connection)
    names = sorted(name for app, name in loader.disk_migrations if app == "riverpy")
    operations = [
        operation
        for name in names
        for operation in loader.disk_migrations["riverpy", name].operations
        if isinstance(operation, RunRiverMigration)
    ]
    assert [(one.line, one.version) for one in operations] == VERSIONS
    assert "No changes detected" in run_command("makemigrations", check_changes=True)
    sql = run_command("sqlmigrate", "riverpy", "0006")
    assert "river_job_state_in_bitmask" in sql
    assert "INSERT INTO river_migration (line, version) VALUES ('main', 6);" in sql


def test_down_and_up(project_url: str) -> None:
    """`migrate riverpy zero` undoes all. After riverpy has created some or all tables, `migrate`
    does the rest, and riverpy finds the tables complete. What River or riverpy has undone already
    is left alone."""
    run_command("migrate", "riverpy", "zero", verbosity=0)
    assert read_applied() == 0
    run_apart(_migrate_main_to, project_url, 5)
    run_command("migrate", "riverpy", verbosity=0)
    assert read_applied() == len(VERSIONS)
    assert run_apart(_is_complete, project_url) == [True, True]
    run_apart(_undo, project_url)
    run_command("migrate", "riverpy", "zero", verbosity=0)
    assert read_applied() == 0
    run_apart(migrate_all, project_url)
    run_command("migrate", "riverpy", verbosity=0)
    assert run_apart(_is_complete, project_url) == [True, True]


def test_schema_and_order(project_url: str) -> None:
    """The tables are in the schema of the settings. Versions that would leave a gap are refused."""
    with connection.cursor() as cursor:
        cursor.execute("create schema jobs")
    try:
        with override_settings(RIVERPY={"SCHEMA": "jobs"}):
            for line, version in VERSIONS:
                _run(line, version, Direction.UP)
            with pytest.raises(MigrationError, match="undo the newer ones first"):
                _run("riverpy", 2, Direction.DOWN)
        assert run_apart(_is_complete, project_url, "jobs") == [True, True]
        with connection.cursor() as cursor:
            cursor.execute("delete from jobs.river_migration where version = 3")
        with override_settings(RIVERPY={"SCHEMA": "jobs"}):
            with pytest.raises(MigrationError, match="versions are applied in order only"):
                _run("main", 3, Direction.UP)
            with connection.cursor() as cursor:
                cursor.execute("delete from jobs.river_migration")
            with pytest.raises(MigrationError, match="records no version"):
                _run("main", 1, Direction.UP)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("drop schema jobs cascade")


def test_migrations_of_riverpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `MIGRATIONS: riverpy` the app has no migrations, and `makemigrations` finds none to
    make."""
    import importlib

    with override_settings(RIVERPY={"MIGRATIONS": "riverpy"}):
        importlib.reload(riverpy.django.migrations)
        try:
            assert "riverpy" in MigrationLoader(connection).unmigrated_apps
            assert "No changes detected" in run_command("makemigrations", check_changes=True)
        finally:
            monkeypatch.undo()
    path = Path(riverpy.django.migrations.__file__ or "").parent
    riverpy.django.migrations.__path__ = [str(path)]
    assert "riverpy" in MigrationLoader(connection).migrated_apps


def _run(line: str, version: int, direction: Direction) -> None:
    with connection.schema_editor(atomic=True) as editor:
        run_migration(editor, line, version, direction)


async def _migrate_main_to(url: str, version: int) -> None:
    await Migrator(url).up(target=version)


async def _undo(url: str) -> None:
    await Migrator(url, line="riverpy").down(target=5)


async def _is_complete(url: str, schema: str | None = None) -> Sequence[bool]:
    return [
        (await Migrator(url, schema=schema, line=line).validate()).ok
        for line in list_migration_lines()
    ]
