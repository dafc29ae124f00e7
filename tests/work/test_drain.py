"""Runs that end by themselves when the queues are empty."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import riverpy._work.run
from riverpy import Job, JobSnooze, QueueConfig
from riverpy._work import run_queues
from tests.kit.proxy import proxied
from tests.work.rig import PATIENCE, Task

if TYPE_CHECKING:
    from tests.work.rig import Rig


async def test_empty_queue(rig: Rig) -> None:
    """A drain of empty queues ends at once."""
    rig.register_task()
    report = await rig.client().run(drain=True)
    assert report.is_clean


async def test_everything_is_worked(rig: Rig) -> None:
    """A drain works all jobs of its queues, including those that jobs insert. Other queues and jobs
    that are due much later stay."""
    client = rig.client(queues={"default": QueueConfig(max_workers=3), "b": QueueConfig()})

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.queue == "b":
            await client.insert(Task(n=job.args.n))
        if job.args.n == 7:
            raise JobSnooze(timedelta(hours=1))

    for queue in ("default", "b", "other"):
        await rig.insert_rows(10, queue=queue)
    report = await client.run(drain=True)
    assert report.is_clean
    assert await rig.states() == {"completed": 27, "available": 10, "scheduled": 3}


async def test_available_and_far_from_due(rig: Rig) -> None:
    """A drain does not wait for rows that are available but due much later, which only SQL can
    make."""
    rig.register_task()
    await rig.insert_rows(3)
    await rig.schema.execute(
        "UPDATE river_job SET scheduled_at = CASE id WHEN 1 THEN timestamptz 'infinity'"
        " ELSE now() + interval '1 hour' END WHERE id <= 2"
    )
    async with asyncio.timeout(PATIENCE):
        await rig.client().run(drain=True)
    assert await rig.states() == {"available": 2, "completed": 1}


@pytest.mark.timeout(180)
async def test_pending_retry(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain returns only after a job has completed that fails once and is due again at once, 12
    times (LD-16)."""
    monkeypatch.setattr(riverpy._work.run, "DRAIN_POLL_INTERVAL", 0.0)

    @rig.job(next_retry=lambda job: timedelta(milliseconds=job.args.n % 4))
    async def work(job: Job[Task]) -> None:
        if job.attempt == 1:
            raise ValueError("once")

    async with rig.client() as client:
        for n in range(12):
            await client.insert(Task(n=n))
            await client.run(drain=True)
            assert await rig.states() == {"completed": n + 1}


async def test_claim_in_flight(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue is not empty while a claim has taken rows and its answer has not arrived (LD-16)."""
    monkeypatch.setattr(riverpy._work.run, "DRAIN_POLL_INTERVAL", 0.0)
    ended = asyncio.Event()

    @rig.job(next_retry=lambda job: timedelta(milliseconds=20))
    async def work(job: Job[Task]) -> None:
        if job.attempt == 1:
            raise ValueError("once")

    async with proxied(rig.url) as proxy, rig.schema.connected() as connection:
        await connection.execute("BEGIN; LOCK TABLE river_job IN EXCLUSIVE MODE")
        client = rig.client(url=proxy.url)

        async def run() -> None:
            await client.run(drain=True)
            ended.set()

        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            tasks.create_task(run())
            await rig.until(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name = 'riverpy claims' AND wait_event_type = 'Lock'",
                1,
            )
            proxy.hold("riverpy claims")
            await connection.execute(
                "INSERT INTO river_job (kind, max_attempts, args) VALUES ('task', 2, '{}'); COMMIT"
            )
            await proxy.held.wait()
            for _ in range(20):
                await rig.schema.fetchval("SELECT 1")
                assert not ended.is_set()
                assert client._run is not None
                assert not client._run._stop_requested.is_set()
            await proxy.release()
    assert await rig.states() == {"completed": 1}


async def test_job_that_ends_while_the_queues_are_read(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queues are read only when no job runs and no result waits. Otherwise a job that fails and
    is stored during the read would be missed (LD-16)."""
    monkeypatch.setattr(riverpy._work.run, "DRAIN_POLL_INTERVAL", 0.0)
    look, busy = run_queues.job_is_any_available, []
    client = rig.client()

    async def looking(*args: Any, **kwargs: Any) -> bool:
        assert client._run is not None
        busy.append(client._run._is_busy)
        return await look(*args, **kwargs)

    monkeypatch.setattr(run_queues, "job_is_any_available", looking)

    rig.register_task()
    async with rig.schema.connected() as connection:
        await connection.execute("BEGIN; LOCK TABLE river_job IN EXCLUSIVE MODE")
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            tasks.create_task(client.run(drain=True))
            await rig.until(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name = 'riverpy claims' AND wait_event_type = 'Lock'",
                1,
            )  # and the drain waits for its connection
            await connection.execute(
                "INSERT INTO river_job (kind, max_attempts, args) VALUES ('task', 2, '{}'); COMMIT"
            )
    assert await rig.states() == {"completed": 1}
    assert busy
    assert not any(busy)


async def test_stop_during_a_drain(rig: Rig) -> None:
    """A stop ends a drain early."""
    started = asyncio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        started.set()
        await asyncio.sleep(3600)

    await rig.insert_rows(1)
    client = rig.client(soft_stop_timeout=timedelta(0))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(client.run(drain=True))
        await started.wait()
        client.stop()
    assert await rig.states() == {"available": 1}
