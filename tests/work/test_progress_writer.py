"""Progress of running jobs: when it is stored, with how many statements, and what is refused."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from riverpy._work import progress_writer
from tests.work.rig import Rig, Task

if TYPE_CHECKING:
    from riverpy import Job

STORED = "SELECT count(*) FROM river_job WHERE metadata @> $1::jsonb AND state = 'running'"
KEY = "riverpy:progress"


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the ids of each write of progress."""
    writes: list[list[int]] = []
    store = progress_writer.job_store_progress

    async def record(*args: Any, **options: Any) -> set[int]:
        writes.append([key.id for key in options["claim_keys"]])
        return await store(*args, **options)

    monkeypatch.setattr(progress_writer, "job_store_progress", record)
    return writes


async def test_jobs_of_one_client(rig: Rig, writes: list[list[int]]) -> None:
    """The first report is written at once. The newest reports of all jobs, in threads too, are
    written together with one statement. The last report is stored with the result."""
    both = asyncio.Barrier(2)

    @rig.job
    async def work(job: Job[Task]) -> None:
        await both.wait()
        for done in range(5):
            job.progress(done, 10, "copying")
        await asyncio.to_thread(job.progress, 5 + job.args.n, 10)
        await rig.release.wait()
        job.progress(10, 10.5)

    async with rig.working() as client:
        for n in range(2):
            await client.insert(Task(n))
        for n in range(2):
            await rig.until(
                STORED, 1, f'{{"{KEY}": {{"done": {5 + n}, "total": 10, "text": null}}}}'
            )
        count = len(writes)
        rig.release.set()
        ends = await rig.take(2)
        found = [event.job.last_progress for event in ends]
    assert count <= 3
    assert sorted(writes[count - 1]) == [1, 2]
    assert [(one.done, one.total, one.text) for one in found if one] == [(10, 10.5, None)] * 2
