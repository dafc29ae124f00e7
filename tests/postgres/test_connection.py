"""A dedicated connection whose users wait for each other."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio
import pytest
import structlog

import riverpy._postgres.connection as connection_module
from riverpy._log_events import CONNECTION_LOST, CONNECTION_RESTORED
from riverpy._postgres.connection import ConnectionOutageTracker, DedicatedConnection
from riverpy._postgres.driver import InterfaceError, connect
from tests._time import settle

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy._postgres.driver import Connection
    from tests._database import Schema


async def test_busy_connection_is_not_cut(schema: Schema) -> None:
    """Who waited for most of the bound gives up, and the connection, which answers, stays."""
    connection = DedicatedConnection(
        "busy",
        partial(connect, schema.url, application_name="riverpy busy"),
        ConnectionOutageTracker(),
    )
    await connection.open()
    async with connection.acquire("asking", 10) as used:
        pid = await used.fetchval("select pg_backend_pid()")
    waiting, release = anyio.Event(), anyio.Event()

    async def hold() -> None:
        async with connection.acquire("holding", 30):
            waiting.set()
            await release.wait()

    async def wait() -> None:
        release_at = anyio.current_time() + 2.4
        async with anyio.create_task_group() as inner:
            inner.start_soon(_set_at, release, release_at)
            with pytest.raises(
                TimeoutError, match="waiting its turn waited too long for connection"
            ):
                async with connection.acquire("waiting its turn", 4.0) as late:
                    await late.fetchval("select pg_sleep(1)")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hold)
        await waiting.wait()
        await wait()
    async with connection.acquire("asking", 10) as used:
        assert await used.fetchval("select pg_backend_pid()") == pid
    await connection.close()


async def test_time_runs_out_while_it_cannot_be_made() -> None:
    """Who gives up says why the connection cannot be made, not only what took too long."""

    async def refuse() -> Connection:
        raise ConnectionError("too many clients already")

    connection = DedicatedConnection("refused", refuse, ConnectionOutageTracker())
    with pytest.raises(TimeoutError, match=r"asking took longer than 0.05 s: too many clients"):
        async with connection.acquire("asking", 0.05):
            pass


async def test_first_connection_that_is_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes a connection and then says nothing more ends the start."""
    monkeypatch.setattr(connection_module, "FIRST_CONNECTION_TIMEOUT", 0.05)
    with pytest.raises(TimeoutError, match=r"making connection 'silent' took longer than 0\.05 s"):
        await DedicatedConnection("silent", anyio.sleep_forever, ConnectionOutageTracker()).open()


def test_outage_of_a_connection_that_is_wanted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that gets no connection for its maintenance resigns and leads again, over and over:
    that is one outage."""
    outage = ConnectionOutageTracker()
    error = ConnectionError("too many connections")
    with structlog.testing.capture_logs() as log:
        for _ in range(3):
            outage.record_loss("maintenance", error)
            assert outage.is_outage_logged
            outage.record_unused("maintenance")
        outage.record_loss("maintenance", error)
        outage.record_success("maintenance")
        assert [line["event"] for line in log] == [CONNECTION_LOST, CONNECTION_RESTORED]
        assert outage.outage_count == 1
        outage.record_loss("maintenance", error)
        outage.record_unused("maintenance")
        outage.record_success("maintenance")  # it can be made when it is wanted again
        assert [line["event"] for line in log] == [CONNECTION_LOST, CONNECTION_RESTORED] * 2
        outage.record_loss("claims", error)
        outage.record_loss("maintenance", error)
        outage.record_unused("maintenance")
        outage.record_success("claims")
        outage.record_success("maintenance")
        monkeypatch.setattr(connection_module, "NEW_OUTAGE_AFTER_UNUSED_SECONDS", 0.0)
        outage.record_loss("maintenance", error)
        outage.record_unused("maintenance")
        outage.record_loss("maintenance", error)
    assert [line["event"] for line in log] == [
        *[CONNECTION_LOST, CONNECTION_RESTORED] * 4,
        CONNECTION_LOST,
    ]


def test_outage_of_a_connection_that_is_never_wanted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All others are back, and then the term ends for whose maintenance the last connection was
    lost: the end of the outage is told once, when that connection was not wanted for a time."""
    outage = ConnectionOutageTracker()
    error = ConnectionError("the server has gone away")
    with structlog.testing.capture_logs() as log:
        outage.record_loss("claims", error)
        outage.record_loss("maintenance", error)
        outage.record_success("claims")
        outage.record_unused("maintenance")
        outage.record_success("claims")
        assert [line["event"] for line in log] == [CONNECTION_LOST]
        monkeypatch.setattr(connection_module, "NEW_OUTAGE_AFTER_UNUSED_SECONDS", 0.0)
        outage.record_success("claims")
        outage.record_success("claims")
    assert [line["event"] for line in log] == [CONNECTION_LOST, CONNECTION_RESTORED]
    assert not outage.is_outage_logged


