"""Leader election of clients on a real database, with short leases."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import riverpy._work.run
from riverpy import StopCause
from riverpy._leading import subscriptions as leadership
from riverpy._leading.subscriptions import LeadershipPublisher, LeadershipSubscription
from riverpy._lifecycle import ServiceGroup
from riverpy._log_events import MAINTENANCE_ABANDONED
from riverpy._maintenance.base import MaintenanceService
from riverpy.events import LeadershipChange, LeaseEventKind
from tests.kit.proxy import Partition, proxied
from tests.work.rig import PATIENCE, Rig, Task

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from anyio.abc import TaskStatus

    from riverpy import Client
    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope
    from tests._database import Schema

QUICK = {"elect_interval": timedelta(seconds=0.2), "leader_ttl": timedelta(seconds=30)}
"""Renews and tries soon. Survives a machine that stalls for seconds."""
SHORT = {"elect_interval": timedelta(seconds=0.2), "leader_ttl": timedelta(seconds=1)}
"""For tests in which the lease expires."""
LONG = {"elect_interval": timedelta(minutes=1), "leader_ttl": timedelta(minutes=5)}
"""In no test does a lease of these expire, or a follower make a second attempt."""


@pytest.fixture
def rig(schema: Schema) -> Rig:
    """A rig with a job, because a client needs one."""
    rig = Rig(schema)

    @rig.job
    async def nothing(job: Any) -> None:
        pass

    return rig


class Watched:
    """A client and its leadership changes."""

    def __init__(self, client: Client, changes: LeadershipSubscription) -> None:
        self.client, self._changes = client, changes

    async def next(self) -> LeadershipChange:
        with anyio.fail_after(PATIENCE, reason="no transition came"):
            return await anext(self._changes)

    async def until(self, is_leader: bool) -> LeadershipChange:
        while (change := await self.next()).is_leader is not is_leader:
            pass
        return change

    async def rest(self) -> list[LeadershipChange]:
        """Return the changes until the end of the run."""
        with anyio.fail_after(PATIENCE, reason="the subscription does not end"):
            return [change async for change in self._changes]


@asynccontextmanager
async def candidate(rig: Rig, client_id: str, **settings: Any) -> AsyncGenerator[Watched]:
    """Run a client that takes part in leader election. Records its leadership changes from the
    first on."""
    client = rig.client(id=client_id, **({**QUICK} | settings))
    async with client.leadership() as changes, rig.running(client):
        yield Watched(client, changes)


async def leader_id(rig: Rig) -> str | None:
    """Return the leader in the table."""
    return await rig.schema.fetchval("SELECT leader_id FROM river_leader WHERE expires_at >= now()")


# -- elected


async def test_life_of_a_leader(rig: Rig) -> None:
    """A subscriber gets the present state first, then the start and the end of the term. The row
    equals River's, and is deleted at the stop (EL11, EL13)."""
    async with candidate(rig, "a") as a:
        first = await a.next()
        assert first == LeadershipChange(is_leader=False, leader_id="a")
        begun = await a.next()
        assert a.client.is_leader
        row = await rig.schema.fetchrow("SELECT * FROM river_leader")
        assert row is not None
        assert (row["name"], row["leader_id"]) == ("default", "a")
        assert begun == LeadershipChange(
            True, "a", row["elected_at"], event=LeaseEventKind.ACQUIRED
        )
        a.client.stop()
        (ended,) = await a.rest()
        assert ended == LeadershipChange(
            False,
            "a",
            row["elected_at"],
            StopCause.CLIENT_STOP,
            event=LeaseEventKind.RELEASED,
            reason="this client is stopping",
        )
        assert not a.client.is_leader
    assert await rig.schema.fetchval("SELECT count(*) FROM river_leader") == 0


