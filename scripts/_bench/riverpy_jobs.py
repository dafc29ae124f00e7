"""Jobs of the measurements that run `riverpy worker scripts._bench.riverpy_jobs:client`."""

from __future__ import annotations

from typing import ClassVar

import msgspec

import riverpy

workers = riverpy.Workers()


class Noop(msgspec.Struct, frozen=True):
    """Args of a job that does nothing."""

    kind: ClassVar[str] = "noop"


@workers.job
async def noop(job: riverpy.Job[Noop]) -> None:
    """Do nothing."""


client = riverpy.Client(workers=workers, queues={"default": riverpy.QueueConfig()})
