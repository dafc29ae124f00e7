"""Timeouts of the client, of a worker and of a job, and code with timeouts of its own."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import msgspec
import pytest
from msgspec import UNSET

import riverpy
from riverpy import EventKind, Job, Worker
from riverpy.worker import Workers
from tests.work.rig import Task, errors_of

if TYPE_CHECKING:
    from tests.work.rig import Rig

SHORT = timedelta(milliseconds=30)
FOREVER = 3600


async def test_timeout_of_the_client(rig: Rig) -> None:
    """A job that exceeds the client's timeout is cancelled, and fails with a text that names the
    client's timeout."""
    cancelled: list[bool] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        try:
            await asyncio.sleep(FOREVER)
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # clean-up may await
            cancelled.append(True)
            raise

    row = await rig.run_one(job_timeout=SHORT)
    (entry,) = errors_of(row)
    assert entry["error"].startswith(
        "TimeoutError: job exceeded its timeout of 0.03 s (the client's job_timeout"
    )
    assert "in work" in entry["trace"]
    assert entry["trace"].rstrip().endswith(entry["error"])
    assert (row["state"], row["attempt"], cancelled) == ("available", 1, [True])
    assert rig.last.event.kind is EventKind.JOB_FAILED


class Once(msgspec.Struct):
    """Args of the class worker below."""

    kind: ClassVar[str] = "once"
    milliseconds: int


class OnceWorker(Worker[Once]):
    """The timeout is in the args: 0 for the client's, negative for none."""

    async def work(self, job: Job[Once]) -> None:
        await asyncio.sleep(0.15 if job.args.milliseconds < 0 else FOREVER)

    def timeout(self, job: Job[Once]) -> Any:
        if job.args.milliseconds == 0:
            return UNSET
        if job.args.milliseconds == 77:
            return 77
        if job.args.milliseconds < 0:
            return None
        return timedelta(milliseconds=job.args.milliseconds)


async def test_precedence(rig: Rig) -> None:
    """A job's own timeout overrides the worker's, and that the client's. None means no timeout."""

    @rig.job(timeout=timedelta(milliseconds=20))
    async def work(job: Job[Task]) -> None:
        await asyncio.sleep(FOREVER)

    rig.workers.add(OnceWorker())
    args = [Task(), Once(30), Once(0), Once(-1), Once(77)]
    rows = await rig.work_in_order(*args, job_timeout=timedelta(milliseconds=40))
    texts = [errors_of(row)[0]["error"] if row["errors"] else row["state"] for row in rows]
    assert texts[0] == "TimeoutError: job exceeded its timeout of 0.02 s"
    assert texts[1] == "TimeoutError: job exceeded its timeout of 0.03 s"
    assert texts[2].startswith("TimeoutError: job exceeded its timeout of 0.04 s (the client's")
    assert texts[3] == "completed"
    assert "timeout of job kind 'once' must be a timedelta above zero" in texts[4]


