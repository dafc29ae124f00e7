"""Faults that a server, its administrator and its users cause: each is a function, or a block that
injects a fault and ends it again, even if the server went away during the block.

Every URL is without proxies and belongs to a superuser, unless stated otherwise.
"""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

import anyio
import asyncpg

from riverpy._postgres.driver import DATABASE_ERRORS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from tests.kit.wall_clock import WallClock

MEND_TIMEOUT = 600.0
"""Seconds within which the server must accept the end of a fault. On a busy machine, a server that
crashed needs minutes to start."""
RETRY = 0.05
CLOCK_TURN = 0.3
"""Seconds between two steps of a clock."""
LOCK_LIMIT = 100
"""Milliseconds for which a statement waits for a table lock. Other statements wait behind it."""
LOCK_RETRY = 0.5
"""Seconds between two tries to lock a table."""
STATE_TIMEOUT = 2.0
"""Timeout in seconds for reading the state of a stopped process of the server, which may hold a
lock that the read needs."""
CONNECTION_NAMES = ("riverpy listener", "riverpy reserved", "riverpy claims", "riverpy results")
"""Names of the connections of which each worker has one."""
POOL_NAME = "riverpy"
"""Name of the connections of a client's pool."""
INSERTS_NAME = "riverpy inserts"
"""Name of the connection of a client for shared inserts."""


# --- backends


async def find_backends(url: str, name: str, *, user: str | None = None) -> list[int]:
    """Return the server processes of connections with this `application_name`, and of one role if
    it is given."""
    async with _connected(url) as connection:
        rows = await connection.fetch(
            "SELECT pid FROM pg_stat_activity WHERE application_name = $1 "
            "AND usename = coalesce($2, usename) ORDER BY pid",
            *(name, user),
        )
    return [row["pid"] for row in rows]


async def kill_backends(url: str, name: str | None, *, user: str | None = None) -> int:
    """Terminate the connections of this name (None: any) and role, and return their number."""
    async with _connected(url) as connection:
        return await connection.fetchval(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend' "
            "AND application_name = coalesce($1, application_name) "
            "AND usename = coalesce($2, usename)",
            *(name, user),
        )


@asynccontextmanager
async def frozen_backends(url: str, pids: Sequence[int]) -> AsyncGenerator[None]:
    """Suspend these processes of the server, so that their connections are half open. Each is
    stopped where it waits for its client, or for a lock of a table or row. Elsewhere it could hold
    an internal lock of the server and stop all other processes."""
    try:
        async with _connected(url) as connection:
            for pid in pids:
                await _stop_where_it_waits(connection, pid)
        yield
    finally:
        for pid in pids:
            _signal(pid, signal.SIGCONT)


async def _stop_where_it_waits(connection: asyncpg.Connection, pid: int) -> None:
    with anyio.fail_after(MEND_TIMEOUT):
        while _signal(pid, signal.SIGSTOP):
            while _runs(pid):
                await anyio.sleep(RETRY / 50)
            with anyio.move_on_after(STATE_TIMEOUT):
                if await connection.fetchval(
                    "SELECT wait_event_type IN ('Client', 'Lock') FROM pg_stat_activity"
                    " WHERE pid = $1",
                    pid,
                ):
                    return
            _signal(pid, signal.SIGCONT)
            await anyio.sleep(RETRY / 50)


