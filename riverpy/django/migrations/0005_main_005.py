"""Version 5 of the migration line `main`: adds `river_migration.line` and
`river_job.unique_key`."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from riverpy.django.operations import RunRiverMigration


class Migration(migrations.Migration):
    """Applies version 5 of the migration line `main`."""

    dependencies: ClassVar = [("riverpy", "0004_main_004")]
    operations: ClassVar = [RunRiverMigration("main", 5)]
