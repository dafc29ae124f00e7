"""Queues are added to a running client, resized and removed."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import (
    Client,
    ClientStateError,
    ConfigError,
    DomainConflictError,
    InsertOpts,
    Job,
    PeriodicJob,
    QueueAlreadyAddedError,
    QueueConfig,
    QueueNotFoundError,
    QueueRemoval,
    current_client,
    never,
)
from riverpy._work.producer import Producer
from riverpy.context import running_job
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


async def test_second_removal(rig: Rig, blocked: Blocked) -> None:
    """A removal waits also for the jobs that an earlier removal of the queue left running."""
    async with rig.working() as client:
        await client.queues.add("extra", ONE_SLOT)
        (first,) = await insert(client)
        await blocked.started.get()
        await client.queues.remove("extra", timeout=timedelta(0))
        await client.queues.add("extra", ONE_SLOT)
        removal = await client.queues.remove("extra", timeout=timedelta(0))
        assert removal.running_job_ids == (first,)
        await client.queues.add("extra", ONE_SLOT)
        waiting = asyncio.create_task(client.queues.remove("extra"))
        await rig.until("SELECT queues = '{default}' FROM riverpy_client")
        run: Any = client._run
        while not run.queues._draining_producers and not waiting.done():
            await asyncio.sleep(0)
        assert not waiting.done()
        blocked.may_end.set()
        assert await waiting == QueueRemoval(queue="extra")
    assert await rig.states() == {"completed": 1}


async def test_refusals(rig: Rig, blocked: Blocked) -> None:
    """A queue that is there is not added, and a queue that is not there is neither removed nor
    resized. This holds for a client that runs and for one that does not."""
    client = rig.client()
    await client.queues.add("extra", ONE_SLOT)
    await client.queues.resize("extra", 3)
    assert await client.queues.remove("extra") == QueueRemoval(queue="extra")
    await client.queues.add("extra", ONE_SLOT)
    await refuse_changes(client)
    async with rig.running(client):
        await refuse_changes(client)
        client.stop()
        with pytest.raises(ClientStateError, match="stopping"):
            await client.queues.add("late")
    assert dict(client.queues) == {"default": QueueConfig(max_workers=20), "extra": ONE_SLOT}
    with pytest.raises(ConfigError, match="workers"):
        await Client(rig.url).queues.add("extra")


async def refuse_changes(client: Client) -> None:
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


async def test_fewer_slots_than_running_jobs(rig: Rig, blocked: Blocked) -> None:
    """If a queue has fewer slots than running jobs, these end first. No job starts before enough of
    them have ended, also with prefetched jobs."""
    config = QueueConfig(max_workers=3, prefetch=True)
    async with rig.working(queues={"default": config}) as client:
        await insert(client, 3, InsertOpts(queue="default"))
        for _ in range(3):
            await blocked.started.get()
        await client.queues.resize("default", 1)
        stats = client.stats().queues["default"]
        assert (stats.slots, stats.running) == (1, 3)
        await insert(client, 2, InsertOpts(queue="default"))
        await rig.until_state("available", 2)
        blocked.may_end.set()
        await rig.until_state("completed", 5)
        assert client.stats().queues["default"].running == 0


async def test_change_from_a_job(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job adds queues with `current_client`, and the added queue does not run in the context of
    that job. A failed add leaves nothing behind, and a cancelled removal still removes."""
    seen: list[object] = []
    contexts: list[object] = []
    run_producer = Producer.run

    async def record_context(producer: Producer, *args: Any, **options: Any) -> None:
        contexts.append(running_job.get())
        await run_producer(producer, *args, **options)

    monkeypatch.setattr(Producer, "run", record_context)

    @rig.job
    async def work(job: Job[Task]) -> None:
        client = current_client()
        await client.queues.add("extra", ONE_SLOT)
        assert current_client() is client
        seen.append(client)

    with pytest.raises(ClientStateError, match="current_client"):
        current_client()
    async with rig.working() as client:
        await rig.work(client, Task())
        assert seen == [client]
        assert contexts == [None, None]
        removal = asyncio.create_task(client.queues.remove("extra"))
        await asyncio.sleep(0)
        removal.cancel()
        with pytest.raises(asyncio.CancelledError):
            await removal
        run: Any = client._run
        assert "extra" not in client.queues
        assert "extra" not in run.producers

        async def fail(name: str) -> None:
            raise OSError(name)

        run.queues._prepare = fail
        with pytest.raises(OSError, match="extra"):
            await client.queues.add("extra")
        assert list(client.queues) == list(run.producers) == ["default"]


