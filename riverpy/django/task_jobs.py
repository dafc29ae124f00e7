"""Converts Django's tasks to jobs, and jobs to task results. A task is a function with Django's
decorator `@task`."""

from __future__ import annotations

import builtins
import re
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

import msgspec
from django.conf import settings as django_settings
from django.core.exceptions import SuspiciousOperation
from django.utils import timezone
from django.utils.module_loading import import_string

from riverpy._json import encode
from riverpy.django.tasks_api import (
    TASK_MAX_PRIORITY,
    TASK_MIN_PRIORITY,
    Task,
    TaskError,
    TaskResult,
    TaskResultStatus,
)
from riverpy.insert_opts import PRIORITY_MAX, InsertOpts
from riverpy.job import JobState, RawArgs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from riverpy._attempt_errors import AttemptError
    from riverpy.job import JobRow

TASK_KIND_PREFIX = "django:"
"""The prefix of the kinds of jobs that run tasks. The module path of the task follows the prefix,
for example `django:shop.tasks.send`."""
TASK_METADATA_KEY = "riverpy:django"
"""The key in a job's metadata under which its TaskMetadata is stored."""
UNKNOWN_EXCEPTION = "builtins.Exception"
"""The exception class in a task result if the class is not known, for example after a worker was
killed."""
_STATUS_BY_STATE = {
    JobState.AVAILABLE: TaskResultStatus.READY,
    JobState.PENDING: TaskResultStatus.READY,
    JobState.RETRYABLE: TaskResultStatus.READY,
    JobState.SCHEDULED: TaskResultStatus.READY,
    JobState.RUNNING: TaskResultStatus.RUNNING,
    JobState.COMPLETED: TaskResultStatus.SUCCESSFUL,
    JobState.CANCELLED: TaskResultStatus.FAILED,
    JobState.DISCARDED: TaskResultStatus.FAILED,
}
_ERROR_CLASS_PATTERN = re.compile(r"([A-Za-z]+(?:Error|Exception|Exit|Group))(?=:|$)")
"""Matches the name of an exception class at the start of an error text."""


class TaskFailure(msgspec.Struct, frozen=True):
    """What the TaskMetadata stores about a failed attempt, because the job's errors lack it."""

    exception_class: str
    """The module path of the class of the exception."""
    trace: str = ""
    """The traceback. If it is empty, the errors of the job have the traceback."""


class TaskMetadata(msgspec.Struct, frozen=True, omit_defaults=True):
    """Data about a task. It is stored in the job's metadata, because the table `river_job` has no
    columns for it."""

    backend: str
    """The alias of the task backend in Django's setting TASKS."""
    priority: int = 0
    """The priority of the task in Django, from -100 to 100."""
    run_after: datetime | None = None
    started_at: datetime | None = None
    """The start of the first attempt. It is stored at the end of that attempt."""
    failures: dict[str, TaskFailure] = {}
    """The failed attempts, by the number of the attempt as text, such as "1"."""


def make_job_kind(module_path: str) -> str:
    """Return the kind of the jobs that run the task with this module path."""
    return TASK_KIND_PREFIX + module_path


def to_river_priority(priority: int) -> int:
    """Convert a priority of Django, -100 (last) to 100 (first), to a priority of River, 1 (first)
    to 4 (last). Each priority of River stands for a quarter of Django's priorities. Django's
    default 0 becomes 2."""
    width = TASK_MAX_PRIORITY - TASK_MIN_PRIORITY + 1
    band = (TASK_MAX_PRIORITY - priority) * PRIORITY_MAX // width
    return 1 + band


def make_job_args(task: Any, args: list[Any], kwargs: dict[str, Any]) -> RawArgs:
    """Return the args of the job that runs a task.

    Raises:
        ArgsError: a number has no JSON form, such as NaN, or a text cannot be stored.
    """
    text = encode({"args": args, "kwargs": kwargs})
    return RawArgs(make_job_kind(task.module_path), text)


def make_insert_opts(task: Any, backend: str, max_attempts: int | None) -> InsertOpts:
    """Return the options for inserting the job that runs a task."""
    run_after = task.run_after
    if run_after is not None and timezone.is_naive(run_after):
        run_after = timezone.make_aware(run_after)
    metadata = TaskMetadata(backend, task.priority, run_after)
    return InsertOpts(
        queue=task.queue_name,
        priority=to_river_priority(task.priority),
        scheduled_at=run_after,
        max_attempts=max_attempts,
        metadata={TASK_METADATA_KEY: msgspec.to_builtins(metadata)},
    )


def read_task_metadata(row: JobRow) -> TaskMetadata | None:
    """Return the task metadata of a job; None: the job has none, for example because a program
    without Django inserted it."""
    try:
        return msgspec.convert(row.metadata.get(TASK_METADATA_KEY), TaskMetadata)
    except msgspec.ValidationError:
        return None


def find_task(module_path: str) -> Any:
    """Import the task with this module path, and return it.

    Raises:
        SuspiciousOperation: the object with this path is not a task.
        ImportError: there is no such module, or no such name in it.
    """
    found: object = import_string(module_path)
    if not isinstance(found, Task):
        raise SuspiciousOperation(f"{module_path} is no task: it has no decorator @task")
    return cast("Any", found)


def make_task_result(row: JobRow, metadata: TaskMetadata, task: Any) -> Any:
    """Return Django's `TaskResult` of a task, made from the row of its job. `task` is the object
    that the decorator `@task` has created."""
    given = cast("Mapping[str, Any]", msgspec.json.decode(row.encoded_args))
    started_at = metadata.started_at or row.attempted_at
    result = TaskResult(
        task=task.using(
            priority=metadata.priority,
            queue_name=row.queue,
            run_after=metadata.run_after and _to_django_time(metadata.run_after),
            backend=metadata.backend,
        ),
        id=str(row.id),
        status=_STATUS_BY_STATE[row.state],
        enqueued_at=_to_django_time(row.created_at),
        started_at=started_at and _to_django_time(started_at),
        finished_at=row.finalized_at and _to_django_time(row.finalized_at),
        last_attempted_at=row.attempted_at and _to_django_time(row.attempted_at),
        args=list(given.get("args", ())),
        kwargs=dict(given.get("kwargs", {})),
        backend=metadata.backend,
        errors=[_make_task_error(error, metadata) for error in row.errors],
        worker_ids=row.attempted_by[-row.attempt :] if row.attempt else [],
    )
    if row.state is JobState.COMPLETED:
        object.__setattr__(result, "_return_value", row.output)  # Django's own backends do the same
    return result


def _make_task_error(error: AttemptError, metadata: TaskMetadata) -> Any:
    failure = metadata.failures.get(str(error.attempt))
    if failure is None:
        match = _ERROR_CLASS_PATTERN.match(error.error)
        is_builtin = match is not None and isinstance(getattr(builtins, match[1], None), type)
        failure = TaskFailure(f"builtins.{match[1]}" if match and is_builtin else UNKNOWN_EXCEPTION)
    return TaskError(
        exception_class_path=failure.exception_class,
        traceback=failure.trace or error.trace or f"{error.error}\n",
    )


def _to_django_time(moment: datetime) -> datetime:
    """Return a time as in Django's models: with a time zone if the setting USE_TZ is True,
    otherwise without one."""
    return moment if django_settings.USE_TZ else timezone.make_naive(moment)
