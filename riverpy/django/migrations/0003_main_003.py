"""Version 3 of the migration line `main`: sets `river_job.tags` to NOT NULL."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from riverpy.django.operations import RunRiverMigration


class Migration(migrations.Migration):
    """Applies version 3 of the migration line `main`."""

    dependencies: ClassVar = [("riverpy", "0002_main_002")]
    operations: ClassVar = [RunRiverMigration("main", 3)]
