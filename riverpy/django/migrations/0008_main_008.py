"""Version 8 of the migration line `main`: changes nothing on PostgreSQL."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from riverpy.django.operations import RunRiverMigration


class Migration(migrations.Migration):
    """Applies version 8 of the migration line `main`."""

    dependencies: ClassVar = [("riverpy", "0007_main_007")]
    operations: ClassVar = [RunRiverMigration("main", 8)]
