"""Stops beside misbehaving jobs and a broken database end within their timeouts."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import anyio
import pytest

from tests.kit.proxy import proxied

if TYPE_CHECKING:
    from riverpy import Job
    from tests.kit.proxy import Proxy
    from tests.work.rig import Rig, Task

SOFT, HARD = timedelta(milliseconds=300), timedelta(seconds=1)
FAR_BEYOND = 40.0
"""Seconds after which a stop has exceeded its timeouts, however busy the machine is."""
BACKLOG = 10_000


async def stop(rig: Rig, proxy: Proxy, trouble: str) -> None:
    """Cause the trouble, and return when the client has stopped."""
    release = threading.Event()
    started = asyncio.Event()

    loop = asyncio.get_running_loop()

    @rig.job(executor="thread", timeout=None)
    def work(job: Job[Task]) -> None:
        loop.call_soon_threadsafe(started.set)
        release.wait()

    client = rig.client(url=proxy.url, slots=5, soft_stop_timeout=SOFT, hard_stop_timeout=HARD)
    try:
        async with rig.running(client):
            await rig.insert_rows(1)
            assert client._run is not None
            client._run.producers["default"].wake()
            await started.wait()
            if trouble == "frozen database":
                proxy.hold()
            elif trouble == "no database":
                proxy.refusing = True
                proxy.cut()
            with anyio.fail_after(FAR_BEYOND, reason="the stop does not end"):
                client.stop()
                while rig.report is None:
                    await asyncio.sleep(0.01)
    finally:
        release.set()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("trouble", ["stuck job", "frozen database", "no database"])
async def test_limits_of_a_stop(rig: Rig, trouble: str) -> None:
    """A stop ends within its timeouts beside a job that ignores its cancellation, also while the
    database does not answer or is down. The report lists what was left (SC-06)."""
    async with proxied(rig.url) as proxy:
        await stop(rig, proxy, trouble)
    assert rig.report is not None
    assert len(rig.report.abandoned) == 1


@pytest.mark.timeout(120)
async def test_limit_of_a_stop_with_a_backlog(rig: Rig) -> None:
    """10,000 results that the database does not store do not delay a stop. They are counted
    (SC-06)."""
    release = asyncio.Event()

    @rig.job(timeout=None)
    async def work(job: Job[Task]) -> None:
        await release.wait()

    await rig.insert_rows(BACKLOG)
    async with proxied(rig.url) as proxy:
        client = rig.client(
            url=proxy.url, slots=BACKLOG, soft_stop_timeout=SOFT, hard_stop_timeout=HARD
        )
        async with rig.running(client):
            run = client._run
            assert run is not None
            with anyio.fail_after(60, reason="not all were claimed"):
                while len(run.running_attempts) < BACKLOG:
                    await asyncio.sleep(0.01)
            proxy.hold("riverpy results")
            release.set()
            await run.running_attempts.wait_until_all_ended()
            with anyio.fail_after(FAR_BEYOND, reason="the stop does not end"):
                client.stop()
                while rig.report is None:
                    await asyncio.sleep(0.01)
    assert rig.report.unstored == BACKLOG
    assert rig.report.abandoned == ()
