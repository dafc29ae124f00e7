"""Worker processes that are killed under load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from riverpy._log_events import (
    JOBS_RESCUED,
    LEADERSHIP_LOST,
    LEASE_ACQUISITION_FAILED,
    LEASE_RENEWAL_FAILED,
    WORKER_STARTED,
)
from tests.kit.load import LoadSettings, until

if TYPE_CHECKING:
    from tests.kit.load import Stage

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

SETTINGS = LoadSettings(slots=50, elect_interval=1.0, leader_ttl=4.0, dead_after=8.0)
EXPECTED = (
    JOBS_RESCUED,
    LEASE_RENEWAL_FAILED,
    LEASE_ACQUISITION_FAILED,
    LEADERSHIP_LOST,
)
"""Log events, besides the rescue, that a busy machine can cause with a lease this short."""


async def test_killed_worker(stage: Stage) -> None:
    """The leader's worker is killed, and another process replaces it. The jobs that it ran run
    again elsewhere, each with one more attempt, and all others run once (LD-07)."""
    killed = stage.leader
    async with stage.load(expected=EXPECTED) as load:
        held: set[int] = set()
        while not (lost := killed.started_jobs & held):
            held.update(await load.start_held(5))
        killed.worker.kill()
        await killed.worker.ended()
        await load.until_completed()
        await killed.worker.start()
        await until(lambda: killed.count(WORKER_STARTED) == 1)
        await until(lambda: lost <= load.restarted_jobs)
