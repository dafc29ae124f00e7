"""Jobs that end their process: what the log says, and where their jobs run then."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import EventKind
from riverpy._log_events import WORKER_CANCELLED
from riverpy._postgres.job_maintenance import RESCUE_ERROR_TEXT
from tests.cli.worker_process import running_worker
from tests.work.rig import errors_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.work.rig import Rig

PATIENCE = 30.0
QUICK: dict[str, Any] = {
    "elect_interval": timedelta(milliseconds=200),
    "leader_ttl": timedelta(milliseconds=900),
    "dead_after": timedelta(seconds=2),
    "fetch_poll_interval": timedelta(milliseconds=50),
}
JOBS = """
import asyncio, ctypes, os, sys, threading
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import msgspec
import riverpy

workers = riverpy.Workers()
HOW = os.environ["HOW"]


class Task(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "task"
    n: int = 0


@workers.job(timeout=None)
async def task(job: riverpy.Job[Task]) -> None:
    print("began", job.args.n, flush=True)
    if job.args.n == 0:
        try:
            await asyncio.sleep(3600)
        finally:
            print("cancelled", flush=True)
    while not Path("go").exists():
        await asyncio.sleep(0.01)
    match HOW:
        case "exit":
            os._exit(7)
        case "crash":
            ctypes.string_at(0)
        case "cancel all":
            for task in asyncio.all_tasks():
                task.cancel()
            await asyncio.sleep(3600)
        case "close descriptors":
            os.closerange(3, 4096)
            await asyncio.sleep(3600)


client = riverpy.Client(
    workers=workers,
    queues={"default": riverpy.QueueConfig(max_workers=10)},
    config=riverpy.Config(
        candidate=False,
        durable_claims=True,
        hard_stop_timeout=timedelta(seconds=2),
        fetch_poll_interval=timedelta(milliseconds=50),
    ),
)
"""


@pytest.mark.parametrize(
    ("how", "codes"),
    [("exit", {7}), ("crash", {-signal.SIGSEGV}), ("close descriptors", {1, 4, -signal.SIGABRT})],
)
async def test_job_that_ends_its_process(
    rig: Rig, tmp_path: Path, how: str, codes: set[int]
) -> None:
    """A job that calls `os._exit`, crashes in C code, or closes every descriptor ends its process,
    at once or within the limits. It and the job that ran beside it run again in another process,
    with one more attempt and an error with the reason. The log has the place of a crash (LD-07)."""
    where = (f"--database-url={rig.url}", f"--schema={rig.schema.name}", "--dead-after=2s")
    await rig.insert_rows(1)
    await rig.schema.execute("UPDATE river_job SET args = '{\"n\": 0}'")
    async with running_worker(tmp_path, "jobs", *where, code=JOBS, HOW=how) as worker:
        await worker.until_printed("began 0")
        await rig.insert_rows(1)
        await worker.until_printed("began 1")
        (tmp_path / "go").touch()
        assert await worker.exit_code() in codes
    if how == "crash":
        text = [entry["text"] for entry in worker.logged if "text" in entry]
        assert text[0] == "Fatal Python error: Segmentation fault"
        assert any("jobs.py" in line and "in task" in line for line in text)

    rig.register_task()
    async with rig.working(**QUICK):
        events = await rig.take(2)
    assert {event.kind for event in events} == {EventKind.JOB_COMPLETED}
    for row in await rig.schema.jobs():
        assert (row["state"], row["attempt"]) == ("completed", 2)
        assert [entry["error"] for entry in errors_of(row)] == [RESCUE_ERROR_TEXT]


async def test_job_that_cancels_everything(rig: Rig, tmp_path: Path) -> None:
    """A job that cancels every task of the loop, also riverpy's, ends the worker at once, with an
    exit code for a restart and a log line with the reason. Another worker runs its jobs."""
    where = (f"--database-url={rig.url}", f"--schema={rig.schema.name}", "--dead-after=2s")
    await rig.insert_rows(1)
    await rig.schema.execute("UPDATE river_job SET args = '{\"n\": 0}'")
    async with running_worker(tmp_path, "jobs", *where, code=JOBS, HOW="cancel all") as worker:
        await worker.until_printed("began 0")
        await rig.insert_rows(1)
        await worker.until_printed("began 1")
        (tmp_path / "go").touch()
        assert await worker.exit_code() == 1
    assert worker.printed[-1] == "cancelled"
    (entry,) = worker.entries(WORKER_CANCELLED)
    assert entry["level"] == "error"
    assert [entry for entry in worker.logged if "text" in entry] == []

    rig.register_task()
    async with rig.working(**QUICK):
        assert {event.kind for event in await rig.take(2)} == {EventKind.JOB_COMPLETED}
