"""Requests of one language's client about jobs and queues reach the other language by notification.
No worker polls within the time that a test waits."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, ClassVar

import msgspec
import pytest
from structlog.testing import capture_logs

from riverpy import Client, Config, EventKind, InsertOpts, Job, QueueConfig, RawArgs
from riverpy._work.reconciler import Reconciler

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.interop.river_go import GoProcess, RiverGo
    from tests.work.rig import Rig

GO_FLAGS = ("--queues", "go:5", "--fetch-poll-interval", "1h")
"""A worker in Go that listens, or one that does nothing."""
QUEUES = {"python": QueueConfig(max_workers=5)}


class Wait(msgspec.Struct, frozen=True):
    """A job that waits to be cancelled, or for the test to let it end."""

    kind: ClassVar[str] = "wait"
    reports_progress: bool = False


class Waiting:
    """Jobs that wait."""

    def __init__(self, rig: Rig) -> None:
        self.may_end = asyncio.Event()

        @rig.job(args=Wait)
        async def wait(job: Job[Wait]) -> None:
            if job.args.reports_progress:
                job.set_metadata("progress", 0.5)
            await self.may_end.wait()


@pytest.fixture
def waiting(rig: Rig) -> Waiting:
    """Jobs of this test that wait."""
    return Waiting(rig)


@pytest.fixture(autouse=True)
def nobody_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python learns of pauses and cancels only by notification."""

    async def nothing(_: Reconciler) -> None:
        pass

    monkeypatch.setattr(Reconciler, "_check_paused_queues", nothing)
    monkeypatch.setattr(Reconciler, "_check_cancelled_jobs", nothing)


@pytest.fixture
def reached(record_property: Callable[[str, object], None]) -> Callable[[str, float], None]:
    """Record the milliseconds from the request to its effect."""

    def note(what: str, seconds: float) -> None:
        record_property(what, round(seconds * 1000, 1))
        print(f"{what}: {seconds * 1000:.1f} ms")

    return note


def inserter(rig: Rig) -> Client:
    """A Python client that works no jobs."""
    return Client(rig.url, config=Config(schema=rig.schema.name))


def for_go(**args: object) -> tuple[RawArgs, InsertOpts]:
    """Insert parameters of a job that a worker in Go works."""
    return RawArgs("sleep", json.dumps(args)), InsertOpts(queue="go")


# -- pause and resume


@pytest.mark.parametrize("name", ["python", "*"])
async def test_go_pauses_what_python_works(
    rig: Rig, go: RiverGo, waiting: Waiting, name: str, reached: Callable[[str, float], None]
) -> None:
    """Python claims nothing from a queue between a pause and a resume by Go."""
    waiting.may_end.set()
    async with rig.working(queues=QUEUES) as client:
        await go.run("pause", name)
        assert (await rig.event()).kind == EventKind.QUEUE_PAUSED
        await noted_pause(rig, "python", reached, "Go pauses in Python")
        job = (await client.insert(Wait(), InsertOpts(queue="python"))).job
        await go.run("resume", name)
        assert (await rig.event()).kind == EventKind.QUEUE_RESUMED
        assert (await rig.event()).kind == EventKind.JOB_COMPLETED
    await claimed_after_resume(rig, job.id, "python")


@pytest.mark.parametrize("name", ["go", "*"])
async def test_python_pauses_what_go_works(
    rig: Rig, go: RiverGo, name: str, reached: Callable[[str, float], None]
) -> None:
    """Go claims nothing from a queue between a pause and a resume by Python."""
    async with go.worker(*GO_FLAGS) as worker, inserter(rig) as client:
        await client.queue_pause(name)
        await worker.until("queue_paused")
        await noted_pause(rig, "go", reached, "Python pauses in Go")
        job = (await client.insert(*for_go())).job
        await client.queue_resume(name)
        await worker.until("queue_resumed")
        await worker.until("job_completed", id=job.id)
    await claimed_after_resume(rig, job.id, "go")


async def noted_pause(
    rig: Rig, queue: str, reached: Callable[[str, float], None], what: str
) -> None:
    age = await rig.schema.fetchval(
        "SELECT extract(epoch FROM now() - paused_at)::float8 FROM river_queue WHERE name = $1",
        queue,
    )
    reached(what, age)


async def claimed_after_resume(rig: Rig, job_id: int, queue: str) -> None:
    assert await rig.schema.fetchval(
        "SELECT attempted_at >= updated_at FROM river_job, river_queue WHERE id = $1 AND name = $2",
        job_id,
        queue,
    )


