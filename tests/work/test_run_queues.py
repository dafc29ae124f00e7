"""Queues are added to a running client, resized and removed."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from riverpy import (
    Client,
    ConfigError,
    InsertOpts,
    Job,
    QueueAlreadyAddedError,
    QueueConfig,
    QueueNotFoundError,
    QueueRemoval,
)
from tests.work.rig import Task

if TYPE_CHECKING:
    from tests.work.rig import Rig

EXTRA = InsertOpts(queue="extra")
ONE_SLOT = QueueConfig(max_workers=1)


class Blocked:
    """Jobs that run until the test lets them end."""

    def __init__(self, rig: Rig) -> None:
        self.started = asyncio.Queue[int]()
        self.may_end = asyncio.Event()

        @rig.job
        async def work(job: Job[Task]) -> None:
            self.started.put_nowait(job.id)
            await self.may_end.wait()


@pytest.fixture
def blocked(rig: Rig) -> Blocked:
    return Blocked(rig)


async def insert(client: Client, count: int = 1, opts: InsertOpts = EXTRA) -> list[int]:
    return [(await client.insert(Task(), opts)).job.id for _ in range(count)]


async def test_add_resize_and_remove(rig: Rig, blocked: Blocked) -> None:
    """A running client works a queue after `add`, runs more of its jobs at a time after `resize`,
    and claims no job of it after `remove`. The removal waits until jobs and results are done. The
    row of the client follows at once, the row of the queue stays."""
    async with rig.working() as client:
        await client.queues.add("extra", ONE_SLOT)
        assert dict(client.queues)["extra"] == ONE_SLOT
        jobs = await insert(client, 3)
        assert await blocked.started.get() == jobs[0]
        await client.queues.resize("extra", 2)
        assert await blocked.started.get() == jobs[1]
        assert client.stats().queues["extra"].running == 2
        await rig.until(
            "SELECT queues = '{default,extra}' AND slots = '{20,2}' FROM riverpy_client"
        )

        removal = asyncio.create_task(client.queues.remove("extra"))
        await rig.until("SELECT queues = '{default}' AND slots = '{20}' FROM riverpy_client")
        with pytest.raises(QueueAlreadyAddedError):
            await client.queues.add("extra")
        blocked.may_end.set()
        assert await removal == QueueRemoval(queue="extra")
        assert await rig.states() == {"completed": 2, "available": 1}
        assert "extra" not in client.queues
        assert "extra" not in client.stats().queues
        await insert(client, opts=InsertOpts(queue="default"))
        await rig.until_state("completed", 3)
        assert await rig.states() == {"completed": 3, "available": 1}
        assert (await client.queue_get("extra")).paused_at is None


async def test_removal_times_out(rig: Rig, blocked: Blocked) -> None:
    """After the timeout of a removal the jobs of the queue keep running, and the result names them.
    The queue can be added again, and a stop ends all its jobs as usual."""
    async with rig.working() as client:
        await client.queues.add("extra", ONE_SLOT)
        (first,) = await insert(client)
        await blocked.started.get()
        removal = await client.queues.remove("extra", timeout=timedelta(0))
        assert removal == QueueRemoval(queue="extra", running_job_ids=(first,))
        assert not removal.is_complete
        (second,) = await insert(client)
        await client.queue_pause("extra")
        await client.queues.add("extra", ONE_SLOT)
        assert client.stats().queues["extra"].paused
        await client.queue_resume("extra")
        assert await blocked.started.get() == second
        blocked.may_end.set()
    assert await rig.states() == {"completed": 2}


async def test_refusals(rig: Rig, blocked: Blocked) -> None:
    """A queue that is there is not added, and a queue that is not there is neither removed nor
    resized. This holds for a client that runs and for one that does not."""
    client = rig.client()
    await client.queues.add("extra", ONE_SLOT)
    await client.queues.resize("extra", 3)
    assert await client.queues.remove("extra") == QueueRemoval(queue="extra")
    await client.queues.add("extra", ONE_SLOT)
    for _ in range(2):
        with pytest.raises(QueueAlreadyAddedError, match="works queue 'extra'"):
            await client.queues.add("extra")
        for call in (client.queues.remove("other"), client.queues.resize("other", 1)):
            with pytest.raises(QueueNotFoundError, match="'other'"):
                await call
        for slots in (0, 10_001):
            with pytest.raises(ConfigError, match="max_workers"):
                await client.queues.resize("extra", slots)
        with pytest.raises(ConfigError, match="queue"):
            await client.queues.add("a b")
        with pytest.raises(ConfigError, match="timeout"):
            await client.queues.remove("extra", timeout=timedelta(seconds=-1))
        async with rig.running(client):
            assert client.queues["extra"] == ONE_SLOT
    with pytest.raises(ConfigError, match="workers"):
        await Client(rig.url).queues.add("extra")
