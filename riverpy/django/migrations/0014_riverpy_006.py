"""Version 6 of the migration line `riverpy`: creates the tables of leader domains."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from riverpy.django.operations import RunRiverMigration


class Migration(migrations.Migration):
    """Applies version 6 of the migration line `riverpy`."""

    dependencies: ClassVar = [("riverpy", "0013_riverpy_005")]
    operations: ClassVar = [RunRiverMigration("riverpy", 6)]
