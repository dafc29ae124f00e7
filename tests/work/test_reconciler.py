"""Notifications and ends of jobs while a read of the reconciler is in flight."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy import EventKind, Job, QueueConfig
from riverpy._postgres import jobs, queues
from riverpy._work.claim_times import RIVER_FOLLOW_UP_CLAIM_DELAYS
from riverpy._work.reconciler import Reconciler
from tests.work.rig import PATIENCE, Task

if TYPE_CHECKING:
    from tests.work.rig import Rig


async def _until(condition: Any) -> None:
    with anyio.fail_after(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("is_pause", [True, False])
@pytest.mark.parametrize(
    ("question", "ask"),
    [
        ("queue_find_paused", Reconciler._check_paused_queues),
        ("queue_upsert", lambda reconciler: reconciler._update_queue_rows()),
    ],
)
async def test_pause_notified_before_an_older_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, question: str, ask: Any, is_pause: bool
) -> None:
    """A pause or a resume that is notified while an older answer is in flight stays. The answer
    still applies to the other queues (OP-09)."""
    rig.register_task()
    both = {name: QueueConfig(max_workers=1) for name in ("default", "other")}
    async with rig.working(queues=both) as client:
        assert client._run is not None
        run = client._run
        heard, silent_cancel = run.producers["default"], run.producers["other"]
        change = client.queue_pause if is_pause else client.queue_resume
        if not is_pause:
            await client.queue_pause("default")
            await _until(lambda: heard.is_paused)
        asked = getattr(queues, question)

        async def answered_late(*args: Any) -> Any:
            answer = await asked(*args)
            await change("default")
            await _until(lambda: heard.is_paused is is_pause)
            return answer

        await rig.schema.execute("UPDATE river_queue SET paused_at = now() WHERE name = 'other'")
        with monkeypatch.context() as patch:
            patch.setattr(queues, question, answered_late)
            await ask(run._reconciler)
        assert heard.is_paused is is_pause
        assert silent_cancel.is_paused


async def test_retried_before_an_older_answer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is cancelled, retried by hand and claimed again, while the answer with its old
    cancel mark is in flight, is not cancelled."""
    attempts: list[int] = []
    ends = asyncio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        attempts.append(job.attempt)
        await ends.wait()

    async with rig.working() as client:
        assert client._run is not None

        async def answered_late(*args: Any) -> Any:
            await client.job_cancel(inserted.job.id)
            answer = [inserted.job.id]  # as between the mark and the end of the attempt
            assert (await rig.event()).kind is EventKind.JOB_CANCELLED
            await client.job_retry(inserted.job.id)
            client._run.producers["default"].wake()  # type: ignore[union-attr]
            await _until(lambda: attempts == [1, 2])
            return answer

        inserted = await client.insert(Task())
        await _until(lambda: attempts == [1])
        with monkeypatch.context() as patch:
            patch.setattr(jobs, "job_find_cancel_requested", answered_late)
            await client._run._reconciler._check_cancelled_jobs()
        ends.set()
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED


async def test_cancel_beside_an_attempt_that_keeps_running(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancel that arrives between a claim and its answer cancels the claimed attempt, also while
    an earlier attempt at the job, which was rescued, still runs here (SC-10)."""

    async def never(_: Reconciler) -> None:
        pass

    monkeypatch.setattr(Reconciler, "_check_cancelled_jobs", never)
    attempts: list[int] = []
    ends = asyncio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        attempts.append(job.attempt)
        while not ends.is_set():
            try:
                await ends.wait()
            except asyncio.CancelledError:
                if job.attempt > 1:
                    raise

    async with rig.working() as client:
        producer: Any = client._run.producers["default"]  # type: ignore[union-attr]
        take = producer._send_claim

        async def answered_late(*args: Any) -> Any:
            rows = await take(*args)
            if rows and attempts:
                await client.job_cancel(inserted.job.id)
                earlier = next(iter(client._run.running_attempts))  # type: ignore[union-attr]
                await _until(lambda: earlier.stop_cause is not None)
            return rows

        # From the start: a claim that runs already when the job becomes available may return it.
        producer._send_claim = answered_late
        inserted = await client.insert(Task())
        await _until(lambda: attempts == [1])
        await rig.schema.execute("UPDATE river_job SET state = 'available'")  # as a rescue does
        producer.wake()
        try:
            assert (await rig.event()).kind is EventKind.JOB_CANCELLED
        finally:
            ends.set()
    assert (await rig.row(inserted.job.id))["state"] == "cancelled"


async def test_claims_after_a_reconnect(rig: Rig) -> None:
    """After a reconnect each queue is claimed as after a notification: at once, and again for what
    a sender may have inserted after the lost notification. A late claim replaces earlier ones."""
    rig.register_task()
    async with rig.working() as client:
        run: Any = client._run
        producer = run.producers["default"]
        await _until(lambda: not producer._planned_claim_times.follow_ups)  # those of the start
        starts: list[float] = []
        send = producer._send_claim

        async def noted(*args: Any) -> Any:
            starts.append(time.monotonic())
            return await send(*args)

        producer._send_claim = noted
        last_claim_at = time.monotonic() + RIVER_FOLLOW_UP_CLAIM_DELAYS[-1]
        run._resync()
        await _until(lambda: starts and starts[-1] >= last_claim_at)
        assert starts[0] < last_claim_at or len(starts) == 1