def _runs(pid: int) -> bool:
    """Return whether the process still runs."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "RSD"
    return False


def _signal(pid: int, number: signal.Signals) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


# --- what an administrator does


@asynccontextmanager
async def connections_refused(url: str, *users: str) -> AsyncGenerator[None]:
    """Refuse new connections to the database, and terminate those of these roles."""
    database = urlsplit(url).path[1:]
    beside = urlunsplit(urlsplit(url)._replace(path="/template1"))
    await _execute(beside, f'ALTER DATABASE "{database}" ALLOW_CONNECTIONS false')
    try:
        for user in users:
            await kill_backends(beside, None, user=user)
        yield
    finally:
        await _execute_until_done(beside, f'ALTER DATABASE "{database}" ALLOW_CONNECTIONS true')


@asynccontextmanager
async def connections_exhausted(url: str) -> AsyncGenerator[None]:
    """Take all connections, also those that become free, so that only a superuser can connect.
    `url` is of an ordinary role."""
    held: list[asyncpg.Connection] = []
    none_is_left = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_hold_connections, url, held, none_is_left)
        try:
            await none_is_left.wait()
            yield
        finally:
            tasks.cancel_scope.cancel()
            for connection in held:
                connection.terminate()


async def _hold_connections(
    url: str, held: list[asyncpg.Connection], none_is_left: anyio.Event
) -> None:
    while True:
        try:
            held.append(await asyncpg.connect(url, timeout=5))
        except DATABASE_ERRORS:
            none_is_left.set()
            await anyio.sleep(RETRY)


@asynccontextmanager
async def server_settings(url: str, **settings: str) -> AsyncGenerator[None]:
    """Change settings of the whole server, also for existing sessions that do not set their own."""
    await _set_all(url, settings)
    try:
        yield
    finally:
        for name in settings:
            await _execute_until_done(url, f"ALTER SYSTEM RESET {name}")
        await _execute_until_done(url, "SELECT pg_reload_conf()")


async def _set_all(url: str, settings: dict[str, str]) -> None:
    for name, value in settings.items():
        await _execute(url, f"ALTER SYSTEM SET {name} = '{value}'")
    await _execute(url, "SELECT pg_reload_conf()")


@asynccontextmanager
async def role_settings(url: str, role: str, **settings: str) -> AsyncGenerator[None]:
    """Change the settings of new sessions of a role during the block."""
    for name, value in settings.items():
        await _execute(url, f"ALTER ROLE \"{role}\" SET {name} = '{value}'")
    try:
        yield
    finally:
        for name in settings:
            await _execute_until_done(url, f'ALTER ROLE "{role}" RESET {name}')


@asynccontextmanager
async def clock_stepped(clock: WallClock, seconds: int) -> AsyncGenerator[None]:
    """Set the clock of a `SteppedServer` forward or back by this many seconds."""
    clock.step(seconds)
    try:
        yield
    finally:
        clock.step(-seconds)


async def step_clock_often(clock: WallClock, seconds: int, *, lasting: float) -> None:
    """Step the clock and back, once for a while and then again and again, so that some steps fall
    between a heartbeat and its reader."""
    end = anyio.current_time() + lasting
    async with clock_stepped(clock, seconds):
        await anyio.sleep(lasting / 2)
    while anyio.current_time() < end:
        await anyio.sleep(CLOCK_TURN)
        async with clock_stepped(clock, seconds):
            await anyio.sleep(CLOCK_TURN)


# --- what a user does


@asynccontextmanager
async def rows_locked(url: str, select: str) -> AsyncGenerator[int]:
    """Hold the locks of the rows that a statement with FOR UPDATE selects, and yield their
    number."""
    async with _connected(url) as connection, connection.transaction():
        yield len(await connection.fetch(select))


@asynccontextmanager
async def row_trigger(
    url: str, name: str, *, table: str, when: str, body: str
) -> AsyncGenerator[None]:
    """Run `body` as a trigger before each update of a row that meets a condition on OLD and NEW."""
    await _lock_and_execute(
        url,
        _trigger(name, body),
        f"DROP TRIGGER IF EXISTS {name} ON {table}",
        f"CREATE TRIGGER {name} BEFORE UPDATE ON {table} FOR EACH ROW WHEN ({when})"
        f" EXECUTE FUNCTION {name}()",
    )
    try:
        yield
    finally:
        # This affects later statements at once. Running ones hold the lock that the drop needs.
        await _execute_until_done(url, _trigger(name, ""))
        await _lock_and_execute(url, f"DROP FUNCTION IF EXISTS {name} CASCADE")


def _trigger(name: str, body: str) -> str:
    return (
        f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql"
        f" AS $$ BEGIN {body} RETURN NEW; END $$"
    )


# --- help


@asynccontextmanager
async def _connected(url: str) -> AsyncGenerator[asyncpg.Connection]:
    connection = await asyncpg.connect(
        url, timeout=20, server_settings={"default_transaction_read_only": "off"}
    )
    try:
        yield connection
    finally:
        connection.terminate()


async def _execute(url: str, statement: str) -> None:
    async with _connected(url) as connection:
        await connection.execute(statement)


async def _lock_and_execute(url: str, *statements: str) -> None:
    """Run statements that lock a whole table, without blocking other sessions for long."""
    limited = "; ".join((f"SET lock_timeout = '{LOCK_LIMIT}ms'", *statements))
    await _execute_until_done(url, limited, retry=LOCK_RETRY)


async def _execute_until_done(url: str, statement: str, *, retry: float = RETRY) -> None:
    """Execute a statement, and try again as often as the server goes away.

    Raises:
        AssertionError: `MEND_TIMEOUT` expired. The fault may last.
    """
    with anyio.move_on_after(MEND_TIMEOUT, shield=True):
        while True:
            try:
                await _execute(url, statement)
            except DATABASE_ERRORS:
                await anyio.sleep(retry)
            else:
                return
    raise AssertionError(f"the server did not accept {statement!r} within {MEND_TIMEOUT:g} s")
