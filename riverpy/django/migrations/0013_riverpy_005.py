"""Version 5 of the migration line `riverpy`: creates the table `riverpy_exec`."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from riverpy.django.operations import RunRiverMigration


class Migration(migrations.Migration):
    """Applies version 5 of the migration line `riverpy`."""

    dependencies: ClassVar = [("riverpy", "0012_riverpy_004")]
    operations: ClassVar = [RunRiverMigration("riverpy", 5)]
