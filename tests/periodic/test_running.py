"""Periodic jobs in running services and clients: wrong timers, outages, changes of leader."""

from __future__ import annotations

import random
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy import Client, Config, HookPeriodicJobsStartFunc, Job, QueueConfig, Workers
from riverpy._clock import Timer
from riverpy._lifecycle import ServiceGroup
from riverpy._log_events import PERIODIC_JOBS_IGNORED
from riverpy._maintenance.periodic_enqueuer import PLANNING_TIME_MAX
from riverpy.errors import ConfigError, NotFoundError, SchemaMissingError
from riverpy.periodic import PeriodicJob
from riverpy.schedules import every
from tests.kit.proxy import proxied
from tests.periodic.enqueuing import EPOCH, Grid, Tick, enqueuing

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, Sequence

    from riverpy._maintenance.periodic_enqueuer import PeriodicJobPlan
    from riverpy.periodic import MissedPolicy, PeriodicJobsStart
    from tests._database import Schema
    from tests.periodic.enqueuing import Enqueuing

QUICK = {
    "elect_interval": timedelta(seconds=0.2),
    "leader_ttl": timedelta(seconds=30),
}
"""It leads soon, and for longer than a machine stalls."""
HOURLY = every(timedelta(hours=1))
workers = Workers()


@workers.job
async def tick(job: Job[Tick]) -> None:
    """Do nothing."""


class WrongTimer(Timer):
    """A timer whose waits are over too early, or too late, and that waits for no stagger."""

    def __init__(self, least: float, most: float) -> None:
        self.error = least, most
        self._random = random.Random(7)

    async def sleep(self, seconds: float) -> None:
        await super().sleep(0)

    async def wait_for_event(self, event: asyncio.Event, timeout: float) -> bool:
        wrong = self._random.uniform(*self.error) if self._random.random() < 0.5 else 0.0
        return await super().wait_for_event(event, min(max(timeout + wrong, 0), 0.2))


@asynccontextmanager
async def running(one: Enqueuing) -> AsyncGenerator[None]:
    """The enqueuer's own loop."""
    one.enqueuer.run_once_succeeded.init()
    async with ServiceGroup() as group:
        await group.start(one.enqueuer)
        yield


async def until(one: Enqueuing, job_id: str, count: int) -> None:
    """Wait until so many jobs are inserted."""
    with anyio.fail_after(40):
        while len(await one.slots(job_id)) < count:
            await one.enqueuer.run_once_succeeded.wait()


@pytest.mark.parametrize(("least", "most"), [(-0.02, -0.001), (0.0, 0.05)])
async def test_wrong_timer(schema: Schema, least: float, most: float) -> None:
    """With a timer that fires early or late, each run is inserted exactly once and not before it is
    due (SK-03, SK-08)."""
    step = timedelta(milliseconds=25)
    job = PeriodicJob(Grid(step), Tick(), id="ticks", missed="all")
    async with enqueuing(schema, job, timer=WrongTimer(least, most)) as one:
        async with running(one):
            await until(one, "ticks", 60)
        slots = await one.slots("ticks")
        assert {later - earlier for earlier, later in pairwise(slots)} == {step}
        assert {(slot - EPOCH) % step for slot in slots} == {timedelta(0)}
    early = "SELECT count(*) FROM river_job WHERE created_at < scheduled_at"
    assert await schema.fetchval(early) == 0


