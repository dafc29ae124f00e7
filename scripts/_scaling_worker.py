"""The client of the worker processes that scripts/scaling measures."""

from __future__ import annotations

import os
from typing import ClassVar

import msgspec

import riverpy

LISTEN_URL_VARIABLE = "SCALING_LISTEN_URL"
"""URL that bypasses the pooler. It is set where the database URL leads to a pooler."""
SLOTS = 500


class Noop(msgspec.Struct, frozen=True):
    """Args of a job that does nothing."""

    kind: ClassVar[str] = "noop"


workers = riverpy.Workers()


@workers.job
async def noop(_job: riverpy.Job[Noop]) -> None:
    """Do nothing."""


listen_url = os.environ.get(LISTEN_URL_VARIABLE)
client = riverpy.Client(
    workers=workers,
    queues={"default": riverpy.QueueConfig(max_workers=SLOTS)},
    config=riverpy.Config(pooler=listen_url is not None, listen_url=listen_url),
)
