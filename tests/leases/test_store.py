"""Leases in the table: sessions, transactions and processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import asyncpg
import pytest
from structlog.testing import capture_logs

from riverpy import (
    ClientStateError,
    ConfigError,
    LeaseLostError,
    LeaseManager,
    MemoryLeases,
    SchemaMissingError,
    TransactionError,
)
from riverpy._log_events import CONNECTION_LOST, CONNECTION_RESTORED, LEASE_RELEASE_FAILED
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._postgres.leases import LeaseLockedError
from riverpy.migrate import Migrator
from tests._database import connected
from tests._time import settle
from tests.kit.proxy import proxied
from tests.leases.backends import ADD_EFFECT

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy import Lease
    from tests._database import Schema

QUICK = {"ttl": timedelta(seconds=15), "renew_interval": timedelta(seconds=0.3)}
ENDED = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    ConnectionError,
)
SHORT_TIMES: Any = {
    "ttl": timedelta(seconds=2.4),
    "renew_interval": timedelta(seconds=1),
}
BOUND = 20.0
"""Seconds for a statement: longer than a machine stalls."""
ISOLATIONS = ("read_committed", "repeatable_read", "serializable")
LEASE_SESSIONS = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND application_name LIKE 'riverpy lease%'"
)


@pytest.fixture
async def leases(schema: Schema) -> AsyncGenerator[LeaseManager]:
    """A manager with connections of its own."""
    async with LeaseManager(schema.url, schema=schema.name, holder="a") as manager:
        yield manager


async def _granted(manager: LeaseManager, name: str = "x") -> Lease:
    lease = await manager.try_acquire(name)
    assert lease is not None
    return lease


async def _take_over(schema: Schema) -> Lease:
    """Let another process acquire the lease. The holder is not notified."""
    await schema.execute("UPDATE riverpy_lease SET expires_at = now() - interval '1 s'")
    async with schema.connected() as connection, LeaseManager(connection, holder="b") as other:
        return await _granted(other)


# -- transactions


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_fence_after_a_renewal(schema: Schema, leases: LeaseManager, isolation: Any) -> None:
    """Transactions of each isolation level pass the fence and commit, with snapshots from before or
    after the fence and renewals."""
    lease = await _granted(leases)
    async with schema.connected() as connection:
        for is_early in (False, True):
            async with connection.transaction(isolation=isolation):
                if is_early:
                    await connection.fetchval("SELECT count(*) FROM riverpy_lease")
                assert await leases.renew(lease)
                await lease.fence(connection)
                assert await leases.renew(lease)
                await lease.fence(connection)
                await connection.execute(ADD_EFFECT, f"{is_early}")
                assert await leases.renew(lease)
    assert await schema.fetchval("SELECT count(*) FROM river_queue") == 2


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_fence_by_an_old_snapshot(
    schema: Schema, leases: LeaseManager, isolation: Any
) -> None:
    """If the lease seems expired in a transaction's old snapshot, the fence still passes: the lease
    was renewed since, under the same epoch."""
    lease = await _granted(leases)
    await schema.execute("UPDATE riverpy_lease SET expires_at = now() - interval '1 s'")
    async with schema.connected() as connection, connection.transaction(isolation=isolation):
        await connection.fetchval("SELECT count(*) FROM riverpy_lease")
        await schema.execute("UPDATE riverpy_lease SET expires_at = now() + ttl")
        await lease.fence(connection)


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_fence_after_a_takeover(
    schema: Schema, leases: LeaseManager, isolation: Any, *, is_early: bool
) -> None:
    """After a takeover, transactions of each isolation level are refused, also if the failure is a
    serialization failure."""
    lease = await _granted(leases)
    async with schema.connected() as connection:
        transaction = connection.transaction(isolation=isolation)
        await transaction.start()
        if is_early:
            await connection.fetchval("SELECT count(*) FROM riverpy_lease")
        await _take_over(schema)
        assert lease.is_held  # locally
        with pytest.raises(LeaseLostError):
            await lease.fence(connection)
        await transaction.rollback()
    assert not lease.is_held


@pytest.mark.parametrize("what", ["database", "snapshot"])
async def test_fence_that_finds_no_term(
    schema: Schema, leases: LeaseManager, fresh_database_url: str, what: str
) -> None:
    """A fence in another database, or in a snapshot from before the term, raises an error with the
    name of the database. The lease stays held."""
    is_other = what == "database"
    async with connected(fresh_database_url) if is_other else schema.connected() as connection:
        if is_other:
            await connection.execute(
                f'CREATE SCHEMA "{schema.name}" CREATE TABLE "{schema.name}".riverpy_lease'
                " (name text, epoch bigint, expires_at timestamptz)"
            )
        transaction = connection.transaction(isolation="repeatable_read")
        await transaction.start()
        await connection.fetchval(f'SELECT count(*) FROM "{schema.name}".riverpy_lease')
        lease = await _granted(leases)
        place = await connection.fetchval("SELECT current_database()")
        with pytest.raises(TransactionError, match=f"sees, in {place}.*which is held"):
            await lease.fence(connection)
        await transaction.rollback()
    assert lease.is_held
    assert await leases.renew(lease)


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("meanwhile", ["nothing", "renewed", "shared"])
async def test_fence_in_a_savepoint(
    schema: Schema, leases: LeaseManager, isolation: Any, meanwhile: str
) -> None:
    """A fence in a savepoint would be undone with it, so it is refused, also if other sessions have
    locked or changed the row. The lease stays held. In the outermost transaction the fence works,
    also after savepoints that have ended."""
    lease = await _granted(leases)
    async with schema.connected() as other, schema.connected() as connection:
        beside = other.transaction()
        await beside.start()
        if meanwhile == "shared":
            await lease.fence(other)
        async with connection.transaction(isolation=isolation):
            await connection.fetchval("SELECT count(*) FROM riverpy_lease")
            if meanwhile == "renewed":
                assert await leases.renew(lease)
            await connection.execute("SAVEPOINT own")
            with pytest.raises(TransactionError, match=r"in a savepoint.*outermost transaction"):
                await lease.fence(connection)
            assert await connection.fetchval(lease.fence_statement) is False
            await connection.execute("ROLLBACK TO own; RELEASE own")
            async with connection.transaction():
                await connection.execute(ADD_EFFECT, "in a savepoint")
            await lease.fence(connection)
            assert await connection.fetchval(lease.fence_statement) is True
            if meanwhile != "shared":
                async with connection.transaction():
                    await lease.fence(connection)  # the one around it stands
            await schema.execute("UPDATE riverpy_lease SET expires_at = now() - interval '1 s'")
            await beside.rollback()
            assert await leases.try_acquire("x") is None
            await connection.execute(ADD_EFFECT, "fenced")
        assert lease.is_held
        assert await leases.try_acquire("x") is not None


async def test_fence_after_a_failure_in_a_savepoint(schema: Schema, leases: LeaseManager) -> None:
    """A nested transaction of asyncpg leaves its savepoint open when it fails. After that a first
    fence is refused, and one from before stays in effect."""
    lease = await _granted(leases)
    async with schema.connected() as connection:
        for is_first in (True, False):
            async with connection.transaction():
                if is_first:
                    await lease.fence(connection)
                with pytest.raises(asyncpg.DivisionByZeroError):
                    async with connection.transaction():
                        await connection.execute("SELECT 1 / 0")
                if is_first:
                    await lease.fence(connection)
                else:
                    with pytest.raises(TransactionError, match="asyncpg leaves it open"):
                        await lease.fence(connection)


async def test_serialization_failure_under_the_lease(schema: Schema, leases: LeaseManager) -> None:
    """If a transaction has a serialization failure while the lease is held, the error is raised,
    and the lease stays held. The transaction can be repeated."""
    lease = await _granted(leases)
    async with schema.connected() as connection:
        transaction = connection.transaction(isolation="repeatable_read")
        await transaction.start()
        await connection.fetchval("SELECT count(*) FROM riverpy_lease")
        for step in (1, -1):  # a change of the key, as of a takeover
            await schema.execute("UPDATE riverpy_lease SET epoch = epoch + $1", step)
        with pytest.raises(asyncpg.SerializationError):
            await lease.fence(connection)
        await transaction.rollback()
        assert lease.is_held
        async with connection.transaction(isolation="repeatable_read"):
            await lease.fence(connection)


async def test_limits_of_a_fenced_transaction(schema: Schema, leases: LeaseManager) -> None:
    """A fence limits its transaction to the ttl, keeps shorter limits of the session, and leaves no
    setting behind."""
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")

    async def limits(connection: asyncpg.Connection[Any]) -> list[str]:
        return [await connection.fetchval("SELECT current_setting($1)", name) for name in names]

    lease = await _granted(leases)
    shorter = {"statement_timeout": "7s", "idle_in_transaction_session_timeout": "6s"}
    for settings, fenced in ((shorter, ["7s", "15s", "6s"]), ({}, ["15s"] * 3)):
        async with schema.connected(**settings) as connection:
            before = await limits(connection)
            async with connection.transaction():
                await lease.fence(connection)
                assert await limits(connection) == fenced
            assert await limits(connection) == before


@pytest.mark.parametrize("setting", ["0", "40s", "500ms"])
@pytest.mark.parametrize("is_text", [False, True])
async def test_end_of_a_busy_fenced_transaction(
    schema: Schema, setting: str, is_text: bool
) -> None:
    """The server ends a fenced transaction of many short statements, with any transaction_timeout
    of the session, so that a takeover is possible. A second fence does not extend the limit."""
    async with (
        LeaseManager(schema.url, schema=schema.name, **SHORT_TIMES) as manager,
        LeaseManager(schema.url, schema=schema.name, **SHORT_TIMES) as other,
        schema.connected() as connection,
    ):
        if connection.get_server_version().major < 17:
            return  # documented: only a single statement or pause is limited there
        lease = await _granted(manager)
        await connection.execute(f"SET transaction_timeout = '{setting}'")
        await connection.execute("BEGIN")
        if is_text:
            assert await connection.fetchval(lease.fence_statement) is True
        else:
            await lease.fence(connection)
            await lease.fence(connection)
        if setting == "500ms":
            assert await connection.fetchval(
                "SELECT current_setting('transaction_timeout')::interval <= '500 ms'"
            )
        await ended_by_the_server(connection)
        with anyio.fail_after(BOUND):
            while await other.try_acquire("x") is None:
                await anyio.sleep(0.05)


async def test_two_fences_in_one_transaction(schema: Schema) -> None:
    """With fences of two leases, the shorter ttl limits the transaction."""
    async with (
        LeaseManager(schema.url, schema=schema.name, **SHORT_TIMES) as manager,
        LeaseManager(schema.url, schema=schema.name, holder="b") as longer,
        schema.connected() as connection,
    ):
        if connection.get_server_version().major < 17:
            return
        short, long = await _granted(manager), await _granted(longer, "y")
        await connection.execute("BEGIN")
        await short.fence(connection)
        first = int(await connection.fetchval("SHOW riverpy.fenced_until"))
        await long.fence(connection)
        assert int(await connection.fetchval("SHOW riverpy.fenced_until")) <= first + 1
        await ended_by_the_server(connection)


async def ended_by_the_server(connection: Any) -> None:
    """Return when the server has ended a transaction of many short statements."""

    async def work() -> None:
        while True:
            await connection.execute("SELECT pg_sleep(0.02)")

    with anyio.fail_after(BOUND), pytest.raises(ENDED):
        await work()


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("how", ["released", "expired", "taken over"])
async def test_statement_of_a_term_that_is_over(
    schema: Schema, leases: LeaseManager, isolation: Any, how: str
) -> None:
    """The fence statement of an ended term finds no row. In a snapshot it finds one until another
    term begins, which waits for the transaction."""
    lease = await _granted(leases)
    statement = lease.fence_statement
    if how == "released":
        await leases.release(lease)
    elif how == "expired":
        await schema.execute("UPDATE riverpy_lease SET expires_at = now() - interval '1 s'")
    else:
        await _take_over(schema)
    passes = isolation != "read_committed" and how != "taken over"
    async with schema.connected() as connection, connection.transaction(isolation=isolation):
        assert (await connection.fetchrow(statement) is not None) == passes
        if how != "taken over":
            assert (await leases.try_acquire("x") is None) == passes


async def test_fence_as_text(schema: Schema, leases: LeaseManager) -> None:
    """The fence statement has the same effect as the fence, for any name: it returns a row while
    the lease is held, and takeovers wait."""
    name = "it's:\\%1$"
    lease = await _granted(leases, name)
    statement = await anyio.to_thread.run_sync(lambda: lease.fence_statement)
    async with schema.connected() as connection:
        async with connection.transaction():
            assert len(await connection.fetch(statement)) == 1
            await schema.execute("UPDATE riverpy_lease SET expires_at = now() - interval '1 s'")
            async with LeaseManager(schema.url, schema=schema.name, holder="b") as other:
                assert await other.try_acquire(name) is None
        async with connection.transaction():
            assert await connection.fetch(statement) == []


@pytest.mark.parametrize(
    "lock",
    [
        "SELECT FROM riverpy_lease WHERE name = 's:x' FOR UPDATE",
        "UPDATE riverpy_lease SET holder = holder WHERE name = 's:x'",
    ],
)
async def test_locked_row(
    schema: Schema, leases: LeaseManager, monkeypatch: pytest.MonkeyPatch, lock: str
) -> None:
    """A locked row does not delay the renewal of other leases. The result for its own lease is
    unknown, and the lease stays held until its deadline. A release soon gives up, and no renewal
    waits for it."""
    # A statement that waited would be ended by the limit of the session, well before these.
    monkeypatch.setattr("riverpy._leases.engine.LEASE_RELEASE_TIMEOUT", BOUND)
    lease, other = await _granted(leases), await _granted(leases, "y")
    store = leases._engine._store
    async with schema.connected() as connection, connection.transaction():
        await connection.execute(lock)
        terms = [(one.name, one.epoch) for one in (lease, other)]
        answers = await store.renew(leases.holder, terms, timeout=BOUND)
        assert answers == {"x": False, "y": True}
        with pytest.raises(LeaseLockedError, match=r"leases: x$"):
            await leases.renew(lease)
        assert lease.is_held
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_release_in_vain, leases, lease)
            assert await leases.renew(other)
    assert await store.renew(leases.holder, terms, timeout=BOUND) == {"x": True, "y": True}
    assert await store.release("x", lease.epoch, leases.holder, timeout=BOUND)


async def _release_in_vain(leases: LeaseManager, lease: Lease) -> None:
    with capture_logs() as log:
        assert not await leases.release(lease)
    lines = [line for line in log if line["event"] == LEASE_RELEASE_FAILED]
    assert "lock timeout" in lines[0]["error"]


async def test_clock_set_back(schema: Schema, leases: LeaseManager) -> None:
    """A lease from before the server's clock was set back is free for other processes. If its
    holder renews first, it stays held by the new clock."""
    ahead = "UPDATE riverpy_lease SET expires_at = now() + interval '1 hour'"
    lease = await _granted(leases)
    async with LeaseManager(schema.url, schema=schema.name, holder="b") as other:
        await schema.execute(ahead)
        assert await leases.renew(lease)
        assert await other.try_acquire("x") is None
        await schema.execute(ahead)
        assert (await _granted(other)).epoch > lease.epoch
        assert not await leases.renew(lease)


# -- connections


async def test_injected_connection_survives(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An injected connection stays open and outside of a transaction after an error, and is not
    closed with the manager."""
    async with schema.connected() as connection:
        pid = connection.get_server_pid()
        async with _injected(connection) as leases:
            lease = await _granted(leases)
            async with schema.connected() as other, other.transaction():
                await other.execute("LOCK TABLE riverpy_lease")
                monkeypatch.setattr(leases._engine, "_acquire_timeout", 0.1)
                with pytest.raises(TimeoutError, match="acquiring a lease took longer"):
                    await leases.try_acquire("x")
                monkeypatch.setattr("riverpy._leases.held_leases.LEASE_STORE_TIMEOUT", 0.1)
                with pytest.raises(TimeoutError, match="renewing leases took longer"):
                    await leases.renew(lease)
        assert not connection.is_closed()
        assert not connection.is_in_transaction()
        assert await connection.fetchval("SELECT pg_backend_pid()") == pid


