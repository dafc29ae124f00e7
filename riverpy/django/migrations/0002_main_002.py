"""Version 2 of the migration line `main`: creates River's tables and the type `river_job_state`."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from riverpy.django.operations import RunRiverMigration


class Migration(migrations.Migration):
    """Applies version 2 of the migration line `main`."""

    dependencies: ClassVar = [("riverpy", "0001_main_001")]
    operations: ClassVar = [RunRiverMigration("main", 2)]
