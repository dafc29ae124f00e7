"""Version 4 of the migration line `riverpy`: creates the table `riverpy_lease`."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from riverpy.django.operations import RunRiverMigration


class Migration(migrations.Migration):
    """Applies version 4 of the migration line `riverpy`."""

    dependencies: ClassVar = [("riverpy", "0011_riverpy_003")]
    operations: ClassVar = [RunRiverMigration("riverpy", 4)]
