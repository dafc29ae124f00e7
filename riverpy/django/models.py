"""Models of River's jobs and queues, for the admin pages and for queries. Django does not manage
their tables, and code should not write to them: use `riverpy.django.client()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import models

from riverpy.django.schema import make_table_name
from riverpy.django.settings import read_database_alias
from riverpy.job import JobState

if TYPE_CHECKING:
    from datetime import datetime

    from django.db.models.query import QuerySet

_STATES = [(str(state), str(state)) for state in JobState]


class RiverManager(models.Manager[Any]):
    """Reads from the database of the setting `RIVERPY`."""

    def get_queryset(self) -> QuerySet[Any]:
        """Return all rows."""
        rows = super().get_queryset()
        return rows if self._db else rows.using(read_database_alias())


class Job(models.Model):
    """A row of `river_job`."""

    id: models.BigAutoField[int, int] = models.BigAutoField(primary_key=True)
    kind: models.TextField[str, str] = models.TextField()
    state: models.TextField[str, str] = models.TextField(choices=_STATES)
    queue: models.TextField[str, str] = models.TextField()
    priority: models.SmallIntegerField[int, int] = models.SmallIntegerField()
    attempt: models.SmallIntegerField[int, int] = models.SmallIntegerField()
    max_attempts: models.SmallIntegerField[int, int] = models.SmallIntegerField()
    created_at: models.DateTimeField[datetime, datetime] = models.DateTimeField()
    scheduled_at: models.DateTimeField[datetime, datetime] = models.DateTimeField()
    attempted_at: models.DateTimeField[datetime | None, datetime | None] = models.DateTimeField(
        null=True
    )
    finalized_at: models.DateTimeField[datetime | None, datetime | None] = models.DateTimeField(
        null=True
    )
    args: models.JSONField[Any, Any] = models.JSONField()
    metadata: models.JSONField[Any, Any] = models.JSONField()

    objects = RiverManager()

    class Meta:
        """Options of the model."""

        managed = False
        db_table = make_table_name("river_job")
        default_permissions = ("change", "view")

    def __str__(self) -> str:
        return f"{self.kind} {self.pk}"


class Queue(models.Model):
    """A row of `river_queue`."""

    name: models.TextField[str, str] = models.TextField(primary_key=True)
    created_at: models.DateTimeField[datetime, datetime] = models.DateTimeField()
    updated_at: models.DateTimeField[datetime, datetime] = models.DateTimeField()
    paused_at: models.DateTimeField[datetime | None, datetime | None] = models.DateTimeField(
        null=True
    )
    metadata: models.JSONField[Any, Any] = models.JSONField()

    objects = RiverManager()

    class Meta:
        """Options of the model."""

        managed = False
        db_table = make_table_name("river_queue")
        default_permissions = ("change", "view")

    def __str__(self) -> str:
        return self.name
