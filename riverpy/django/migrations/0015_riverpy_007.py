"""Version 7 of the migration line `riverpy`: adds column `state` to `riverpy_client`."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from riverpy.django.operations import RunRiverMigration


class Migration(migrations.Migration):
    """Applies version 7 of the migration line `riverpy`."""

    dependencies: ClassVar = [("riverpy", "0014_riverpy_006")]
    operations: ClassVar = [RunRiverMigration("riverpy", 7)]
