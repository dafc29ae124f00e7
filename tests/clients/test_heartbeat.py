"""Signs of life: when they are given, over what, and what follows when they cannot be."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy import Config, Job
from riverpy._clients.heartbeat import HeartbeatWriter
from riverpy._lifecycle import ServiceGroup
from riverpy._log_events import (
    CLIENT_ID_LOST,
    HEARTBEAT_LOST,
    HEARTBEAT_RESTORED,
    HEARTBEAT_TABLE_NOT_FOUND,
)
from riverpy._postgres import clients
from riverpy._postgres.clients import ClientRegistration
from riverpy.migrate import migrate_all
from tests._database import connected
from tests._time import VirtualTimer
from tests.work.rig import PATIENCE, Rig, Task

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy import Client
    from tests._database import Schema

REGISTRATION = ClientRegistration(
    "me", ["default"], ["task"], True, False, "1", timedelta(minutes=1)
)


class FakeConnection:
    """Answers, or does not."""

    def __init__(self, name: str, server: FakeServer) -> None:
        self.name = name
        self.is_broken = False
        self.server = server

    @asynccontextmanager
    async def acquire(self, purpose: str, timeout: float) -> AsyncGenerator[FakeConnection]:
        if self.is_broken:
            await self.server.timer.sleep(timeout)
            raise TimeoutError(purpose)
        yield self

    @asynccontextmanager
    async def transaction(self, **_: object) -> AsyncGenerator[None]:
        yield

    async def execute(self, *statement: object) -> None:
        """Sets a limit."""


class FakeServer:
    """Keeps the moments at which heartbeats arrived, and over what."""

    def __init__(self) -> None:
        self.timer = VirtualTimer()
        self.connections = [
            FakeConnection(name, self) for name in ("results", "claims", "reserved")
        ]
        self.beats: list[tuple[float, str]] = []
        self.has_id = True
        """Whether no other run has registered."""
        self.displaced = 0
        """How often a heartbeat has said that another has."""

    async def register(self, connection: FakeConnection, *_: Any) -> int:
        self.beats.append((self.timer.seconds_since_boot(), connection.name))
        return 7

    async def beat(
        self, connection: FakeConnection, *_: Any, registered_at: int, lease_report: None
    ) -> bool:
        self.beats.append((self.timer.seconds_since_boot(), connection.name))
        return self.has_id

    def break_all(self, *, broken: bool = True) -> None:
        for connection in self.connections:
            connection.is_broken = broken

    @asynccontextmanager
    async def beating(self, **settings: Any) -> AsyncGenerator[HeartbeatWriter]:
        """A heartbeat that has registered."""
        connections: Any = self.connections
        heartbeat = HeartbeatWriter(
            REGISTRATION, Config(**settings), connections, self.timer, self._displace
        )
        await heartbeat.register()
        async with ServiceGroup() as group:
            await group.start(heartbeat)
            yield heartbeat
        heartbeat.record_run_end()

    def _displace(self) -> None:
        self.displaced += 1


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """A server that answers heartbeats."""
    server = FakeServer()
    monkeypatch.setattr("riverpy._clients.heartbeat.client_write_heartbeat", server.beat)
    monkeypatch.setattr("riverpy._clients.client_id.client_register", server.register)
    return server


@pytest.fixture
def rig(schema: Schema) -> Rig:
    """Workers, clients and jobs on a schema of the test's own."""
    return Rig(schema)


# --- in virtual time


@pytest.mark.parametrize("dead_after", [timedelta(minutes=1), timedelta(seconds=6)])
async def test_interval(server: FakeServer, dead_after: timedelta) -> None:
    """The interval follows from `dead_after` alone: six heartbeats within it (LD-15)."""
    async with server.beating(dead_after=dead_after):
        await server.timer.advance(dead_after.total_seconds())
    times = [at for at, _ in server.beats]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps == pytest.approx([dead_after.total_seconds() / 6] * 6)
    assert [name for _, name in server.beats] == ["reserved"] + ["results"] * 6


async def test_early_heartbeat(server: FakeServer) -> None:
    """All requests for an early heartbeat within a second cause one heartbeat."""
    async with server.beating() as heartbeat:
        for _ in range(3):
            heartbeat.request_early_heartbeat()
            await server.timer.advance(0.3)
        assert len(server.beats) == 1
        await server.timer.advance(0.2)
        assert len(server.beats) == 2
        await server.timer.advance(9.85)
        assert len(server.beats) == 2
        await server.timer.advance(0.1)
        assert len(server.beats) == 3