async def test_codecs_of_the_caller(schema: Schema) -> None:
    """Codecs for times that the user set on its connection are not used."""

    def refuse(value: Any) -> Any:
        raise AssertionError(f"a codec of the caller's saw {value!r}")

    async with schema.connected() as connection:
        for name in ("timestamptz", "interval", "json", "jsonb", "uuid", "float4", "numeric"):
            await connection.set_type_codec(
                name, schema="pg_catalog", encoder=refuse, decoder=refuse
            )
        async with _injected(connection) as leases:
            lease = await leases.try_acquire("x")
            assert lease is not None
            assert await leases.try_acquire("x") is None
            assert await leases.renew(lease)
            assert await leases.release(lease)


async def test_injected_connection_that_is_lost(schema: Schema) -> None:
    """A lost injected connection is not replaced. Each call raises an error."""
    async with schema.connected() as connection, _injected(connection) as leases:
        lease = await _granted(leases)
        connection.terminate()
        for _ in range(2):
            with pytest.raises(asyncpg.InterfaceError, match="closed"):
                await leases.renew(lease)
        assert not await leases.release(lease)


async def test_injected_connection_in_a_transaction(schema: Schema) -> None:
    """A lease is not acquired over a connection with an open transaction."""
    async with schema.connected() as connection, _injected(connection) as leases:
        lease = await _granted(leases)
        async with connection.transaction():
            with pytest.raises(TransactionError, match="is in a transaction"):
                await leases.try_acquire("y")
            with pytest.raises(TransactionError, match="is in a transaction"):
                await leases.renew(lease)
            assert not await leases.release(lease)
    assert await schema.fetchval("SELECT count(*) FROM riverpy_lease") == 1


