"""Jobs that a client releases: which clients are notified, and what is published."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import riverpy._postgres.jobs
import riverpy._work.completer
import riverpy._work.executor
import riverpy._work.prefetch
from riverpy import EventKind, Job, QueueConfig
from riverpy._work.prefetch import PrefetchBuffer
from tests._notifications import due_payload
from tests.work.rig import FAR, PATIENCE, Task
from tests.work.test_prefetch import AHEAD, QUEUES, Blocked, insert, producer_of, until_ahead

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.work.rig import Rig


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make jobs look short, so that many are claimed ahead, and let them wait without a limit."""
    monkeypatch.setattr(PrefetchBuffer, "count_extra_jobs_to_claim", lambda self: AHEAD - len(self))
    monkeypatch.setattr(riverpy._work.prefetch, "PREFETCHED_JOB_WAIT_MAX", 600.0)


class Storing:
    """Delays the storing of results other than plain completions until the test allows it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        settle = riverpy._work.completer.jobs.job_store_results

        async def late(*args: Any) -> dict[int, str]:
            self.reached.set()
            await self.go_on.wait()
            return await settle(*args)

        monkeypatch.setattr(riverpy._work.completer.jobs, "job_store_results", late)


@asynccontextmanager
async def idle_client(rig: Rig) -> AsyncGenerator[None]:
    """Run another client with free slots that has found its queue empty and does not poll."""
    other = rig.client(id="other", fetch_poll_interval=FAR, candidate=False)
    async with other, other.working():
        producer = producer_of(other)
        producer.claimed.init()
        producer.wake()
        await producer.claimed.wait()
        yield


async def test_idle_client_is_notified(rig: Rig, ahead: None) -> None:
    """Another client with a free slot is notified of jobs that a client releases. It does not wait
    for its poll."""
    blocked = Blocked(rig)
    await insert(rig)
    async with rig.working(queues=QUEUES) as client:
        await until_ahead(rig, client)
        async with idle_client(rig):
            prefetch: Any = producer_of(client)._prefetch_buffer
            prefetch.count_extra_jobs_to_claim = lambda: 0
            prefetch.release_all_attempts()
            try:
                await rig.until_state("completed", AHEAD)
            finally:
                blocked.release.set()


async def test_idle_client_is_notified_of_an_interruption(rig: Rig) -> None:
    """Another client is notified of a job that a stop interrupted."""
    began: asyncio.Queue[str] = asyncio.Queue()

    @rig.job
    async def work(job: Job[Task]) -> None:
        began.put_nowait(job.attempted_by[-1])
        if job.attempted_by[-1] == "first":
            await asyncio.sleep(3600)

    await rig.insert_rows(1)
    async with rig.working(id="first", candidate=False) as client:
        assert await began.get() == "first"
        async with idle_client(rig):
            client.stop_and_cancel()
            with anyio.fail_after(PATIENCE):
                assert await began.get() == "other"
            await rig.until_state("completed")


async def test_notified_queues(rig: Rig) -> None:
    """Clients are notified of a released job, once per queue. They are not notified of jobs with a
    cancel mark, completed jobs, or jobs that are due later."""
    heard: asyncio.Queue[str] = asyncio.Queue()

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.id == 1:
            raise ValueError("runs again later")

    client = rig.client()
    async with rig.schema.connected() as connection:
        await connection.add_listener(
            f"{rig.schema.name}.river_insert", lambda *message: heard.put_nowait(message[-1])
        )
        await rig.insert_rows(2)
        async with rig.running(client):
            await rig.take(2)
        for queue, metadata in (("b", "{}"), ("b", "{}"), ("c", '{"cancel_attempted_at": "x"}')):
            await rig.insert_rows(1, queue=queue, metadata=metadata)
        await rig.schema.execute(
            "UPDATE river_job SET state = 'running', attempt = 1, attempted_at = to_timestamp(0)"
            " WHERE queue <> 'default'"
        )
        at = -946_684_800_000_000  # to_timestamp(0) in microseconds since 2000
        claim_keys = [riverpy._postgres.jobs.ClaimKey(job_id, 1, at) for job_id in (3, 4, 5)]
        async with client:
            assert await client.release_claims(claim_keys) == 3
        await rig.schema.execute(
            "SELECT pg_notify($1, 'the end')", f"{rig.schema.name}.river_insert"
        )
        with anyio.fail_after(PATIENCE):
            assert await heard.get() == due_payload("b")
            assert await heard.get() == "the end"


def test_no_prefetch_after_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client does not prefetch again at once after jobs waited too long and were released."""
    now, returned = 100.0, []
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(riverpy._work.prefetch, "time", clock)
    prefetch = PrefetchBuffer(100, returned.extend)
    for _ in range(100):
        prefetch.count_ended_job()
    now += 0.01
    assert prefetch.count_extra_jobs_to_claim() == 25
    prefetch._waiting_attempts.append((now, SimpleNamespace()))  # type: ignore[arg-type]
    for _ in range(100):
        prefetch.count_ended_job()
    now += 0.01
    prefetch._release_expired_attempts()
    assert len(returned) == 1
    assert prefetch.count_extra_jobs_to_claim() == 0


