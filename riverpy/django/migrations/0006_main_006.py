"""Version 6 of the migration line `main`: adds to `river_job` the states in which a unique key
counts."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from riverpy.django.operations import RunRiverMigration


class Migration(migrations.Migration):
    """Applies version 6 of the migration line `main`."""

    dependencies: ClassVar = [("riverpy", "0005_main_005")]
    operations: ClassVar = [RunRiverMigration("main", 6)]