async def test_transaction_during_a_hold(schema: Schema) -> None:
    """If the user opens a transaction on the connection of the leases, renewals fail and are
    repeated in time."""
    async with schema.connected() as connection, _injected(connection) as leases:
        engine = leases._engine
        async with leases.hold("x") as lease:
            async with connection.transaction():
                with anyio.fail_after(30):
                    while not engine.renewer.renewal_failure_count:
                        await anyio.sleep(0.01)
            engine.renewer.leases_renewed.init()
            await engine.renewer.leases_renewed.wait()
            assert lease.is_held


def _injected(connection: asyncpg.Connection[Any]) -> LeaseManager:
    return LeaseManager(connection, holder="a", **QUICK)


async def test_owned_connections_are_rebuilt(schema: Schema) -> None:
    """Own connections that were lost are replaced at the next call, with one warning that names the
    holder and the error."""
    async with LeaseManager(schema.url, schema=schema.name, holder="it is me") as leases:
        lease = await _granted(leases)
        ended = await schema.fetchval(
            "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'riverpy lease%'"
        )
        assert ended == 2
        with capture_logs() as log:
            assert await _until_answered(leases, lease)
            assert await leases.try_acquire("x") is None
        lost = [line for line in log if line["event"] == CONNECTION_LOST]
        assert [line["holder"] for line in lost[:1]] == ["it is me"]
        assert lost[0]["log_level"] == "warning"
        assert "Error" in lost[0]["error_type"]
        assert await leases.release(lease)