async def test_any_healthy_connection(server: FakeServer, log: list[dict[str, Any]]) -> None:
    """When the connection of the results does not answer, the next one is beaten on within a short
    while, and the client goes on as if nothing had happened (LD-14)."""
    async with server.beating() as heartbeat:
        for connection in server.connections[:2]:
            await server.timer.advance(60)
            connection.is_broken = True
        await server.timer.advance(60)
        assert heartbeat.can_claim_jobs
        assert heartbeat.unbroken_contact_seconds() == 180
    times = [at for at, _ in server.beats]
    assert max(later - earlier for earlier, later in pairwise(times)) <= 14
    assert {name for _, name in server.beats} == {"reserved", "claims", "results"}
    assert not [entry for entry in log if entry["log_level"] == "warning"]


async def test_without_any_connection(server: FakeServer, log: list[dict[str, Any]]) -> None:
    """A client that cannot beat stops claiming at a third of `dead_after`, warns once at half of
    it, and goes on with the next heartbeat."""
    async with server.beating() as heartbeat, anyio.create_task_group() as tasks:
        server.break_all()
        await server.timer.advance(19)
        assert heartbeat.can_claim_jobs
        await server.timer.advance(2)
        assert not heartbeat.can_claim_jobs
        waiting = asyncio.Event()

        async def wait() -> None:
            await heartbeat.wait_until_can_claim_jobs()
            waiting.set()

        tasks.start_soon(wait)
        assert not [entry for entry in log if entry["log_level"] == "warning"]
        await server.timer.advance(60)
        (entry,) = [entry for entry in log if entry["log_level"] == "warning"]
        assert entry["event"] == HEARTBEAT_LOST
        assert 30 < entry["seconds_since_last"] < 40
        assert not waiting.is_set()
        server.break_all(broken=False)
        await server.timer.advance(10)
        assert waiting.is_set()
        assert heartbeat.can_claim_jobs
    assert [entry["event"] for entry in log if entry["log_level"] == "info"] == [HEARTBEAT_RESTORED]


async def test_contact(server: FakeServer) -> None:
    """The contact grows from the first heartbeat, is 0 when the last one is older than half of
    `dead_after`, and begins again after that; a shorter gap does not break it."""
    async with server.beating() as heartbeat:
        assert heartbeat.unbroken_contact_seconds() == 0
        await server.timer.advance(100)
        assert heartbeat.unbroken_contact_seconds() == 100
        server.break_all()
        await server.timer.advance(12)
        server.break_all(broken=False)
        await server.timer.advance(18)
        assert heartbeat.unbroken_contact_seconds() == 130
        server.break_all()
        await server.timer.advance(31)
        assert heartbeat.unbroken_contact_seconds() == 0
        server.break_all(broken=False)
        await server.timer.advance(10)
        assert 0 < heartbeat.unbroken_contact_seconds() <= 10


@pytest.mark.parametrize("how", ["suspend", "stall"])
async def test_time_that_was_missed(server: FakeServer, how: str) -> None:
    """A machine that was suspended, or an event loop that was blocked, for longer than half of
    `dead_after` has lost contact and claims nothing until its next heartbeat (LM-14)."""
    async with server.beating() as heartbeat:
        await server.timer.advance(100)
        if how == "suspend":
            await server.timer.suspend(40)
            assert not heartbeat.can_claim_jobs
            assert heartbeat.unbroken_contact_seconds() == 0
            await server.timer.advance(10)
        else:
            server.timer._now += 40  # it finds out before anything else runs
            assert not heartbeat.can_claim_jobs
            assert heartbeat.unbroken_contact_seconds() == 0
            await server.timer.stall(0)
        assert heartbeat.can_claim_jobs
        assert heartbeat.unbroken_contact_seconds() < 20


async def test_another_run_has_registered(server: FakeServer, log: list[dict[str, Any]]) -> None:
    """A client whose heartbeat finds another run under its id claims nothing from then on, writes
    no heartbeat any more, and says so once (FR-08)."""
    async with server.beating() as heartbeat:
        await server.timer.advance(10)
        assert (heartbeat.can_claim_jobs, server.displaced) == (True, 0)
        server.has_id = False
        await server.timer.advance(60)
        assert (heartbeat.can_claim_jobs, heartbeat.has_lost_client_id) == (False, True)
        assert server.displaced == 1
        assert len(server.beats) == 3
    (entry,) = [entry for entry in log if entry["log_level"] == "error"]
    assert entry["event"] == CLIENT_ID_LOST
    assert entry["client_id"] == "me"


