"""Log events about handlers that return a value, or return although they were cancelled."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import pytest

from riverpy import Job, Worker, WorkerMiddlewareFunc
from riverpy._log_events import CANCELLED_JOB_COMPLETED, JOB_RETURN_VALUE_IGNORED
from tests.work.rig import PATIENCE, Task

if TYPE_CHECKING:
    from riverpy import Client
    from riverpy.middleware import WorkInner
    from tests.work.rig import Rig

FOREVER = 3600


class OfClass(msgspec.Struct):
    kind: ClassVar[str] = "of_class"


class InThread(msgspec.Struct):
    kind: ClassVar[str] = "run_in_thread"


class InProcess(msgspec.Struct):
    kind: ClassVar[str] = "run_in_process"


class Nothing(msgspec.Struct):
    kind: ClassVar[str] = "nothing"


class OfClassWorker(Worker[OfClass]):
    """Its method returns a value without an annotation."""

    async def work(self, job: Job[OfClass]):  # type: ignore[no-untyped-def]
        return [job.id]


def run_in_process(job: Job[InProcess]):  # type: ignore[no-untyped-def]
    """Return a value in a process."""
    return {"id": job.id}


async def around(job: Job[Any], do_inner: WorkInner) -> None:
    """Do nothing."""
    await do_inner()


MIDDLEWARE = [WorkerMiddlewareFunc(around)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("middleware", [[], MIDDLEWARE], ids=["plain", "middleware"])
async def test_returned_value(rig: Rig, log: list[Any], middleware: list[Any]) -> None:
    """A value that any form of handler returns without an annotation is logged once per kind, and
    the job is completed."""

    @rig.workers.job
    async def plain(job: Job[Task]):  # type: ignore[no-untyped-def]
        return job.args.n or None

    @rig.workers.blocking_job
    def run_in_thread(job: Job[InThread]):  # type: ignore[no-untyped-def]
        return "sent"

    @rig.workers.job
    async def nothing(job: Job[Nothing]):  # type: ignore[no-untyped-def]
        pass

    rig.workers.blocking_job(executor="process")(run_in_process)
    rig.workers.add(OfClassWorker())
    args = [Task(0), *[Task(n) for n in (1, 2)], OfClass(), InThread(), InProcess(), Nothing()]
    async with rig.working(middleware=middleware) as client:
        rows = await rig.work(client, *args, *args)
    assert {row["state"] for row in rows} == {"completed"}
    entries = [entry for entry in log if entry["event"] == JOB_RETURN_VALUE_IGNORED]
    assert {(entry["kind"], entry["type"]) for entry in entries} == {
        ("task", "int"),
        ("of_class", "list"),
        ("run_in_thread", "str"),
        ("run_in_process", "dict"),
    }
    assert len(entries) == 4
    assert {entry["log_level"] for entry in entries} == {"warning"}


async def end_by(how: str, rig: Rig, client: Client, job_id: int) -> None:
    """Cancel the running job in one way."""
    if how == "cancel":
        await client.job_cancel(job_id)
    elif how == "stop":
        client.stop_and_cancel()
    else:
        assert client._run is not None
        for attempt in client._run.running_attempts:
            attempt.timeout, attempt.deadline = 0.0, time.monotonic()
            client._run.running_attempts.schedule_deadline_check(attempt.deadline)


REASON = {
    "cancel": "job cancelled remotely",
    "stop": "hard stop",
    "timeout": "job timeout",
}


@pytest.mark.parametrize("middleware", [[], MIDDLEWARE], ids=["plain", "middleware"])
@pytest.mark.parametrize("executor", ["task", "thread"])
@pytest.mark.parametrize("how", REASON)
async def test_completed_although_cancelled(
    rig: Rig,
    log: list[Any],
    how: str,
    executor: Literal["task", "thread"],
    middleware: list[Any],
) -> None:
    """A job that returns normally after its cancellation is completed, and this is logged."""
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    if executor == "task":

        @rig.job(timeout=None)
        async def work(job: Job[Task]) -> None:
            started.set()
            try:
                await asyncio.sleep(FOREVER)
            except asyncio.CancelledError:
                return

    else:

        @rig.job(timeout=None, executor="thread")
        def work_in_thread(job: Job[Task]) -> None:
            loop.call_soon_threadsafe(started.set)
            assert job.cancelled.wait(PATIENCE)

    async with rig.working(middleware=middleware) as client:
        job_id = (await client.insert(Task())).job.id
        async with asyncio.timeout(PATIENCE):
            await started.wait()
        await end_by(how, rig, client, job_id)
        await rig.event()
    assert (await rig.row(job_id))["state"] == "completed"
    (entry,) = [entry for entry in log if entry["event"] == CANCELLED_JOB_COMPLETED]
    assert entry["seconds"] >= 0
    assert entry | {"seconds": 0} == {
        "event": CANCELLED_JOB_COMPLETED,
        "log_level": "warning",
        "job_id": job_id,
        "kind": "task",
        "queue": "default",
        "reason": REASON[how],
        "seconds": 0,
    }


async def test_many_completed_although_cancelled(rig: Rig, log: list[Any]) -> None:
    """Of many such jobs ten are logged as warnings."""
    count = 12

    @rig.job(timeout=timedelta(milliseconds=10))
    async def work(job: Job[Task]) -> None:
        try:
            await asyncio.sleep(FOREVER)
        except asyncio.CancelledError:
            return

    async with rig.working() as client:
        await rig.work(client, *[Task(n) for n in range(count)])
    levels = Counter(
        entry["log_level"] for entry in log if entry["event"] == CANCELLED_JOB_COMPLETED
    )
    assert levels == {"warning": 10, "debug": count - 10}