async def test_pause_before_the_start(rig: Rig, go: RiverGo, waiting: Waiting) -> None:
    """A worker that starts finds an earlier pause of the other language."""
    waiting.may_end.set()
    async with rig.working(queues=QUEUES):
        pass
    await go.run("pause", "python")
    async with rig.working(queues=QUEUES) as client:
        assert (await rig.event()).kind == EventKind.QUEUE_PAUSED
        await client.queue_resume("python")
        assert (await rig.event()).kind == EventKind.QUEUE_RESUMED
        async with go.worker(*GO_FLAGS):
            pass
        await client.queue_pause("go")
        async with go.worker(*GO_FLAGS) as worker:
            job = (await client.insert(*for_go())).job
            await go.run("resume", "go")
            await worker.until("job_completed", id=job.id)
    await claimed_after_resume(rig, job.id, "go")


# -- metadata


async def test_metadata_of_a_queue(rig: Rig, go: RiverGo, waiting: Waiting) -> None:
    """Python's workers keep the metadata that Go writes to a queue, continue to work, and log
    nothing."""
    waiting.may_end.set()
    with capture_logs() as log:
        async with rig.working(queues=QUEUES) as client:
            await go.run("queue-metadata", "python", '{"owner": {"name": "é"}, "limit": 5}')
            await client.insert(Wait(), InsertOpts(queue="python"))
            assert (await rig.event()).kind == EventKind.JOB_COMPLETED
        async with rig.working(queues=QUEUES):
            pass
    (queue,) = [one for one in await go.run("queues") if one["name"] == "python"]
    assert json.loads(queue["metadata"]) == {"owner": {"name": "é"}, "limit": 5}
    assert [entry for entry in log if entry["log_level"] in {"warning", "error"}] == []


async def test_output_that_go_writes(rig: Rig, go: RiverGo, waiting: Waiting) -> None:
    """A Python reader finds at once the output that Go writes while the job runs in Python. It
    stays when the job ends, beside what the job has recorded."""
    async with rig.working(queues=QUEUES) as client:
        args = Wait(reports_progress=True)
        job = (await client.insert(args, InsertOpts(queue="python"))).job
        await rig.until_state("running")
        await go.run("job-output", job.id, '{"from": "go"}')
        assert (await client.job_get(job.id)).output == {"from": "go"}
        waiting.may_end.set()
        assert (await rig.event()).kind == EventKind.JOB_COMPLETED
    (row,) = await go.run("list")
    assert json.loads(row["metadata"]) == {"output": {"from": "go"}, "progress": 0.5}


async def test_go_reads_what_python_changes(rig: Rig, go: RiverGo) -> None:
    """Go finds the metadata that Python writes to a queue, and the output that it writes to a job.
    Go's worker is notified of the metadata and continues."""
    async with go.worker(*GO_FLAGS) as worker, inserter(rig) as client:
        job = (await client.insert(*for_go(ms=60_000))).job
        await worker.until("job_started", id=job.id)
        await client.queue_update("go", metadata={"owner": {"name": "é"}, "limit": 5})
        await client.job_update(job.id, output={"from": ["python", None]})
        (queue,) = [one for one in await go.run("queues") if one["name"] == "go"]
        (row,) = await go.run("list")
        assert json.loads(queue["metadata"]) == {"owner": {"name": "é"}, "limit": 5}
        assert json.loads(row["metadata"]) == {"output": {"from": ["python", None]}}
        await client.job_cancel(job.id)
        await worker.until("job_cancelled", id=job.id)


async def test_notified_of_inserts(
    rig: Rig, go: RiverGo, waiting: Waiting, reached: Callable[[str, float], None]
) -> None:
    """An idle worker of one language is notified of inserts by the other."""
    waiting.may_end.set()
    async with go.worker(*GO_FLAGS) as worker, rig.working(queues=QUEUES) as client:
        await insert_there_and_back(rig, go, worker, client)
    rows = await rig.schema.fetch(
        "SELECT queue, extract(epoch FROM attempted_at - scheduled_at)::float8 AS waited"
        " FROM river_job"
    )
    for row in rows:
        reached(f"insert reaches {row['queue']}", row["waited"])


async def insert_there_and_back(rig: Rig, go: RiverGo, worker: GoProcess, client: Client) -> None:
    job = (await client.insert(*for_go())).job
    await worker.until("job_completed", id=job.id)
    await go.run("insert", requests=[{"kind": "wait", "args": {}, "opts": {"queue": "python"}}])
    assert (await rig.event()).kind == EventKind.JOB_COMPLETED
