"""Subscriptions: which events arrive, in which order, and with what content."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import riverpy
from riverpy import EventKind, Job, JobCancel, JobSnooze, JobState
from riverpy._log_events import SUBSCRIBER_EVENTS_DROPPED
from tests.work.rig import Task

if TYPE_CHECKING:
    from tests.work.rig import Rig


def ends(rig: Rig) -> None:
    """Register jobs with each outcome, by their number."""

    @rig.job(next_retry=lambda job: timedelta(hours=1))
    async def work(job: Job[Task]) -> None:
        match job.args.n:
            case 1:
                raise ValueError("fails")
            case 2:
                raise JobSnooze(timedelta(hours=1))
            case 3:
                raise JobCancel("cancels")


async def test_kinds_and_jobs(rig: Rig) -> None:
    """Each outcome has its kind of event. The event's job is the row after its result was
    stored."""
    ends(rig)
    for n, kind in enumerate(
        [
            EventKind.JOB_COMPLETED,
            EventKind.JOB_FAILED,
            EventKind.JOB_SNOOZED,
            EventKind.JOB_CANCELLED,
        ]
    ):
        await rig.run_one(Task(n))
        event, told, stored = rig.last.event, rig.last.event.job, rig.last.job
        assert event.kind is kind
        assert told is not None
        for column in (
            "state",
            "attempt",
            "metadata",
            "errors",
            "attempted_by",
            "encoded_args",
            "attempted_at",
            "tags",
            "max_attempts",
            "queue",
            "kind",
            "created_at",
        ):
            assert getattr(told, column) == getattr(stored, column), column
        assert (told.finalized_at is None) == (stored.finalized_at is None)
        assert abs(told.scheduled_at - stored.scheduled_at) < timedelta(seconds=5)
        assert event.queue is None
        assert repr(event)


async def test_only_the_kinds_asked_for(rig: Rig) -> None:
    """A subscription receives only events of its kinds, in the order in which jobs end."""
    ends(rig)
    client = rig.client(slots=1)
    async with (
        client.subscribe(EventKind.JOB_FAILED, EventKind.JOB_CANCELLED) as some,
        rig.running(client),
    ):
        for n in range(8):
            await client.insert(Task(n=n % 4))
        await rig.take(8)
    events = [event async for event in some]
    assert [event.kind for event in events] == [
        EventKind.JOB_FAILED,
        EventKind.JOB_CANCELLED,
    ] * 2
    assert [event.job.id for event in events if event.job] == [2, 4, 6, 8]


async def test_invalid_arguments_are_refused(rig: Rig) -> None:
    """A subscription without a kind, with an unknown kind, or without room is refused."""
    client = rig.client()
    with pytest.raises(riverpy.ConfigError, match="name the kinds"):
        client.subscribe()
    with pytest.raises(riverpy.ConfigError, match="job_completed"):
        client.subscribe("nonsense")  # type: ignore[arg-type]
    with pytest.raises(riverpy.ConfigError, match="whole number from 1"):
        client.subscribe(EventKind.JOB_FAILED, size=0)


async def test_ends_with_the_client(rig: Rig) -> None:
    """An iteration ends when the client stops, after the last result. So do several iterations over
    one subscription. A subscription that is opened again continues with the next run."""
    ends(rig)
    client = rig.client()
    seen: list[int] = []

    async def read(subscription: riverpy.Subscription) -> None:
        async for event in subscription:
            assert event.job is not None
            seen.append(event.job.id)

    async with (
        client.subscribe(EventKind.JOB_COMPLETED) as subscription,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(read(subscription))
        tasks.create_task(read(subscription))
        async with rig.running(client):
            for _ in range(20):
                await client.insert(Task(n=0))
            client.stop()
    assert len(seen) == len(set(seen))
    assert len(seen) == (await rig.states()).get("completed", 0)


async def test_stalled_subscriber(rig: Rig, log: list[dict[str, Any]]) -> None:
    """A subscriber that never reads holds only its size of events, and counts the others as
    dropped. It is logged once and delays nothing (ME-04)."""
    ends(rig)
    client = rig.client(slots=100)
    await rig.insert_rows(2000)
    await rig.schema.execute("""UPDATE river_job SET args = '{"n": 0}'""")
    async with client.subscribe(EventKind.JOB_COMPLETED, size=50) as stalled, rig.running(client):
        await rig.take(2000)
    assert stalled.dropped == 1950
    assert len([event async for event in stalled]) == 50
    full = [entry for entry in log if entry["event"] == SUBSCRIBER_EVENTS_DROPPED]
    assert len(full) == 1


async def test_subscriber_that_raises_or_leaves(rig: Rig) -> None:
    """A subscriber that raises, or leaves during a delivery, affects no other (ME-04)."""
    ends(rig)
    async with rig.working() as client:

        async def raising() -> None:
            async with client.subscribe(EventKind.JOB_COMPLETED) as events:
                async for _ in events:
                    raise LookupError("the subscriber's own")

        failing = asyncio.get_running_loop().create_task(raising())
        await asyncio.sleep(0)
        await client.insert(Task(n=0))
        await rig.event()
        with pytest.raises(LookupError):
            await failing
        await client.insert(Task(n=0))
        await rig.event()


async def test_statistics(rig: Rig) -> None:
    """No wait or duration is negative, also after snoozes and retries, for jobs with a time in the
    future, and for jobs that were due long before their insert (OP-11)."""
    runs: dict[int, int] = {}

    @rig.job(next_retry=lambda job: timedelta(milliseconds=1))
    async def work(job: Job[Task]) -> None:
        runs[job.id] = runs.get(job.id, 0) + 1
        await asyncio.sleep(0.001)
        match runs[job.id]:
            case 1:
                raise JobSnooze(timedelta(milliseconds=1))
            case 2:
                raise ValueError("once")

    await rig.insert_rows(20)
    await rig.schema.execute(
        "UPDATE river_job SET created_at = now() + interval '5 seconds' WHERE id = 1"
    )
    await rig.schema.execute(
        "UPDATE river_job SET scheduled_at = now() - interval '1 year' WHERE id = 2"
    )
    async with rig.working():
        events = await rig.take(60)
    for event in events:
        statistics = event.statistics
        assert statistics is not None
        assert statistics.queue_wait >= timedelta(0)
        assert statistics.run > timedelta(0)
        assert statistics.complete >= timedelta(0)
        assert event.job is not None
        assert statistics.queue_wait < timedelta(minutes=1)
        assert event.job.state is not JobState.RUNNING


async def test_queue_events(rig: Rig) -> None:
    """A pause and a resume publish one event of the queue each."""
    ends(rig)
    async with rig.working() as client:
        await client.queue_pause("default")
        await client.queue_pause("default")
        await client.queue_resume("default")
        events = await rig.take(2)
    assert [(event.kind, event.queue, event.job) for event in events] == [
        (EventKind.QUEUE_PAUSED, "default", None),
        (EventKind.QUEUE_RESUMED, "default", None),
    ]
