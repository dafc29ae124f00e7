"""The fence of a term: what may be written during the term, and not after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from riverpy._clock import Timer
from riverpy._leading.term_fence import FenceTimeoutError, TermFence
from riverpy._postgres.connection import ConnectionOutageTracker, DedicatedConnection
from riverpy._postgres.driver import DATABASE_ERRORS, PostgresError, connect
from riverpy.errors import FencedOutError
from tests.kit.proxy import proxied
from tests.leading.term_context import lease_of

if TYPE_CHECKING:
    from riverpy._postgres.driver import Connection
    from tests._database import Schema
    from tests.leading.term_context import HeldTerm


async def test_holder_writes(held: HeldTerm, schema: Schema) -> None:
    """A write under a held term is committed."""
    context = held.context
    async with context.fence.transaction(context.connection, "a test") as connection:
        await connection.execute(
            f"INSERT INTO {schema.name}.river_queue (name, updated_at) VALUES ('q', now())"
        )
    assert await schema.fetchval("SELECT count(*) FROM river_queue") == 1
    assert not held.is_refused


async def test_write_after_a_takeover(held: HeldTerm, schema: Schema) -> None:
    """A transaction of a term that another term has followed is refused before its first write, and
    the term ends."""
    context = held.context
    await held.take_over()
    with pytest.raises(FencedOutError):
        async with context.fence.transaction(context.connection, "a test"):
            pytest.fail("the transaction began")
    assert held.is_refused


async def test_no_statement_after_the_deadline(held: HeldTerm) -> None:
    """After the local deadline a process sends no statement for the fence."""
    context = held.context
    held.pass_deadline()
    with pytest.raises(FencedOutError):
        async with context.fence.transaction(context.connection, "a test"):
            pytest.fail("the transaction began")
    assert not held.is_refused


async def test_write_after_the_expiry(held: HeldTerm, schema: Schema) -> None:
    """A transaction of an expired term is refused, even if no other client is leader yet."""
    context = held.context
    await schema.execute("UPDATE river_leader SET expires_at = now() - interval '1 second'")
    with pytest.raises(FencedOutError):
        async with context.fence.transaction(context.connection, "a test"):
            pytest.fail("the transaction began")
    assert held.is_refused


def fence_of(held: HeldTerm, ttl: float) -> TermFence:
    """Return a fence of the same term, with a lease of this many seconds."""
    return TermFence(lease_of(held, ttl, Timer()))


@pytest.mark.parametrize(
    ("ttl", "options", "limits"),
    [
        (30.0, {}, ("5s", "1s", "5s")),
        (4.5, {}, ("4500ms", "900ms", "4500ms")),
        (30.0, {"statement_timeout": "2s", "lock_timeout": "50ms"}, ("2s", "50ms", "5s")),
        (30.0, {"statement_timeout": "1h", "lock_timeout": "1min"}, ("5s", "1s", "5s")),
    ],
)
async def test_limits(
    held: HeldTerm, ttl: float, options: dict[str, str], limits: tuple[str, ...]
) -> None:
    """The server ends a transaction that hangs after 5 s or the lease's time, whichever is less.
    This includes connections without settings, as behind a pooler. A shorter limit of the session
    stays in effect. After the transaction the session has its old settings."""
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")

    async def read(connection: Connection) -> tuple[str, ...]:
        return tuple([await connection.fetchval(f"SHOW {name}") for name in names])

    plain = await plain_connection(held, options)
    try:
        async with plain.acquire("a test", 10.0) as connection:
            before = await read(connection)
        async with fence_of(held, ttl).transaction(plain, "a test") as connection:
            assert await read(connection) == limits
            if int(await connection.fetchval("SHOW server_version_num")) >= 170000:
                assert await connection.fetchval("SHOW transaction_timeout") == limits[2]
        async with plain.acquire("a test", 10.0) as connection:
            assert await read(connection) == before
    finally:
        await plain.close()


async def test_end_of_a_busy_transaction(held: HeldTerm) -> None:
    """The server ends a fenced transaction of many short statements at its limit, even if the
    session has a longer transaction_timeout. A shorter one of the session applies."""
    for own, ttl in (("40s", 1.5), ("500ms", 30.0)):
        plain = await plain_connection(held, {})
        try:
            async with plain.acquire("a test", 20.0) as connection:
                if connection.get_server_version().major < 17:
                    return  # there only single statements and pauses are limited
                await connection.execute(f"SET transaction_timeout = '{own}'")
                await connection.execute("BEGIN")
                assert await fence_of(held, ttl)._try_to_fence_transaction(connection)
                timeout = await connection.fetchval("SHOW transaction_timeout")
                assert timeout == ("500ms" if own == "500ms" else "1500ms")
                with pytest.raises(DATABASE_ERRORS) as raised:
                    await busy(connection)
                assert not isinstance(raised.value, TimeoutError)
        finally:
            await plain.close()


async def test_two_fences_in_one_transaction(held: HeldTerm) -> None:
    """A second fence does not extend the limit of the first."""
    plain = await plain_connection(held, {})
    try:
        async with plain.acquire("a test", 20.0) as connection, connection.transaction():
            until: list[int] = []
            for ttl in (1.5, 30.0):
                assert await fence_of(held, ttl)._try_to_fence_transaction(connection)
                until.append(int(await connection.fetchval("SHOW riverpy.fenced_until")))
            assert until[1] <= until[0] + 1
    finally:
        await plain.close()


async def busy(connection: Connection) -> None:
    """Run one short statement after another."""
    while True:
        await connection.execute("SELECT pg_sleep(0.02)")


async def plain_connection(held: HeldTerm, settings: dict[str, str]) -> DedicatedConnection:
    """Open a connection with only these settings."""

    async def make() -> Connection:
        return await connect(held.schema.url, application_name="plain", session_settings=settings)

    return DedicatedConnection("plain", make, ConnectionOutageTracker())


async def test_isolation(held: HeldTerm) -> None:
    """The fence does not use a stricter default isolation of the session: with a snapshot the fence
    would fail if the lease is renewed during the transaction."""
    strict = await plain_connection(held, {"default_transaction_isolation": "serializable"})
    try:
        async with held.context.fence.transaction(strict, "a test") as connection:
            assert await connection.fetchval("SHOW transaction_isolation") == "read committed"
    finally:
        await strict.close()


async def test_rollback_that_is_not_answered(held: HeldTerm) -> None:
    """If a statement fails and the rollback gets no answer in time, the connection is closed, so
    that nothing later runs inside the transaction."""
    async with proxied(held.schema.url) as proxy:

        async def make() -> Connection:
            return await connect(proxy.url, application_name="held")

        async def fail() -> None:
            async with held.context.fence.transaction(connection, "a test") as inner:
                try:
                    await inner.execute(f"INSERT INTO {held.schema.name}.river_queue VALUES (1/0)")
                finally:
                    proxy.hold("held")

        connection = DedicatedConnection("held", make, ConnectionOutageTracker())
        try:
            with pytest.raises(PostgresError, match="division by zero"):
                await fail()
            assert not connection.is_connected
        finally:
            await connection.close()


async def time_out(fence: TermFence, connection: DedicatedConnection) -> None:
    """Fail in the block."""
    async with fence.transaction(connection, "a test"):
        raise TimeoutError("of the block")


async def test_locked_row_of_the_leader(held: HeldTerm, schema: Schema) -> None:
    """A wait for the leader's row and a wait for other rows give different errors. The first ends
    even if the session has no limit. Then the connection can be used again."""
    plain = await plain_connection(held, {})
    fence = fence_of(held, 30.0)
    try:
        async with schema.connected() as blocker, blocker.transaction():
            await blocker.execute(f"SELECT FROM {schema.name}.river_leader FOR UPDATE")
            with anyio.fail_after(10.0), pytest.raises(FenceTimeoutError, match=r"a test: .*lock"):
                async with fence.transaction(plain, "a test"):
                    pytest.fail("the transaction began")
        with pytest.raises(TimeoutError, match="of the block") as raised:
            await time_out(fence, plain)
        assert not isinstance(raised.value, FenceTimeoutError)
        async with fence.transaction(plain, "a test") as connection:
            assert await connection.fetchval("SELECT 1") == 1
    finally:
        await plain.close()
