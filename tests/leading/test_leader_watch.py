"""LeaderWatch with a fake server, and on a real one."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import Config
from riverpy._leading.leader_watch import LeaderWatch
from riverpy._lifecycle import ServiceGroup
from riverpy._log_events import LEADER_WITHOUT_RIVERPY_FOUND, NO_LEADER_CANDIDATE_FOUND
from riverpy._postgres.clients import ElectionStatus
from riverpy.periodic import PeriodicJob, PeriodicJobs
from riverpy.schedules import every
from tests._time import VirtualTimer
from tests.work.rig import Rig, Task

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy._postgres.connection import DedicatedConnection
    from tests._database import Schema


class FakeServer:
    """A connection that returns a fixed election status."""

    def __init__(self) -> None:
        self.timer = VirtualTimer()
        self.answer = ElectionStatus(None, None, False, True)
        self.is_broken = False

    @asynccontextmanager
    async def acquire(self, purpose: str, timeout: float) -> AsyncGenerator[FakeServer]:
        if self.is_broken:
            await self.timer.sleep(timeout)
            raise TimeoutError(purpose)
        yield self

    async def status(self, *_: Any) -> ElectionStatus:
        return self.answer

    @asynccontextmanager
    async def watching(self, **settings: Any) -> AsyncGenerator[None]:
        """Run a LeaderWatch."""
        connection: Any = self
        watch = LeaderWatch(
            connection,
            Config(**settings),
            kinds=["task"],
            queues=["default"],
            periodic_jobs=PeriodicJobs([PeriodicJob(every(timedelta(hours=1)), Task, id="hourly")]),
            is_leader=lambda: False,
            timer=self.timer,
        )
        async with ServiceGroup() as group:
            await group.start(watch)
            await self.timer.advance(0)
            yield


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """A fake server."""
    server = FakeServer()
    monkeypatch.setattr(
        "riverpy._leading.leader_watch.default_domain_get_election_status", server.status
    )
    return server


async def test_no_leader_candidate(server: FakeServer, log: list[Any]) -> None:
    """A client with `candidate=False` warns if for longer than a lease there is no leader and no
    client that could become leader. It repeats the warning after an hour, or if it happens
    again."""

    def warnings() -> int:
        return len([entry for entry in log if entry["event"] == NO_LEADER_CANDIDATE_FOUND])

    no_candidate, candidate = (ElectionStatus(None, None, False, could) for could in (False, True))
    server.answer = no_candidate
    async with server.watching(candidate=False):
        await server.timer.advance(15)
        assert warnings() == 0
        await server.timer.advance(200)
        assert warnings() == 1
        await server.timer.advance(3600)
        assert warnings() == 2
        server.answer = candidate
        await server.timer.advance(20)
        server.answer = no_candidate
        await server.timer.advance(60)
        assert warnings() == 3
    async with server.watching(candidate=True):
        await server.timer.advance(100)
        assert warnings() == 3


async def test_outage_does_not_count(server: FakeServer, log: list[Any]) -> None:
    """The time of an outage does not count, because no client can write a heartbeat during it."""
    server.answer = ElectionStatus(None, None, False, False)
    async with server.watching(candidate=False):
        server.is_broken = True
        await server.timer.advance(100)
        server.is_broken = False
        await server.timer.advance(20)
        server.answer = ElectionStatus(None, None, False, True)
        await server.timer.advance(100)
    assert not [entry for entry in log if entry["event"] == NO_LEADER_CANDIDATE_FOUND]


async def test_foreign_leader(server: FakeServer, log: list[Any]) -> None:
    """A leader that is not a riverpy client is logged at once and once for each term, with the
    effects on this client. A riverpy leader is not."""

    def warnings() -> list[Any]:
        return [entry for entry in log if entry["event"] == LEADER_WITHOUT_RIVERPY_FOUND]

    first, second = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
    server.answer = ElectionStatus("go", first, False, True)
    async with server.watching():
        (entry,) = warnings()
        assert entry["log_level"] == "warning"
        assert (entry["leader_id"], entry["elected_at"]) == ("go", first)
        assert (entry["periodic_job_ids"], entry["kinds"]) == (["hourly"], ["task"])
        server.answer = ElectionStatus("go", first, False, False)  # still the same term
        await server.timer.advance(100)
        server.answer = ElectionStatus("me", second, True, True)
        await server.timer.advance(30)
        assert len(warnings()) == 1
        server.is_broken = True
        await server.timer.advance(30)
        server.is_broken, server.answer = False, ElectionStatus("go", second, False, False)
        await server.timer.advance(30)
        assert len(warnings()) == 2


async def test_leaders_on_a_server(schema: Schema, log: list[Any]) -> None:
    """A registered client is a riverpy client and is not logged as leader. A row of another leader
    is logged, unless it has expired."""
    rig = Rig(schema)

    rig.register_task()

    async def checked(client: Any) -> None:
        watch: LeaderWatch = client._run._leader_watch
        watch.leader_checked.init()
        await watch.leader_checked.wait()

    async with rig.working() as client:
        await rig.until("SELECT leader_id FROM river_leader", client.id)
    insert = """
        INSERT INTO river_leader (leader_id, elected_at, expires_at)
        VALUES ($1, now(), now() + $2::interval)
    """
    await schema.execute(insert, "gone", timedelta(seconds=-1))
    async with rig.working(candidate=False, dead_after=timedelta(seconds=0.3)) as client:
        await checked(client)
        assert not [entry for entry in log if entry["event"] == LEADER_WITHOUT_RIVERPY_FOUND]
        await schema.execute("DELETE FROM river_leader")
        await schema.execute(insert, "go", timedelta(minutes=1))
        await checked(client)
        await checked(client)
    (entry,) = [entry for entry in log if entry["event"] == LEADER_WITHOUT_RIVERPY_FOUND]
    assert (entry["leader_id"], entry["kinds"]) == ("go", ["task"])


async def test_unreleased_lease(schema: Schema) -> None:
    """A client that stops while its lease cannot be released stays registered, so that other
    clients do not take it for a leader in another language."""
    rig = Rig(schema)

    rig.register_task()
    async with rig.working() as client:
        await rig.until("SELECT leader_id FROM river_leader", client.id)
        engine: Any = client._run._election_manager.lease_engine
        connection: DedicatedConnection = engine._store._connection

        async def fails(*_: Any, **_options: Any) -> bool:
            raise TimeoutError(connection.name)

        engine._store.release = fails
    assert await schema.fetchval("SELECT leader_id FROM river_leader") == client.id
    assert await schema.fetchval("SELECT client_id FROM riverpy_client") == client.id