async def test_no_timeout_at_all(rig: Rig) -> None:
    """With `job_timeout=None` there is no timeout."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        await asyncio.sleep(0.05)

    assert (await rig.run_one(job_timeout=None))["state"] == "completed"


@pytest.mark.parametrize("timeout", [30, timedelta(0), timedelta(seconds=-1), "1m"])
def test_timeouts_that_are_refused(timeout: Any) -> None:
    """A timeout that is not a timedelta above zero is refused at the registration of the worker."""

    async def work(job: Job[Task]) -> None: ...

    with pytest.raises(riverpy.ConfigError, match="timedelta above zero"):
        Workers().job(timeout=timeout)(work)


async def test_late_deadline_does_not_hide_an_early_one(rig: Rig) -> None:
    """A job with a short timeout that starts after one with a long timeout is stopped in time. Jobs
    without timeouts keep running."""
    release = asyncio.Event()

    @rig.job
    async def task(job: Job[Task]) -> None:
        await release.wait()

    rig.workers.add(OnceWorker())
    async with rig.working(job_timeout=timedelta(hours=1)) as client:
        await client.insert(Task())
        await client.insert(Once(60_000))
        await client.insert(Once(20))
        event = await rig.event()
        assert event.job is not None
        assert event.job.encoded_args == '{"milliseconds": 20}'
        await client.insert(Once(25))
        assert (await rig.event()).kind is EventKind.JOB_FAILED
        release.set()
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED
        client.stop_and_cancel()


async def test_swallowed_cancellation(rig: Rig) -> None:
    """A job that catches the cancellation and returns has completed. One that raises its own error
    then has failed with that."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        try:
            await asyncio.sleep(FOREVER)
        except asyncio.CancelledError:
            if job.args.n == 1:
                raise ValueError("was cut") from None

    rows = await rig.work_in_order(Task(n=0), Task(n=1), job_timeout=SHORT)
    assert [row["state"] for row in rows] == ["completed", "available"]
    assert errors_of(rows[1])[0]["error"] == "ValueError: was cut"


