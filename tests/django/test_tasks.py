"""Django's tasks as jobs: what Django expects of a backend that queues tasks and keeps results."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

import riverpy.django
from riverpy import ArgsError, Config, RawArgs, TransactionError, _plugins
from riverpy.django.connections import ConnectionCloser
from riverpy.django.database import make_database_url
from riverpy.django.task_jobs import find_task, to_river_priority
from riverpy.django.tasks import RiverpyBackend
from riverpy.django.tasks_api import (
    InvalidTask,
    TaskResultDoesNotExist,
    TaskResultMismatch,
    TaskResultStatus,
    task,
    task_backends,
    task_enqueued,
    task_finished,
    task_started,
)
from riverpy.django.worker import make_client
from riverpy.testing import drain
from tests.django.shop import tasks
from tests.django.shop.models import Order

if TYPE_CHECKING:
    from collections.abc import Generator

    from riverpy import JobRow

READY, RUNNING = TaskResultStatus.READY, TaskResultStatus.RUNNING
SUCCESSFUL, FAILED = TaskResultStatus.SUCCESSFUL, TaskResultStatus.FAILED
backend: Any = task_backends["default"]


@pytest.fixture(autouse=True)
def _closed_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close the connections of the threads of jobs."""
    monkeypatch.setattr(_plugins, "process_wide_plugins", [ConnectionCloser()])


class HourlyRetry:
    """A retry policy whose retries are not due in a test."""

    def next_retry(self, job: JobRow, /) -> timedelta:
        """Return an hour."""
        return timedelta(hours=1)


def work_all() -> None:
    """Work all due jobs, with a client as that of `manage.py riverpy worker`."""

    async def work() -> None:
        with override_settings(RIVERPY={"CONFIG": Config(retry_policy=HourlyRetry())}):
            client = await make_client()
        client.configure(database=make_database_url("default"))
        async with client:
            await drain(client)

    asyncio.run(work())


@pytest.fixture
def sent() -> Generator[list[tuple[str, str]]]:
    """The signals that are sent: the name and the status of the result."""
    found: list[tuple[str, str]] = []
    receivers = {
        name: (
            signal,
            lambda task_result, name=name, **_: found.append((name, str(task_result.status))),
        )
        for name, signal in (
            ("enqueued", task_enqueued),
            ("started", task_started),
            ("finished", task_finished),
        )
    }
    for signal, receiver in receivers.values():
        signal.connect(receiver, weak=False)
    yield found
    for signal, receiver in receivers.values():
        signal.disconnect(receiver)