async def test_leader_keeps_its_term(rig: Rig) -> None:
    """A healthy leader keeps its term by renewals (EL14)."""
    async with candidate(rig, "a") as a:
        term = await a.until(True)
        expires = "SELECT expires_at > $1 FROM river_leader"
        for _ in range(3):
            at = await rig.schema.fetchval("SELECT expires_at FROM river_leader")
            await rig.until(expires, True, at)
        assert await rig.schema.fetchval("SELECT elected_at FROM river_leader") == term.elected_at
        a.client.stop()
        assert len(await a.rest()) == 1


async def test_not_a_candidate(rig: Rig) -> None:
    """A client with `candidate=False` works jobs but does not become leader."""
    async with candidate(rig, "a", candidate=False) as a:
        assert (await a.next()).is_leader is False
        await rig.work(a.client, Task())
        assert not a.client.is_leader
        async with candidate(rig, "b") as b:
            await b.until(True)
        assert await rig.schema.fetchval("SELECT count(*) FROM river_leader") == 0
        a.client.stop()
        assert await a.rest() == []


# -- handed over


@pytest.mark.timeout(180)
async def test_stop_hands_over(rig: Rig) -> None:
    """When a leader stops, a follower becomes leader through the notification, long before its next
    attempt. In 20 repetitions the leader changes exactly once each, and the stopping client does
    not become leader again (LM-03)."""
    async with AsyncExitStack() as stack:

        async def start(client_id: str) -> Watched:
            return await stack.enter_async_context(candidate(rig, client_id, **LONG))

        leader = await start("c0")
        await leader.until(True)
        for number in range(1, 21):
            follower = await start(f"c{number}")
            await follower.next()
            # The row of one that stopped may stay, where its end took long.
            registered = "SELECT count(*) FROM riverpy_client WHERE client_id = $1"
            await rig.until(registered, 1, f"c{number}")
            leader.client.stop()
            await follower.until(True)
            assert await leader_id(rig) == f"c{number}"
            assert [change.cause for change in await leader.rest()] == [StopCause.CLIENT_STOP]
            leader = follower


async def test_poll_only(rig: Rig) -> None:
    """Clients that only poll become leader, renew and hand over. They do not receive requests to
    resign (EL1)."""
    async with candidate(rig, "a", poll_only=True) as a:
        await a.until(True)
        async with candidate(rig, "b", poll_only=True) as b:
            await rig.schema.execute(
                "SELECT pg_notify(current_schema() || '.river_leadership', $1)",
                json.dumps({"action": "request_resign", "leader_id": ""}),
            )
            expires = await rig.schema.fetchval("SELECT expires_at FROM river_leader")
            await rig.until("SELECT expires_at > $1 FROM river_leader", True, expires)
            assert a.client.is_leader
            a.client.stop()
            await b.until(True)


async def test_request_from_go(rig: Rig) -> None:
    """A request to resign in the format of River in Go makes the leader resign. The other client
    becomes leader."""
    async with candidate(rig, "a", **LONG) as a:
        await a.until(True)
        async with candidate(rig, "b", **LONG) as b:
            await b.next()
            await rig.until("SELECT count(*) FROM riverpy_client", 2)
            await rig.schema.execute(
                "SELECT pg_notify(current_schema() || '.river_leadership', $1)",
                '{"action":"request_resign","leader_id":""}',
            )
            await b.until(True)
            assert (await a.until(False)).cause is StopCause.LEADERSHIP_LOST


# -- trouble


async def test_connection_is_killed(rig: Rig) -> None:
    """If the connection of the lease is lost, the term continues over a new one."""
    async with candidate(rig, "a") as a:
        await a.until(True)
        for _ in range(3):
            await rig.until(  # there may be none for a moment, after an answer that came late
                "SELECT count(pg_terminate_backend(pid)) > 0 FROM pg_stat_activity"
                " WHERE application_name = 'riverpy reserved' AND datname = current_database()"
                " AND query LIKE $1",
                True,
                f'%"{rig.schema.name}"%',
            )
            expires = await rig.schema.fetchval("SELECT expires_at FROM river_leader")
            await rig.until("SELECT expires_at > $1 FROM river_leader", True, expires)
        assert a.client.is_leader
        a.client.stop()
        assert len(await a.rest()) == 1


