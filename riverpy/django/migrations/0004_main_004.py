"""Version 4 of the migration line `main`: adds the job state `pending`, among other changes."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from riverpy.django.operations import RunRiverMigration


class Migration(migrations.Migration):
    """Applies version 4 of the migration line `main`."""

    dependencies: ClassVar = [("riverpy", "0003_main_003")]
    operations: ClassVar = [RunRiverMigration("main", 4)]
