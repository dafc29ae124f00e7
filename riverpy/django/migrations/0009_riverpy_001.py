"""Version 1 of the migration line `riverpy`: creates the table `riverpy_client`."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from riverpy.django.operations import RunRiverMigration


class Migration(migrations.Migration):
    """Applies version 1 of the migration line `riverpy`."""

    dependencies: ClassVar = [("riverpy", "0008_main_008")]
    operations: ClassVar = [RunRiverMigration("riverpy", 1)]
