"""Jobs that riverpy replaces while they wait, and jobs that expire, beside workers in Go."""

from __future__ import annotations

import asyncio
import itertools
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from riverpy import InsertResult, JobState, ReplaceOpts
from tests.interop.conform import conform
from tests.interop.inserting import params_of
from tests.work.rig import errors_of, metadata_of

if TYPE_CHECKING:
    from riverpy import Client
    from tests.interop.callers import Caller
    from tests.interop.working import Fleet
    from tests.work.rig import Rig

    Callers = dict[str, Caller]

BY_QUEUE = {"by_queue": True}
"""Unique options that do not depend on the args."""
RACING_QUEUES = [f"race-{number}" for number in range(8)]
AT_ONCE = timedelta(microseconds=1)
"""A job that expires before any worker can claim it."""


async def replace(client: Client, message: str, **opts: Any) -> InsertResult:
    """Insert a job that replaces a waiting job of the same queue."""
    params = params_of(conform(message=message, unique=BY_QUEUE, replace=ReplaceOpts(), **opts))
    return await client.insert(params.args, params.opts)


async def test_go_runs_the_new_args(callers: Callers, fleet: Fleet, rig: Rig) -> None:
    """A worker in Go runs a job that riverpy has replaced once, with the new args, whichever
    language has inserted it. The replacement notifies the worker. An insert in Go still finds the
    duplicate."""
    queues = {"go": "by-go", "python": "by-python"}
    async with (
        rig.client(skip_unknown_job_check=True) as client,
        fleet.worker("go", queues=dict.fromkeys(queues.values(), 5)) as worker,
    ):
        for language, queue in queues.items():
            options: dict[str, Any] = {"queue": queue, "unique": BY_QUEUE}
            old = conform(message="old", scheduled_at="2100-01-31T18:00:00Z", **options)
            job = await callers[language].insert(old)
            replaced = await replace(client, "new", queue=queue)
            assert (replaced.is_replaced, replaced.job.id) == (True, job["id"])
            started = await worker.until("job_started", id=job["id"])
            assert (started["message"], started["attempt"]) == ("new", 1)
            await worker.until("job_completed", id=job["id"])
            other = conform(message="other", **options)
            ((found, is_duplicate),) = await callers["go"].insert_unique(other)
            assert (found["id"], is_duplicate) == (job["id"], True)
    assert await rig.states() == {"completed": 2}


async def test_a_job_that_go_has_claimed_is_not_changed(
    callers: Callers, fleet: Fleet, rig: Rig
) -> None:
    """A job that Go has claimed keeps its row: riverpy reports that it is running and changes
    nothing. The same holds when the job has ended."""
    async with (
        rig.client(skip_unknown_job_check=True) as client,
        fleet.worker("go") as worker,
    ):
        job = await callers["go"].insert(conform("signal", message="go", unique=BY_QUEUE))
        await worker.until("job_started", id=job["id"])
        before = await rig.row(job["id"])
        for priority in (1, 4):
            result = await replace(client, "new", priority=priority)
            assert (result.is_replaced, result.job.state) == (False, JobState.RUNNING)
        assert await rig.row(job["id"]) == before
        worker.release("go")
        await worker.until("job_completed", id=job["id"])
        result = await replace(client, "new")
        assert (result.is_replaced, result.job.state) == (False, JobState.COMPLETED)
    assert (await rig.row(job["id"]))["args"] == before["args"]
    assert await rig.states() == {"completed": 1}


async def test_claims_of_go_during_replacements(callers: Callers, fleet: Fleet, rig: Rig) -> None:
    """While riverpy replaces waiting jobs, a worker in Go begins to claim them. Each job runs once,
    with the args of the last insert that reported a replacement."""
    newest: dict[int, str] = {}
    replaced = asyncio.Event()

    async def replace_until_claimed(client: Client, queue: str) -> None:
        for number in itertools.count():
            result = await replace(client, f"{queue} {number}", queue=queue)
            if number and not result.is_replaced:
                return
            newest[result.job.id] = f"{queue} {number}"
            if number and len(newest) == len(RACING_QUEUES):
                replaced.set()

    async with (
        rig.client(skip_unknown_job_check=True) as client,
        fleet.worker("go", queues=dict.fromkeys(RACING_QUEUES, 2)) as worker,
        asyncio.TaskGroup() as tasks,
    ):
        await callers["python"].pause("*")
        for queue in RACING_QUEUES:
            await worker.until("queue_paused", queue=queue)
        for queue in RACING_QUEUES:
            tasks.create_task(replace_until_claimed(client, queue))
        await replaced.wait()
        await callers["python"].resume("*")
        started = [await worker.until("job_started") for _ in RACING_QUEUES]
    assert {line["id"]: line["message"] for line in started} == newest
    assert (await rig.states()).keys() <= {"running", "completed"}
    assert len(newest) == len(RACING_QUEUES) == sum((await rig.states()).values())


async def test_go_runs_an_expired_job_that_waits(callers: Callers, fleet: Fleet, rig: Rig) -> None:
    """A worker in Go does not know `expires_in`: it runs an expired job that is not cancelled yet,
    and its retries. A worker in Python cancels the job at the next claim."""
    failing = conform("fail", message="late", expires_in=AT_ONCE)
    async with fleet.worker("go", poll=0.1) as worker:
        job = await callers["python"].insert(conform(expires_in=AT_ONCE))
        await worker.until("job_completed", id=job["id"])
        assert "riverpy:expires_at" in metadata_of(await rig.row(job["id"]))
        job = await callers["python"].insert(failing)
        for attempt in (1, 2):
            await worker.until("job_started", id=job["id"], attempt=attempt)
            await worker.until("job_failed", id=job["id"])
            if attempt == 1:
                await callers["go"].retry(job["id"])
    await callers["go"].retry(job["id"])
    async with fleet.worker("python"):
        await rig.until_state("cancelled")
    texts = [error["error"] for error in errors_of(await rig.row(job["id"]))]
    assert texts == ["late", "late", "JobCancelError: expired"]


async def test_go_never_runs_a_cancelled_expired_job(
    callers: Callers, fleet: Fleet, rig: Rig
) -> None:
    """An expired job that a leader in Python has cancelled is not run by Go. A retry in Go keeps
    the time at which the job expires, and `job_retry` removes it."""
    expired = conform(message="late", expires_in=AT_ONCE)
    jobs = [await callers["python"].insert(expired) for _ in range(2)]
    async with fleet.worker("python", queues={"other": 1}, candidate=True):
        await rig.until_state("cancelled", 2)
    async with fleet.worker("go") as worker:
        marker = await callers["python"].insert(conform(message="marker"))
        assert (await worker.until("job_started"))["id"] == marker["id"]
        await worker.until("job_completed", id=marker["id"])
        row = await callers["go"].get(jobs[0]["id"])
        assert row["state"] == "cancelled"
        assert [error.error for error in row["errors"]] == ["JobCancelError: expired"]
        for job, language in zip(jobs, ("go", "python"), strict=True):
            await callers[language].retry(job["id"])
            keeps = "riverpy:expires_at" in metadata_of(await rig.row(job["id"]))
            assert keeps is (language == "go")