async def test_slow_plans_are_inserted_in_turn(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow constructor's job is inserted before the next constructor is called, so the event loop
    is not blocked for long."""
    order: list[str] = []

    def slow() -> Tick:
        time.sleep(PLANNING_TIME_MAX)
        order.append("planned")
        return Tick()

    jobs = [PeriodicJob(HOURLY, slow, id=f"slow-{n}") for n in range(3)]
    async with enqueuing(schema, *jobs) as one:
        transact = one.enqueuer._update_rows_and_insert_jobs

        async def noted(plans: Sequence[PeriodicJobPlan]) -> set[str]:
            order.append("inserted")
            return await transact(plans)

        monkeypatch.setattr(one.enqueuer, "_update_rows_and_insert_jobs", noted)
        for job in jobs:
            await one.move(job.id, timedelta(seconds=1))
        await one.held.run(one.enqueuer)
    assert order == ["planned", "inserted"] * 3


async def test_outage(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an outage, runs are inserted again, without a limit of attempts (LM-09)."""
    async with proxied(schema.url) as proxy:
        monkeypatch.setattr(schema, "url", proxy.url)
        job = PeriodicJob(Grid(timedelta(milliseconds=100)), Tick(), id="ticks")
        async with enqueuing(schema, job, timer=WrongTimer(0, 0)) as one:
            one.held.context.fence.transaction_timeout = timedelta(seconds=0.3)
            async with running(one):
                await until(one, "ticks", 2)
                proxy.refusing = True
                proxy.cut()
                with anyio.fail_after(20):
                    while not one.held.context.connection.outage_tracker.is_outage_logged:
                        await anyio.sleep(0.01)
                before = len(await one.slots("ticks"))
                proxy.refusing = False
                await until(one, "ticks", before + 10)
            slots = await one.slots("ticks")
            assert len(slots) == len(set(slots))


@asynccontextmanager
async def leading(schema: Schema, *jobs: PeriodicJob, **settings: object) -> AsyncGenerator[Client]:
    """A client that works and leads."""
    config = Config(schema=schema.name, **{**QUICK, **settings})  # type: ignore[arg-type]
    client = Client(
        schema.url,
        workers=workers,
        queues={"default": QueueConfig(max_workers=5)},
        periodic_jobs=jobs,
        config=config,
    )
    async with client, client.working():
        yield client


async def state(schema: Schema, condition: str) -> None:
    """Wait until the rows fulfil a condition."""
    with anyio.fail_after(30):
        while not await schema.fetchval(f"SELECT {condition}"):
            await anyio.sleep(0.02)


async def test_client_inserts_and_works(schema: Schema) -> None:
    """A client that becomes leader inserts its run on start once and works it. Periodic jobs can be
    added at run time (LM-15)."""
    hooked: list[PeriodicJobsStart] = []

    async def hook(start: PeriodicJobsStart) -> None:
        hooked.append(start)

    start = PeriodicJob(HOURLY, Tick(1), id="start", run_on_start=True)
    async with leading(schema, start, hooks=[HookPeriodicJobsStartFunc(hook)]) as client:
        await state(schema, "count(*) = 1 FROM river_job WHERE state = 'completed'")
        assert [one.jobs for one in hooked] == [client.periodic_jobs]
        client.periodic_jobs.add(
            PeriodicJob(every(timedelta(milliseconds=200)), Tick(2), id="quick")
        )
        await state(schema, "count(*) > 4 FROM river_job WHERE state = 'completed'")
        assert client.periodic_jobs.remove("quick")
    rows = await schema.fetch("SELECT metadata->>'river:periodic_job_id' AS id FROM river_job")
    assert [row["id"] for row in rows].count("start") == 1


async def test_calls(schema: Schema) -> None:
    """A client that is not the leader can pause, resume and run a periodic job, also with `tx`."""
    job = PeriodicJob(HOURLY, Tick(), id="ticks")
    config = Config(schema=schema.name)
    async with leading(schema, job), Client(schema.url, config=config) as other:
        await state(schema, "count(*) = 1 FROM riverpy_periodic")
        await other.periodic_pause("ticks")
        await other.periodic_pause("ticks")
        assert await schema.fetchval("SELECT paused_at IS NOT NULL FROM riverpy_periodic")
        await other.periodic_run("ticks")
        await state(schema, "count(*) = 1 FROM river_job")
        await other.periodic_resume("ticks")
        assert await schema.fetchval("SELECT paused_at IS NULL FROM riverpy_periodic")
        async with schema.connected() as connection:
            transaction = connection.transaction()
            await transaction.start()
            await other.periodic_run("ticks", tx=connection)
            await transaction.rollback()
        assert await schema.fetchval("SELECT run_requested_at IS NULL FROM riverpy_periodic")
        for verb in (other.periodic_run, other.periodic_pause, other.periodic_resume):
            with pytest.raises(NotFoundError, match="no periodic job 'tick': did you mean ticks"):
                await verb("tick")
            with pytest.raises(
                NotFoundError, match="no periodic job 'zz': `riverpy periodic list` shows"
            ):
                await verb("zz")


@pytest.mark.parametrize("missed", ["all", "one", "skip"])
async def test_resume_skips_missed_runs(schema: Schema, missed: MissedPolicy) -> None:
    """Runs that were due during a pause are skipped, even if there was no leader. Later runs are
    inserted."""
    job = PeriodicJob(every(timedelta(minutes=1)), Tick(), id="ticks", missed=missed)
    async with (
        enqueuing(schema, job) as one,
        Client(schema.url, config=Config(schema=schema.name)) as client,
    ):
        await client.periodic_pause("ticks")
        await one.move("ticks", timedelta(minutes=5))
        await client.periodic_resume("ticks")
        await one.run()
        assert await one.slots("ticks") == []
        await schema.execute("UPDATE riverpy_periodic SET resumed_at = now() - '1 hour'::interval")
        await client.periodic_resume("ticks")  # it is not paused: nothing changes
        slot = await one.move("ticks", timedelta(seconds=1))
        await one.run()
        assert await one.slots("ticks") == [slot]


async def test_calls_without_table(schema: Schema) -> None:
    """Without the table, each call raises an error with the command that creates it."""
    await schema.execute("ALTER TABLE riverpy_periodic RENAME TO elsewhere")
    try:
        async with Client(schema.url, config=Config(schema=schema.name)) as client:
            with pytest.raises(SchemaMissingError, match="riverpy migrate up --line riverpy"):
                await client.periodic_run("ticks")
    finally:
        await schema.execute("ALTER TABLE elsewhere RENAME TO riverpy_periodic")


async def test_next_leader_inserts(schema: Schema) -> None:
    """A run that is due after its leader has gone is inserted once by the next leader (SK-06)."""
    job = PeriodicJob(every(timedelta(seconds=1.5)), Tick(), id="ticks", missed="all")
    for _ in range(3):
        async with leading(schema, job):
            await state(schema, "count(*) = 1 FROM riverpy_periodic")
            known = await schema.fetchval("SELECT next_run_at FROM riverpy_periodic")
            await state(schema, f"next_run_at > '{known}' FROM riverpy_periodic")
    slots = await schema.fetch("SELECT scheduled_at FROM river_job ORDER BY scheduled_at")
    steps = {later[0] - earlier[0] for earlier, later in pairwise(slots)}
    assert steps == {timedelta(seconds=1.5)}


def test_duplicate_ids_of_a_client() -> None:
    """A client refuses two periodic jobs with one id."""
    jobs = [PeriodicJob(HOURLY, Tick(), id="ticks"), PeriodicJob(HOURLY, Tick(), id="ticks")]
    with pytest.raises(ConfigError, match="two periodic jobs have the id 'ticks'"):
        Client(periodic_jobs=jobs)


async def test_no_candidate(schema: Schema, log: list[dict[str, Any]]) -> None:
    """A client that takes no part in leader election warns once of each periodic job that it will
    never insert, also of one that is added while it runs, and inserts none (CF-061,
    leader_election_disabled_both_directions)."""
    first, second = (
        PeriodicJob(HOURLY, Tick(1), id="first"),
        PeriodicJob(HOURLY, Tick(2), id="second"),
    )
    async with leading(schema, first, candidate=False) as client:
        client.periodic_jobs.add(second)
        assert client.is_leader is False
    warned = [one["periodic_job_ids"] for one in log if one["event"] == PERIODIC_JOBS_IGNORED]
    assert warned == [["first"], ["second"]]
    assert await schema.fetchval("SELECT count(*) FROM river_job") == 0
