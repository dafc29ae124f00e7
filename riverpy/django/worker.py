"""Creates the client that `manage.py riverpy worker` runs."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from django.conf import settings as django_settings

from riverpy.client import Client
from riverpy.config import QueueConfig
from riverpy.django.settings import SETTING_NAME, import_workers, read_settings
from riverpy.errors import ConfigError
from riverpy.worker import Workers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy.django.tasks import RiverpyBackend


async def make_client() -> Client:
    """Return the client that `manage.py riverpy worker` runs.

    If `RIVERPY["WORKERS"]` names a client, that client is returned. If it names workers, a new
    client with these workers is returned. If it is not set, a new client for Django's tasks is
    returned. Workers for Django's tasks are added in all cases, except to a client that has no
    workers.

    Raises:
        ConfigError: there are no workers and no tasks.
        ImproperlyConfigured: the setting is wrong.
    """
    settings = read_settings()
    found = None if settings.workers is None else await _load_workers_or_client(settings.workers)
    if isinstance(found, Client):
        _include_task_workers(found.workers)
        return found
    workers = Workers() if found is None else Workers().include(found)
    task_queues = _include_task_workers(workers)
    if not len(workers):
        raise ConfigError(
            f'there is no worker: set {SETTING_NAME} = {{"WORKERS": "shop.jobs:workers"}}, which '
            "names a riverpy.Workers with at least one worker"
        )
    return Client(
        workers=workers,
        queues={
            **{name: QueueConfig() for name in task_queues},
            **{name: QueueConfig(max_workers=slots) for name, slots in settings.queues.items()},
        },
        config=settings.config,
    )


def read_slots_per_queue() -> dict[str, int] | None:
    """Return the slots of each queue that `manage.py riverpy worker` works. The slots of a queue
    are the maximum number of its jobs that the worker runs at the same time.

    Return None if a setting is wrong, or if `RIVERPY["WORKERS"]` names a function: only
    `manage.py riverpy worker` calls such a function, so the slots are not known here. This call
    imports the object that `RIVERPY["WORKERS"]` names, but opens no connection.
    """
    try:
        settings = read_settings()
        found = None if settings.workers is None else import_workers(settings.workers)
        if isinstance(found, Client):
            return {name: queue.max_workers for name, queue in found.queues.items()}
        if callable(found) and not isinstance(found, Workers):
            return None
        tasks_queues = {name for one in find_riverpy_backends_if_installed() for name in one.queues}
    except Exception:  # Django's system checks report the error
        return None
    return {**dict.fromkeys(sorted(tasks_queues), QueueConfig().max_workers), **settings.queues}


def find_riverpy_backends_if_installed() -> Sequence[RiverpyBackend]:
    """Return the backends of riverpy in Django's setting TASKS; none if Django's tasks are not
    installed."""
    if not has_task_backend():
        return ()
    from riverpy.django.tasks import find_riverpy_backends

    return find_riverpy_backends()


def has_task_backend() -> bool:
    """Return whether Django's tasks are installed and Django's setting TASKS names a backend of
    riverpy."""
    settings: object = getattr(django_settings, "TASKS", None)
    if not isinstance(settings, dict):
        return False
    is_named = any(
        isinstance(one, dict) and str(cast("Any", one).get("BACKEND")).startswith("riverpy.")
        for one in cast("dict[str, Any]", settings).values()
    )
    return is_named and any(map(find_spec, ("django.tasks", "django_tasks")))


async def _load_workers_or_client(import_path: str) -> Workers | Client:
    found = import_workers(import_path)
    if callable(found) and not isinstance(found, (Workers, Client, type)):
        result: object = cast("Any", found)()
        found = await result if inspect.isawaitable(result) else result
    if not isinstance(found, (Workers, Client)):
        raise ConfigError(
            f"{SETTING_NAME}['WORKERS'] names {import_path!r}, which is no riverpy.Workers or "
            f"riverpy.Client but {type(found).__name__}"
        )
    return found


def _include_task_workers(workers: Workers | None) -> Sequence[str]:
    """Register workers for Django's tasks, and return the names of the tasks' queues. Do nothing if
    the project does not use riverpy's task backend, or if `workers` is None."""
    if workers is None:
        return ()
    try:
        from riverpy.django.task_workers import register_tasks
        from riverpy.django.tasks import find_riverpy_backends
    except ModuleNotFoundError as error:
        if error.name != "django_tasks":
            raise
        return ()  # Django 5.2 without the package django-tasks
    backends = find_riverpy_backends()
    if not backends or not register_tasks(
        workers, {one.alias: one.task_options for one in backends}
    ):
        return ()
    return sorted({name for backend in backends for name in backend.queues})
