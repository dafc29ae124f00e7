"""Cancels of jobs that run, drain, or have ended."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import pytest

import riverpy
import riverpy._work.reconciler
from riverpy import EventKind, Job, JobState
from riverpy._log_events import JOB_CANCELLED_AFTER_ITS_ATTEMPT
from riverpy._work.reconciler import Reconciler
from tests.work.rig import PATIENCE, Task, errors_of, metadata_of

if TYPE_CHECKING:
    from tests.work.rig import Rig

FOREVER = 3600


@pytest.fixture
def started(rig: Rig) -> asyncio.Queue[Job[Task]]:
    """Jobs that run until they are cancelled put themselves into this queue."""
    queue: asyncio.Queue[Job[Task]] = asyncio.Queue()

    @rig.job(next_retry=lambda job: timedelta(0))
    async def work(job: Job[Task]) -> None:
        queue.put_nowait(job)
        await asyncio.sleep(FOREVER)

    return queue


async def test_running_job(rig: Rig, started: asyncio.Queue[Job[Task]]) -> None:
    """A running job is cancelled at once, and not retried, also when all slots are busy and the
    poll is minutes away (SC-10)."""
    async with rig.working(slots=1) as client:
        inserted = await client.insert(Task())
        await started.get()
        told = await client.job_cancel(inserted.job.id)
        assert told.state is JobState.RUNNING
        assert (await rig.event()).kind is EventKind.JOB_CANCELLED
    row = await rig.row(inserted.job.id)
    assert (row["state"], row["attempt"]) == ("cancelled", 1)
    assert errors_of(row)[0]["error"] == "JobCancelError: job cancelled remotely"
    assert list(metadata_of(row)) == ["cancel_attempted_at"]


async def test_before_the_answer_to_the_claim(
    rig: Rig, started: asyncio.Queue[Job[Task]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancel that arrives between a claim and its answer cancels the claimed job (SC-10)."""

    async def never(_: Reconciler) -> None:
        pass

    monkeypatch.setattr(Reconciler, "_check_cancelled_jobs", never)
    async with rig.working() as client:
        producer: Any = client._run.producers["default"]  # type: ignore[union-attr]
        take = producer._send_claim

        async def answered_late(*args: Any) -> Any:
            for row in (rows := await take(*args)):
                await client.job_cancel(row[0])
                with anyio.fail_after(PATIENCE):
                    while not producer._ids_cancelled_during_claim:
                        await asyncio.sleep(0.001)
            return rows

        producer._send_claim = answered_late
        inserted = await client.insert(Task())
        assert (await rig.event()).kind is EventKind.JOB_CANCELLED
    assert started.empty()
    assert (await rig.row(inserted.job.id))["state"] == "cancelled"


async def test_another_job_of_the_number(rig: Rig, started: asyncio.Queue[Job[Task]]) -> None:
    """A control message with another queue or an unknown job cancels nothing."""
    async with rig.working(slots=2) as client:
        inserted = await client.insert(Task())
        await started.get()
        channel = f"{rig.schema.name}.river_control"
        for payload in (
            f'{{"action":"cancel","job_id":{inserted.job.id},"queue":"other"}}',
            f'{{"action":"cancel","job_id":{inserted.job.id + 1000},"queue":"default"}}',
            '{"action":"cancel"}',
        ):
            await rig.schema.execute("SELECT pg_notify($1, $2)", channel, payload)
        await client.insert(Task(n=1))
        await started.get()  # earlier messages are handled by now
        assert client._run is not None
        assert len(client._run.running_attempts) == 2
        client.stop_and_cancel()
    assert await rig.states() == {"available": 2}


async def test_while_draining(rig: Rig, started: asyncio.Queue[Job[Task]]) -> None:
    """A job that a stop waits for can still be cancelled. Then the stop ends (SC-08)."""
    async with rig.working(soft_stop_timeout=None) as client:
        inserted = await client.insert(Task())
        await started.get()
        client.stop()
        other = rig.client()
        async with other:
            await other.job_cancel(inserted.job.id)
    assert (await rig.row(inserted.job.id))["state"] == "cancelled"
    assert rig.report is not None
    assert rig.report.is_clean