@pytest.mark.parametrize(
    ("queued", "args", "kwargs"),
    [
        (tasks.add, (1,), {"right": 2}),
        (tasks.count_orders, (), {}),
        (tasks.add.using(priority=-100, queue_name="mail", backend="other"), (2,), {}),
        (tasks.add.using(run_after=datetime(2126, 1, 2, 3, 4, 5, 6, tzinfo=UTC)), (), {}),
    ],
)
def test_enqueued_task(queued: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A task that is enqueued is ready and has no times but one. The stored result equals it. Each
    call is one statement."""
    with CaptureQueriesContext(connection) as captured:
        result = queued.enqueue(*args, **kwargs)
        again = queued.get_result(result.id)
    assert len(captured) == 2
    assert result == again
    assert (result.task, result.args, result.kwargs) == (queued, list(args), kwargs)
    assert (result.status, result.is_finished, result.attempts) == (READY, False, 0)
    assert (result.started_at, result.finished_at, result.last_attempted_at) == (None, None, None)
    assert (result.backend, result.errors, result.worker_ids) == (queued.backend, [], [])
    assert result.enqueued_at.utcoffset() == timedelta(0)
    with pytest.raises(ValueError, match="not finished"):
        _ = result.return_value
    job = riverpy.django.client().job_get(int(result.id))
    assert (job.kind, job.queue) == (f"django:{queued.module_path}", queued.queue_name)
    assert job.scheduled_at == (queued.run_after or job.created_at)


def test_finished_tasks(sent: list[tuple[str, str]], caplog: pytest.LogCaptureFixture) -> None:
    """A worker runs tasks, async and not, and their results have the value, the times, the worker
    and one attempt. Signals and Django's log show the course."""
    caplog.set_level(logging.DEBUG)
    Order.objects.create(number=1)
    queued = [
        (tasks.add.enqueue(1, right=2), 3),
        (tasks.count_orders.enqueue(), {"orders": 1, "tuple": [1, 2]}),
        (tasks.get_context.enqueue("word"), None),
    ]
    assert sent == [("enqueued", READY)] * 3
    work_all()
    for result, value in queued:
        assert result.status == READY
        result.refresh()
        assert (result.status, result.is_finished, result.attempts) == (SUCCESSFUL, True, 1)
        assert result.enqueued_at <= result.started_at <= result.finished_at
        assert result.last_attempted_at == result.started_at
        expected = value or [result.id, 1, "RUNNING", "word", True]
        assert result.return_value == expected
        assert len(result.worker_ids) == 1
        assert result.errors == []
        lines = [line for line in caplog.messages if f"id={result.id} " in line]
        assert [
            word for line in lines for word in ("enqueued", "RUNNING", "SUCCESSFUL") if word in line
        ] == [
            "enqueued",
            "RUNNING",
            "SUCCESSFUL",
        ]
    assert sorted(sent[3:]) == [("finished", SUCCESSFUL)] * 3 + [("started", RUNNING)] * 3


def test_failed_tasks(sent: list[tuple[str, str]]) -> None:
    """A failing task is ready again until its last attempt. Its errors have the classes and the
    tracebacks of all attempts. Only the last attempt is the end."""
    results = [
        (tasks.fail.enqueue("ValueError"), ValueError, "ValueError: this is a ValueError\n"),
        (tasks.fail.enqueue("SystemExit"), SystemExit, "SystemExit: this is a SystemExit\n"),
        (tasks.fail_async.enqueue(), ValueError, "ValueError: inner\n"),
    ]
    work_all()
    for result, error_class, text in results:
        result.refresh()
        assert (result.status, result.attempts, result.finished_at) == (READY, 1, None)
        assert result.errors[0].exception_class is error_class
        assert result.errors[0].traceback.endswith(text)
        assert "task_runs.py" not in result.errors[0].traceback
    assert "finished" not in dict(sent)
    started_at = results[0][0].started_at
    for result, *_ in results:
        riverpy.django.client().job_retry(int(result.id))
    work_all()
    for result, error_class, text in results:
        result.refresh()
        assert (result.status, result.attempts, len(result.errors)) == (FAILED, 2, 2)
        assert [error.exception_class for error in result.errors] == [error_class] * 2
        assert all(error.traceback.endswith(text) for error in result.errors)
        with pytest.raises(ValueError, match="Task failed"):
            _ = result.return_value
    first = results[0][0]
    assert (first.started_at, first.last_attempted_at > started_at) == (started_at, True)
    assert sent.count(("finished", FAILED)) == 3


def test_errors_of_the_worker() -> None:
    """An error that riverpy has stored itself has the class at the start of its text, or else
    `Exception`."""
    result = tasks.add.enqueue(1)
    with connection.cursor() as cursor:
        for text in ("TimeoutError: too long", "stuck in a dead worker", "open: x"):
            entry = json.dumps({"at": "2026-01-01T00:00:00Z", "attempt": 1, "error": text})
            cursor.execute("update river_job set errors = errors || %s::jsonb", [entry])
    result.refresh()
    classes = [error.exception_class for error in result.errors]
    assert classes == [TimeoutError, Exception, Exception]
    assert result.errors[0].traceback == "TimeoutError: too long\n"


def test_value_that_is_not_json() -> None:
    """A task whose value cannot be stored fails at once. It has run, so it does not run again."""
    expected = {"object": (TypeError, "Unsupported type"), "nan": (ArgsError, "has no JSON form")}
    results = {name: tasks.return_object.enqueue(name) for name in expected}
    work_all()
    for name, (error_class, text) in expected.items():
        result = results[name]
        result.refresh()
        assert (result.status, result.attempts, result._return_value) == (FAILED, 1, None)
        assert result.errors[0].exception_class is error_class
        assert text in result.errors[0].traceback


def test_async_calls() -> None:
    """The methods for async code do the same."""

    async def run() -> None:
        result = await tasks.add.aenqueue(1)
        assert await tasks.add.aget_result(result.id) == result
        await result.arefresh()
        assert result.status == READY
        with pytest.raises(TaskResultDoesNotExist):
            await backend.aget_result("123456")
        with pytest.raises(TaskResultMismatch):
            await tasks.fail.aget_result(result.id)
        with pytest.raises(TypeError, match="Unsupported type"):
            await tasks.add.aenqueue(datetime.now(UTC))
        with pytest.raises(TransactionError, match=r"use `await task\.aenqueue"):
            tasks.add.enqueue(1)

    asyncio.run(run())


def test_transactions() -> None:
    """A task is enqueued with the commit, and not at all after a rollback."""
    with transaction.atomic():
        kept = tasks.add.enqueue(1)
        with suppress(ZeroDivisionError), transaction.atomic():
            lost = tasks.add.enqueue(2)
            raise ZeroDivisionError
    assert tasks.add.get_result(kept.id) == kept
    with pytest.raises(TaskResultDoesNotExist):
        backend.get_result(lost.id)


def test_results_that_do_not_exist() -> None:
    """Other ids, jobs that are no tasks, tasks of another backend, and rows that name other code
    have no result. The module that such a row names is not imported."""
    client = riverpy.django.client()
    metadata = riverpy.InsertOpts(metadata={"riverpy:django": {"backend": "default"}})
    rows = [
        client.insert(RawArgs("pack", "{}")).job.id,
        client.insert(RawArgs("django:tests.django.shop.tasks.add", "{}")).job.id,
        client.insert(RawArgs("django:antigravity.fly", "{}"), metadata).job.id,
        tasks.add.using(backend="other").enqueue(1).id,
        client.insert(RawArgs("django:tests.django.shop.tasks.renamed", "{}"), metadata).job.id,
        client.insert(RawArgs("django:tests.django.shop.tasks.not_a_task", "{}"), metadata).job.id,
    ]
    for result_id in (*rows, "123456", "-1", "x", "", "²", 2**80):
        with pytest.raises(TaskResultDoesNotExist):
            backend.get_result(result_id)
    assert "antigravity" not in sys.modules
    with pytest.raises(Exception, match=r"shop\.tasks\.not_a_task is no task"):
        find_task("tests.django.shop.tasks.not_a_task")


@task(backend="other")
def misplaced() -> None:
    """A task in a module that workers do not read."""


def test_invalid_tasks() -> None:
    """Tasks and queues that jobs or workers cannot have are refused, with the way out."""
    for change, match in (
        ({"queue_name": "unknown"}, "is not valid for backend"),
        ({"queue_name": "Mail", "backend": "other"}, "a queue name must have lower-case"),
        ({"priority": 101}, "priority must be a whole number"),
        ({"run_after": datetime(2026, 1, 1)}, "aware datetime"),
    ):
        with pytest.raises(InvalidTask, match=match):
            tasks.add.using(**change).enqueue(1)
    with pytest.raises(InvalidTask, match="add its module to TASKS"):
        misplaced.enqueue()
    with pytest.raises(TypeError, match="Unsupported type"):
        tasks.add.enqueue(object())
    with pytest.raises(TypeError, match="Unsupported type"):
        tasks.add.enqueue(right=[{1}])
    for value, match in ((float("nan"), "has no JSON form"), ("\ud800", "surrogate U\\+D800")):
        with pytest.raises(ArgsError, match=match):
            tasks.add.enqueue(value)
    with connection.cursor() as cursor:
        cursor.execute("select count(*) from river_job")
        assert cursor.fetchone() == (0,)


def test_backend() -> None:
    """The backend supports all that Django knows. Its check finds a missing app and wrong names of
    queues, and wrong options are refused."""
    assert (backend.supports_defer, backend.supports_async_task) == (True, True)
    assert (backend.supports_get_result, backend.supports_priority) == (True, True)
    assert list(backend.check()) == []
    assert [to_river_priority(number) for number in (100, 51, 49, 0, -1, -49, -51, -100)] == [
        1,
        1,
        2,
        2,
        3,
        3,
        4,
        4,
    ]
    wrong = RiverpyBackend("x", {"QUEUES": ["Mail"]})
    with override_settings(INSTALLED_APPS=[]):
        assert [error.id for error in wrong.check()] == ["riverpy.E004", "riverpy.E005"]
    with pytest.raises(ImproperlyConfigured, match="OPTIONS"):
        _ = RiverpyBackend("x", {"OPTIONS": {"MODULE": []}}).task_options
