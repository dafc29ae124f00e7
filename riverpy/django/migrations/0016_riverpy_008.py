"""Version 8 of the migration line `riverpy`: adds the column `leases` to `riverpy_client`."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from riverpy.django.operations import RunRiverMigration


class Migration(migrations.Migration):
    """Applies version 8 of the migration line `riverpy`."""

    dependencies: ClassVar = [("riverpy", "0015_riverpy_007")]
    operations: ClassVar = [RunRiverMigration("riverpy", 8)]
