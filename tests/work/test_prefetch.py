"""Prefetch: jobs that are claimed before a slot is free, and the risks of that."""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import riverpy._work.completer
import riverpy._work.prefetch
import riverpy._work.reconciler
from riverpy import ConfigError, EventKind, Job, QueueConfig
from riverpy._work.prefetch import PrefetchBuffer
from tests.work.rig import FAR, Task, errors_of

if TYPE_CHECKING:
    from riverpy import Client
    from riverpy._work.producer import Producer
    from tests.work.rig import Rig

AHEAD = 3
"""Jobs that wait for the only slot."""
QUEUES = {"default": QueueConfig(max_workers=1, prefetch=True)}


class Blocked:
    """A job in the only slot, which ends when the test says so."""

    def __init__(self, rig: Rig) -> None:
        self.began, self.release = asyncio.Event(), asyncio.Event()
        self.ran: list[int] = []

        @rig.job
        async def work(job: Job[Task]) -> None:
            self.ran.append(job.id)
            if job.id == 1:
                self.began.set()
                await self.release.wait()


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make jobs look short, so that this many are claimed ahead."""
    monkeypatch.setattr(PrefetchBuffer, "count_extra_jobs_to_claim", lambda self: AHEAD - len(self))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let prefetched jobs wait without a limit."""
    monkeypatch.setattr(riverpy._work.prefetch, "PREFETCHED_JOB_WAIT_MAX", 600.0)


def producer_of(client: Client) -> Producer:
    """Return the producer of the queue `default`."""
    assert client._run is not None
    return client._run.producers["default"]


async def until_ahead(rig: Rig, client: Client) -> None:
    """Wait until so many jobs wait in the client and are running in the database."""
    prefetch = producer_of(client)._prefetch_buffer
    while prefetch is None or len(prefetch) < AHEAD:
        await asyncio.sleep(0.001)
    await rig.until_state("running", 1 + AHEAD)


async def expect_given_back(rig: Rig, before: list[Any]) -> None:
    """Check that the jobs are available as if they had never been claimed."""
    await rig.until_state("available", AHEAD)
    rows = await rig.schema.fetch("SELECT * FROM river_job WHERE id > 1 ORDER BY id")
    for row in rows:
        assert (row["state"], row["attempt"], row["errors"]) == ("available", 0, None)
        assert row["finalized_at"] is None
    assert [row["scheduled_at"] for row in rows] == before


async def insert(rig: Rig) -> list[Any]:
    """Insert a job for the slot and jobs that wait for it. Returns when the latter are due."""
    await rig.insert_rows(1 + AHEAD)
    rows = await rig.schema.fetch("SELECT scheduled_at FROM river_job WHERE id > 1 ORDER BY id")
    return [row["scheduled_at"] for row in rows]


@pytest.mark.usefixtures("ahead", "patient")
async def test_context(rig: Rig) -> None:
    """A job has no context variables of the job before it in its slot."""
    whose: ContextVar[int | None] = ContextVar("whose", default=None)
    seen: list[int | None] = []
    release = asyncio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        seen.append(whose.get())
        whose.set(job.id)
        await release.wait()

    await insert(rig)
    async with rig.working(queues=QUEUES) as client:
        await until_ahead(rig, client)
        release.set()
        await rig.take(1 + AHEAD)
    assert seen == [None] * (1 + AHEAD)


def test_switch() -> None:
    """Prefetch is off by default, and accepts only True or False."""
    assert QueueConfig().prefetch is False
    with pytest.raises(ConfigError, match="prefetch must be True or False, got 5"):
        QueueConfig(prefetch=5)  # type: ignore[arg-type]


