"""Handlers that return a value, or return although they were cancelled."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import pytest

import riverpy
from riverpy import EventKind, InsertOpts, Job, Worker, WorkerMiddlewareFunc
from riverpy._log_events import CANCELLED_JOB_COMPLETED
from tests.work.rig import PATIENCE, Task, errors_of, metadata_of

if TYPE_CHECKING:
    from riverpy import Client, JobRow
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


class Invoice(msgspec.Struct):
    """An output with a type."""

    number: int
    paid: bool = False


class OfClassWorker(Worker[OfClass]):
    """Its method returns a Struct."""

    async def work(self, job: Job[OfClass]) -> Invoice:
        return Invoice(job.id)


def run_in_process(job: Job[InProcess]) -> dict[str, int]:
    """Return a value in a process."""
    return {"id": job.id}


async def around(job: Job[Any], do_inner: WorkInner) -> None:
    """Do nothing."""
    await do_inner()


MIDDLEWARE = [WorkerMiddlewareFunc(around)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("middleware", [[], MIDDLEWARE], ids=["plain", "middleware"])
async def test_returned_value(rig: Rig, middleware: list[Any]) -> None:
    """A value that any form of handler returns is the output of the job."""

    @rig.workers.job
    async def plain(job: Job[Task]) -> int | None:
        return job.args.n or None

    @rig.workers.blocking_job
    def run_in_thread(job: Job[InThread]) -> str:
        return "sent"

    @rig.workers.job
    async def nothing(job: Job[Nothing]):  # type: ignore[no-untyped-def]
        pass

    rig.workers.blocking_job(executor="process")(run_in_process)
    rig.workers.add(OfClassWorker())
    args = [Task(0), Task(1), OfClass(), InThread(), InProcess(), Nothing()]
    found: list[JobRow] = []
    for one in args:
        await rig.run_one(one, middleware=middleware)
        found.append(rig.last.job)
    assert [row.metadata.get("output", "none") for row in found] == [
        *("none", 1, {"number": found[2].id, "paid": False}, "sent"),
        *({"id": found[4].id}, "none"),
    ]
    assert riverpy.result(found[2], type=Invoice) == Invoice(found[2].id)
    assert riverpy.result(found[5]) is None


@pytest.mark.parametrize("executor", [None, "thread"])
async def test_recorded_output_wins(rig: Rig, executor: Any) -> None:
    """A returned value, whatever it is, does not replace an output that the code has recorded."""

    def work(job: Job[Task]) -> Any:
        job.record_output("recorded")
        return object()

    async def work_in_task(job: Job[Task]) -> Any:
        job.record_output("recorded")
        return later()

    if executor is None:
        rig.job(work_in_task)
    else:
        rig.job(work, executor=executor)
    row = await rig.run_one()
    assert (row["state"], metadata_of(row)["output"]) == ("completed", "recorded")


async def later() -> None:
    """A coroutine function."""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: {1}, r"output: a set has no order; use a sorted list\. If no code reads"),
        (lambda: {"a": [object()]}, r"\$\.a\[0\]: an instance of object .*; use a dict, a Struct"),
        (lambda: object, "the class object: return an instance"),
        (lambda: float("nan"), "nan has no JSON form; use None"),
        (later, "a coroutine: return what it gives, with `await`"),
        (lambda: (n for n in ()), "a generator: return a list"),
        (lambda: "x" * (32 * 1024 * 1024), "at most 33554432 bytes.*store the data elsewhere"),
    ],
)
@pytest.mark.parametrize("executor", [None, "thread"])
async def test_value_without_json_form(rig: Rig, make: Any, words: str, executor: Any) -> None:
    """An attempt that returns a value without a JSON form fails, and its error says what to
    return. Nothing is stored as the output."""
    if executor is None:

        @rig.job
        async def work(job: Job[Task]) -> Any:
            return make()

    else:

        @rig.job(executor=executor)
        def work_in_thread(job: Job[Task]) -> Any:
            return make()

    row = await rig.run_one(opts=InsertOpts(max_attempts=1))
    (error,) = errors_of(row)
    assert row["state"] == "discarded"
    assert re.match(f"ReturnedValueError: the job returned .*{words}", error["error"])
    assert "output" not in metadata_of(row)


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
    "timeout": "job timeout",
    "stop": "hard stop",
}
"""The ways of `end_by`, and the reasons that are logged. A stop is the last."""


@pytest.mark.parametrize("middleware", [[], MIDDLEWARE], ids=["plain", "middleware"])
@pytest.mark.parametrize("executor", ["task", "thread"])
async def test_completed_although_cancelled(
    rig: Rig, log: list[Any], executor: Literal["task", "thread"], middleware: list[Any]
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
        for job_id, how in enumerate(REASON, start=1):
            started.clear()
            await client.insert(Task())
            async with asyncio.timeout(PATIENCE):
                await started.wait()
            await end_by(how, rig, client, job_id)
            assert (await rig.event()).kind is EventKind.JOB_COMPLETED
    assert await rig.states() == {"completed": len(REASON)}
    entries = [entry for entry in log if entry["event"] == CANCELLED_JOB_COMPLETED]
    for (job_id, reason), entry in zip(enumerate(REASON.values(), start=1), entries, strict=True):
        assert entry["seconds"] >= 0
        assert entry | {"seconds": 0} == {
            "event": CANCELLED_JOB_COMPLETED,
            "log_level": "warning",
            "job_id": job_id,
            "kind": "task",
            "queue": "default",
            "reason": reason,
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
