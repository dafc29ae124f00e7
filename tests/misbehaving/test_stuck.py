"""Jobs that continue in spite of their cancellation: they are logged, counted, and keep their slot
unless a handler releases it."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import EventKind, InsertManyParams, Job, StuckJob
from riverpy._log_events import (
    CANCELLED_JOB_COMPLETED,
    LOG_EVENTS_LIMITED,
    STUCK_JOB_ENDED,
    STUCK_JOB_FOUND,
    STUCK_JOB_HANDLER_FAILED,
)
from tests.work.rig import Task

if TYPE_CHECKING:
    from riverpy import Client
    from tests.work.rig import Rig

PATIENCE = 30.0
STUCK_THRESHOLD = timedelta(milliseconds=50)
FREQUENT_HEARTBEATS: dict[str, Any] = {"dead_after": timedelta(seconds=12), "candidate": False}
"""Makes a client renew its row every 2 s."""


class Stubborn:
    """A job whose first run ignores its cancellation until it is released. Later runs just end."""

    def __init__(self, rig: Rig, executor: str | None = None) -> None:
        self.release = threading.Event()
        self.started = threading.Event()

        if executor:

            @rig.job(executor=executor)
            def work(job: Job[Task]) -> None:
                if job.args.n == 1:
                    self.started.set()
                    assert self.release.wait(PATIENCE)

        else:

            @rig.job
            async def work_async(job: Job[Task]) -> None:
                while job.args.n == 1 and not self.release.is_set():
                    self.started.set()
                    try:
                        await asyncio.sleep(0.005)
                    except asyncio.CancelledError:
                        continue

    async def time_out(self, client: Client, count: int = 1) -> None:
        """Time out this many running jobs. A short timeout would also hit other jobs on a slow
        machine."""
        assert client._run is not None
        running = client._run.running_attempts
        async with asyncio.timeout(PATIENCE):
            while sum(attempt.started_at > 0 for attempt in running) < count:
                await asyncio.sleep(0.001)
        for attempt in running:
            if attempt.started_at:
                attempt.timeout = 0.0
            attempt.deadline = time.monotonic()
            running.schedule_deadline_check(attempt.deadline)


class Handler:
    """A handler that always returns the same answer."""

    def __init__(self, answer: bool | type[BaseException]) -> None:
        self.answer = answer
        self.reported: list[StuckJob] = []

    def handle_stuck(self, job: StuckJob, /) -> bool:
        self.reported.append(job)
        if isinstance(self.answer, bool):
            return self.answer
        raise self.answer


async def entry(log: list[dict[str, Any]], event: str) -> dict[str, Any]:
    """Wait for a log line."""
    async with asyncio.timeout(PATIENCE):
        while not (found := [entry for entry in log if entry["event"] == event]):
            await asyncio.sleep(0.005)
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("executor", [None, "thread"])
@pytest.mark.parametrize("how", ["timeout", "cancel"])
async def test_stuck_job(
    rig: Rig, log: list[dict[str, Any]], executor: str | None, how: str
) -> None:
    """A job that ignores its timeout or cancel is logged once, with kind, id and duration. It is
    counted, shown in the client's row, and keeps its slot, and other jobs continue. Its end is
    logged too."""
    jobs = Stubborn(rig, executor)
    async with rig.working(
        slots=2, job_stuck_threshold=STUCK_THRESHOLD, **FREQUENT_HEARTBEATS
    ) as client:
        stuck = await client.insert(Task(n=1))
        if how == "cancel":
            await asyncio.get_running_loop().run_in_executor(None, jobs.started.wait)
            await client.job_cancel(stuck.job.id)
        else:
            await jobs.time_out(client)
        reported = await entry(log, STUCK_JOB_FOUND)
        for n in (2, 3, 4):
            await client.insert(Task(n=n))
            assert (await rig.event()).kind is EventKind.JOB_COMPLETED
        run = client._run
        assert run is not None
        assert client.stats().stuck_jobs == 1
        assert run.producers["default"]._free_slot_count == 1
        await rig.until("SELECT stuck FROM riverpy_client", [stuck.job.id])
        jobs.release.set()
        event = await rig.event()
        assert event.job is not None
        assert event.job.id == stuck.job.id
        assert client.stats().stuck_jobs == 0
        assert run.producers["default"]._free_slot_count == 2
        await rig.until("SELECT stuck FROM riverpy_client", [])
    assert reported["job_id"] == stuck.job.id
    assert (reported["kind"], reported["queue"], reported["stuck"]) == ("task", "default", 1)
    assert reported["reason"] == ("job timeout" if how == "timeout" else "job cancelled remotely")
    assert reported["seconds"] > STUCK_THRESHOLD.total_seconds()
    assert reported["keeps_slot"] is True
    ended = await entry(log, STUCK_JOB_ENDED)
    assert (ended["job_id"], ended["stuck"]) == (stuck.job.id, 0)


@pytest.mark.parametrize("executor", [None, "thread"])
async def test_slot_for_a_stuck_job(rig: Rig, executor: str | None) -> None:
    """A handler may release the slot of a stuck job. Another job runs beside it, the client's row
    shows one more slot, and the original number is back when the stuck job ends."""
    jobs, handler = Stubborn(rig, executor), Handler(answer=True)
    settings: dict[str, Any] = {
        "job_stuck_threshold": STUCK_THRESHOLD,
        "job_stuck_handler": handler,
        **FREQUENT_HEARTBEATS,
    }
    async with rig.working(slots=1, **settings) as client:
        stuck = await client.insert(Task(n=1))
        other = await client.insert(Task(n=2))
        await jobs.time_out(client)
        event = await rig.event()
        assert event.job is not None
        assert event.job.id == other.job.id
        await rig.until("SELECT slots FROM riverpy_client", [2])
        jobs.release.set()
        await rig.event()
        assert client._run is not None
        assert client._run.producers["default"]._free_slot_count == 1
    (reported,) = handler.reported
    assert (reported.id, reported.kind, reported.queue, reported.total) == (
        stuck.job.id,
        "task",
        "default",
        1,
    )
    assert reported.running > STUCK_THRESHOLD


@pytest.mark.parametrize("answer", [False, ValueError, SystemExit])
async def test_handler_that_releases_nothing(
    rig: Rig, log: list[dict[str, Any]], answer: bool | type[BaseException]
) -> None:
    """A handler that returns no, or raises, changes nothing."""
    jobs = Stubborn(rig)
    settings = {"job_stuck_threshold": STUCK_THRESHOLD, "job_stuck_handler": Handler(answer)}
    async with rig.working(slots=1, **settings) as client:
        await client.insert(Task(n=1))
        await client.insert(Task(n=2))
        await jobs.time_out(client)
        assert (await entry(log, STUCK_JOB_FOUND))["keeps_slot"] is True
        assert await rig.states() == {"running": 1, "available": 1}
        jobs.release.set()
        await rig.take(2)
    failures = [entry for entry in log if entry["event"] == STUCK_JOB_HANDLER_FAILED]
    assert len(failures) == (answer is not False)


async def test_many_stuck_jobs(rig: Rig, log: list[dict[str, Any]]) -> None:
    """The log names ten of many stuck jobs, and says that there are more. The stats have their
    number (OP-07)."""
    jobs = Stubborn(rig)
    async with rig.working(slots=15, job_stuck_threshold=STUCK_THRESHOLD) as client:
        await client.insert_many([InsertManyParams(Task(n=1))] * 15)
        await jobs.time_out(client, 15)
        async with asyncio.timeout(PATIENCE):
            while client.stats().stuck_jobs < 15:
                await asyncio.sleep(0.005)
        jobs.release.set()
        await rig.take(15)
    events = [STUCK_JOB_FOUND, CANCELLED_JOB_COMPLETED, STUCK_JOB_ENDED]
    for event in events:
        levels = [one["log_level"] for one in log if one["event"] == event]
        assert levels[10:] == ["debug"] * 5
        assert "debug" not in levels[:10]
    assert [one["limited_event"] for one in log if one["event"] == LOG_EVENTS_LIMITED] == events


async def test_job_that_ends_in_time(rig: Rig, log: list[dict[str, Any]]) -> None:
    """A job that cleans up after its cancellation within the threshold is not stuck."""

    @rig.job(timeout=STUCK_THRESHOLD)
    async def work(job: Job[Task]) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)

    async with rig.working(job_stuck_threshold=timedelta(seconds=30)) as client:
        await client.insert(Task())
        assert (await rig.event()).kind is EventKind.JOB_FAILED
        assert client.stats().stuck_jobs == 0
    assert [entry for entry in log if entry["event"] == STUCK_JOB_FOUND] == []
