"""Jobs that block the event loop: what is logged, and how they and other jobs end."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import EventKind, Job
from riverpy._log_events import EVENT_LOOP_BLOCKED, EVENT_LOOP_RESUMED
from riverpy._work import loop_watch
from riverpy._work.attempt import Attempt
from riverpy._work.attempt_store import AttemptStore
from tests.work.rig import Task

if TYPE_CHECKING:
    from tests.work.rig import Rig

LATE = 0.4
PATIENCE = 30.0


@pytest.fixture(autouse=True)
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log a blocked loop soon. (A thread that is later than this treats the process as frozen.)"""
    monkeypatch.setattr(loop_watch, "LOOP_CHECK_INTERVAL", 0.05)
    monkeypatch.setattr(loop_watch, "LOOP_BLOCKED_THRESHOLD", LATE)


def block_until_told(log: list[dict[str, Any]]) -> None:
    """Block the loop until the log has an event about it."""
    give_up = time.monotonic() + PATIENCE
    while not told(log, EVENT_LOOP_BLOCKED) and time.monotonic() < give_up:
        time.sleep(0.01)


def told(log: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    """Return the events about `block_until_told`. A busy machine may cause others."""
    return [e for e in log if e["event"] == event and "block_until_told" in e.get("at", "")]


async def until_told(log: list[dict[str, Any]], event: str) -> dict[str, Any]:
    """Wait for an event in the log."""
    async with asyncio.timeout(PATIENCE):
        while not told(log, event):
            await asyncio.sleep(0.01)
    return told(log, event)[0]


@pytest.mark.parametrize("where", ["job", "task of the job"])
async def test_job_that_blocks_the_loop(rig: Rig, log: list[dict[str, Any]], where: str) -> None:
    """While the loop is blocked, a warning names kind, id and code position. Afterwards another has
    the duration. The result of the job counts, and no other job is named (LM-14)."""

    async def block() -> None:
        block_until_told(log)

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.args.n == 1 and where == "job":
            block_until_told(log)
        elif job.args.n == 1:
            await asyncio.create_task(block())

    async with rig.working() as client:
        first = await client.insert(Task(n=1))
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED
        after = await until_told(log, EVENT_LOOP_RESUMED)
        await client.insert(Task(n=2))
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED
    (entry,) = told(log, EVENT_LOOP_BLOCKED)
    if where == "job" or sys.version_info >= (3, 12):
        assert (entry["kind"], entry["job_id"]) == ("task", first.job.id)
        assert (after["kind"], after["job_id"]) == ("task", first.job.id)
    assert re.search(r"test_loop_watch\.py:\d+ block_until_told < .*\.py:\d+ .*", entry["at"])
    assert "executor.py" not in entry["at"]
    assert entry["seconds"] >= LATE
    assert after["seconds"] >= LATE
    assert entry["log_level"] == after["log_level"] == "warning"


async def test_blocked_by_no_job(rig: Rig, log: list[dict[str, Any]]) -> None:
    """If other code of the program blocks the loop, no job is named, but the code position is."""
    rig.register_task()
    async with rig.working() as client:
        run = client._run
        assert run is not None
        store = AttemptStore(client._transaction, None, client._subscription_manager, "client")
        waiting = Attempt([0] * 20, (None, 0.0), lambda: None, 0.0, store)
        run.running_attempts.add_attempts([waiting])  # like a prefetched job, without a task
        asyncio.get_running_loop().call_soon(block_until_told, log)
        after = await until_told(log, EVENT_LOOP_RESUMED)
        run.running_attempts._attempts.remove(waiting)
    (entry,) = told(log, EVENT_LOOP_BLOCKED)
    assert "kind" not in entry | after
    assert "block_until_told" in entry["at"]


async def test_blocked_thread_is_no_blocked_loop(rig: Rig) -> None:
    """A blocking job in a thread does not block the loop: other jobs run at the same time
    (LM-14)."""
    release = threading.Event()

    @rig.job(executor="thread")
    def work(job: Job[Task]) -> None:
        if job.args.n == 1:
            assert release.wait(PATIENCE)

    async with rig.working() as client:
        await client.insert(Task(n=1))
        for n in range(2, 5):
            inserted = await client.insert(Task(n=n))
            event = await rig.event()
            assert event.job is not None
            assert event.job.id == inserted.job.id
        release.set()
        await rig.event()
