"""Watches: the changes of one job, from its present state to its end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import Client, Config, Job, JobChangeKind, JobState
from tests.work.rig import Rig, Task

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

PATIENCE = 30.0


@pytest.fixture
async def watcher(rig: Rig) -> AsyncGenerator[Client]:
    """Yield an open client that works no jobs."""
    async with Client(rig.url, config=Config(schema=rig.schema.name)) as client:
        yield client


async def test_states_progress_and_output(rig: Rig, watcher: Client) -> None:
    """A watch yields the present row, then each change of state, progress and output, and ends
    after the final state. A watch of an ended job has one item."""
    steps = [asyncio.Event() for _ in range(3)]

    @rig.job
    async def work(job: Job[Task]) -> None:
        await steps[0].wait()
        job.progress(1, 2, "half")
        await steps[1].wait()
        await job.save_output({"rows": 1})
        await steps[2].wait()
        await job.save_output({"rows": 2})

    inserted = await watcher.insert(Task())
    found: list[tuple[JobChangeKind, JobState, Any, Any]] = []
    async with asyncio.timeout(PATIENCE):
        changes = watcher.watch(inserted.job.id)
        first = await anext(changes)
        assert (first.kind, first.job.state) == (JobChangeKind.PRESENT, JobState.AVAILABLE)
        async with rig.working():
            async for change in changes:
                done = None if change.progress is None else change.progress.done
                found.append((change.kind, change.job.state, done, change.output))
                if change.job.state is JobState.RUNNING:
                    steps[len(found) - 1].set()
        [only] = [change async for change in watcher.watch(inserted.job.id)]
    assert found[:3] == [
        (JobChangeKind.STATE, JobState.RUNNING, None, None),
        (JobChangeKind.PROGRESS, JobState.RUNNING, 1, None),
        (JobChangeKind.OUTPUT, JobState.RUNNING, 1, {"rows": 1}),
    ]
    assert found[-1] == (JobChangeKind.STATE, JobState.COMPLETED, 1, {"rows": 2})
    assert only.output == {"rows": 2}
