"""The system checks of riverpy for Django. `manage.py check` finds wrong settings, and `manage.py
check --database default` also finds missing tables."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from django.core.checks import CheckMessage, Error, Tags, Warning, register  # noqa: A004 (Django's)
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.migrations.recorder import MigrationRecorder

from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy._postgres.schema import list_migration_lines
from riverpy.client import Client
from riverpy.django.schema import read_river_tables_state
from riverpy.django.settings import (
    SETTING_NAME,
    find_setting_problems,
    import_workers,
    read_settings,
)
from riverpy.django.worker import (
    find_riverpy_backends_if_installed,
    has_task_backend,
    read_slots_per_queue,
)
from riverpy.errors import RiverError
from riverpy.worker import Workers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper

    from riverpy.django.schema import RiverTablesState

WRONG_SETTING_ID = "riverpy.E001"
WORKERS_NOT_IMPORTED_ID = "riverpy.E002"
WRONG_WORKERS_ID = "riverpy.E003"
TABLES_MISSING_ID = "riverpy.W001"
QUEUE_NOT_WORKED_ID = "riverpy.W002"
SMALL_POOL_ID = "riverpy.W003"
_POOL_SIZE_DEFAULT = 4
"""The default size of a connection pool of psycopg."""


def register_checks() -> None:
    """Register the system checks of riverpy with Django."""
    register(check_settings)
    register(check_workers)
    register(check_task_queues)
    register(check_pools)
    register(check_tables, Tags.database)
    if has_task_backend():
        # This import registers Django's own check of task backends. Otherwise the check would not
        # run in a project that has not imported its tasks yet.
        from riverpy.django.tasks_api import task_backends

        import_module(f"{type(task_backends).__module__}.checks")


def check_settings(**_: Any) -> Sequence[CheckMessage]:
    """Check the keys and values of the setting `RIVERPY`."""
    return [
        Error(problem.message, hint=problem.hint, id=WRONG_SETTING_ID)
        for problem in find_setting_problems()
    ]


def check_workers(**_: Any) -> Sequence[CheckMessage]:
    """Check that the object of `RIVERPY["WORKERS"]` can be imported, and has an allowed type."""
    try:
        workers = read_settings().workers
    except ImproperlyConfigured:  # `check_settings` reports it
        return []
    if workers is None:
        return []
    label = f"{SETTING_NAME}['WORKERS'] = {workers!r}"
    try:
        found = import_workers(workers)
    except Exception as error:
        return [
            Error(
                f"{label} cannot be imported: {type(error).__name__}: {error}",
                hint='name the module and the object in it, as in "shop.jobs:workers"',
                id=WORKERS_NOT_IMPORTED_ID,
            )
        ]
    is_class = isinstance(found, type)
    if isinstance(found, (Workers, Client)) or (callable(found) and not is_class):
        return []
    return [
        Error(
            f"{label} is a {'class' if is_class else type(found).__name__}",
            hint="name a riverpy.Workers, a riverpy.Client, or a function that returns one",
            id=WRONG_WORKERS_ID,
        )
    ]


def check_task_queues(**_: Any) -> Sequence[CheckMessage]:
    """Check that the worker works all queues that the backends of Django's tasks use."""
    slots = read_slots_per_queue()
    if slots is None:
        return []
    worked = ", ".join(slots) or "none"
    found: list[CheckMessage] = []
    for backend in find_riverpy_backends_if_installed():
        label = f"TASKS[{backend.alias!r}]['QUEUES']"
        missing = ", ".join(sorted(backend.queues - slots.keys()))
        if missing:
            text = f"{label} has queues that the worker does not work: {missing}"
            hint = f"add them to the queues of the client that {SETTING_NAME}['WORKERS'] names"
            found.append(Warning(text, hint=hint, id=QUEUE_NOT_WORKED_ID))
        elif not backend.queues:
            text = f"{label} is empty, so a task may have any queue. The worker works: {worked}"
            hint = "list the queues of the tasks, or else tasks in other queues wait for ever"
            found.append(Warning(text, hint=hint, id=QUEUE_NOT_WORKED_ID))
    return found


def check_pools(**_: Any) -> Sequence[CheckMessage]:
    """Check that Django's connection pools are large enough for the threads of a worker."""
    sizes = {alias: size for alias in connections if (size := _read_pool_size(alias)) is not None}
    slots = sum((read_slots_per_queue() or {}).values()) if sizes else 0
    return [
        Warning(
            f"the pool of DATABASES[{alias!r}] has at most {size} connections, and the worker runs "
            f"up to {slots} jobs at the same time",
            hint=f"raise max_size in OPTIONS['pool'], or lower the numbers in {SETTING_NAME}"
            "['QUEUES']. Otherwise jobs in threads wait for a connection, and fail after the "
            "timeout of the pool",
            id=SMALL_POOL_ID,
        )
        for alias, size in sizes.items()
        if size < slots
    ]


def _read_pool_size(alias: str) -> int | None:
    """Return the maximum size of the connection pool of a database, or None if the database has no
    pool."""
    pool: Any = connections[alias].settings_dict.get("OPTIONS", {}).get("pool")
    if not pool:
        return None
    options = cast("dict[str, Any]", pool) if isinstance(pool, dict) else {}
    return options.get("max_size") or options.get("min_size", _POOL_SIZE_DEFAULT)


def check_tables(databases: Sequence[str] | None = None, **_: Any) -> Sequence[CheckMessage]:
    """Check that the database has River's and riverpy's tables in their newest version."""
    try:
        settings = read_settings()
    except ImproperlyConfigured:
        return []
    # `manage.py migrate` runs this check before it creates the tables.
    if settings.database not in (databases or ()) or sys.argv[1:2] == ["migrate"]:
        return []
    connection = connections[settings.database]
    hint = "run `manage.py riverpy migrate up`"
    try:
        schema = read_river_tables_state(connection, settings.schema)
        messages = schema.find_problems()
        if settings.migrations == "django" and not _are_missing_migrations_recorded(
            connection, schema
        ):
            hint = f"run `manage.py migrate --database {settings.database}`"
    except (RiverError, *DATABASE_ERRORS) as error:
        messages = [describe_error(error)]
        hint = f"correct DATABASES[{settings.database!r}] or {SETTING_NAME}, and check again"
    return [Warning(message, hint=hint, id=TABLES_MISSING_ID) for message in messages]


def _are_missing_migrations_recorded(
    connection: BaseDatabaseWrapper, schema: RiverTablesState
) -> bool:
    """Return whether a migration is missing that Django has recorded as applied. `manage.py
    migrate` does not apply such a migration again."""
    missing = {
        f"{line}_{version:03}"
        for line in list_migration_lines()
        for version in schema.state.missing_versions(line)
    }
    recorded = MigrationRecorder(connection).applied_migrations()
    return any(app == "riverpy" and name.partition("_")[2] in missing for app, name in recorded)
