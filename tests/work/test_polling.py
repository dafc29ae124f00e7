"""Polls: what makes a worker claim without a notification, and how often."""

from __future__ import annotations

import random
import statistics
import time
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import riverpy._work.claimer
import riverpy._work.poll_schedule
import riverpy._work.producer
from riverpy import InsertManyParams, InsertOpts, Job, QueueConfig
from tests.work.rig import FAR, PATIENCE, Task

if TYPE_CHECKING:
    from tests.work.rig import Rig

POLL = 0.05
QUEUES = ("a", "b", "c")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, list[str]]]:
    """Record the time and the queues of each claim."""
    seen: list[tuple[float, list[str]]] = []

    def spy_on(module: Any, name: str) -> None:
        claim = getattr(module, name)

        async def spy(*args: Any, **values: Any) -> Any:
            seen.append((time.monotonic(), values.get("queues") or [values["queue"]]))
            return await claim(*args, **values)

        monkeypatch.setattr(module, name, spy)

    for module in (riverpy._work.producer, riverpy._work.claimer):
        spy_on(module, "job_claim")
    spy_on(riverpy._work.claimer, "job_claim_queues")
    return seen


@pytest.mark.parametrize("poll_only", [False, True])
async def test_poll_finds_jobs_of_lost_notifications(rig: Rig, *, poll_only: bool) -> None:
    """The poll finds jobs whose notification was lost, in each queue, with LISTEN and without it
    (NR-06)."""
    rig.register_task()
    settings: dict[str, Any] = {
        "queues": {queue: QueueConfig() for queue in QUEUES},
        "fetch_poll_interval": timedelta(seconds=POLL),
        "poll_only": poll_only,
        "candidate": False,
    }
    async with rig.working(**settings) as client:
        run: Any = client._run
        assert run._is_listening() is not poll_only
        for _ in range(2):
            for queue in QUEUES:
                await rig.insert_rows(1, queue=queue)
            jobs = [event.job for event in await rig.take(len(QUEUES))]
            assert {job.queue for job in jobs if job is not None} == set(QUEUES)


@pytest.mark.usefixtures("fast_claims")
async def test_one_poll_an_interval(rig: Rig, looks: list[tuple[float, list[str]]]) -> None:
    """Without notifications all empty queues with one interval cost one claim per interval (NR-14,
    PF-04). A queue that is paused, or has another interval, is left out."""
    late = QueueConfig(fetch_poll_interval=FAR)
    settings: dict[str, Any] = {
        "queues": {**{queue: QueueConfig() for queue in (*QUEUES, "paused")}, "late": late},
        "fetch_poll_interval": timedelta(seconds=POLL),
        "poll_only": True,
        "candidate": False,
    }

    rig.register_task()
    async with rig.working(**settings) as client:
        await client.queue_pause("paused")
        producer: Any = client._run.producers["paused"]  # type: ignore[union-attr]
        producer.set_paused(paused=True)
        looks.clear()
        with anyio.fail_after(PATIENCE):
            while len(looks) < 12:
                await anyio.sleep(0.005)
    polls = looks[2:]  # a claim that ran already, and a poll after the start, which is early
    assert {tuple(sorted(queues)) for _, queues in polls} == {QUEUES}
    gaps = [later - earlier for (earlier, _), (later, _) in pairwise(polls)]
    assert min(gaps) >= POLL * 0.8  # a timer may fire a little early


async def test_polls_are_spread(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty clients that started or were notified together poll at different times: the deviation
    is more than a tenth of the interval. No poll is more than a tenth of the interval late
    (NR-14)."""
    rig.register_task()
    chance = random.Random(14)
    monkeypatch.setattr(riverpy._work.poll_schedule, "random", chance)
    producers: list[Any] = [rig.client()._make_client_run().producers["default"] for _ in range(20)]
    poll = FAR.total_seconds()

    def waits() -> list[float]:
        return [
            producer._poll_group.seconds_to_next_poll(
                is_woken_with_other_clients=producer._is_woken_with_other_clients
            )
            for producer in producers
        ]

    for wake in ("start", "notification"):
        if wake == "notification":
            for producer in producers:
                producer._is_woken_with_other_clients = False
                producer._poll_group.poll_waiting_queues()
            assert poll <= min(waits()) <= max(waits()) <= poll * 1.1
            for producer in producers:
                producer.wake_after_notification()
        assert statistics.pstdev(waits()) > poll * 0.1
        assert poll * 0.5 <= min(waits()) <= max(waits()) <= poll


async def test_job_that_becomes_due_between_polls(rig: Rig) -> None:
    """Jobs that another client inserts for later start when they are due, in their order and not
    before, although the worker's next poll is far off (NR-16)."""
    started: list[int] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        started.append(job.args.n)

    async with rig.working() as client, rig.client(queues={}) as other:
        await rig.until("SELECT leader_id FROM river_leader", client.id)
        now = await rig.schema.fetchval("SELECT now()")
        times = {2: now + timedelta(seconds=1.2), 1: now + timedelta(seconds=0.6)}
        await other.insert_many(
            [InsertManyParams(Task(n), InsertOpts(scheduled_at=at)) for n, at in times.items()]
        )  # in any order, since both may be due by then
        await rig.take(2)
    assert started == [1, 2]
    rows = await rig.schema.fetch("SELECT attempted_at >= scheduled_at AS due FROM river_job")
    assert all(row["due"] for row in rows)


async def test_job_that_is_made_available_early(rig: Rig) -> None:
    """A client that is notified of jobs that become due soon claims at that time, however far off
    its poll is (NR-16)."""
    rig.register_task()
    async with rig.working(candidate=False):
        now = await rig.schema.fetchval("SELECT now()")
        await rig.insert_rows(1, scheduled_at=now + timedelta(seconds=0.5))
        await rig.schema.execute(
            f'NOTIFY "{rig.schema.name}.riverpy_event",'
            ' \'{"action": "due", "queue": "default", "seconds": [0.5]}\''
        )
        await rig.event()