def test_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many jobs are kept as ended in 5 ms, at most a quarter of the slots, and none if jobs are
    slow."""
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(riverpy._work.prefetch, "time", clock)
    prefetch = PrefetchBuffer(100, lambda attempts: None)

    def room_after(seconds: float, ended: int) -> int:
        nonlocal now
        now += seconds
        for _ in range(ended):
            prefetch.count_ended_job()
        return prefetch.count_extra_jobs_to_claim()

    assert room_after(0.001, 60) == 0  # too soon to know
    assert room_after(0.009, 0) == 25
    assert room_after(0.010, 21) == 10
    assert room_after(0.004, 0) == 10  # the same window
    assert room_after(0.001, 0) == 0
    assert room_after(1.0, 100) == 0
    assert PrefetchBuffer(3, lambda attempts: None)._prefetched_jobs_max == 0


async def test_slots_and_order(rig: Rig, ahead: None, patient: None) -> None:
    """Prefetched jobs run once each, in order, and not more than there are slots."""
    now, most = 0, 0
    ran: list[int] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        ran.append(job.id)
        await asyncio.sleep(0)
        now -= 1

    await rig.insert_rows(60)
    client = rig.client(queues={"default": QueueConfig(max_workers=2, prefetch=True)})
    async with rig.running(client):
        kinds = {event.kind for event in await rig.take(60)}
    assert kinds == {EventKind.JOB_COMPLETED}
    assert ran == list(range(1, 61))
    assert most == 2


async def test_released_after_a_while(rig: Rig, ahead: None) -> None:
    """Prefetched jobs do not wait for a long job: another client works them, and no interruption is
    published."""
    blocked = Blocked(rig)
    await insert(rig)
    async with rig.working(queues=QUEUES) as client:
        await blocked.began.wait()
        producer_of(client)._prefetch_buffer.count_extra_jobs_to_claim = lambda: 0  # type: ignore[method-assign, union-attr]
        other = rig.client(id="other", fetch_poll_interval=timedelta(milliseconds=20))
        async with other, other.working():
            await rig.until_state("completed", AHEAD)
        blocked.release.set()
        assert (await rig.event()).job.id == 1  # type: ignore[union-attr]
    rows = await rig.schema.fetch("SELECT * FROM river_job WHERE id > 1")
    assert {(row["attempt"], row["attempted_by"][-1]) for row in rows} == {(1, "other")}


async def test_stop(rig: Rig, ahead: None, patient: None) -> None:
    """A stop first releases the prefetched jobs, then waits for the running ones. The released
    attempts do not count."""
    blocked = Blocked(rig)
    due = await insert(rig)
    async with rig.working(queues=QUEUES) as client:
        await until_ahead(rig, client)
        client.stop()
        await expect_given_back(rig, due)
        blocked.release.set()
    assert rig.report is not None
    assert rig.report.is_clean
    assert blocked.ran == [1]
    assert await rig.states() == {"available": AHEAD, "completed": 1}


async def test_pause(rig: Rig, ahead: None, patient: None) -> None:
    """A pause releases the prefetched jobs. A job that ends then starts no other."""
    blocked = Blocked(rig)
    due = await insert(rig)
    async with rig.working(queues=QUEUES) as client:
        await until_ahead(rig, client)
        await client.queue_pause("default")
        await expect_given_back(rig, due)
        blocked.release.set()
        assert [event.kind for event in await rig.take(2)] == [
            EventKind.QUEUE_PAUSED,
            EventKind.JOB_COMPLETED,
        ]
        assert blocked.ran == [1]
        await client.queue_resume("default")
        await rig.until_state("completed", 1 + AHEAD)


async def test_pause_during_a_claim(rig: Rig, ahead: None, patient: None) -> None:
    """Jobs that a claim returns beyond the free slots after its queue was paused are released."""
    blocked = Blocked(rig)
    await rig.insert_rows(1)
    async with rig.working(queues=QUEUES) as client:
        await blocked.began.wait()
        producer = producer_of(client)
        take = producer._send_claim

        async def paused(*args: Any) -> Any:
            rows = await take(*args)
            if rows:
                producer.set_paused(paused=True)
            return rows

        producer._send_claim = paused  # type: ignore[method-assign]
        await client.insert(Task())
        assert (await rig.event()).kind is EventKind.QUEUE_PAUSED
        await rig.until("SELECT attempted_by IS NOT NULL FROM river_job WHERE id = 2")
        await rig.until_state("available")
        blocked.release.set()
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED
    assert blocked.ran == [1]


@pytest.mark.parametrize("how", ["begins", "is given back"])
async def test_cancel(rig: Rig, ahead: None, patient: None, how: str) -> None:
    """A cancel finds a prefetched job: it never runs, and is cancelled when its turn comes or when
    it is released."""
    blocked = Blocked(rig)
    await insert(rig)
    async with rig.working(queues=QUEUES) as client:
        await until_ahead(rig, client)
        await client.job_cancel(3)
        run = client._run
        assert run is not None
        while not any(attempt.stop_cause for attempt in run.running_attempts):
            await asyncio.sleep(0.001)
        if how == "begins":
            blocked.release.set()
            await rig.until_state("completed", AHEAD)
        else:
            await client.queue_pause("default")
            await rig.until_state("available", AHEAD - 1)
            blocked.release.set()
        await rig.until_state("cancelled")
    events = [event async for event in rig.events or ()]
    kinds = [event.kind for event in events if event.job is not None and event.job.id == 3]
    assert kinds == [EventKind.JOB_CANCELLED]
    assert 3 not in blocked.ran
    row = await rig.row(3)
    assert row["finalized_at"] is not None
    assert errors_of(row)[0]["error"] == "JobCancelError: job cancelled remotely"
    assert errors_of(row)[0]["at"] > "2026"


async def test_looks_for_lost_claims(
    rig: Rig, ahead: None, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefetched jobs are not released as lost claims, however often the client checks. Lost claims
    are."""
    monkeypatch.setattr(riverpy._work.reconciler, "RECONCILE_INTERVAL", 0.02)
    monkeypatch.setattr(riverpy._work.reconciler, "CLAIM_TIMEOUT", 0.0)
    blocked = Blocked(rig)
    await insert(rig)
    async with rig.working(queues=QUEUES, id="me") as client:
        await until_ahead(rig, client)
        for n in range(2):
            await rig.schema.execute(
                "INSERT INTO river_job (kind, max_attempts, args, state, attempt, attempted_by,"
                " attempted_at, scheduled_at) VALUES ($1, 5, '{}', 'running', 3, array['me'],"
                " now() - interval '1 minute', now())",
                f"lost_{n}",
            )
            found = "SELECT state::text FROM river_job WHERE kind = $1"
            await rig.until(found, "available", f"lost_{n}")
        assert await rig.states() == {"running": 1 + AHEAD, "available": 2}
        await rig.schema.execute("DELETE FROM river_job WHERE kind <> 'task'")
        blocked.release.set()
        await rig.take(1 + AHEAD)
    assert blocked.ran == [1, 2, 3, 4]
    assert {row["attempt"] for row in await rig.schema.jobs()} == {1}