async def test_after_a_lost_notification(
    rig: Rig, started: asyncio.Queue[Job[Task]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancel whose notification was lost is found in the row."""
    monkeypatch.setattr(riverpy._work.reconciler, "RECONCILE_INTERVAL", 0.05)
    async with rig.working() as client:
        inserted = await client.insert(Task())
        await started.get()
        await rig.schema.execute(
            """UPDATE river_job SET metadata = '{"cancel_attempted_at": "2026-01-01T00:00:00Z"}'"""
        )
        assert (await rig.event()).kind is EventKind.JOB_CANCELLED
    assert (await rig.row(inserted.job.id))["state"] == "cancelled"


async def test_poll_only(
    rig: Rig, started: asyncio.Queue[Job[Task]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without LISTEN a running job is cancelled too, and queues pause and resume. No connection
    ever listens (NR-13)."""
    monkeypatch.setattr(riverpy._work.reconciler, "RECONCILE_INTERVAL_WHEN_POLLING", 0.05)
    soon = timedelta(milliseconds=50)
    began = await rig.schema.fetchval("SELECT clock_timestamp()")
    async with rig.working(poll_only=True, fetch_poll_interval=soon) as client:
        inserted = await client.insert(Task())
        await started.get()
        await client.job_cancel(inserted.job.id)
        assert (await rig.event()).kind is EventKind.JOB_CANCELLED
        await client.queue_pause("default")
        assert (await rig.event()).kind is EventKind.QUEUE_PAUSED
        await client.queue_resume("*")
        assert (await rig.event()).kind is EventKind.QUEUE_RESUMED
        names = await rig.schema.fetch(
            "SELECT application_name FROM pg_stat_activity WHERE application_name ~ '^riverpy'"
            " AND (application_name = 'riverpy listener' OR query ~* 'listen')"
            " AND datname = current_database() AND backend_start > $1",
            began,  # others may still end
        )
        assert names == []
    assert (await rig.row(inserted.job.id))["state"] == "cancelled"


@pytest.mark.parametrize("end", ["fail", "snooze", "fail at last", "return"])
async def test_cancel_without_a_notification(rig: Rig, end: str, log: list[dict[str, Any]]) -> None:
    """If the notification of a cancel never arrives, a job that would be retried is cancelled with
    its error, and this is logged. A job that completed stays completed."""

    @rig.job(next_retry=lambda job: timedelta(0))
    async def work(job: Job[Task]) -> None:
        await rig.schema.execute(
            """UPDATE river_job SET metadata = '{"cancel_attempted_at": "2026-01-01T00:00:00Z"}'"""
        )
        if end.startswith("fail"):
            raise ValueError("after the cancel")
        if end == "snooze":
            raise riverpy.JobSnooze(timedelta(0))

    opts = riverpy.InsertOpts(max_attempts=1 if end == "fail at last" else 5)
    row = await rig.run_one(opts=opts)
    expected = {"return": "completed", "fail at last": "discarded"}.get(end, "cancelled")
    assert row["state"] == expected
    assert row["finalized_at"] is not None
    assert row["attempt"] == 1
    assert len(errors_of(row)) == (1 if end.startswith("fail") else 0)
    assert rig.last.event.job is not None
    assert rig.last.event.job.state == expected
    kind = EventKind.JOB_FAILED if expected == "discarded" else EventKind(f"job_{expected}")
    assert rig.last.event.kind is kind
    told = [entry for entry in log if entry["event"] == JOB_CANCELLED_AFTER_ITS_ATTEMPT]
    assert len(told) == (expected == "cancelled")


async def test_retry_clears_the_mark(rig: Rig) -> None:
    """A cancelled job that is retried by hand is worked to its end: the old cancel mark is gone."""
    runs: list[int] = []

    @rig.job(next_retry=lambda job: timedelta(0))
    async def work(job: Job[Task]) -> None:
        runs.append(job.attempt)
        if len(runs) == 1:
            await asyncio.sleep(FOREVER)
        if len(runs) == 2:
            raise ValueError("would be cancelled by the old mark")

    async with rig.working() as client:
        inserted = await client.insert(Task())
        await rig.until_state("running")
        await client.job_cancel(inserted.job.id)
        await rig.event()
        retried = await client.job_retry(inserted.job.id)
        assert retried.metadata == {}
        client._run.producers["default"].wake()  # type: ignore[union-attr]
        kinds = [event.kind for event in await rig.take(2)]
    assert kinds == [EventKind.JOB_FAILED, EventKind.JOB_COMPLETED]
    assert runs == [1, 2, 3]


async def test_transaction_of_a_cancelled_job(rig: Rig, started: asyncio.Queue[Job[Task]]) -> None:
    """Jobs that are cancelled inside a transaction leave no transaction and no lock behind
    (SC-18)."""
    await rig.schema.execute("CREATE TABLE things (id int PRIMARY KEY)")
    await rig.schema.execute("INSERT INTO things SELECT generate_series(1, 20)")
    rig.workers = riverpy.Workers()
    locked: asyncio.Queue[int] = asyncio.Queue()
    settings = {"search_path": rig.schema.name, "application_name": "the jobs' own"}
    async with asyncpg.create_pool(rig.url, max_size=20, server_settings=settings) as pool:

        @rig.job
        async def work(job: Job[Task]) -> None:
            async with pool.acquire() as connection, connection.transaction():
                await connection.fetch("SELECT id FROM things WHERE id = $1 FOR UPDATE", job.args.n)
                locked.put_nowait(job.id)
                await connection.execute("SELECT pg_sleep(600)")

        await rig.insert_rows(20)
        async with rig.working(slots=20) as client:
            for _ in range(20):
                await client.job_cancel(await locked.get())
            events = await rig.take(20)
        assert {event.kind for event in events} == {EventKind.JOB_CANCELLED}
        await rig.until(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'the jobs'' own'"
            " AND datname = current_database() AND state <> 'idle'",
            0,
        )
        free = await rig.schema.fetch("SELECT id FROM things FOR UPDATE SKIP LOCKED")
        assert len(free) == 20
    await rig.schema.execute("DROP TABLE things")
