"""River's tables by Django's migrations, by riverpy's, and by one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
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
from tests.django.test_command import MANAGE, PATIENCE, ROOT, SETTINGS

if TYPE_CHECKING:
    from collections.abc import Sequence

TESTS = """
import riverpy.django
from django.test import TestCase
from tests.django.shop.jobs import Pack

class FirstTest(TestCase):
    def test_insert(self):
        assert riverpy.django.insert(Pack(1)).job.id
        assert riverpy.django.client().job_count() == 1

class SecondTest(FirstTest):
    pass
"""
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


@pytest.mark.parametrize("migrations", ["django", "riverpy"])
def test_test_databases(project_url: str, tmp_path: Path, migrations: str) -> None:
    """`manage.py test` creates River's tables in its databases, also in those of parallel tests, in
    a schema that it creates: by Django's migrations, and in projects that use riverpy's. In a
    database that is not for tests, `migrate` then creates nothing."""
    (tmp_path / "manage.py").write_text(MANAGE)
    (tmp_path / "site_settings.py").write_text(
        SETTINGS.format(url=project_url)
        + "DATABASES = {'default': DATABASES['default']}\n"
        + f"RIVERPY = {{'SCHEMA': 'jobs', 'MIGRATIONS': {migrations!r}}}\n"
    )
    (tmp_path / "test_site.py").write_text(TESTS)
    assert "Ran 2 tests" in run_manage(tmp_path, "test", "--parallel", "2")
    if migrations == "riverpy":
        run_manage(tmp_path, "migrate")
    with connection.cursor() as cursor:
        cursor.execute("select to_regnamespace('jobs') is null")
        assert cursor.fetchone()[0]


def run_manage(directory: Path, *arguments: str) -> str:
    """Run `manage.py` of a project, and return what it writes to stderr."""
    done = subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_schema_without_the_right(project_url: str) -> None:
    """A role that may not create schemas is told so, and needs no right if the schema exists.
    `sqlmigrate` shows the statement."""
    with connection.cursor() as cursor:
        cursor.execute("create role plain; create schema jobs authorization plain")
    try:
        with override_settings(RIVERPY={"SCHEMA": "jobs"}):
            assert 'CREATE SCHEMA IF NOT EXISTS "jobs"' in run_command(
                "sqlmigrate", "riverpy", "0001"
            )
            with connection.schema_editor(atomic=True) as editor:
                editor.execute("set local role plain")
                run_migration(editor, "main", 1, Direction.UP)
        with (
            override_settings(RIVERPY={"SCHEMA": "missing"}),
            connection.schema_editor(atomic=True) as editor,
        ):
            editor.execute("set local role plain")
            with pytest.raises(MigrationError, match=r"role may not create it: .* CREATE SCHEMA"):
                run_migration(editor, "main", 1, Direction.UP)
            connection.set_rollback(True)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("drop schema jobs cascade; drop role plain")


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