async def test_removal_by_a_job_of_the_queue(rig: Rig) -> None:
    """A job that removes its own queue does not wait for itself, but for the other jobs of the
    queue. The result names the job."""
    removals: list[QueueRemoval] = []
    started, may_end = asyncio.Event(), asyncio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.args.n:
            started.set()
            await may_end.wait()
            return
        await started.wait()
        removal = asyncio.create_task(current_client().queues.remove("extra", timeout=None))
        await rig.until("SELECT queues = '{default}' FROM riverpy_client")
        assert not removal.done()
        may_end.set()
        removals.append(await removal)

    async with rig.working() as client:
        await client.queues.add("extra")
        other, own = [(await client.insert(Task(n), EXTRA)).job.id for n in (1, 0)]
        ended = [event.job.id for event in await rig.take(2)]
    assert removals == [QueueRemoval(queue="extra", running_job_ids=(own,))]
    assert ended == [other, own]


@pytest.mark.parametrize("policy", ["error", "warn"])
async def test_queue_of_a_leader_domain(rig: Rig, blocked: Blocked, policy: Any) -> None:
    """A client of a leader domain claims an added queue for its domain. If another domain owns the
    queue, the configuration decides whether the queue is refused or only worked."""
    settings: dict[str, Any] = {"leader_domain": "one", "on_domain_conflict": policy}
    owners = (
        "SELECT string_agg(queue || ':' || domain, ' ' ORDER BY queue) FROM riverpy_queue_owner"
    )
    other = {"foreign": ONE_SLOT}
    async with rig.working(queues=other, leader_domain="two", id="two"):
        pass
    async with rig.working(id="one", **settings) as client:
        await client.queues.add("extra", ONE_SLOT)
        assert await rig.schema.fetchval(owners) == "default:one extra:one foreign:two"
        if policy == "warn":
            await client.queues.add("foreign", ONE_SLOT)
        else:
            with pytest.raises(DomainConflictError, match="foreign"):
                await client.queues.add("foreign", ONE_SLOT)
        assert ("foreign" in client.queues) is (policy == "warn")
        await client.queues.remove("extra")
        run: Any = client._run
        assert run._domain_membership._claimed_queues == ["default"]
    assert await rig.schema.fetchval(owners) == "default:one extra:one foreign:two"


@pytest.mark.parametrize("domain", [None, "one"])
async def test_request_resign(rig: Rig, blocked: Blocked, domain: str | None) -> None:
    """The leader resigns after the commit of a request, and not after a rollback. A periodic job
    with the schedule `never` runs at the start of each term only."""
    never_due = PeriodicJob(never(), Task(), id="never", run_on_start=True)
    settings: dict[str, Any] = {"leader_domain": domain, "elect_interval": timedelta(seconds=0.2)}
    client = rig.client(queues={"extra": ONE_SLOT}, **settings)
    client.periodic_jobs.add(never_due)
    async with client, client.leadership() as changes, client.working():
        while not (await anext(changes)).is_leader:
            pass
        await rig.until("SELECT count(*) FROM river_job", 1)
        async with rig.schema.connected() as connection:
            transaction = connection.transaction()
            await transaction.start()
            await client.request_resign(tx=connection)
            await transaction.rollback()
            async with connection.transaction():
                await client.request_resign(tx=connection)
                assert client.is_leader
        while (await anext(changes)).is_leader:
            pass
        await rig.until("SELECT count(*) FROM river_job", 2)
