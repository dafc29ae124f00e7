"""The client of worker processes under load: `riverpy worker tests.kit.load_worker:client`.

Each start of an attempt is a line in a file. The file survives the process and needs no database.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from time import time
from typing import ClassVar

import anyio
import msgspec

import riverpy
from riverpy import _log
from riverpy._maintenance import job_scheduler
from riverpy._work import reconciler
from tests.kit.fleet import SETTINGS_VARIABLE, end_with_the_fleet
from tests.kit.load import LoadSettings

LOOK_INTERVAL = 0.02
EVENTS_MAX = 1_000_000
"""Lines about single jobs per minute. Tests need all of them."""

settings = msgspec.json.decode(os.environ[SETTINGS_VARIABLE], type=LoadSettings)
effects = os.open(settings.effects, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
job_scheduler.RUN_INTERVAL = reconciler.RECONCILE_INTERVAL = settings.look_interval
_log.EVENTS_PER_WINDOW_MAX = EVENTS_MAX
workers = riverpy.Workers()
taking = anyio.Lock()
"""Held by the one job that takes connections, so that two jobs do not wait for each other's."""


class Effect(msgspec.Struct, frozen=True):
    """A job with a side effect."""

    kind: ClassVar[str] = "effect"
    seconds: float = 0.0
    """Seconds that it takes."""
    until: str = ""
    """Path of a file; the job runs until it exists."""
    taken_connections: int = 0
    """Number of connections of the client's pool that it takes while it runs."""


@workers.job(timeout=None)
async def effect(job: riverpy.Job[Effect]) -> None:
    """Record the start, and take a while."""
    os.write(effects, b"%d %d %f\n" % (job.id, job.attempt, time()))
    pool = client._get_open_pool()
    async with taking:
        held = [await pool.acquire() for _ in range(job.args.taken_connections)]
    await anyio.sleep(job.args.seconds)
    while job.args.until and not Path(job.args.until).exists():
        await anyio.sleep(LOOK_INTERVAL)
    for connection in held:
        await pool.release(connection)


client = riverpy.Client(
    workers=workers,
    queues={"default": riverpy.QueueConfig(max_workers=settings.slots)},
    config=riverpy.Config(
        reindexer_index_names=[],
        # Jobs without a notification are not worked.
        fetch_poll_interval=timedelta(minutes=10),
        elect_interval=timedelta(seconds=settings.elect_interval),
        leader_ttl=timedelta(seconds=settings.leader_ttl),
        dead_after=timedelta(seconds=settings.dead_after),
        durable_claims=settings.durable_claims,
    ),
)
end_with_the_fleet()