async def test_own_timeout_is_not_the_jobs(rig: Rig) -> None:
    """A TimeoutError of the job's own code is not reported as the job timeout (SC-17)."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        match job.args.n:
            case 0:
                async with asyncio.timeout(0.01):
                    await asyncio.sleep(FOREVER)
            case 1:
                with anyio.fail_after(0.01):
                    await anyio.sleep(FOREVER)
            case 2:
                await asyncio.wait_for(asyncio.Event().wait(), 0.01)
            case 3:
                with anyio.move_on_after(0.01):
                    await anyio.sleep(FOREVER)
            case 4:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(asyncio.sleep(0))
                    tasks.create_task(failing())
            case _:
                async with anyio.create_task_group() as group:
                    group.start_soon(failing)

    async def failing() -> None:
        await asyncio.sleep(0)
        raise OSError("of a child")

    rows = await rig.work_in_order(*(Task(n=n) for n in range(6)))
    assert [row["state"] for row in rows] == ["available"] * 3 + ["completed"] + ["available"] * 2
    texts = [errors_of(row)[0]["error"] for row in rows if row["errors"]]
    assert not any("exceeded its timeout" in text for text in texts)
    assert texts[3] == "OSError: of a child"


@pytest.mark.parametrize("style", ["asyncio", "anyio", "wait_for", "shielded"])
async def test_timeout_reaches_into_scopes(rig: Rig, style: str) -> None:
    """The job timeout also ends code inside the job's own scopes and groups, and is reported as the
    job timeout."""

    async def child() -> None:
        await asyncio.sleep(FOREVER)

    @rig.job
    async def work(job: Job[Task]) -> None:
        match style:
            case "asyncio":
                async with asyncio.timeout(FOREVER), asyncio.TaskGroup() as tasks:
                    tasks.create_task(child())
            case "anyio":
                with anyio.fail_after(FOREVER):
                    async with anyio.create_task_group() as group:
                        group.start_soon(child)
            case "wait_for":
                await asyncio.wait_for(child(), FOREVER)
            case _:
                await asyncio.shield(asyncio.sleep(FOREVER))

    before = asyncio.all_tasks()
    row = await rig.run_one(job_timeout=SHORT)
    assert errors_of(row)[0]["error"].startswith("TimeoutError: job exceeded its timeout of 0.03 s")
    left = {task for task in asyncio.all_tasks() - before if "sleep" not in repr(task)}
    assert not left


async def test_cancelled_in_nested_groups(rig: Rig) -> None:
    """Jobs in nested groups with a failing child, or in a timeout of zero, at the moment of the
    cancel are cancelled, 200 times (SC-16)."""
    started: asyncio.Queue[int] = asyncio.Queue()
    let_fail = asyncio.Event()

    async def failing() -> None:
        await let_fail.wait()
        raise OSError("child")

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.args.n % 2:
            async with asyncio.TaskGroup() as outer:
                outer.create_task(asyncio.sleep(FOREVER))
                async with asyncio.TaskGroup() as inner:
                    inner.create_task(failing())
                    started.put_nowait(job.id)
                    await asyncio.sleep(FOREVER)
        else:
            started.put_nowait(job.id)
            await let_fail.wait()
            async with asyncio.timeout(0):
                await asyncio.sleep(FOREVER)

    await rig.insert_rows(200)
    async with rig.working(slots=200) as client:
        ids = [await started.get() for _ in range(200)]
        assert client._run is not None
        let_fail.set()
        for job_id in ids:
            client._run.running_attempts.cancel_job(job_id, "default")
        events = await rig.take(200)
    assert {event.kind for event in events} == {EventKind.JOB_CANCELLED}
    assert await rig.states() == {"cancelled": 200}


async def test_time_limit_before_the_first_step(rig: Rig) -> None:
    """If the loop is blocked between the claim and the first step of a job for longer than its
    timeout, the job runs with its full time."""

    @rig.job(timeout=timedelta(hours=1))
    async def work(job: Job[Task]) -> None:
        pass

    async with rig.working() as client:
        run = client._run
        assert run is not None
        launch = run._job_executor.make_and_start_attempts

        def launch_late(rows: Any, free_slot: Any, slots: int) -> list[Any]:
            waiting = launch(rows, free_slot, slots)
            for attempt in run.running_attempts:
                attempt.deadline = 0.0
            run.running_attempts._cancel_attempts_after_deadline()
            assert all(attempt.deadline > time.monotonic() for attempt in run.running_attempts)
            return waiting

        run._job_executor.make_and_start_attempts = launch_late  # type: ignore[method-assign]
        await client.insert(Task())
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED


async def test_time_limit_of_a_late_first_step(rig: Rig) -> None:
    """If the first step of a job comes after its timeout, but before the deadlines are checked, the
    job has its full time too."""

    @rig.job(timeout=timedelta(hours=1))
    async def work(job: Job[Task]) -> None:
        run.running_attempts._cancel_attempts_after_deadline()
        await asyncio.sleep(0)

    async with rig.working() as client:
        assert client._run is not None
        run = client._run
        launch = run._job_executor.make_and_start_attempts

        def launch_late(rows: Any, free_slot: Any, slots: int) -> list[Any]:
            waiting = launch(rows, free_slot, slots)
            for attempt in run.running_attempts:
                attempt.deadline = 0.0
            return waiting

        run._job_executor.make_and_start_attempts = launch_late  # type: ignore[method-assign]
        await client.insert(Task())
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED


async def test_cancel_before_the_first_step(rig: Rig) -> None:
    """An attempt that is stopped before its task starts runs no code of the job, and its slot and
    row are free again."""
    called: list[int] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        called.append(job.args.n)

    await rig.insert_rows(1)
    async with rig.working(slots=1) as client:
        run = client._run
        assert run is not None
        await rig.event()
        launch = run._job_executor.make_and_start_attempts

        def launch_and_cancel(rows: Any, free_slot: Any, slots: int) -> list[Any]:
            waiting = launch(rows, free_slot, slots)
            for attempt in run.running_attempts:
                run.running_attempts.cancel_job(attempt.id, attempt.queue)
            return waiting

        run._job_executor.make_and_start_attempts = launch_and_cancel  # type: ignore[method-assign]
        inserted = await client.insert(Task(n=5))
        assert (await rig.event()).kind is EventKind.JOB_CANCELLED
        run._job_executor.make_and_start_attempts = launch  # type: ignore[method-assign]
        await rig.work(client, Task(n=6))
    assert called == [1, 6]
    row = await rig.row(inserted.job.id)
    assert (row["state"], errors_of(row)[0]["error"]) == (
        "cancelled",
        "JobCancelError: job cancelled remotely",
    )
