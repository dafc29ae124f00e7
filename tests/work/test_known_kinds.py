"""Claims take only jobs of kinds that have a worker, unless the client says otherwise."""

from __future__ import annotations

import asyncio
import time
from typing import ClassVar

import msgspec

from riverpy import Job, Workers
from riverpy._work.producer import EMPTY_CLAIM_INTERVAL, EMPTY_CLAIMS_MAX
from tests.work.rig import PATIENCE, Rig, Task


class Beta(msgspec.Struct):
    """Args of a kind that only new clients work, under a new name."""

    kind: ClassVar[str] = "beta"
    kind_aliases: ClassVar[tuple[str, ...]] = ("old_beta",)


def new_workers() -> Workers:
    """Return the workers of a new release: `task` and `beta`."""
    workers = Workers()

    @workers.job
    async def task(job: Job[Task]) -> None: ...

    @workers.job
    async def beta(job: Job[Beta]) -> None: ...

    return workers


async def test_other_kinds_wait_for_their_workers(rig: Rig) -> None:
    """Jobs without a worker in this client stay as they were inserted. Jobs after them run at once.
    A client that works the kind or its alias completes each at the first attempt (FR-09)."""
    rig.register_task()
    await rig.insert_rows(100, kind="beta")
    await rig.insert_rows(1, kind="old_beta")
    before = await rig.schema.fetch("SELECT * FROM river_job WHERE kind <> 'task' ORDER BY id")
    await rig.insert_rows(20)
    async with rig.working(slots=5) as old:
        await rig.take(20)
        assert await rig.states() == {"available": 101, "completed": 20}
        await old.insert(Beta())
        after = await rig.schema.fetch("SELECT * FROM river_job WHERE kind <> 'task' ORDER BY id")
        assert after[:101] == before
        new = rig.client(workers=new_workers())
        async with new, new.working():
            await rig.until_state("completed", 122)
    assert all(row["attempt"] == 1 and not row["errors"] for row in await rig.schema.jobs())


async def test_drain_leaves_other_kinds(rig: Rig) -> None:
    """A drain ends when no job of its kinds is left, although other jobs wait (FR-09)."""
    rig.register_task()
    await rig.insert_rows(3, kind="beta")
    await rig.insert_rows(3)
    async with asyncio.timeout(PATIENCE):
        report = await rig.client().run(drain=True)
    assert report.is_clean
    assert await rig.states() == {"available": 3, "completed": 3}


async def test_known_kinds_are_those_of_the_start(rig: Rig) -> None:
    """A worker that is registered while the client runs is used after the next start (CF-106)."""
    rig.register_task()
    await rig.insert_rows(1, kind="beta")
    async with rig.working() as client:

        @rig.job(args=Beta)
        async def beta(job: Job[Beta]) -> None: ...

        await client.insert(Task())
        await rig.take(1)
    assert await rig.states() == {"available": 1, "completed": 1}
    await rig.client().run(drain=True)
    assert await rig.states() == {"completed": 2}


async def test_notifications_of_other_kinds(rig: Rig) -> None:
    """Many notifications for jobs of other kinds do not cause a stream of empty claims. A job of
    the client's own kinds is found among them (FR-09)."""
    rig.register_task()
    await rig.insert_rows(1, kind="beta")
    async with rig.working() as client:
        assert client._run is not None
        producer = client._run.producers["default"]
        claims: list[float] = []
        producer.claimed.emit = lambda: claims.append(time.monotonic())  # type: ignore[method-assign]
        began = time.monotonic()
        while time.monotonic() < began + 1.0:
            producer.wake_after_notification()
            await asyncio.sleep(0.001)
        assert (
            len(claims)
            <= EMPTY_CLAIMS_MAX + 1.2 * (time.monotonic() - began) / EMPTY_CLAIM_INTERVAL
        )
        await rig.work(client, Task())
