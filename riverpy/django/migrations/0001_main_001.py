"""Version 1 of the migration line `main`. It also creates the models `Job` and `Queue`, whose
tables Django does not manage."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models

from riverpy.django.operations import RunRiverMigration
from riverpy.django.schema import make_table_name
from riverpy.job import JobState

_STATES = [(str(state), str(state)) for state in JobState]


class Migration(migrations.Migration):
    """Applies version 1 of the migration line `main`."""

    initial = True
    dependencies: ClassVar = []
    operations: ClassVar = [
        RunRiverMigration("main", 1),
        migrations.CreateModel(
            name="Job",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("kind", models.TextField()),
                ("state", models.TextField(choices=_STATES)),
                ("queue", models.TextField()),
                ("priority", models.SmallIntegerField()),
                ("attempt", models.SmallIntegerField()),
                ("max_attempts", models.SmallIntegerField()),
                ("created_at", models.DateTimeField()),
                ("scheduled_at", models.DateTimeField()),
                ("attempted_at", models.DateTimeField(null=True)),
                ("finalized_at", models.DateTimeField(null=True)),
                ("args", models.JSONField()),
                ("metadata", models.JSONField()),
            ],
            options={
                "managed": False,
                "db_table": make_table_name("river_job"),
                "default_permissions": ("change", "view"),
            },
        ),
        migrations.CreateModel(
            name="Queue",
            fields=[
                ("name", models.TextField(primary_key=True, serialize=False)),
                ("created_at", models.DateTimeField()),
                ("updated_at", models.DateTimeField()),
                ("paused_at", models.DateTimeField(null=True)),
                ("metadata", models.JSONField()),
            ],
            options={
                "managed": False,
                "db_table": make_table_name("river_queue"),
                "default_permissions": ("change", "view"),
            },
        ),
    ]
