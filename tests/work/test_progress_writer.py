"""Progress of running jobs: when it is stored, with how many statements, and what is refused."""

from __future__ import annotations

import asyncio
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import anyio
import msgspec
import pytest

from riverpy import ArgsError, EventKind, Job
from riverpy._work import progress_writer
from riverpy.progress import make_progress
from tests._database import connected
from tests.work.rig import Rig, Task

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
    """The newest reports of all jobs, in threads too, are written with at most one statement a
    second. The last report is stored with the result."""
    both = asyncio.Barrier(2)

    @rig.job
    async def work(job: Job[Task]) -> None:
        await both.wait()
        for done in range(5):
            job.progress(done, 10, "copying")
        await asyncio.to_thread(job.progress, 5 + job.args.n, 10)
        await rig.release.wait()
        job.progress(10, 10.5)

    started_at = time.monotonic()
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
    assert count <= time.monotonic() - started_at + 1  # at most one a second
    assert [(one.done, one.total, one.text) for one in found if one] == [(10, 10.5, None)] * 2


async def test_locked_and_odd_rows(rig: Rig, writes: list[list[int]]) -> None:
    """A row that another session has locked does not delay the others, and gets its progress after
    the lock."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        async with connected(rig.url) as connection, connection.transaction():
            if job.args.n == 1:
                locked_job = f'SELECT FROM "{rig.schema.name}".river_job WHERE id = $1 FOR UPDATE'
                await connection.execute(locked_job, job.id)
            job.progress(job.args.n)
            started.release()
            await other_is_written.wait()
        await rig.release.wait()

    started, other_is_written = anyio.Semaphore(0), anyio.Event()
    async with rig.working() as client:
        for n in range(3):
            await client.insert(Task(n))
        for _ in range(3):
            await started.acquire()
        await rig.until(STORED, 1, f'{{"{KEY}": {{"done": 2}}}}')
        other_is_written.set()
        await rig.until(STORED, 1, f'{{"{KEY}": {{"done": 1}}}}')
        rig.release.set()
        await rig.take(3)
    assert writes


@pytest.mark.parametrize("executor", ["thread", "process"])
async def test_blocking_jobs(rig: Rig, tmp_path: Path, executor: str) -> None:
    """A blocking job reports in a thread and in a process. Its progress is stored while it runs,
    the newest of several quick reports too, and its last one with its result. A job after it in the
    same process has no progress of its own."""
    rig.workers.blocking_job(executor=executor)(report)
    async with rig.working(slots=1) as client:
        inserted = await client.insert(Reporting(str(tmp_path / "go")))
        await rig.until(STORED, 1, f'{{"{KEY}": {{"done": 1000}}}}')
        assert (await rig.row(inserted.job.id))["state"] == "running"
        (tmp_path / "go").touch()
        event = await rig.event()
        await client.insert(Reporting(""))
        other = await rig.event()
    assert event.job.last_progress is not None
    assert event.job.last_progress.done == 1002
    assert (other.kind, other.job.last_progress) == (EventKind.JOB_COMPLETED, None)


class Reporting(msgspec.Struct):
    """The args of a blocking job that reports."""

    kind: ClassVar[str] = "reporting"
    path: str
    """The job waits for this file between its reports. Empty: it reports nothing."""


def report(job: Job[Reporting]) -> None:
    """Report, in a thread or process."""
    if job.args.path:
        for done in range(1001):
            job.progress(done)
        while not Path(job.args.path).exists():
            time.sleep(0.01)
        job.progress(1001)
        job.progress(1002)


def make(done: object, total: object = None, text: object = None) -> tuple[object, ...] | None:
    """Return the values and the line of a progress."""
    progress = make_progress(done, total, text)
    return progress and (progress.done, progress.total, progress.text, str(progress))


def test_odd_values() -> None:
    """A value that a job may have computed never fails the job: it is stored as the nearest value
    that has a meaning, or the report is ignored. A value of a wrong type is refused."""
    nan, inf, most = float("nan"), float("inf"), 2**63 - 1
    assert make(nan) is make(-inf, 2) is make(Decimal("sNaN")) is make(Fraction(10**400)) is None
    assert make(-1, -5) == (0, 0, None, "0 of 0")
    assert make(2**63, 1e300) == (most, most, None, f"{most:,} of {most:,} (100 %)")
    assert make(1, inf) == make(1, nan) == (1, None, None, "1")
    assert make(3, 2) == (3, 2, None, "3 of 2 (150 %)")
    assert make(Decimal("0.5"), Fraction(1, 2)) == (0.5, 0.5, None, "0.5 of 0.5 (100 %)")
    assert make(1, 5e-324) == (1, 5e-324, None, "1 of 5e-324")
    assert make(1, 2, "x" * 1000) == (1, 2, "x" * 1000, "1 of 2 (50 %): " + "x" * 1000)
    assert make(1, 2, "x" * 1001) == (1, 2, "x" * 999 + "…", "1 of 2 (50 %): " + "x" * 999 + "…")
    assert make(1, 2, "a\0\udc80b") == (1, 2, "a��b", "1 of 2 (50 %): a��b")
    for wrong, message in (
        (("5",), "done must be a number, got str"),
        ((True,), "done must be a number, got bool"),
        ((1, 1j), "total must be a number, got complex"),
        ((1, 2, b"x"), "text must be a str or None, got bytes"),
    ):
        with pytest.raises(ArgsError, match=message):
            make(*wrong)
