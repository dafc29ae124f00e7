"""The client of workers whose job has ten steps: `riverpy worker tests.kit.step_worker:client`.

The results of two steps are kept. Each step waits until the process that injects faults opens it.
What the steps do is recorded in a file, which survives a killed process.
"""

from __future__ import annotations

import os
import random
import uuid
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import asyncpg
import msgspec

import riverpy
from riverpy._postgres.driver import DATABASE_ERRORS
from tests.kit.fleet import SETTINGS_VARIABLE, WorkerSettings, end_with_the_fleet

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

STEPS = range(1, 11)
KEPT = (3, 7)
"""The steps whose results are kept."""
POLL = 0.01
WORK_MAX = 0.03
"""Maximum seconds of work in a step after it is open."""
ROW = """
SELECT metadata -> 'riverpy:steps' ? $2 AS is_kept, attempt = $3 AND attempted_at = $4 AS is_own
FROM river_job WHERE id = $1
"""


class StepSettings(WorkerSettings, frozen=True, kw_only=True):
    """Settings of a worker process."""

    target: str = "tests.kit.step_worker:client"
    records: str = ""
    """Path of the file with the records."""
    open_steps: str = ""
    """Path of the file with the number of the last step that may end."""


class Long(msgspec.Struct, frozen=True):
    """A job with ten steps."""

    kind: ClassVar[str] = "long"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a step does: `start` of an attempt, `run` of a function, `got` a kept result."""

    what: str
    job_id: int
    attempt: int
    pid: int
    step: int = 0
    token: str = ""
    """The kept result."""
    is_repeated: bool = False
    """Whether the function runs although its result is stored."""
    is_overtaken: bool = False
    """Whether another attempt has claimed the job meanwhile."""


settings = (
    msgspec.json.decode(os.environ[SETTINGS_VARIABLE], type=StepSettings)
    if SETTINGS_VARIABLE in os.environ
    else StepSettings()
)
workers = riverpy.Workers()


def record(what: str, job: riverpy.JobRow, **values: Any) -> None:
    """Append one record."""
    found = Record(what=what, job_id=job.id, attempt=job.attempt, pid=os.getpid(), **values)
    with Path(settings.records).open("ab") as file:
        file.write(msgspec.json.encode(found) + b"\n")


async def wait_until_open(step: int) -> None:
    """Wait until the step may end, and a moment longer."""
    while int(Path(settings.open_steps).read_text("utf-8") or 0) < step:
        await anyio.sleep(POLL)
    await anyio.sleep(random.uniform(0, WORK_MAX))


async def run_plain(job: riverpy.Job[Long], step: int) -> None:
    """Run a step without a kept result."""
    record("run", job, step=step)
    await wait_until_open(step)


async def run_kept(job: riverpy.Job[Long], step: int) -> str:
    """Run a step with a kept result. Check in the row that the result is not stored yet."""
    row = await read_row(job, f"step {step}")
    is_own = bool(row["is_own"])
    record(
        "run",
        job,
        step=step,
        is_repeated=is_own and bool(row["is_kept"]),
        is_overtaken=not is_own,
    )
    await wait_until_open(step)
    return uuid.uuid4().hex


async def read_row(job: riverpy.Job[Long], name: str) -> asyncpg.Record:
    """Read the row by a connection of its own, also across outages of the server."""
    while True:
        with suppress(*DATABASE_ERRORS):
            connection = await asyncpg.connect(settings.history_url, timeout=5)
            try:
                row = await connection.fetchrow(ROW, job.id, name, job.attempt, job.attempted_at)
            finally:
                connection.terminate()
            if row is not None:
                return row
        await anyio.sleep(POLL)


@workers.job(timeout=None, next_retry=lambda job: timedelta(0))
async def long(job: riverpy.Job[Long]) -> None:
    """Run the ten steps."""
    record("start", job)
    for step in STEPS:
        name = f"step {step}"
        if step in KEPT:
            token = await job.step(name, run_kept, job, step, keep=True)
            record("got", job, step=step, token=token)
        else:
            await job.step(name, run_plain, job, step)


@asynccontextmanager
async def client() -> AsyncGenerator[riverpy.Client]:
    """Yield the client."""
    end_with_the_fleet()
    yield riverpy.Client(
        workers=workers,
        queues={"default": riverpy.QueueConfig(max_workers=settings.slots)},
        config=riverpy.Config(
            elect_interval=timedelta(seconds=settings.elect_interval),
            leader_ttl=timedelta(seconds=settings.leader_ttl),
            dead_after=timedelta(seconds=settings.dead_after),
            soft_stop_timeout=timedelta(0),
        ),
    )
