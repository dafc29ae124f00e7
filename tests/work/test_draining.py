"""What keeps working while a stop waits for the last jobs."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import TYPE_CHECKING

import anyio

from tests.work.rig import Task

if TYPE_CHECKING:
    from riverpy import Job
    from tests.work.rig import Rig


async def test_heartbeat_during_a_drain(rig: Rig) -> None:
    """A client that waits for its last job keeps its heartbeat, so no other client runs the job.
    Afterwards its row is deleted (SC-08)."""
    go_on, runs = anyio.Event(), 0

    @rig.job
    async def work(job: Job[Task]) -> None:
        nonlocal runs
        runs += 1
        await go_on.wait()

    settings = {"dead_after": timedelta(seconds=3), "soft_stop_timeout": None}
    async with rig.working(candidate=False, **settings) as client:
        await client.insert(Task())
        await rig.until_state("running")
        client.stop()
        for _ in range(3):
            last = await rig.schema.fetchval("SELECT heartbeat_at FROM riverpy_client")
            await rig.until("SELECT heartbeat_at > $1 FROM riverpy_client", True, last)
        assert await rig.states() == {"running": 1}
        go_on.set()
    assert await rig.states() == {"completed": 1}
    assert await rig.schema.fetchval("SELECT count(*) FROM riverpy_client") == 0
    assert runs == 1


async def test_signals_stay_the_application_s(rig: Rig) -> None:
    """A client inside another program, such as a web server, changes no signal handler and no
    wake-up descriptor, during its work or after it (SC-07)."""
    rig.register_task()

    def taken() -> list[object]:
        wake_up = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wake_up)
        return [wake_up, *map(signal.getsignal, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))]

    before = taken()
    async with rig.working() as client:
        await client.insert(Task())
        await rig.event()
        assert taken() == before
    assert taken() == before
