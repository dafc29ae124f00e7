"""Version 7 of the migration line `main`: creates the table `river_notification`."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from riverpy.django.operations import RunRiverMigration


class Migration(migrations.Migration):
    """Applies version 7 of the migration line `main`."""

    dependencies: ClassVar = [("riverpy", "0006_main_006")]
    operations: ClassVar = [RunRiverMigration("main", 7)]
