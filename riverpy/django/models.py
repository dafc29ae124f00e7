"""Django models of River's jobs and queues, for the admin pages and for queries. Django does not
manage their tables, and the models can only read. To write, use `riverpy.django.client()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from django.db import NotSupportedError, models
from django.db.models.signals import pre_delete, pre_save

from riverpy.django.schema import make_table_name
from riverpy.django.settings import read_database_alias
from riverpy.job import JobState

if TYPE_CHECKING:
    from datetime import datetime

    _QuerySet = models.QuerySet[Any, Any]
    _TextField = models.TextField[str, str]
else:  # at run time, these classes of Django take no type parameters
    _QuerySet, _TextField = models.QuerySet, models.TextField

_STATES = [(str(state), str(state)) for state in JobState]


def _refuse_write(*_: object, **_options: object) -> NoReturn:
    """Raise an error, because the models must not write to River's tables.

    Raises:
        NotSupportedError: always.
    """
    raise NotSupportedError(
        "the models of riverpy only read: insert and change jobs and queues with the methods of "
        "riverpy.django.client(), such as job_cancel and queue_pause"
    )


class RiverQuerySet(_QuerySet):
    """A query on one of River's tables. Its methods that write raise NotSupportedError."""

    bulk_create = bulk_update = delete = update = _refuse_write
    abulk_create = abulk_update = adelete = aupdate = _refuse_write


class RiverManager(models.Manager[Any]):
    """A model manager whose queries read from the database of the setting `RIVERPY`."""

    def get_queryset(self) -> RiverQuerySet:
        """Return a query for all rows."""
        return RiverQuerySet(self.model, using=self._db or read_database_alias())


class StateField(_TextField):
    """A field for the state of a job. A query with an unknown state raises ValueError, because the
    server would also refuse it."""

    def get_prep_value(self, value: Any) -> Any:
        """Return a state as a query parameter. Raise ValueError if there is no such state."""
        prepared = super().get_prep_value(value)
        if isinstance(prepared, str) and prepared not in [*JobState]:
            raise ValueError(f"there is no state {prepared!r}: use {', '.join(JobState)}")
        return prepared

    def deconstruct(self) -> Any:
        """Return the description of this field for migrations, in which it is a plain TextField."""
        name, _, args, options = super().deconstruct()
        return name, "django.db.models.TextField", args, options


class Job(models.Model):
    """A job, i.e. a row of the table `river_job`."""

    id: models.BigAutoField[int, int] = models.BigAutoField(primary_key=True)
    kind: models.TextField[str, str] = models.TextField()
    state: StateField = StateField(choices=_STATES)
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
    """A queue, i.e. a row of the table `river_queue`."""

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


for _model in (Job, Queue):  # `loaddata` does not call the methods above, but sends signals
    pre_save.connect(_refuse_write, sender=_model)
    pre_delete.connect(_refuse_write, sender=_model)