async def _until_answered(leases: LeaseManager, lease: Lease) -> bool:
    """Renew until the result is known."""
    while True:
        try:
            return await leases.renew(lease)
        except DATABASE_ERRORS:
            assert lease.is_held


async def test_cancelled_release(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease is released even if its holder is cancelled repeatedly during the release. A job that
    is stopped is cancelled like this, and a shielded scope does not prevent it."""
    monkeypatch.setattr("riverpy._postgres.leases.RELEASE_LOCK_TIMEOUT", timedelta(seconds=20))
    monkeypatch.setattr("riverpy._leases.engine.LEASE_RELEASE_TIMEOUT", 20.0)
    held, may_end = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with leases.hold("x"):
            held.set()
            await may_end.wait()

    async with LeaseManager(schema.url, schema=schema.name) as leases:
        task = asyncio.create_task(hold())
        await held.wait()
        async with schema.connected() as connection, connection.transaction():
            await connection.execute("SELECT FROM riverpy_lease FOR UPDATE")
            may_end.set()
            for _ in range(2):
                await _until_waiting(schema)
                task.cancel()
                await settle()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await schema.fetchval("SELECT expires_at = '-infinity' FROM riverpy_lease")


async def _until_waiting(schema: Schema) -> None:
    """Return when an attempt or a release waits for a row."""
    with anyio.fail_after(30):
        while not await schema.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name = 'riverpy lease requests' AND wait_event_type = 'Lock'"
        ):
            await anyio.sleep(0.01)


async def test_outage_of_an_idle_connection(schema: Schema) -> None:
    """If the connection for requests is lost when the last caller stops waiting, the outage does
    not continue: its end is logged before a later outage of the renewals."""

    def outage_lines() -> list[tuple[str, str]]:
        return [
            (line["event"].removeprefix("connection "), line["connection"])
            for line in log
            if line["event"] in {CONNECTION_LOST, CONNECTION_RESTORED}
        ]

    async with proxied(schema.url) as proxy:
        manager = LeaseManager(proxy.url, schema=schema.name, holder="a", **QUICK)
        with capture_logs() as log:
            async with manager as leases, leases.hold("x"):
                leases._engine._acquire_timeout = 0.2
                proxy.refusing = True
                proxy.cut("riverpy lease requests")
                with pytest.raises((TimeoutError, OSError, asyncpg.InterfaceError)):
                    async with leases.hold("y", wait=timedelta(0)):
                        pytest.fail("it was granted")
                assert outage_lines() == [("lost", "lease requests")]
                proxy.refusing = False
                proxy.cut("riverpy leases")
                with anyio.fail_after(30):
                    while outage_lines()[1:] != [
                        ("restored", "lease requests"),
                        ("lost", "leases"),
                        ("restored", "leases"),
                    ]:
                        await anyio.sleep(0.01)


async def test_exhausted_pool(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a pool has no free connection, calls time out with an unknown result, and work again
    later."""
    async with (
        asyncpg.create_pool(schema.url, min_size=1, max_size=1) as pool,
        LeaseManager(pool, schema=schema.name, holder="a", **QUICK) as leases,
    ):
        async with pool.acquire():
            with monkeypatch.context() as patch:
                patch.setattr(leases._engine, "_acquire_timeout", 0.1)
                with pytest.raises(TimeoutError, match="acquiring a lease took longer"):
                    await leases.try_acquire("x")
        assert await leases.release(await _granted(leases))


async def _no_sessions(connection: Schema | asyncpg.Connection[Any]) -> None:
    """Wait until the server has no session of riverpy."""
    with anyio.fail_after(30):
        while await connection.fetchval(LEASE_SESSIONS):
            await anyio.sleep(0.01)


async def test_nothing_is_left_open(schema: Schema) -> None:
    """A closed manager has no session, and cannot be opened again."""
    await _no_sessions(schema)
    leases = LeaseManager(schema.url, schema=schema.name)
    with pytest.raises(ClientStateError, match="not open"):
        await leases.try_acquire("x")
    async with leases:
        await _granted(leases)
        assert await schema.fetchval(LEASE_SESSIONS) == 2
    await _no_sessions(schema)
    with pytest.raises(ClientStateError, match="make another"):
        await leases.__aenter__()


@pytest.mark.parametrize("is_pool", [True, False])
async def test_line_is_not_migrated(database_url: str, *, is_pool: bool) -> None:
    """Without the table the manager does not open. The error has the command that creates it, and
    no session is left."""
    name = f"bare_{is_pool}".lower()
    async with connected(database_url) as connection:
        await connection.execute(f"CREATE SCHEMA {name}")
        await Migrator(connection, schema=name).up()
        async with asyncpg.create_pool(database_url, min_size=0, max_size=1) as pool:
            leases = LeaseManager(pool if is_pool else database_url, schema=name)
            text = rf"{name}' lacks version.*leases.*up --line riverpy.*--schema {name}"
            with pytest.raises(SchemaMissingError, match=text):
                await leases.__aenter__()
        await _no_sessions(connection)
        await connection.execute(f"DROP SCHEMA {name} CASCADE")


async def test_release_wakes_waiting_callers(schema: Schema) -> None:
    """The notification of a release, sent at its commit, wakes waiting callers."""
    slow = {"ttl": timedelta(hours=1), "renew_interval": timedelta(minutes=20)}
    async with (
        LeaseManager(schema.url, schema=schema.name, holder="a", **slow) as a,
        LeaseManager(schema.url, schema=schema.name, holder="b", **slow) as b,
        schema.connected() as listener,
    ):
        lease = await _granted(a)
        b._engine.lease_denied.init()

        def receive(*notification: Any) -> None:
            b._engine.receive_notification(notification[-1])

        await listener.add_listener(f"{schema.name}.riverpy_lease", receive)

        async def release() -> None:
            await b._engine.lease_denied.wait()
            assert await a.release(lease)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(release)
            with anyio.fail_after(30):
                async with b.hold("x") as other:
                    assert other.epoch > lease.epoch


async def test_loss_inside_of_a_transaction(schema: Schema) -> None:
    """A block that loses its lease during a statement can roll its transaction back. The connection
    can be used again."""
    quick = {"ttl": timedelta(seconds=15), "renew_interval": timedelta(seconds=0.1)}
    async with (
        schema.connected() as connection,
        LeaseManager(schema.url, schema=schema.name, holder="a", **quick) as leases,
    ):
        with pytest.raises(LeaseLostError, match="another process may hold the lease"):
            await _lose_inside(schema, leases, connection)
        assert not connection.is_in_transaction()
        async with leases.hold("y") as lease, connection.transaction():
            await lease.fence(connection)


async def _lose_inside(
    schema: Schema, leases: LeaseManager, connection: asyncpg.Connection[Any]
) -> None:
    async with leases.hold("x"), connection.transaction():
        await schema.execute("UPDATE riverpy_lease SET expires_at = '-infinity'")
        await connection.execute("SELECT pg_sleep(60)")


# -- processes


def test_race_of_eight_threads(schema_pool: Any) -> None:
    """Of eight event loops in threads, one acquires the lease."""

    async def attempt(url: str, name: str, holder: str) -> bool:
        async with LeaseManager(url, schema=name, holder=holder) as leases:
            return await leases.try_acquire("x") is not None

    async def race() -> list[bool]:
        async with schema_pool.schema() as schema:
            loop = asyncio.get_running_loop()
            with ThreadPoolExecutor(8) as threads:
                runs = [
                    loop.run_in_executor(
                        threads,
                        partial(asyncio.run, attempt(schema.url, schema.name, f"thread {number}")),
                    )
                    for number in range(8)
                ]
                return [await run for run in runs]

    assert sum(asyncio.run(race())) == 1


@pytest.mark.parametrize("what", ["fence first", "fence late"])
async def test_frozen_process(schema: Schema, what: str) -> None:
    """A process that is frozen inside or before its fenced transaction delays a takeover only by
    its limits. After it runs again it commits nothing."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.leases.holder", schema.url, schema.name, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    async def next_line() -> str:
        """Return the next line. Fails if none comes in time."""
        read = process.stdout.readline
        return await anyio.to_thread.run_sync(read, abandon_on_cancel=True)

    try:
        assert await next_line() == "held\n"
        os.kill(process.pid, signal.SIGSTOP)
        async with LeaseManager(schema.url, schema=schema.name, **QUICK) as leases:
            with anyio.fail_after(60):
                async with leases.hold("x") as lease, schema.connected() as connection:
                    async with connection.transaction():
                        await lease.fence(connection)
                        await connection.execute(ADD_EFFECT, "fresh")
                    process.stdin.write("go on\n")
                    process.stdin.flush()
                    os.kill(process.pid, signal.SIGCONT)
                    outcome = await next_line()
        assert outcome not in {"committed\n", ""}
        rows = await schema.fetch("SELECT name FROM river_queue")
        assert [row["name"] for row in rows] == ["fresh"]
    finally:
        process.kill()
        process.communicate()


def test_default_holder() -> None:
    """The default holder has the process id, and is different for each manager."""
    first, second = LeaseManager(MemoryLeases()).holder, LeaseManager(MemoryLeases()).holder
    assert first != second
    assert f":{os.getpid()}:" in first


async def test_lease_in_a_fork(
    schema: Schema, leases: LeaseManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a forked process the parent's lease is not held and its fence is refused. The parent keeps
    the lease."""
    lease = await _granted(leases)
    async with schema.connected() as connection, connection.transaction():
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 2**22 + 1)
            assert not lease.is_held
            assert lease.valid_for == 0
            with pytest.raises(LeaseLostError, match="this process is a fork of its holder"):
                await lease.fence(connection)
            with pytest.raises(LeaseLostError):
                _ = lease.fence_statement
        await lease.fence(connection)


