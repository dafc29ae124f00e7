"""Version 9 of the migration line `riverpy`: creates the table `riverpy_job_count`."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from riverpy.django.operations import RunRiverMigration


class Migration(migrations.Migration):
    """Applies version 9 of the migration line `riverpy`."""

    dependencies: ClassVar = [("riverpy", "0016_riverpy_008")]
    operations: ClassVar = [RunRiverMigration("riverpy", 9)]
