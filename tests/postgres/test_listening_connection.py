"""The connection that listens: one, of its own, whatever fails."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import pytest

from riverpy import Client, Config
from riverpy._postgres import notifier
from tests.work.rig import PATIENCE, Rig, Task

if TYPE_CHECKING:
    from tests._database import Schema

FAILURES = 50
LISTENERS = "datname = current_database() AND application_name = 'riverpy listener'"


async def test_failed_attempts_leave_no_connections(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts to listen that fail after they have connected, for which each has a connection,
    leave none behind; when they succeed again, the same client receives notifications (NR-04)."""
    for name in ("RECONNECT_DELAY_MIN", "RECONNECT_DELAY_MAX"):
        monkeypatch.setattr(notifier, name, timedelta(milliseconds=1))
    failures = 0
    listen, is_failing, has_failed = notifier.listen_on_channels, False, anyio.Event()

    async def fail(*args: Any) -> None:
        nonlocal failures
        if not is_failing:
            await listen(*args)
            return
        failures += 1
        if failures == FAILURES:
            has_failed.set()
        raise asyncpg.InsufficientPrivilegeError("no LISTEN for you")

    monkeypatch.setattr(notifier, "listen_on_channels", fail)
    rig = Rig(schema)

    rig.register_task()
    async with rig.working() as client:
        is_failing = True
        await schema.fetch(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {LISTENERS}"
        )
        with anyio.fail_after(PATIENCE):
            await has_failed.wait()
        await rig.until(f"SELECT count(*) <= 2 FROM pg_stat_activity WHERE {LISTENERS}")
        is_failing = False
        run: Any = client._run
        with anyio.fail_after(PATIENCE):
            while not run._is_listening():
                await asyncio.sleep(0.005)
        await client.insert(Task())
        await rig.event()
    await rig.until(f"SELECT count(*) FROM pg_stat_activity WHERE {LISTENERS}", 0)


async def test_failed_start_leaves_no_connection(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does a start that fails because LISTEN fails (NR-04)."""

    async def fail(*_: Any) -> None:
        raise asyncpg.InsufficientPrivilegeError("no LISTEN for you")

    monkeypatch.setattr(notifier, "listen_on_channels", fail)
    rig = Rig(schema)

    rig.register_task()
    started_at = await schema.fetchval("SELECT clock_timestamp()")
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="no LISTEN"):
        await rig.client().run()
    await rig.until(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name ~ '^riverpy' AND backend_start > $1",  # a test may have left some
        0,
        started_at,
    )


async def test_pool_that_renews_its_connections(schema: Schema) -> None:
    """The listener has a connection that no pool lends, so it receives notifications while the pool
    that inserts closes each connection after one query, or after a moment; nothing is warned of
    (NR-05)."""
    rig = Rig(schema)

    rig.register_task()
    pid = f"SELECT pid FROM pg_stat_activity WHERE {LISTENERS}"
    backends: set[int] = set()
    async with (
        asyncpg.create_pool(
            schema.url,
            min_size=0,
            max_size=1,
            max_queries=1,
            max_inactive_connection_lifetime=0.05,
        ) as pool,
        Client(pool, config=Config(schema=schema.name)) as inserting,
        rig.working(),
    ):
        # That of an earlier test may still be on its way out.
        await rig.until(f"SELECT count(*) FROM pg_stat_activity WHERE {LISTENERS}", 1)
        listener = await schema.fetchval(pid)
        for _ in range(10):
            backends.add(await pool.fetchval("SELECT pg_backend_pid()"))
            await inserting.insert(Task())
            await rig.event()
        assert await schema.fetchval(pid) == listener
    assert len(backends) == 10
    assert listener not in backends
