"""The client of `manage.py riverpy worker`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

from riverpy.client import Client
from riverpy.config import QueueConfig
from riverpy.django.settings import SETTING_NAME, import_workers, read_settings
from riverpy.errors import ConfigError
from riverpy.worker import Workers

if TYPE_CHECKING:
    from collections.abc import Sequence


async def make_client() -> Client:
    """Return the client of `RIVERPY["WORKERS"]`, or one with these workers, and with a worker for
    each of Django's tasks.

    Raises:
        ConfigError: there are no workers and no tasks.
        ImproperlyConfigured: the setting is wrong.
    """
    settings = read_settings()
    found = None if settings.workers is None else await _load_workers(settings.workers)
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


async def _load_workers(import_path: str) -> Workers | Client:
    found = import_workers(import_path)
    if callable(found) and not isinstance(found, (Workers, Client)):
        result: object = cast("Any", found)()
        found = await result if inspect.isawaitable(result) else result
    if not isinstance(found, (Workers, Client)):
        raise ConfigError(
            f"{SETTING_NAME}['WORKERS'] names {import_path!r}, which is no riverpy.Workers or "
            f"riverpy.Client but {type(found).__name__}"
        )
    return found


def _include_task_workers(workers: Workers | None) -> Sequence[str]:
    """Add the workers of Django's tasks, if the project has the backend of riverpy. Return the
    queues of tasks."""
    if workers is None:
        return ()
    try:
        from riverpy.django.task_workers import register_tasks
        from riverpy.django.tasks import find_backends
    except ModuleNotFoundError as error:
        if error.name != "django_tasks":
            raise
        return ()  # Django 5.2 without the package django-tasks
    backends = find_backends()
    if not backends or not register_tasks(
        workers, {one.alias: one.task_options for one in backends}
    ):
        return ()
    return sorted({name for backend in backends for name in backend.queues})
