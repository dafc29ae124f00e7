"""A maintenance service that always fails, or is always slow, beside the others of its leader."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy import InsertOpts
from riverpy.periodic import PeriodicJob
from riverpy.schedules import every
from tests.maintenance.bad_rows import triggered
from tests.maintenance.rows import insert_ended, insert_jobs
from tests.work.rig import Rig, Task

if TYPE_CHECKING:
    from tests._database import Schema

REFUSED = "RAISE EXCEPTION 'refused'"
SLOW = "PERFORM pg_sleep(15)"
"""For longer than any statement of maintenance may take."""
SECOND = timedelta(seconds=1)


@pytest.fixture
def rig(schema: Schema) -> Rig:
    """A rig."""
    return Rig(schema)


async def insert_work(rig: Rig) -> list[int]:
    """Insert due jobs for the scheduler, and what the cleaner and the rescuer have to end; returns
    the ids of these two."""
    schema = rig.schema
    await insert_jobs(
        schema, 20, state="'retryable'", scheduled_at="now() - interval '1 minute'", queue="'other'"
    )
    ended = await insert_ended(schema, "completed", "30 days")
    stuck = await insert_jobs(
        schema,
        state="'running'",
        attempt="1",
        attempted_at="now() - interval '3 hours'",
        attempted_by="'{gone}'",
        queue="'other'",
    )
    return [ended, *stuck]


@pytest.mark.parametrize("does", [REFUSED, SLOW], ids=["fails", "is slow"])
async def test_scheduler(rig: Rig, does: str, log: list[dict[str, Any]]) -> None:
    """While the scheduler can move no job, old jobs are deleted, stuck ones are rescued, and
    periodic ones are inserted in time. Each service gets its turn, and none fails for want of
    it."""
    rig.register_task()
    ended, stuck = await insert_work(rig)
    body = f"IF it ->> 'state' IN ('scheduled', 'retryable') THEN {does}; END IF;"
    async with triggered(rig.schema, "river_job", "UPDATE OF state", body):
        client = rig.client(elect_interval=timedelta(seconds=0.2))
        client.periodic_jobs.add(
            PeriodicJob(every(SECOND), lambda: (Task(1), InsertOpts(queue="periodic")), id="each")
        )
        async with rig.running(client):
            with anyio.fail_after(60, reason="other services stand still"):
                while await rig.schema.fetchval(
                    "SELECT count(*) FROM river_job WHERE id = $1 OR id = $2 AND state = 'running'",
                    ended,
                    stuck,
                ):
                    await anyio.sleep(0.05)
                while await rig.schema.fetchval(
                    "SELECT count(*) < 5 FROM river_job WHERE queue = 'periodic'"
                ):
                    await anyio.sleep(0.05)
        left = "SELECT count(*) FROM river_job WHERE state = 'retryable' AND id <> $1"
        assert await rig.schema.fetchval(left, stuck) == 20
    waited = "waited too long for connection"
    assert not [line for line in log if waited in str(line.get("error"))]
