"""Finds the Django tasks of a project, and registers a worker for each of them."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from inspect import iscoroutinefunction
from pkgutil import walk_packages
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from django.apps import apps
from msgspec import UNSET, UnsetType

from riverpy.django.task_jobs import find_task, make_job_kind
from riverpy.django.task_runs import TaskAttemptRunner
from riverpy.django.tasks_api import Task, task_backends
from riverpy.job import Job  # noqa: TC001 (the registry reads the annotations)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from riverpy.worker import Workers

TASKS_MODULE_NAME = "tasks"
"""The name of the module or package with tasks. riverpy imports it from each installed app."""
_OWN_APP_NAME = "riverpy.django"


class TaskOptions(msgspec.Struct, frozen=True, rename="upper", forbid_unknown_fields=True):
    """The options of a task backend: the key `OPTIONS` in Django's setting TASKS."""

    modules: tuple[str, ...] = ()
    """The module paths of further modules and packages with tasks."""
    max_attempts: Annotated[int, msgspec.Meta(ge=1, le=32_767)] | None = None
    """The maximum number of attempts of a task; None: 25, as for other jobs."""
    timeout: timedelta | UnsetType | None = UNSET
    """How long an attempt of a task may run. None: no limit. UNSET: one minute, as for other
    jobs."""

    def __post_init__(self) -> None:
        """Check that the timeout is above zero.

        Raises:
            ValueError: the timeout is zero or negative.
        """
        if isinstance(self.timeout, timedelta) and self.timeout <= timedelta(0):
            raise ValueError("TIMEOUT must be above zero")


def is_found_by_workers(module_name: str, options: TaskOptions) -> bool:
    """Return whether workers search for tasks in this module."""
    return any(
        module_name == name or module_name.startswith(f"{name}.")
        for name in _list_module_names(options)
    )


def register_tasks(workers: Workers, options_by_backend: dict[str, TaskOptions]) -> bool:
    """Register a worker for each task of the project. Return whether the project has a task.

    Args:
        workers: the registry of workers. A kind that already has a worker keeps it.
        options_by_backend: the options of each task backend of riverpy, by its alias.
    """
    paths = {path for options in options_by_backend.values() for path in _find_task_paths(options)}
    for path in sorted(paths):
        task = find_task(path)
        if make_job_kind(path) not in workers:
            options = options_by_backend.get(task.backend, TaskOptions())
            _register_task(workers, task, options.timeout)
    return bool(paths)


def _list_module_names(options: TaskOptions) -> Iterator[str]:
    for app in apps.get_app_configs():
        if app.name != _OWN_APP_NAME:
            yield f"{app.name}.{TASKS_MODULE_NAME}"
    yield from options.modules


def _find_task_paths(options: TaskOptions) -> Iterator[str]:
    """Yield the module path of each task in the modules that workers search for tasks."""
    for name in _list_module_names(options):
        if name not in options.modules and find_spec(name) is None:
            continue
        for module in _import_with_submodules(name):
            for value in vars(module).values():
                if isinstance(value, Task) and is_found_by_workers(value.func.__module__, options):
                    yield value.module_path


def _import_with_submodules(name: str) -> Iterator[ModuleType]:
    module = import_module(name)
    yield module
    for found in walk_packages(getattr(module, "__path__", ()), f"{name}."):
        yield import_module(found.name)


def _register_task(workers: Workers, task: Any, timeout: timedelta | UnsetType | None) -> None:
    kind = make_job_kind(task.module_path)
    if iscoroutinefunction(task.func):

        @workers.job(kind=kind, timeout=timeout)
        async def _run_async_task(job: Job[dict[str, Any]]) -> None:
            await TaskAttemptRunner(job, task, _get_backend_class(task)).run_async()

        return

    @workers.blocking_job(kind=kind, timeout=timeout)
    def _run_task(job: Job[dict[str, Any]]) -> None:
        TaskAttemptRunner(job, task, _get_backend_class(task)).run()


def _get_backend_class(task: Any) -> type[Any]:
    return type(task_backends[task.backend])