async def test_before_it_runs(server: FakeServer) -> None:
    """Without the table no heartbeat can be written. Then claiming is allowed, and no client has
    contact that would find others dead."""
    connections: Any = server.connections
    heartbeat = HeartbeatWriter(REGISTRATION, Config(), connections, server.timer, lambda: None)
    assert heartbeat.can_claim_jobs
    assert heartbeat.unbroken_contact_seconds() == 0
    await heartbeat.delete_client_row()
    assert not server.beats


# --- on a server


async def test_registration(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running client is registered with what it works; its row goes with it."""
    rig.register_task()
    monkeypatch.setattr("riverpy._clients.heartbeat.UNREGISTER_TIMEOUT", PATIENCE)
    async with rig.working(id="me", candidate=False, poll_only=True, dead_after=timedelta(hours=1)):
        row = await rig.schema.fetchrow("SELECT * FROM riverpy_client")
        assert row is not None
        assert row["client_id"] == "me"
        assert (row["queues"], row["kinds"]) == (["default"], ["task"])
        assert (row["candidate"], row["poll_only"]) == (False, True)
        assert row["dead_after"] == timedelta(hours=1)
        assert row["version"]
    assert await rig.schema.fetchval("SELECT count(*) FROM riverpy_client") == 0


async def test_what_is_left_keeps_the_row(rig: Rig) -> None:
    """A run that leaves a job behind stays registered, so that the job is rescued by that row."""
    release = asyncio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    async with rig.working(
        id="me", soft_stop_timeout=timedelta(0), hard_stop_timeout=timedelta(milliseconds=50)
    ) as client:
        await client.insert(Task())
        await rig.until_state("running")
    found = await rig.schema.fetchval("SELECT client_id FROM riverpy_client")
    release.set()
    assert found == "me"
    assert rig.report is not None
    assert not rig.report.is_clean


async def test_runs_of_one_id(schema: Schema) -> None:
    """A run takes over the row of one whose last heartbeat it has seen, and no other row. The
    earlier run then writes no heartbeat and deletes nothing, and that of a forgotten client
    registers its run again (FR-08)."""
    async with schema.connected() as connection:
        register = partial(clients.client_register, connection, schema.name, REGISTRATION)
        beat = partial(clients.client_write_heartbeat, connection, schema.name, REGISTRATION)
        leave = partial(clients.client_unregister, connection, schema.name, client_id="me")
        holder = partial(clients.client_get_registered_run, connection, schema.name, client_id="me")
        displace = partial(clients.client_delete_dead, connection, schema.name, client_id="me")
        first = await register()
        assert first is not None
        assert await register() is None
        seen = await holder()
        assert seen is not None
        assert await beat(registered_at=first)
        await displace(last_heartbeat=seen.last_heartbeat.raw_timestamp)
        assert await register() is None
        seen = await holder()
        assert seen is not None
        await displace(last_heartbeat=seen.last_heartbeat.raw_timestamp)
        second = await register()
        assert second is not None
        assert not await beat(registered_at=first)
        assert await beat(registered_at=second)
        await leave(registered_at=first)
        assert await holder() is not None
        await schema.execute("DELETE FROM riverpy_client")
        assert await beat(registered_at=second)
        await leave(registered_at=second)
        assert await holder() is None


async def test_beats_are_cheap(schema: Schema) -> None:
    """A heartbeat changes its row on its page and no index, so that pages are cleaned in
    passing."""
    async with schema.connected() as connection, connection.transaction():
        at = await clients.client_register(connection, schema.name, REGISTRATION)
        assert at is not None
        for _ in range(10):
            await clients.client_write_heartbeat(
                connection, schema.name, REGISTRATION, registered_at=at
            )
        found = await connection.fetchrow(
            "SELECT pg_stat_get_xact_tuples_updated('riverpy_client'::regclass),"
            " pg_stat_get_xact_tuples_hot_updated('riverpy_client'::regclass)"
        )
    assert found is not None
    assert tuple(found) == (10, 10)


def no_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the server refuses heartbeats."""

    async def refuse(*args: Any, **values: Any) -> bool:
        raise ConnectionError("no")

    monkeypatch.setattr("riverpy._clients.heartbeat.client_write_heartbeat", refuse)


def heartbeat_of(client: Client) -> HeartbeatWriter:
    assert client._run is not None
    return client._run._heartbeat


@pytest.mark.parametrize("waits", [False, True])
async def test_claims_wait_for_a_sign_of_life(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """A client without a recent heartbeat claims nothing, also not by a claim that waited for
    its connection in the meantime; with the next one it goes on."""
    rig.register_task()
    beat = clients.client_write_heartbeat
    async with rig.working(dead_after=timedelta(seconds=1)) as client:
        heartbeat = heartbeat_of(client)
        heartbeat.heartbeat_failed.init()
        await rig.work(client, Task())
        assert client._run is not None
        claims = client._run._connections.claims
        async with claims.acquire("test", 20) if waits else asyncio.timeout(20):
            if waits:
                await rig.insert_rows(1)
                client._run.producers["default"].wake()
            no_beats(monkeypatch)
            while heartbeat.can_claim_jobs:
                await heartbeat.heartbeat_failed.wait()
            if not waits:
                await client.insert(Task())
        claimed = client._run.producers["default"].claimed
        claimed.init()
        for _ in range(3):
            await heartbeat.heartbeat_failed.wait()
        assert await rig.states() == {"completed": 1, "available": 1}
        assert claimed._emitted_events is not None
        assert claimed._emitted_events.locked()
        monkeypatch.setattr("riverpy._clients.heartbeat.client_write_heartbeat", beat)
        await rig.until_state("completed", 2)


async def test_locked_leader_stops_no_job(rig: Rig) -> None:
    """While another session has locked the table of leaders there is no leader, and jobs are
    worked."""
    rig.register_task()
    async with (
        rig.working(dead_after=timedelta(seconds=1)) as client,
        rig.schema.connected() as other,
        other.transaction(),
    ):
        await other.execute("LOCK TABLE river_leader IN ACCESS EXCLUSIVE MODE")
        beaten = heartbeat_of(client).heartbeat_written
        beaten.init()
        for _ in range(4):  # longer than claims would go on without
            await beaten.wait()
        await rig.work(client, Task())


async def test_dropped_table_stops_no_job(
    rig: Rig, fresh_database_url: str, log: list[dict[str, Any]]
) -> None:
    """A table of clients that is dropped under its clients is an error that is said once; they go
    on, and so do those that start later."""
    await migrate_all(fresh_database_url)

    rig.register_task()
    settings = {"url": fresh_database_url, "schema": None, "dead_after": timedelta(seconds=1)}
    async with rig.working(**settings) as client, connected(fresh_database_url) as other:
        heartbeat = heartbeat_of(client)
        heartbeat.heartbeat_failed.init()
        await other.execute("DROP TABLE riverpy_client")
        for _ in range(4):
            await heartbeat.heartbeat_failed.wait()
        assert heartbeat.can_claim_jobs
        await client.insert(Task())
        await rig.take(1)
    told = [entry for entry in log if entry["event"] == HEARTBEAT_TABLE_NOT_FOUND]
    assert [entry["log_level"] for entry in told if entry["log_level"] != "debug"] == ["error"]
    assert "riverpy_client" in told[0]["error"]
    async with rig.working(**settings) as client:
        await client.insert(Task())
        await rig.take(1)


async def test_locked_table_costs_no_connection(rig: Rig) -> None:
    """While another session has locked the table of clients no heartbeat is written, but the
    connections, the one of the lease too, stay as they are."""
    rig.register_task()
    async with rig.working(dead_after=timedelta(seconds=30)) as client:
        heartbeat = heartbeat_of(client)

        async def pids() -> list[int]:
            found: list[int] = []
            for dedicated in heartbeat._connections:
                async with dedicated.acquire("test", 20) as connection:
                    found.append(connection.get_server_pid())
            return found

        before = await pids()
        async with rig.schema.connected() as connection, connection.transaction():
            await connection.execute("LOCK TABLE riverpy_client IN ACCESS EXCLUSIVE MODE")
            await heartbeat._try_to_write_heartbeat()
        last = heartbeat._last_heartbeat_at
        assert await pids() == before
        await heartbeat._try_to_write_heartbeat()
        assert heartbeat._last_heartbeat_at > last
        assert await pids() == before
