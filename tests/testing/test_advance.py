"""advance: time passes for jobs and periodic jobs."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, ClassVar

import msgspec
import pytest

import riverpy
from riverpy import Client, Config, InsertOpts, PeriodicJob, UniqueOpts, every
from riverpy.testing import FixedClock, advance

if TYPE_CHECKING:
    from tests._database import Schema

HOUR, DAY = timedelta(hours=1), timedelta(days=1)


class Task(msgspec.Struct, frozen=True):
    """The args of most jobs here."""

    kind: ClassVar[str] = "task"
    name: str = ""


def _make_daily() -> tuple[Task, InsertOpts]:
    return Task("daily"), InsertOpts(unique_opts=UniqueOpts(by_args=True, by_period=DAY))


PERIODIC_JOBS = (
    PeriodicJob(every(8 * HOUR), Task("often"), id="often", run_on_start=True),
    PeriodicJob(riverpy.cron("0 0 * * *", timezone="UTC"), _make_daily, id="daily"),
)
COUNT = "select count(*) from river_job where args->>'name' = $1"


@pytest.mark.parametrize("has_tx", [False, True])
async def test_jobs_and_due_times(schema: Schema, has_tx: bool) -> None:
    """Each slot in the time that passes inserts a job at its time, and unique periods end. Due jobs
    are available, and others wait for the rest of their time."""
    clock = FixedClock(datetime(2030, 1, 1, 23, tzinfo=UTC))
    config = Config(schema=schema.name, clock=clock)
    client = Client(schema.url, config=config, periodic_jobs=PERIODIC_JOBS)
    async with client, schema.connected() as connection:
        transaction = connection.transaction()
        await transaction.start()
        tx = connection if has_tx else None
        reader = connection if has_tx else schema
        now = datetime.now(UTC)
        soon = await client.insert(Task(), InsertOpts(scheduled_at=now + HOUR), tx=tx)
        late = await client.insert(Task(), InsertOpts(scheduled_at=now + 4 * DAY), tx=tx)
        await advance(timedelta(0), client=client, tx=tx)
        assert await reader.fetchval(COUNT, "often") == 1
        await advance(DAY, client=client, tx=tx)
        await advance(2 * DAY, client=client, tx=tx)
        assert clock() == datetime(2030, 1, 4, 23, tzinfo=UTC)
        assert [(await client.job_get(job.job.id, tx=tx)).state for job in (soon, late)] == [
            "available",
            "scheduled",
        ]
        job = await client.job_get(late.job.id, tx=tx)
        assert abs(job.scheduled_at - now - DAY) < timedelta(minutes=5)
        assert abs(job.created_at - now + 3 * DAY) < timedelta(minutes=5)
        assert await reader.fetchval(COUNT, "often") == 1 + 9
        assert await reader.fetchval(COUNT, "daily") == 3
        ages = [
            round((now - row["scheduled_at"]) / HOUR)
            for row in await reader.fetch(
                "select scheduled_at from river_job where args->>'name' = 'daily' order by id"
            )
        ]
        assert ages == [71, 47, 23]
        await transaction.rollback()


async def test_refusals(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative time, no database, a periodic job that fails and too many due times are errors."""

    monkeypatch.setattr(sys.modules["riverpy.testing.advance"], "DUE_TIMES_MAX", 3)

    def fail() -> Task:
        raise ValueError("no luck")

    async with schema.connected() as tx:
        await tx.execute("begin")
        config = Config(schema=schema.name)
        for by, jobs, message in (
            (-HOUR, (), "cannot go back"),
            (DAY, (PeriodicJob(every(HOUR), fail, id="failing"),), "'failing' .* no luck"),
            (DAY, (PeriodicJob(every(HOUR / 4), Task(), id="busy"),), "more than 3 due times"),
        ):
            client = Client(config=config, periodic_jobs=jobs)
            with pytest.raises(riverpy.ConfigError, match=message):
                await advance(by, client=client, tx=tx)
        await advance(HOUR, tx=tx)
        await tx.execute("rollback")
    with pytest.raises(riverpy.ConfigError, match="client= or tx="):
        await advance(HOUR)
