"""Claims at the time at which an available job becomes due, while the next poll is far off."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio

from riverpy._postgres.job_maintenance import JobRescue, job_rescue
from riverpy._postgres.jobs import ClaimKey
from riverpy.queues import QueueConfig
from tests.kit.server_faults import kill_backends
from tests.work.rig import PATIENCE, Rig, Task

if TYPE_CHECKING:
    from riverpy import Job

DELAY = 0.8


def fail_first_attempts(rig: Rig) -> None:
    @rig.job(next_retry=lambda _job: timedelta(seconds=DELAY))
    async def work(job: Job[Task]) -> None:
        if job.attempt == 1:
            raise ValueError


async def insert_due_soon(rig: Rig, **columns: object) -> None:
    """Insert an available job that is due later, without a notification."""
    now = await rig.schema.fetchval("SELECT now()")
    await rig.insert_rows(1, scheduled_at=now + timedelta(seconds=DELAY), **columns)


async def require_started_when_due(rig: Rig) -> None:
    await rig.event()
    row = await rig.row(1)
    assert (row["state"], row["attempted_at"] >= row["scheduled_at"]) == ("completed", True)


async def test_restart_before_a_retry(rig: Rig) -> None:
    """A job fails, and its client stops and notifies other clients of the time of the retry. A
    client that starts before this time runs the job when it is due (NR-16)."""
    fail_first_attempts(rig)
    heard: list[dict[str, Any]] = []
    async with rig.schema.connected() as listener:
        await listener.add_listener(
            f"{rig.schema.name}.riverpy_event", lambda *of: heard.append(json.loads(of[-1]))
        )
        async with rig.working(candidate=False) as client:
            await client.insert(Task(1))
            await rig.event()
        with anyio.fail_after(PATIENCE):
            while not (due := [one for one in heard if one["action"] == "due"]):
                await listener.fetchval("SELECT 1")
    ((seconds,),) = [one["seconds"] for one in due if one["queue"] == "default"]
    assert 0 < seconds <= DELAY + 0.5
    async with rig.working(candidate=False):
        await require_started_when_due(rig)


async def test_job_that_no_notification_announced(rig: Rig) -> None:
    """A client reads the due times of available jobs when it starts, when a queue is added, and
    after its listening connection was lost (NR-16)."""
    rig.register_task()
    await insert_due_soon(rig)
    async with rig.working(candidate=False) as client:
        await require_started_when_due(rig)
        await insert_due_soon(rig, queue="added")
        await client.queues.add("added", QueueConfig(max_workers=1))
        await rig.event()
        await insert_due_soon(rig)
        await kill_backends(rig.url, "riverpy listener")
        await rig.event()
    assert await rig.states() == {"completed": 3}


async def test_drain_waits_for_a_retry(rig: Rig) -> None:
    """A run with `drain` works a retry that another client has stored, when it is due."""
    rig.register_task()
    await insert_due_soon(rig)
    async with rig.client(candidate=False) as client:
        await asyncio.wait_for(client.run(drain=True), PATIENCE)
    assert await rig.states() == {"completed": 1}


async def test_rescued_job_with_a_delay(rig: Rig) -> None:
    """A rescue with a delay notifies the clients of the time at which the job is due (NR-16)."""
    rig.register_task()
    await rig.insert_rows(1, state="running", attempt=1, attempted_by=["gone"])
    await rig.schema.execute("UPDATE river_job SET attempted_at = now()")
    attempted_at = await rig.schema.fetchval(
        "SELECT (1000000 * extract(epoch FROM attempted_at - '2000-01-01Z'))::bigint FROM river_job"
    )
    async with rig.working(candidate=False), rig.schema.connected() as connection:
        rescue = JobRescue(ClaimKey(1, 1, attempted_at), "gone", DELAY)
        assert await job_rescue(connection, rig.schema.name, [rescue])
        await require_started_when_due(rig)
