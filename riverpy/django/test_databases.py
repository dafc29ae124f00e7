"""Creates River's tables in Django's test databases, for projects that use `riverpy migrate up`.

In such a project the Django app of riverpy has no migrations. So the `migrate` of Django's test
runner does not create River's tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core import mail
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router
from django.db.models.signals import pre_migrate

from riverpy._postgres.migration_step import Direction
from riverpy._postgres.schema import list_migration_lines, load_migrations
from riverpy.django.schema import run_migration
from riverpy.django.settings import read_settings

if TYPE_CHECKING:
    from django.apps import AppConfig


def register_test_table_creator(app: AppConfig) -> None:
    """Register a handler that creates River's tables in test databases, before Django's `migrate`
    runs the migrations of other apps."""
    pre_migrate.connect(_create_river_tables, sender=app, dispatch_uid=__name__)


def _create_river_tables(*, using: str, sender: AppConfig, **_: Any) -> None:
    if not _is_test_run():
        return
    try:
        settings = read_settings()
    except ImproperlyConfigured:  # `check_settings` reports it
        return
    if (
        settings.migrations != "riverpy"
        or using != settings.database
        or not router.allow_migrate(using, sender.label)
    ):
        return
    for line in list_migration_lines():
        for version in sorted(load_migrations(line)):
            with connections[using].schema_editor(atomic=True) as editor:
                run_migration(editor, line, version, Direction.UP)


def _is_test_run() -> bool:
    """Return whether a test runner has called Django's `setup_test_environment`.

    Test runners call that function before they create databases. It sets `django.core.mail.outbox`,
    so the existence of `outbox` shows that it was called.
    """
    return hasattr(mail, "outbox")