@pytest.mark.parametrize("partition", Partition)
async def test_partition(rig: Rig, partition: Partition) -> None:
    """A leader without a connection to the database ends its term before another client becomes
    leader. Later it can become leader in a new term."""
    async with proxied(rig.url) as proxy, candidate(rig, "a", url=proxy.url, **SHORT) as a:
        old = await a.until(True)
        async with candidate(rig, "b", **SHORT) as b:
            proxy.partition = partition
            new = await b.until(True)
            assert not a.client.is_leader
            assert (await a.until(False)).cause is StopCause.LEADERSHIP_LOST
            assert old.elected_at is not None
            assert new.elected_at is not None
            assert new.elected_at > old.elected_at
            await proxy.heal()
            b.client.stop()
            await a.until(True)


async def test_row_is_gone(rig: Rig) -> None:
    """A crash of the server empties the table. The old term ends, and one client becomes leader in
    a new term, which is in the table (LM-08)."""
    async with candidate(rig, "a") as a, candidate(rig, "b") as b:
        await rig.until("SELECT count(*) FROM river_leader", 1)
        old = await rig.schema.fetchrow("SELECT * FROM river_leader")
        assert old is not None
        await rig.schema.execute("TRUNCATE river_leader")
        loser = a if old["leader_id"] == "a" else b
        await loser.until(True)
        assert (await loser.until(False)).cause is StopCause.LEADERSHIP_LOST
        await rig.until(
            "SELECT count(*) FROM river_leader WHERE elected_at > $1", 1, old["elected_at"]
        )
        held = await rig.schema.fetchrow("SELECT * FROM river_leader")
        assert held is not None
        winner = a if held["leader_id"] == "a" else b
        assert (await winner.until(True)).elected_at >= held["elected_at"]
        assert [a.client.is_leader, b.client.is_leader].count(True) == 1


# -- maintenance


class Stuck(MaintenanceService):
    """A service that records its stop cause, and stops when a test lets it."""

    name = "stuck"

    def __init__(self, context: TermContext, may_end: asyncio.Event, causes: list[Any]) -> None:
        super().__init__(context)
        self._may_end, self._causes = may_end, causes

    async def run_once(self, scope: StopScope) -> float:
        raise NotImplementedError

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        task_status.started()
        self._causes.append("up")
        try:
            await anyio.sleep_forever()
        finally:
            self._causes.append(scope.cause)
            with anyio.CancelScope(shield=True):
                await self._may_end.wait()
            self._causes.append("ended")


class ReplacedServices:
    """Replaces the services of each term by one."""

    def __init__(self) -> None:
        self.causes: list[Any] = []
        self.may_end = asyncio.Event()
        self.may_end.set()

    def services(self, context: TermContext, *_: object) -> list[MaintenanceService]:
        return [Stuck(context, self.may_end, self.causes)]

    async def until(self, count: int) -> None:
        """Wait until this was recorded."""
        with anyio.fail_after(PATIENCE):
            while len(self.causes) < count:
                await asyncio.sleep(0.005)


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> ReplacedServices:
    """Each term has one service, which records its stop cause."""
    replaced = ReplacedServices()
    monkeypatch.setattr("riverpy._work.elections.make_domain_services", replaced.services)
    return replaced


async def test_maintenance_ends_before_the_release(rig: Rig, replaced: ReplacedServices) -> None:
    """Services get the stop cause and have stopped before the lease is released."""
    replaced.may_end.clear()
    async with candidate(rig, "a", **LONG) as a:
        await a.until(True)
        await replaced.until(1)
        a.client.stop()
        await replaced.until(2)
        assert not a.client.is_leader
        assert await leader_id(rig) == "a"
        replaced.may_end.set()
        await a.rest()
        assert await leader_id(rig) is None
    assert replaced.causes == ["up", StopCause.CLIENT_STOP, "ended"]
    assert rig.report is not None
    assert rig.report.is_clean