async def test_end_of_an_idle_connection_is_told(schema: Schema) -> None:
    """What ends, unused since an outage of others, after that is over, is an outage of its own.
    What ends during the outage of another, also after it was used in it, or just before it was
    told, is a part of that; but not of one of a connection that is not used any more."""
    outage = ConnectionOutageTracker()
    connection = DedicatedConnection(
        "idle", partial(connect, schema.url, application_name="riverpy idle"), outage
    )
    error = ConnectionError("the server has gone away")
    await connection.open()
    async with _closing(connection):
        with structlog.testing.capture_logs() as log:
            outage.record_loss("other", error)
            outage.record_success("other")
            await _end(connection, schema)
            await _use(connection)
            assert [line["event"] for line in log] == [CONNECTION_LOST, CONNECTION_RESTORED] * 2
            outage.record_loss("other", error)
            await _end(connection, schema)
            outage.record_success("other")
            await _use(connection)
            assert [line["event"] for line in log] == [CONNECTION_LOST, CONNECTION_RESTORED] * 3
            await _end(connection, schema)
            outage.record_loss("other", error)
            outage.record_success("other")
            await _use(connection)
            assert [line["event"] for line in log] == [CONNECTION_LOST, CONNECTION_RESTORED] * 4
            outage.record_loss("other", error)
            await _use(connection)
            await _end(connection, schema)
            outage.record_success("other")
            await _use(connection)
            assert [line["event"] for line in log] == [CONNECTION_LOST, CONNECTION_RESTORED] * 5
            outage.record_loss("other", error)
            outage.record_unused("other")
            await _end(connection, schema)
            await _use(connection)
            assert [line["event"] for line in log] == [CONNECTION_LOST, CONNECTION_RESTORED] * 7
            assert [line["connection"] for line in log[10:]] == ["other", "other", "idle", "idle"]


async def test_close_while_it_is_made_again(schema: Schema) -> None:
    """A connection that is closed while a use makes it again is not left open, and its end is no
    outage; nor is that of a use of one that was closed."""
    may_connect = anyio.Event()
    made: list[Connection] = []

    async def make() -> Connection:
        await may_connect.wait()
        made.append(await connect(schema.url))
        return made[-1]

    async def use() -> None:
        with pytest.raises(InterfaceError, match="was closed"):
            await _use(connection)

    connection = DedicatedConnection("reserved", make, ConnectionOutageTracker())
    with structlog.testing.capture_logs() as log:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(use)
            await settle()
            await connection.close()
            may_connect.set()
        await use()
    assert [one.is_closed() for one in made] == [True]
    assert log == []


@asynccontextmanager
async def _closing(connection: DedicatedConnection) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        await connection.close()


async def _use(connection: DedicatedConnection) -> None:
    async with connection.acquire("asking", 10) as used:
        await used.fetchval("select 1")


async def _end(connection: DedicatedConnection, schema: Schema) -> None:
    """Have the server end it, and return when that is seen."""
    await schema.fetchval(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'riverpy idle' AND datname = current_database()"
    )
    with anyio.fail_after(10):
        while connection.is_connected:
            await anyio.sleep(0.005)
    await anyio.sleep(0)


async def _set_at(event: anyio.Event, time: float) -> None:
    await anyio.sleep_until(time)
    event.set()