async def test_time_limit(rig: Rig, ahead: None, patient: None) -> None:
    """The timeout counts from the start of the job, not from its claim."""
    began, release = asyncio.Event(), asyncio.Event()
    deadlines: list[float] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        deadlines.append(job.deadline)  # type: ignore[attr-defined]
        if job.id == 1:
            began.set()
            await release.wait()

    await insert(rig)
    async with rig.working(queues=QUEUES, job_timeout=FAR) as client:
        await until_ahead(rig, client)
        released = time.monotonic()
        release.set()
        await rig.take(1 + AHEAD)
    assert all(deadline >= released + FAR.total_seconds() for deadline in deadlines[1:])
    assert deadlines[0] < deadlines[1]


async def test_client_that_counts_as_dead(rig: Rig, ahead: None, patient: None) -> None:
    """A client that may count as dead starts no prefetched job, since other clients may work it."""
    blocked = Blocked(rig)
    due = await insert(rig)
    async with rig.working(queues=QUEUES) as client:
        await until_ahead(rig, client)
        heartbeat = producer_of(client)._heartbeat
        heartbeat._claims_allowed_until, until = 0.0, heartbeat._claims_allowed_until
        blocked.release.set()
        await expect_given_back(rig, due)
        assert blocked.ran == [1]
        heartbeat._claims_allowed_until = until
        heartbeat._claims_allowed_event.set()
        await rig.take(1 + AHEAD)
    assert blocked.ran == [1, 2, 3, 4]


async def test_lost_answer_of_a_return(
    rig: Rig, ahead: None, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release whose answer is lost is known as stored, and nothing is published about it."""
    settle = riverpy._work.completer.jobs.job_store_results
    lost: list[int] = []

    async def lose(*args: Any, **values: Any) -> dict[int, str]:
        states = await settle(*args, **values)
        if not lost:
            lost.extend(states)
            raise TimeoutError("the answer is lost")
        return states

    monkeypatch.setattr(riverpy._work.completer.jobs, "job_store_results", lose)
    blocked = Blocked(rig)
    due = await insert(rig)
    async with rig.working(queues=QUEUES) as client:
        await until_ahead(rig, client)
        await client.queue_pause("default")
        await expect_given_back(rig, due)
        blocked.release.set()
        kinds = [event.kind for event in await rig.take(2)]
    assert kinds == [EventKind.QUEUE_PAUSED, EventKind.JOB_COMPLETED]
    assert lost == [2, 3, 4]
    assert rig.report is not None
    assert rig.report.is_clean
