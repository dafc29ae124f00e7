"""The server sessions of a client, and when a loss and a recovery are logged."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import riverpy._work.producer
from riverpy._log_events import CONNECTION_LOST, CONNECTION_RESTORED
from tests.work.rig import PATIENCE, Task

if TYPE_CHECKING:
    from riverpy._postgres.driver import Connection
    from tests.work.rig import Rig

OURS = "datname = current_database() AND application_name"


@pytest.fixture
def plain(rig: Rig) -> None:
    """Jobs of kind `task` complete at once."""
    rig.register_task()


@pytest.mark.usefixtures("plain")
async def test_cut_while_it_waits_for_a_lock(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that times out while the table is locked leaves no session on the server."""
    monkeypatch.setattr(riverpy._work.producer, "CLAIM_TIMEOUT", 0.3)
    waiting = (
        f"SELECT array_agg(pid) FROM pg_stat_activity WHERE {OURS} = 'riverpy claims'"
        " AND wait_event_type = 'Lock'"
    )
    async with rig.working() as client, rig.schema.connected() as connection:
        async with connection.transaction():
            await connection.execute("LOCK TABLE river_job IN ACCESS EXCLUSIVE MODE")
            assert client._run is not None
            client._run.producers["default"].wake()
            async with asyncio.timeout(PATIENCE):
                while not (pids := await rig.schema.fetchval(waiting)):
                    await asyncio.sleep(0.01)
            await rig.until(
                "SELECT count(*) FROM pg_stat_activity WHERE pid = any($1::int[])", 0, pids
            )
        await rig.work(client, Task())


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    ("own", "expected"), [(None, "8s"), ("3s", "3s"), ("1500ms", "1500ms"), ("1h", "8s")]
)
async def test_limits_of_the_sessions(rig: Rig, own: str | None, expected: str) -> None:
    """The server ends statements that the client gave up. A shorter limit of the database stays."""
    name = await rig.schema.fetchval("SELECT quote_ident(current_database())")
    if own is not None:
        await rig.schema.execute(f"ALTER DATABASE {name} SET statement_timeout = '{own}'")
    try:
        async with rig.working() as client:
            run = client._run
            assert run is not None
            for dedicated in (
                run._connections.claims,
                run._connections.results,
                run._connections.reserved,
            ):
                async with dedicated.acquire("looking", 5) as connection:
                    limit = await connection.fetchval("SHOW statement_timeout")
                    known = await connection.fetchval(
                        "SELECT setting FROM pg_settings"
                        " WHERE name = 'client_connection_check_interval'"
                    )
                assert limit == expected
                assert known in {None, "1000"}
    finally:
        await rig.schema.execute(f"ALTER DATABASE {name} RESET statement_timeout")


@pytest.mark.usefixtures("plain")
async def test_session_of_maintenance(rig: Rig) -> None:
    """The server ends statements of maintenance after 5 s, so that a dead leader delays the next
    one no longer. It compiles none, which would take a hundred times longer than running it."""
    async with rig.working() as client:
        assert client._run is not None
        connection = await client._run._connections.connector.connect_for_maintenance("maintenance")
        assert await connection.fetchval("SHOW jit") == "off"
        assert await connection.fetchval("SHOW statement_timeout") == "4s"
        await connection.close()


@pytest.mark.usefixtures("plain")
async def test_read_only_server_is_one_outage(rig: Rig, log: list[dict[str, Any]]) -> None:
    """A server that allows connections and reads but no writes, as in a failover, is not logged as
    restored before it allows writes."""

    def said(event: str) -> int:
        return [entry["event"] for entry in log].count(event)

    name = await rig.schema.fetchval("SELECT quote_ident(current_database())")
    async with rig.working() as client:
        await rig.work(client, Task())
        run = client._run
        assert run is not None
        await rig.schema.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        tries = asyncio.Semaphore(0)
        connect = run._connections.claims._connect

        async def counted() -> Connection:
            connection = await connect()
            tries.release()
            return connection

        run._connections.claims._connect = counted
        try:
            await rig.schema.execute(
                f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {OURS} ~ '^riverpy'"
            )
            async with asyncio.timeout(PATIENCE):
                for _ in range(4):
                    await tries.acquire()
            lost = said(CONNECTION_LOST)
            restored = said(CONNECTION_RESTORED)
            assert lost == restored + 1  # that of the listener, which needs no writes, came first
            async with asyncio.timeout(PATIENCE):
                await tries.acquire()
            assert said(CONNECTION_LOST) == lost
            assert said(CONNECTION_RESTORED) == restored
        finally:
            await rig.schema.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        await rig.insert_rows(1)
        await rig.event()
        async with asyncio.timeout(PATIENCE):
            while said(CONNECTION_RESTORED) == restored:
                await asyncio.sleep(0.01)
    assert said(CONNECTION_LOST) == said(CONNECTION_RESTORED) == lost