async def test_cancel_while_a_return_is_stored(
    rig: Rig, ahead: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is cancelled while its release is stored is published as cancelled."""
    storing = Storing(monkeypatch)
    blocked = Blocked(rig)
    await insert(rig)
    async with rig.working(queues=QUEUES) as client:
        await until_ahead(rig, client)
        await client.queue_pause("default")
        await storing.reached.wait()
        await client.job_cancel(3)
        storing.go_on.set()
        await rig.until_state("cancelled")
        blocked.release.set()
        await rig.until_state("completed")
    events = [event async for event in rig.events or () if event.job and event.job.id == 3]
    assert [event.kind for event in events] == [EventKind.JOB_CANCELLED]
    assert events[0].statistics is not None
    assert events[0].statistics.run == timedelta(0)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("when", ["before the answer", "before the first step"])
async def test_frozen_client(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, when: str, prefetch: bool
) -> None:
    """A client that counts as dead when its claim is answered, or when a job would take its first
    step, releases the job, and publishes no attempt."""
    if when == "before the first step":
        monkeypatch.setattr(riverpy._work.executor, "TASK_START_DELAY_MAX", -1.0)
    ran: list[int] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        ran.append(job.attempt)

    queues = {"default": QueueConfig(max_workers=4, prefetch=prefetch)}
    async with rig.working(queues=queues) as client:
        producer: Any = producer_of(client)
        heartbeat, take, launch = (
            producer._heartbeat,
            producer._send_claim,
            producer._executor.make_and_start_attempts,
        )
        until: list[float] = []

        def stand_still() -> None:
            if not until:
                until.append(heartbeat._claims_allowed_until)
                heartbeat._claims_allowed_until = 0.0

        async def late_answer(*args: Any) -> Any:
            if (rows := await take(*args)) and when == "before the answer":
                stand_still()
            return rows

        def late_start(*args: Any) -> Any:
            waiting = launch(*args)
            if args[0] and when == "before the first step":
                stand_still()
            return waiting

        producer._send_claim, producer._executor.make_and_start_attempts = (
            late_answer,
            late_start,
        )
        await client.insert(Task())
        await rig.until("SELECT state = 'available' AND attempted_by IS NOT NULL FROM river_job")
        assert (ran, (await rig.row(1))["attempt"]) == ([], 0)
        heartbeat._claims_allowed_until = until[0]
        heartbeat._claims_allowed_event.set()
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED
    assert ran == [1]


async def test_times_of_a_job_that_waited(rig: Rig, ahead: None) -> None:
    """The time that a job waits here for a slot belongs to its waiting time, and its end comes
    after it."""
    blocked = Blocked(rig)
    await insert(rig)
    hour = timedelta(hours=1)
    async with rig.working(queues=QUEUES) as client:
        await until_ahead(rig, client)
        for _, attempt in producer_of(client)._prefetch_buffer._waiting_attempts:  # type: ignore[union-attr]
            attempt.claimed_at -= hour.total_seconds()
        blocked.release.set()
        events = await rig.take(1 + AHEAD)
    for event in events[1:]:
        assert event.job is not None
        assert event.statistics is not None
        assert event.job.attempted_at is not None
        assert event.job.finalized_at is not None
        assert event.statistics.queue_wait >= hour
        assert event.job.finalized_at >= event.job.attempted_at + hour
        assert event.statistics.run < hour
