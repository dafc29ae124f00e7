"""Django's tasks as jobs: the args and metadata of their jobs, and the results that jobs give."""

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

KIND_PREFIX = "django:"
"""A task has the job kind `django:` and its module path, such as `django:shop.tasks.send`."""
METADATA_KEY = "riverpy:django"
"""The key in a job's metadata with what a job has no column for; see TaskMetadata."""
UNKNOWN_EXCEPTION = "builtins.Exception"
"""The class of an error whose class is not known, such as the end of a killed worker."""
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
"""The name of a class at the start of an error text."""


class TaskFailure(msgspec.Struct, frozen=True):
    """What an entry in a job's errors does not have."""

    exception_class: str
    """The module path of the exception's class."""
    trace: str = ""
    """The traceback, if the entry has none."""


class TaskMetadata(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a job has no column for."""

    backend: str
    """The alias of the backend in Django's setting TASKS."""
    priority: int = 0
    """Django's priority, from -100 to 100."""
    run_after: datetime | None = None
    started_at: datetime | None = None
    """The start of the first attempt, from its end on."""
    failures: dict[str, TaskFailure] = {}
    """The failures by the number of the attempt."""


def make_kind(module_path: str) -> str:
    """Return the kind of a task's jobs."""
    return KIND_PREFIX + module_path


def map_priority(priority: int) -> int:
    """Return River's priority, 1 (first) to 4 (last), for Django's, -100 (last) to 100 (first). The
    four bands are equally wide, and Django's default 0 becomes 2."""
    width = TASK_MAX_PRIORITY - TASK_MIN_PRIORITY + 1
    band = (TASK_MAX_PRIORITY - priority) * PRIORITY_MAX // width
    return 1 + band


def make_args(task: Any, args: list[Any], kwargs: dict[str, Any]) -> RawArgs:
    """Return the args of a task's job.

    Raises:
        ArgsError: a number has no JSON form, such as NaN, or a text cannot be stored.
    """
    text = encode({"args": args, "kwargs": kwargs})
    return RawArgs(make_kind(task.module_path), text)


def make_insert_opts(task: Any, backend: str, max_attempts: int | None) -> InsertOpts:
    """Return the options for the insert of a task's job."""
    run_after = task.run_after
    if run_after is not None and timezone.is_naive(run_after):
        run_after = timezone.make_aware(run_after)
    metadata = TaskMetadata(backend, task.priority, run_after)
    return InsertOpts(
        queue=task.queue_name,
        priority=map_priority(task.priority),
        scheduled_at=run_after,
        max_attempts=max_attempts,
        metadata={METADATA_KEY: msgspec.to_builtins(metadata)},
    )


def read_metadata(row: JobRow) -> TaskMetadata | None:
    """Return the metadata of a task's job; None: a program without Django inserted it."""
    try:
        return msgspec.convert(row.metadata.get(METADATA_KEY), TaskMetadata)
    except msgspec.ValidationError:
        return None


def find_task(module_path: str) -> Any:
    """Return the task with this module path. Only tasks are returned, whatever a job names.

    Raises:
        SuspiciousOperation: the path names something else.
        ImportError: there is no such module or name.
    """
    found: object = import_string(module_path)
    if not isinstance(found, Task):
        raise SuspiciousOperation(f"{module_path} is no task: it has no decorator @task")
    return cast("Any", found)


def make_result(row: JobRow, metadata: TaskMetadata, task: Any) -> Any:
    """Return the result of a task from its job. `task` has the defaults of the decorator."""
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
        object.__setattr__(result, "_return_value", row.output)  # as Django's backends do
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
    """Return a time as Django's models have it: aware, or without USE_TZ naive."""
    return moment if django_settings.USE_TZ else timezone.make_naive(moment)
