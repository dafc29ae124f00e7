"""An enqueuer of periodic jobs with a fixed term, on a real table."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from riverpy._clock import Clock
from riverpy._insert.inserter import Inserter
from riverpy._insert.row import InsertSettings
from riverpy._maintenance.periodic_enqueuer import PeriodicEnqueuer
from riverpy._plugins import PluginLists
from riverpy.periodic import PeriodicJob, PeriodicJobs
from riverpy.schedules import every
from tests.leading.term_context import QuickTimer, held_term

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy._clock import Timer
    from riverpy._postgres.leases import LeaseAcquireResult
    from tests._database import Schema
    from tests.leading.term_context import HeldTerm

MINUTELY = every(timedelta(minutes=1))
EPOCH = datetime(2020, 1, 1, tzinfo=UTC)


class Tick(msgspec.Struct):
    """What is inserted."""

    kind: ClassVar[str] = "tick"

    number: int = 0


class Grid:
    """A schedule of a user's own: every `step` since 2020."""

    def __init__(self, step: timedelta) -> None:
        self.step = step

    def next(self, after: datetime, /) -> datetime | None:
        """The next multiple."""
        return EPOCH + ((after - EPOCH) // self.step + 1) * self.step


class WrongClock(Clock):
    """The clock of a machine that is ten minutes ahead."""

    def now(self) -> datetime:
        return super().now() + timedelta(minutes=10)


class Enqueuing:
    """One enqueuer of one term."""

    def __init__(self, held: HeldTerm, *jobs: PeriodicJob) -> None:
        self.held, self.schema = held, held.schema
        self.jobs = PeriodicJobs(jobs)
        self.enqueuer = PeriodicEnqueuer(held.context, self.jobs, inserter(held))

    async def run(self) -> float:
        """Passes until nothing is due; returns the seconds until something may be."""
        while (delay := await self.held.run(self.enqueuer)) == 0.0:
            pass
        return delay

    async def move(self, job_id: str, ago: timedelta) -> datetime:
        """Let the next slot of a job be so long ago. Returns it."""
        return await self.schema.fetchval(
            "UPDATE riverpy_periodic"
            " SET next_run_at = date_trunc('milliseconds', now()) - $2::interval"
            " WHERE id = $1 RETURNING next_run_at",
            job_id,
            ago,
        )

    async def row(self, job_id: str) -> Any:
        """The row of a job."""
        return await self.schema.fetchrow("SELECT * FROM riverpy_periodic WHERE id = $1", job_id)

    async def slots(self, job_id: str) -> list[datetime]:
        """The times of what was inserted for a job."""
        rows = await self.schema.fetch(
            "SELECT scheduled_at FROM river_job WHERE metadata->>'river:periodic_job_id' = $1"
            " ORDER BY scheduled_at",
            job_id,
        )
        return [row[0] for row in rows]

    def wait_out_holds(self) -> None:
        """Let what is held after a failure be tried again."""
        assert isinstance(self.held.timer, QuickTimer)
        self.held.timer.skipped += 60


def inserter(held: HeldTerm) -> Inserter:
    """An inserter without a pool, on a machine with a wrong clock."""

    def no_pool() -> Any:
        raise AssertionError("an insert left the transaction")

    rules = InsertSettings(default_max_attempts=25)
    config = held.context.config
    plugins = PluginLists(config.plugins, config.hooks, config.middleware)
    return Inserter(
        no_pool, schema=held.schema.name, insert_settings=rules, plugins=plugins, clock=WrongClock()
    )


@asynccontextmanager
async def enqueuing(
    schema: Schema,
    *jobs: PeriodicJob,
    timer: Timer | None = None,
    term: LeaseAcquireResult | None = None,
    **settings: Any,
) -> AsyncGenerator[Enqueuing]:
    """An enqueuer that has begun its term, with these jobs registered."""
    async with held_term(schema, timer=timer, term=term, **settings) as held:
        one = Enqueuing(held, *jobs)
        await one.enqueuer.prepare()
        yield one
