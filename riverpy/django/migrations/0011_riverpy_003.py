"""Version 3 of the migration line `riverpy`: adds column `slots` to `riverpy_client`."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from riverpy.django.operations import RunRiverMigration


class Migration(migrations.Migration):
    """Applies version 3 of the migration line `riverpy`."""

    dependencies: ClassVar = [("riverpy", "0010_riverpy_002")]
    operations: ClassVar = [RunRiverMigration("riverpy", 3)]