async def test_maintenance_is_left(rig: Rig, replaced: ReplacedServices, log: list[Any]) -> None:
    """Maintenance that does not stop within the grace period is logged. The client does not stop
    cleanly, and the lease expires unreleased."""
    replaced.may_end.clear()
    limits = {"soft_stop_timeout": timedelta(0), "hard_stop_timeout": timedelta(seconds=0.5)}
    async with candidate(rig, "a", **SHORT, **limits) as a:
        await a.until(True)
        await replaced.until(1)
    assert rig.report is not None
    assert rig.report.maintenance_left
    assert not rig.report.is_clean
    assert await rig.schema.fetchval("SELECT leader_id FROM river_leader") == "a"
    assert MAINTENANCE_ABANDONED in [entry["event"] for entry in log]
    replaced.may_end.set()
    await replaced.until(3)


@pytest.mark.parametrize("how", ["cancel", "fault"])
async def test_term_ends_with_a_broken_run(
    rig: Rig, replaced: ReplacedServices, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """If a run is cancelled, or another service fails, its term ends as always: the services get a
    cause, and the lease is released."""
    broken = asyncio.Event()

    class Sibling:
        name = "sibling"

        async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
            task_status.started()
            await broken.wait()
            raise LookupError("a fault")

    monkeypatch.setattr(riverpy._work.run.ServiceGroup, "start", _start_beside(Sibling()))
    client = rig.client(id="a", **LONG)
    async with client.leadership() as changes:
        watched = Watched(client, changes)
        task = asyncio.create_task(client.run())
        await watched.until(True)
        await replaced.until(1)
        if how == "cancel":
            task.cancel()
        else:
            broken.set()
        with pytest.raises(asyncio.CancelledError if how == "cancel" else LookupError):
            await task
        (ended,) = await watched.rest()
    assert ended.cause is StopCause.CLIENT_STOP
    assert replaced.causes == ["up", StopCause.CLIENT_STOP, "ended"]
    assert await leader_id(rig) is None


def _start_beside(sibling: Any) -> Any:
    """Replace ServiceGroup.start so that it also starts this service next to the election."""
    start = ServiceGroup.start

    async def start_both(self: ServiceGroup, service: Any) -> None:
        await start(self, service)
        if service.name == "leader election":
            await start(self, sibling)

    return start_both


# -- subscribing


async def test_slow_subscriber(monkeypatch: pytest.MonkeyPatch, log: list[Any]) -> None:
    """A subscriber that does not read delays nothing and gets the changes in order. If its queue is
    full, the oldest are dropped, counted and logged once, so that the last one is the present state
    (EL6)."""
    monkeypatch.setattr(leadership, "UNREAD_LEADERSHIP_CHANGES_MAX", 5)
    owner = LeadershipPublisher(lambda: "a", lambda: "default")
    async with LeadershipSubscription(owner) as slow, LeadershipSubscription(owner) as quick:
        seen = [await anext(quick)]
        changes = [LeadershipChange(number % 2 == 0, "a") for number in range(8)]
        for change in changes:
            owner.publish(change)
            seen.append(await anext(quick))
        owner.close()
        assert seen[1:] == changes
        assert [change async for change in slow] == changes[-5:]
        assert slow.dropped == 4
        assert quick.dropped == 0
    assert [entry["log_level"] for entry in log] == ["warning"]


async def test_subscriptions_end(rig: Rig) -> None:
    """A subscription that was left gets no more changes. A later one gets the present state first.
    Each ends with the run (EL11)."""
    async with candidate(rig, "a") as a:
        await a.until(True)
        async with a.client.leadership() as late:
            assert (await anext(late)).is_leader
        async with a.client.leadership() as later:
            a.client.stop()
            with anyio.fail_after(PATIENCE):
                assert [change.is_leader async for change in later] == [True, False]
        assert [change async for change in late] == []
