"""TaskAttemptRunner: runs the function of a Django task for one attempt of its job."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from datetime import UTC, datetime
from traceback import format_exception
from typing import TYPE_CHECKING, Any

import msgspec
from django.utils import timezone

from riverpy.django.task_jobs import (
    TASK_METADATA_KEY,
    TaskFailure,
    TaskMetadata,
    make_task_result,
    read_task_metadata,
)
from riverpy.django.tasks_api import (
    TaskContext,
    TaskError,
    TaskResultStatus,
    normalize_json,
    task_finished,
    task_started,
)
from riverpy.errors import JobCancel, JobSnooze

if TYPE_CHECKING:
    from collections.abc import Generator

    from riverpy.job import Job

_UNRECORDED_EXCEPTIONS = (asyncio.CancelledError, GeneratorExit, JobSnooze)
"""The exceptions that end a snoozed or cancelled attempt. This module does not record them as
failures."""


class TaskAttemptRunner:
    """Runs the function of a task for one attempt, and records what Django's task result needs."""

    def __init__(self, job: Job[dict[str, Any]], task: Any, backend_class: type[Any]) -> None:
        """`backend_class` is the class of the task backend. The runner sends Django's task signals
        with this class as the sender."""
        self._job, self._backend_class = job, backend_class
        self._metadata = read_task_metadata(job) or TaskMetadata(task.backend, task.priority)
        self._result = make_task_result(job, self._metadata, task)
        self._function = task.func
        self._should_signal_end = False
        """Whether to send the signal `task_finished`, because the task has ended."""

    def run(self) -> None:
        """Run the function of a task that is not async."""
        task_started.send(sender=self._backend_class, task_result=self._result)
        try:
            with self._record_attempt_end():
                self._store_return_value(
                    self._function(*self._make_arguments(), **self._result.kwargs)
                )
        finally:
            # Send the signal after `_record_attempt_end`, but in `finally`: if the function raised
            # an error, receivers of the signal can read the error with `sys.exc_info()`.
            if self._should_signal_end:
                task_finished.send(sender=self._backend_class, task_result=self._result)

    async def run_async(self) -> None:
        """Run the function of an async task."""
        await task_started.asend(sender=self._backend_class, task_result=self._result)
        try:
            with self._record_attempt_end():
                returned = await self._function(*self._make_arguments(), **self._result.kwargs)
                self._store_return_value(returned)
        finally:
            if self._should_signal_end:
                await task_finished.asend(sender=self._backend_class, task_result=self._result)

    def _make_arguments(self) -> list[Any]:
        if not self._result.task.takes_context:
            return self._result.args
        return [TaskContext(task_result=self._result), *self._result.args]

    def _store_return_value(self, returned: object) -> None:
        try:
            value = normalize_json(returned)
            if value is not None:
                self._job.record_output(value)
        except (TypeError, ValueError) as error:
            # The function itself did not fail, only its return value is wrong. Cancel the job, so
            # that no retry runs the function again.
            self._record_failure(error, should_keep_trace=True)
            raise JobCancel(
                f"the task ran, but its return value cannot be stored: {error}"
            ) from error
        self._set_task_result_field("_return_value", value)

    @contextmanager
    def _record_attempt_end(self) -> Generator[None]:
        """Record the outcome of the `with` block in the job's metadata and in the task result."""
        try:
            yield
        except _UNRECORDED_EXCEPTIONS:
            self._store_metadata()
            raise
        except BaseException as error:
            is_cancel = isinstance(error, JobCancel)
            if not is_cancel or str(self._job.attempt) not in self._metadata.failures:
                self._record_failure(error, should_keep_trace=is_cancel)
            self._store_metadata()
            if is_cancel or self._job.attempt >= self._job.max_attempts:
                self._finish_task_result(TaskResultStatus.FAILED)
            raise
        self._store_metadata()
        self._finish_task_result(TaskResultStatus.SUCCESSFUL)

    def _record_failure(self, error: BaseException, *, should_keep_trace: bool) -> None:
        cls = type(error)
        trace = "".join(format_exception(error))
        failure = TaskFailure(
            f"{cls.__module__}.{cls.__qualname__}", trace if should_keep_trace else ""
        )
        failures = {**self._metadata.failures, str(self._job.attempt): failure}
        self._metadata = msgspec.structs.replace(self._metadata, failures=failures)
        self._result.errors.append(
            TaskError(exception_class_path=failure.exception_class, traceback=trace)
        )

    def _store_metadata(self) -> None:
        if self._metadata.started_at is None:
            started_at = self._job.attempted_at or datetime.now(UTC)
            self._metadata = msgspec.structs.replace(self._metadata, started_at=started_at)
        self._job.set_metadata(TASK_METADATA_KEY, msgspec.to_builtins(self._metadata))

    def _finish_task_result(self, status: Any) -> None:
        self._set_task_result_field("finished_at", timezone.now())
        self._set_task_result_field("status", status)
        self._should_signal_end = True

    def _set_task_result_field(self, name: str, value: object) -> None:
        object.__setattr__(self._result, name, value)  # Django's result class is frozen
