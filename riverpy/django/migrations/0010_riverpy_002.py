"""Version 2 of the migration line `riverpy`: creates the table `riverpy_periodic`."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from riverpy.django.operations import RunRiverMigration


class Migration(migrations.Migration):
    """Applies version 2 of the migration line `riverpy`."""

    dependencies: ClassVar = [("riverpy", "0009_riverpy_001")]
    operations: ClassVar = [RunRiverMigration("riverpy", 2)]
