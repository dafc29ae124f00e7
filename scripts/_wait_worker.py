"""The client of the worker processes that scripts/bench wait measures."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import msgspec

import riverpy

JOB_SECONDS = 0.05
SLOTS = 100


class Short(msgspec.Struct, frozen=True):
    """Args of a job that takes `JOB_SECONDS`."""

    kind: ClassVar[str] = "short"
    n: int = 0


workers = riverpy.Workers()


@workers.job
async def work(job: riverpy.Job[Short]) -> int:
    """Wait, and return the number of the job."""
    await asyncio.sleep(JOB_SECONDS)
    return job.args.n


client = riverpy.Client(workers=workers, queues={"default": riverpy.QueueConfig(max_workers=SLOTS)})
