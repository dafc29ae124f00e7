"""Leader election after the leader was killed, and with clients that take no part."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.interop.conform import conform
from tests.interop.river_go import RiverGoError
from tests.interop.test_fleet import ENGINES
from tests.interop.working import LANGUAGES, OTHER, Periodic, Settings

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.interop.callers import Caller
    from tests.interop.river_go import RiverGo
    from tests.interop.working import Fleet, Worker
    from tests.work.rig import Rig

    Callers = dict[str, Caller]

EITHER = pytest.mark.parametrize("language", LANGUAGES)
MOMENT = 1.0
"""Seconds for which a test checks that nothing happens."""
START = Periodic(id="start", every_ms=86_400_000, run_on_start=True)
TICKS = Periodic(id="ticks", every_ms=300, queue="ticks")
LEADER = "SELECT leader_id FROM river_leader"
COUNT = "SELECT count(*) FROM river_job WHERE metadata ->> 'river:periodic_job_id' = $1"


async def works(worker: Worker, caller: Caller, queue: str) -> None:
    """Check that the worker takes a job of its queue: it has started, and receives
    notifications."""
    job = await caller.insert(conform(queue=queue))
    await worker.until("job_completed", id=job["id"])


async def stays(schema: Schema, leader_id: str | None) -> None:
    """Check that the leader stays the same for a moment."""
    for _ in range(10):
        assert await schema.fetchval(LEADER) == leader_id
        await asyncio.sleep(MOMENT / 10)


@EITHER
async def test_killed_leader(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """When the lease of a killed leader expires, a client of the other language becomes leader and
    inserts once what runs on start. It inserted nothing before. The killed client, started again,
    follows and inserts nothing (CF-060, mixed_leader_death_failover_both_directions)."""
    settings: dict[str, Any] = {"candidate": True, "periodic": [START], "leader_ttl": 6}
    caller = callers[language]
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(fleet.process(language, id="first", **settings))
        await rig.until(COUNT, 1, START.id)
        queues = {"second": 1}
        second = await stack.enter_async_context(
            fleet.worker(OTHER[language], id="second", queues=queues, **settings)
        )
        await works(second, caller, "second")
        first.process.kill()
        await first.stopped()
        await stays(schema, "first")
        assert await schema.fetchval(COUNT, START.id) == 1
        await schema.execute("UPDATE river_leader SET expires_at = now()")
        await rig.until(COUNT, 2, START.id)
        queues = {"again": 1}
        again = await stack.enter_async_context(
            fleet.worker(language, id="first", queues=queues, **settings)
        )
        await works(again, caller, "again")
        await stays(schema, "second")
        assert await schema.fetchval(COUNT, START.id) == 2


@EITHER
async def test_election_disabled(
    language: str, go: RiverGo, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """A client that takes no part in leader election never becomes leader, alone, beside one that
    does, or after it. It works the leader's periodic jobs, and pauses and cancels reach it. In Go
    it may have no periodic jobs of its own; riverpy warns of them (CF-061,
    leader_election_disabled_both_directions)."""
    if language == "go":
        with pytest.raises(RiverGoError, match=r"PeriodicJobs .*LeaderElectionDisabled"):
            await go.run("work", *Settings(periodic=[START]).for_go())
    caller = callers[OTHER[language]]
    async with fleet.worker(language, queues={"default": 2, "other": 1}) as worker:
        await works(worker, caller, "default")
        await stays(schema, None)
        async with fleet.worker(
            OTHER[language], id="leader", candidate=True, queues={"idle": 1}, periodic=[START]
        ) as leader:
            await rig.until(COUNT + " AND state = 'completed'", 1, START.id)
            assert await schema.fetchval(LEADER) == "leader"
            await caller.pause("other")
            await worker.until("queue_paused", queue="other")
            job = await caller.insert(conform("signal"))
            await worker.until("job_started", id=job["id"])
            await caller.cancel(job["id"])
            await worker.until("job_cancelled", id=job["id"])
            leader.stop()
            await leader.stopped()
        await works(worker, caller, "default")
        await stays(schema, None)
    async with fleet.worker(language) as worker:
        await works(worker, caller, "default")
        await stays(schema, None)
    assert await schema.fetchval(COUNT, START.id) == 1


async def test_one_of_three_takes_part(
    callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """Of three clients only one takes part in leader election, each in turn. It is the leader while
    it runs, no other is after it, and only it inserts periodic jobs (CF-083,
    multi_engine_leader_election_disabled)."""
    names = [f"{engine}-{n}" for n, engine in enumerate(ENGINES)]
    for chosen in names:
        async with AsyncExitStack() as stack:
            workers = {
                name: await stack.enter_async_context(
                    fleet.worker(
                        engine,
                        id=name,
                        queues={name: 1},
                        candidate=name == chosen,
                        periodic=[TICKS] if name == chosen else [],
                    )
                )
                for name, engine in zip(names, ENGINES, strict=True)
            }
            known = await schema.fetchval(COUNT, TICKS.id)
            await rig.until(COUNT.replace("count(*)", "count(*) >= $2"), True, TICKS.id, known + 2)
            assert await schema.fetchval(LEADER) == chosen
            leader = workers.pop(chosen)
            leader.stop()
            await leader.stopped()
            inserted = await schema.fetchval(COUNT, TICKS.id)
            for name, worker in workers.items():
                await works(worker, callers["go"], name)
            await stays(schema, None)
            assert await schema.fetchval(COUNT, TICKS.id) == inserted
