"""Line main, version 3: river job tags non null."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from riverpy.django.operations import RunRiverMigration


class Migration(migrations.Migration):
    """Applies version 3 of line main."""

    dependencies: ClassVar = [("riverpy", "0002_main_002")]
    operations: ClassVar = [RunRiverMigration("main", 3)]
