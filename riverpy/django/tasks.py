"""RiverpyBackend: a backend for Django's tasks framework. It inserts each enqueued task as a job.

TASKS = {"default": {"BACKEND": "riverpy.django.tasks.RiverpyBackend"}}
"""

from __future__ import annotations

import asyncio
import os
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import msgspec
from django.apps import apps
from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured, SuspiciousOperation
from django.db import connections

from riverpy._names import validate_kind, validate_queue_name
from riverpy._postgres.jobs import job_get
from riverpy._without_loop import run_without_loop
from riverpy.django.django_client import client
from riverpy.django.schema import adapt_django_connection
from riverpy.django.settings import read_settings
from riverpy.django.task_jobs import (
    TASK_KIND_PREFIX,
    find_task,
    make_insert_opts,
    make_job_args,
    make_job_kind,
    make_task_result,
    read_task_metadata,
)
from riverpy.django.task_workers import TaskOptions, is_found_by_workers
from riverpy.django.tasks_api import (
    BaseTaskBackend,
    InvalidTask,
    TaskResultDoesNotExist,
    normalize_json,
    task_backends,
    task_enqueued,
)
from riverpy.errors import ConfigError, TransactionError
from riverpy.job import JobRow

if TYPE_CHECKING:
    from collections.abc import Sequence

_JOB_ID_MAX = 2**63 - 1


class RiverpyBackend(BaseTaskBackend):
    """A backend for Django's tasks. It inserts a job for each enqueued task, and
    `manage.py riverpy worker` runs the jobs.

    A task that is enqueued in `transaction.atomic()` is visible to workers after the commit, so
    `on_commit` is not needed.

    The setting `OPTIONS` has these keys: `MODULES` (modules with tasks, in addition to the module
    `tasks` of each app), `MAX_ATTEMPTS` (default 25) and `TIMEOUT` (a timedelta; None: no limit;
    default one minute).
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    @cached_property
    def task_options(self) -> TaskOptions:
        """The values of this backend's setting `OPTIONS`, checked.

        Raises:
            ImproperlyConfigured: an option is wrong. `manage.py check` reports it too.
        """
        try:
            return msgspec.convert(self.options, TaskOptions)
        except msgspec.ValidationError as error:
            raise ImproperlyConfigured(f"TASKS[{self.alias!r}]['OPTIONS']: {error}") from None

    def validate_task(self, task: Any) -> None:
        """Raise InvalidTask if the name or the queue of the task is not allowed for a job."""
        super().validate_task(task)
        try:
            validate_queue_name(task.queue_name)
            validate_kind(make_job_kind(task.module_path))
        except ConfigError as error:
            raise InvalidTask(str(error)) from None

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Insert a job that runs the task, and return a `TaskResult`.

        Raises:
            InvalidTask: the task is not allowed, or workers do not import its module.
            TypeError, ArgsError: an argument cannot be stored as JSON.
            TransactionError: the transaction of the database is aborted, or the calling code is
                async.
        """
        self.validate_task(task)
        _require_no_event_loop()
        module_name = task.func.__module__
        if not is_found_by_workers(module_name, self.task_options):
            raise InvalidTask(
                f"no worker finds the task {task.module_path}: move it into the module `tasks` of "
                f"an installed app, or add its module to TASKS[{self.alias!r}]['OPTIONS'] = "
                f"{{'MODULES': [{module_name!r}]}}"
            )
        given = cast("Any", normalize_json([list(args), kwargs]))
        raw_args = make_job_args(task, *given)
        opts = make_insert_opts(task, self.alias, self.task_options.max_attempts)
        row = client().insert(raw_args, opts).job
        result = self._make_task_result(row, task)
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        """Return the `TaskResult` of a task that was enqueued with this backend.

        Raises:
            TaskResultDoesNotExist: there is no such job, or its task was renamed or removed.
                Completed jobs are deleted after a day by default, see `Config.retention`.
        """
        settings = read_settings()
        text = str(result_id)
        job_id = int(text) if text.isascii() and text.isdigit() else _JOB_ID_MAX + 1
        record = None
        if job_id <= _JOB_ID_MAX:
            session = adapt_django_connection(connections[settings.database])
            record = run_without_loop(job_get(session, settings.schema, job_id))
        row = None if record is None else JobRow(cast("Sequence[Any]", record))
        if row is None or not row.kind.startswith(TASK_KIND_PREFIX):
            raise TaskResultDoesNotExist(result_id)
        metadata = read_task_metadata(row)
        if metadata is None or metadata.backend != self.alias:
            raise TaskResultDoesNotExist(result_id)
        module_path = row.kind.removeprefix(TASK_KIND_PREFIX)
        if not is_found_by_workers(module_path.rpartition(".")[0], self.task_options):
            # Do not import the module: any program may have inserted the job that names it.
            raise TaskResultDoesNotExist(result_id)
        try:
            task = find_task(module_path)
        except (ImportError, SuspiciousOperation) as error:  # the task was renamed or removed
            raise TaskResultDoesNotExist(result_id) from error
        return self._make_task_result(row, task)

    def _make_task_result(self, row: JobRow, task: Any) -> Any:
        metadata = read_task_metadata(row)
        assert metadata is not None  # noqa: S101 (`enqueue` has written it, or the caller checks)
        return make_task_result(row, metadata, task)

    def check(self, **_: Any) -> list[CheckMessage]:
        """Return messages for Django's system checks: wrong options or queue names, a missing app
        `riverpy.django`, and modules in `MODULES` that cannot be imported."""
        found: list[CheckMessage] = []
        if not apps.is_installed("riverpy.django"):
            found.append(
                Error(
                    "the task backend of riverpy needs its app",
                    hint="add 'riverpy.django' to INSTALLED_APPS",
                    id="riverpy.E004",
                )
            )
        for name in sorted(self.queues):
            try:
                validate_queue_name(name)
            except ConfigError as error:
                label = f"TASKS[{self.alias!r}]['QUEUES']"
                found.append(Error(f"{label}: {error}", hint="rename the queue", id="riverpy.E005"))
        return [*found, *self._check_options()]

    def _check_options(self) -> list[CheckMessage]:
        try:
            modules = self.task_options.modules
        except ImproperlyConfigured as error:
            names = ", ".join(name.upper() for name in TaskOptions.__struct_fields__)
            return [Error(str(error), hint=f"the options are {names}", id="riverpy.E006")]
        found: list[CheckMessage] = []
        for name in modules:
            try:
                import_module(name)
            except Exception as error:
                label = f"TASKS[{self.alias!r}]['OPTIONS']['MODULES']"
                text = f"{label}: {name!r} cannot be imported: {type(error).__name__}: {error}"
                hint = "name modules or packages with tasks, as in 'shop.mail_tasks'"
                found.append(Error(text, hint=hint, id="riverpy.E007"))
        return found


def _require_no_event_loop() -> None:
    """Raise TransactionError in async code, where Django does not allow the use of its
    connections."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE"):
        raise TransactionError(
            "Django's connections are for code that is not async: use `await task.aenqueue(…)`"
        )


def find_riverpy_backends() -> list[RiverpyBackend]:
    """Return the backends of riverpy in Django's setting TASKS."""
    return [one for one in task_backends.all() if isinstance(one, RiverpyBackend)]
