"""Version 10 of the migration line `riverpy`: adds the column `run_request` to
`riverpy_periodic`."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from riverpy.django.operations import RunRiverMigration


class Migration(migrations.Migration):
    """Applies version 10 of the migration line `riverpy`."""

    dependencies: ClassVar = [("riverpy", "0017_riverpy_009")]
    operations: ClassVar = [RunRiverMigration("riverpy", 10)]