async def test_manager_of_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager that was opened before a fork is refused after it."""
    async with LeaseManager(MemoryLeases()) as leases:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 2**22 + 1)
            with pytest.raises(ClientStateError, match="before a fork"):
                await leases.try_acquire("x")


async def test_manager_of_another_loop() -> None:
    """A manager is refused in another event loop."""
    async with LeaseManager(MemoryLeases()) as leases:

        async def ask() -> None:
            with pytest.raises(ClientStateError, match="another event loop"):
                await leases.try_acquire("x")
            with pytest.raises(ClientStateError, match="another event loop"):
                leases.hold("x")

        await anyio.to_thread.run_sync(asyncio.run, ask())


@pytest.mark.parametrize("kind", ["pool", "connection", "given back"])
async def test_closed_database(schema: Schema, kind: str) -> None:
    """If the pool or connection of the leases is closed by its owner, waiting callers get an
    error."""
    async with (
        schema.connected() as connection,
        asyncpg.create_pool(schema.url, min_size=1) as pool,
    ):
        database: Any = {"pool": pool, "connection": connection}.get(kind) or await pool.acquire()
        async with LeaseManager(database, schema=schema.name) as leases:
            await leases.release(await _granted(leases))
            await (pool.release(database) if kind == "given back" else database.close())
            with pytest.raises(ClientStateError, match="is closed: keep it open"):
                async with leases.hold("x"):
                    pytest.fail("it is held")


# -- settings


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ttl": timedelta(seconds=5)}, "ttl must be at least 2.4 times renew_interval.*0:00:12"),
        ({"ttl": timedelta(seconds=11.9)}, "with renew_interval 0:00:05 .*got 0:00:11.9"),
        ({"renew_interval": timedelta(0)}, "renew_interval, which is more than zero"),
        ({"renew_interval": timedelta(seconds=-1)}, "renew_interval, which is more than zero"),
        ({"ttl": timedelta(days=2)}, "ttl must be between"),
        (
            {"ttl": timedelta(milliseconds=10), "renew_interval": timedelta(milliseconds=1)},
            "ttl must be between",
        ),
        ({"ttl": 15}, "ttl takes a timedelta, got int"),
        ({"max_held": 0}, "max_held must be a number, 1 or more"),
        ({"holder": ""}, "a holder must not be empty"),
        ({"schema": "a.b"}, "a schema name"),
        ({"max_held": "3"}, "max_held must be a number.*got '3'"),
        ({"max_held": True}, "max_held must be a number.*got True"),
        ({"max_held": 1.5}, "max_held must be a number.*got 1.5"),
        ({"holder": 5}, "a holder must be a string, got int"),
        ({"holder": "\ud800"}, "lone surrogate"),
        ({"schema": 5}, "a schema name must be a string, got int"),
        ({"pooler": "no"}, "pooler must be True or False, got 'no'"),
        ({"renew_interval": timedelta.max}, "ttl must be at least 2.4 times renew_interval"),
    ],
)
def test_bad_settings(options: dict[str, Any], text: str) -> None:
    """A ttl that leaves no time for a second renewal is refused, with both values. So are other
    wrong settings (LM-02)."""
    with pytest.raises(ConfigError, match=text):
        LeaseManager(MemoryLeases(), **options)
    with pytest.raises(ConfigError, match="got int"):
        LeaseManager(7)  # type: ignore[arg-type]
