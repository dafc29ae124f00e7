"""A server that restarts, crashes, refuses connections or gets difficult settings, under load."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from riverpy._log_events import (
    CLAIM_SIZE_REDUCED,
    CLAIMING_FAILED,
    JOB_RESULTS_TIMED_OUT,
    LEADERSHIP_LOST,
    LEASE_ACQUISITION_FAILED,
    LEASE_RENEWAL_FAILED,
    MAINTENANCE_RUN_FAILED,
    REJECTED_JOB_RESULTS_STORED,
    RESULT_BATCH_SIZE_REDUCED,
)
from tests.kit.fleet import Shutdown, with_user
from tests.kit.load import HELD, LOST, REFUSED, RESTORED, until
from tests.kit.server_faults import (
    CONNECTION_NAMES,
    connections_exhausted,
    connections_refused,
    find_backends,
    kill_backends,
    role_settings,
    server_settings,
)

if TYPE_CHECKING:
    from tests.kit.load import Stage

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

TRIES = 12
"""Attempts of each worker to connect, enough for the pauses between them to grow."""


async def restored(stage: Stage) -> None:
    """Return when each worker has logged that its connections are restored."""
    for member in stage.members:
        await until(lambda member=member: member.count(RESTORED) == member.count(LOST) > 0)


async def lost(stage: Stage) -> None:
    """Return when each worker has logged that the database is lost."""
    for member in stage.members:
        await until(lambda member=member: member.count(LOST) > 0)


async def test_restart(stage: Stage) -> None:
    """The server restarts while jobs run. They end in the workers that started them, their results
    are kept and stored, and the other jobs are worked (NR-02, NR-03, LD-18)."""
    async with stage.load(outages=1) as load:
        await load.start_held(5)
        await stage.fleet.server.shut_down(Shutdown.FAST)
        load.release()
        await lost(stage)
        await stage.fleet.server.come_back()
        await restored(stage)


async def test_crash(stage: Stage) -> None:
    """The server crashes. It loses the leader and the last claims, whose jobs are worked again. All
    other jobs end in the workers that started them (NR-02, LD-18)."""
    async with stage.load(outages=1, expected=[REFUSED, LEADERSHIP_LOST]) as load:
        leader = stage.leader
        held = await load.start_held(5)
        await load.until_completed()  # later commits have flushed these claims to the disk
        began = time.time()
        await stage.fleet.server.shut_down(Shutdown.IMMEDIATE)
        load.release()
        await lost(stage)
        await stage.fleet.server.come_back()
        load.crashes.append((began, time.time()))
        await restored(stage)
        await until(lambda: leader.count(LEADERSHIP_LOST) == 1)
    refused = {line.get("job_id") for member in stage.members for line in member.warnings}
    assert not refused & {*held}


async def test_refused_connections(stage: Stage) -> None:
    """The database refuses new connections and terminates the existing ones, then accepts
    connections again."""
    async with stage.load(outages=1) as load:
        async with connections_refused(
            stage.url, *(member.worker.name for member in stage.members)
        ):
            await lost(stage)
        await restored(stage)
        await load.until_completed()


async def test_no_connection_left(stage: Stage) -> None:
    """Other clients take every connection of the server, and the workers' connections are killed.
    They get new ones only when others close theirs."""
    user = stage.members[0].worker.name
    async with stage.load(outages=1):
        async with connections_exhausted(with_user(stage.url, user)):
            await kill_backends(stage.url, "riverpy claims")
            await lost(stage)
        await restored(stage)


SLOW = (
    CLAIMING_FAILED,
    CLAIM_SIZE_REDUCED,
    RESULT_BATCH_SIZE_REDUCED,
    JOB_RESULTS_TIMED_OUT,
    REJECTED_JOB_RESULTS_STORED,
    LEASE_RENEWAL_FAILED,
    LEASE_ACQUISITION_FAILED,
    MAINTENANCE_RUN_FAILED,
    LEADERSHIP_LOST,
)
"""Log events when statements are slower than the administrator's timeout."""


@pytest.mark.parametrize("limit", ["50ms", "1s"])
async def test_statement_timeout(stage: Stage, limit: str) -> None:
    """The administrator sets a statement timeout for the workers' roles, and terminates their
    sessions so that it applies. Jobs are worked all the same, and no session is lost because of a
    slow statement."""
    names = [member.worker.name for member in stage.members]
    async with stage.load(expected=[*SLOW, HELD]) as load, AsyncExitStack() as stack:
        for name in names:
            settings = role_settings(stage.url, name, statement_timeout=limit)
            await stack.enter_async_context(settings)
            await kill_backends(stage.url, None, user=name)
        await restored(stage)
        await load.until_completed()
        await stack.aclose()
        for name in names:
            await kill_backends(stage.url, None, user=name)


async def test_idle_in_transaction_timeout(stage: Stage) -> None:
    """The administrator terminates sessions that are idle in a transaction. riverpy's sessions
    never are for long."""
    async with (
        stage.load(outages=0) as load,
        server_settings(stage.url, idle_in_transaction_session_timeout="1s"),
    ):
        await load.until_recovered()


async def test_read_only(stage: Stage) -> None:
    """The server becomes read-only, as after a failover, and writable again. Results of that time
    are kept and stored, and a connection that got this error is replaced (NR-12)."""
    users = [member.worker.name for member in stage.members]
    async with stage.load(outages=1) as load:
        await load.start_held(5)
        before = {user: await find_dedicated(stage, user) for user in users}
        async with server_settings(stage.url, default_transaction_read_only="on"):
            load.release()
            await lost(stage)
        await restored(stage)
        await load.until_recovered()
        for user in users:
            assert not before[user] <= await find_dedicated(stage, user)


async def find_dedicated(stage: Stage, user: str) -> set[int]:
    """Return the backends of a worker that write."""
    names = [name for name in CONNECTION_NAMES if name != "riverpy listener"]
    return {pid for name in names for pid in await find_backends(stage.url, name, user=user)}


async def test_down_for_a_while(stage: Stage) -> None:
    """While the server is away workers try again and again to connect, and log nothing but an
    expired lease. When it is back they work (NR-03)."""
    async with stage.load(outages=1, expected=[LEADERSHIP_LOST]) as load:
        await stage.fleet.server.shut_down(Shutdown.FAST)
        await lost(stage)
        for member in stage.members:
            seen = member.worker.proxy.accepted
            await until(
                lambda member=member, seen=seen: member.worker.proxy.accepted >= seen + TRIES
            )
        await stage.fleet.server.come_back()
        await restored(stage)
        await load.until_completed()
