"""Effects of users, their code and the machine on workers under load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from riverpy._log_events import QUEUE_PAUSED
from tests.kit.load import HELD, LoadSettings, until
from tests.kit.server_faults import rows_locked

if TYPE_CHECKING:
    from tests.kit.load import Stage

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

SETTINGS = LoadSettings(slots=50, dead_after=24.0)
POOL_SIZE = 10
"""Size of a client's pool, by default."""
LOCK_RUNNING = "SELECT id FROM river_job WHERE state = 'running' FOR UPDATE"
LOCK_AVAILABLE = "SELECT id FROM river_job WHERE state = 'available' FOR UPDATE"


async def test_locked_running_rows(stage: Stage) -> None:
    """Another transaction locks the rows of running jobs. Their results wait for it, and nothing
    else does. A long wait is logged."""
    async with stage.load(outages=0, expected={HELD}) as load:
        held = await load.start_held(5)
        async with rows_locked(stage.url, LOCK_RUNNING) as count:
            assert count >= len(held)
            load.release()
            await load.until_completed()
            await load.until_completed()
        await load.until_recovered()


async def test_locked_available_rows(stage: Stage) -> None:
    """Another transaction locks the rows of available jobs. Other jobs are claimed, and these after
    its end."""
    async with stage.load(outages=0) as load:
        await load.client.queue_pause("default")
        for member in stage.members:
            await until(lambda member=member: member.count(QUEUE_PAUSED) == 1)
        await load.until_jobs_wait()
        async with rows_locked(stage.url, LOCK_AVAILABLE) as count:
            assert count > 0
            await load.client.queue_resume("default")
            await load.until_completed()
        await load.until_recovered()


async def test_pool_is_held(stage: Stage) -> None:
    """Jobs take every connection of each worker's pool, and other jobs wait for one. Claims,
    results, the lease and heartbeats continue on connections of their own (PB-10)."""
    async with stage.load(outages=0) as load:
        held: set[int] = set()
        while not all(member.started_jobs & held for member in stage.members):
            held.update(await load.start_held(taken_connections=POOL_SIZE))
        began = await stage.fetchval("now")
        await load.until_completed()
        await until(lambda: load.is_positive("all_have_beaten", began))
        await until(lambda: load.is_positive("lease_is_renewed", began))


async def test_frozen_worker(stage: Stage) -> None:
    """A worker process is suspended and continues. The other one works in that time, and each job
    runs once."""
    frozen, _ = stage.members
    async with stage.load(outages=0) as load:
        frozen.worker.freeze()
        await load.until_completed()
        frozen.worker.thaw()
        await load.until_completed()
