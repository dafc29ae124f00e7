"""An operation for Django migrations that runs one migration of River or riverpy."""

from __future__ import annotations

from typing import Any

from django.db import router
from django.db.migrations.operations.base import Operation

from riverpy._postgres.migration_step import Direction
from riverpy.django.schema import run_migration
from riverpy.django.settings import read_settings


class RunRiverMigration(Operation):
    """Applies or undoes one version of a migration line in the database of the setting `RIVERPY`.
    Does nothing in other databases, or if this was already done."""

    reduces_to_sql = True
    reversible = True

    def __init__(self, line: str, version: int) -> None:
        """`line` is the migration line: `main` for River's tables, `riverpy` for riverpy's own
        tables."""
        self.line, self.version = line, version

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Do nothing, because Django does not manage the tables of the models."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Apply the version."""
        self._run_migration(app_label, schema_editor, Direction.UP)

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Undo the version. This may drop tables and the jobs in them."""
        self._run_migration(app_label, schema_editor, Direction.DOWN)

    def _run_migration(self, app_label: str, schema_editor: Any, direction: Direction) -> None:
        alias = schema_editor.connection.alias
        if alias == read_settings().database and router.allow_migrate(alias, app_label):
            run_migration(schema_editor, self.line, self.version, direction)

    def describe(self) -> str:
        """Return the description for `manage.py migrate --plan`."""
        return f"River's tables, line {self.line}, version {self.version}"
