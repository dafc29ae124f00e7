"""A server that fails over to its standby, under load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
import pytest_asyncio

from riverpy._log_events import LEADER_ELECTED, LEADERSHIP_LOST, WORKER_STARTED
from tests.kit.fleet import Worker, running_fleet, with_user
from tests.kit.load import LOST, RESTORED, LoadSettings, Stage, StageMember, until
from tests.kit.proxy import Partition, Proxy
from tests.kit.standby import Pair, PairProxy

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.kit.fleet import Fleet

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

TRIES = 12
"""Attempts to connect, enough for the pauses between them to grow."""
SETTINGS = LoadSettings(slots=50)


class FailingOver(Stage):
    """Workers whose URL has both servers of a pair."""

    def __init__(self, fleet: Fleet, pair: Pair) -> None:
        super().__init__(fleet)
        self.pair = pair


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncGenerator[FailingOver]:
    """Run two workers in front of a primary and its standby."""
    async with running_fleet(Pair) as fleet:
        assert isinstance(fleet.server, Pair)
        stage = FailingOver(fleet, fleet.server)
        await stage.start(SETTINGS)
        yield stage


async def restored(member: StageMember) -> None:
    """Return when a worker has logged that its connections are restored."""
    await until(lambda: member.count(RESTORED) == member.count(LOST) > 0)


async def test_switch_over(stage: FailingOver) -> None:
    """The standby takes over while jobs run. Results of that time are stored on the new primary,
    nothing is lost, a client becomes leader there, and no worker restarts. Inserts continue with a
    client whose URL has both servers (NR-12)."""
    async with stage.load(outages=1, expected=[LEADERSHIP_LOST]) as load:
        await load.start_held(5)
        await stage.pair.switch_over()
        load.release()
        for member in stage.members:
            await restored(member)
        await until(lambda: any(member.count(LEADER_ELECTED) for member in stage.members))
        await load.until_completed()


async def test_machine_is_lost(stage: FailingOver) -> None:
    """The machine of the primary is lost, so that connections to it are neither closed nor refused.
    Workers give up silent connections and work on the promoted standby (NR-12)."""
    async with stage.load(expected=[LEADERSHIP_LOST]) as load:
        ways = [way_to_primary(stage, member) for member in stage.members]
        for way in ways:
            way.partition = Partition.HELD
        await stage.pair.switch_over()
        for member in stage.members:
            await restored(member)
        await load.until_recovered()
    for way in ways:
        await way.heal()


def way_to_primary(stage: FailingOver, member: StageMember) -> Proxy:
    """Return the worker's proxy to the current primary."""
    proxy = member.worker.proxy
    assert isinstance(proxy, PairProxy)
    return proxy.ways[stage.pair.is_second_primary]


async def test_worker_before_a_standby(stage: FailingOver) -> None:
    """A worker whose URL has only the server that comes back as a standby logs this once, polls it,
    and works when that server is the primary again (NR-12)."""
    member = await add_single(stage)
    async with stage.load(expected=[LEADERSHIP_LOST]) as load:
        await until(lambda: bool(member.started_jobs))
        await stage.pair.switch_over()
        seen = member.worker.proxy.accepted
        await load.until_completed()
        await until(lambda: member.worker.proxy.accepted >= seen + TRIES)
        assert (member.count(LOST), member.count(RESTORED)) == (1, 0)
        await stage.pair.switch_over()
        await restored(member)
        print(member.log_lines)


async def add_single(stage: FailingOver) -> StageMember:
    """Add a worker whose URL has only the current primary."""
    fleet = stage.fleet
    async with fleet.server.connected() as connection:
        await connection.execute("CREATE ROLE single LOGIN IN ROLE postgres")
    proxy = Proxy(with_user(stage.pair.primary.url, "single"))
    await proxy.start()
    effects = str(fleet.directory / "single.effects")
    settings = msgspec.structs.replace(SETTINGS, effects=effects, name="single")
    worker = Worker("single", settings, proxy, fleet.directory / "single.log")
    fleet.workers.append(worker)
    await worker.start()
    member = StageMember(worker, settings)
    await until(lambda: member.count(WORKER_STARTED) == 1)
    stage.members.append(member)
    return member
