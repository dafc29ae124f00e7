"""The log of a job: what is stored for each attempt, from which loggers, within which limits."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from riverpy import InsertOpts, Job, JobCancel, JobSnooze
from riverpy.joblog import JobLog, JobLogHandler
from tests.work.rig import Rig, Task, metadata_of

if TYPE_CHECKING:
    from collections.abc import Generator

LOG = "river:log"


@pytest.fixture
def logger() -> Generator[logging.Logger]:
    """Return a logger with the handler of job logs."""
    logger = logging.getLogger("test_joblog")
    handler = JobLogHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield logger
    logger.removeHandler(handler)


async def test_each_attempt(rig: Rig, logger: logging.Logger) -> None:
    """An attempt appends one entry to what the row held, whether it fails, is snoozed or cancelled.
    Lines of its tasks and threads belong to it, and lines below the level and of other code do not.
    A second JobLog changes nothing."""

    async def in_task(said: str) -> None:
        logger.error("task of %s", said)

    @rig.job(next_retry=lambda job: timedelta(0))
    async def work(job: Job[Task]) -> None:
        said = f"attempt {job.attempt}"
        logger.info("info of %s", said)
        logger.debug("too low")
        await asyncio.to_thread(logger.warning, "thread\0 of %s", said)
        await asyncio.create_task(in_task(said))
        match len(job.metadata[LOG]):
            case 1:
                raise ValueError("failed")
            case 2:
                raise JobSnooze(timedelta(0))
            case _:
                raise JobCancel("enough")

    logger.info("outside of a job")
    before = {"attempt": 9, "log": "of River\n", "more": 1.50}
    opts = InsertOpts(metadata={LOG: [before], "mine": 1})
    async with rig.working(middleware=[JobLog(), JobLog(level="ERROR")]) as client:
        job_id = (await client.insert(Task(), opts)).job.id
        await rig.take(3)
    found = metadata_of(await rig.row(job_id))
    entries = [
        {
            "attempt": n,
            "log": f"INFO info of attempt {n}\nWARNING thread\ufffd of attempt {n}\n"
            f"ERROR task of attempt {n}\n",
        }
        for n in (1, 2, 2)
    ]
    assert found[LOG] == [before, *entries]
    assert found["mine"] == 1
