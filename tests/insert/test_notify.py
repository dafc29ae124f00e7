"""The notifications of inserts."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

import riverpy.sync
from riverpy._insert import shared_statement
from riverpy._insert.notify_limiter import (
    NOTIFICATION_COVERAGE_SECONDS,
    NOTIFY_INTERVAL_MIN,
    NotifyLimiter,
)
from riverpy.client import Client
from riverpy.config import Config
from riverpy.insert_opts import InsertManyParams, InsertOpts
from tests._notifications import due_payload
from tests.insert.conftest import inserter_on
from tests.insert.jobs import BY_ARGS, Data, Welcome, many

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema

FUTURE = datetime(2200, 1, 1, tzinfo=UTC)
PAST = datetime(2000, 1, 1, tzinfo=UTC)


class FixedClock:
    """A clock whose time a test sets."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    def monotonic(self) -> float:
        return self.time


class Heard:
    """The notifications on the insert channel of a schema."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._payloads: list[str] = []
        self._end = asyncio.Event()

    def hear(self, _connection: Any, _pid: int, channel: str, payload: object) -> None:
        assert channel == f"{self._schema.name}.river_insert"
        if payload == "end":
            self._end.set()
        else:
            self._payloads.append(str(payload))

    async def take(self) -> list[str]:
        """Return the payloads of all transactions that have ended since the last call."""
        await self._schema.execute(f"NOTIFY \"{self._schema.name}.river_insert\", 'end'")
        await asyncio.wait_for(self._end.wait(), 10)
        self._end.clear()
        taken, self._payloads = self._payloads, []
        return taken


@asynccontextmanager
async def listening(schema: Schema) -> AsyncGenerator[Heard]:
    heard = Heard(schema)
    async with schema.connected() as connection:
        await connection.add_listener(f"{schema.name}.river_insert", heard.hear)
        yield heard
        await connection.remove_listener(f"{schema.name}.river_insert", heard.hear)


@pytest.fixture
async def heard(schema: Schema) -> AsyncGenerator[Heard]:
    """A listener on the test's schema."""
    async with listening(schema) as heard:
        yield heard


def in_queue(queue: str, **opts: Any) -> InsertOpts:
    return InsertOpts(queue=queue, **opts)


async def test_notifications_equal_rivers(schema: Schema, heard: Heard) -> None:
    """Inserts send the notifications that were recorded from River, step by step."""
    async with inserter_on(schema.url, schema.name) as inserter:
        await inserter.insert(Welcome(1), None, tx=None)
        assert await heard.take() == [due_payload("default")]
        q2 = many(Welcome(1), Welcome(2), Welcome(3), opts=in_queue("q2"))
        await inserter.insert_many(q2, tx=None)
        assert await heard.take() == [due_payload("q2")]
        await inserter.insert_many_fast(q2, tx=None)
        assert await heard.take() == [due_payload("q2")]
        await inserter.insert(Welcome(1), InsertOpts(scheduled_at=FUTURE), tx=None)
        await inserter.insert(Welcome(1), InsertOpts(scheduled_at=PAST), tx=None)
        await inserter.insert(Welcome(1), InsertOpts(pending=True), tx=None)
        await inserter.insert_many_fast(many(Welcome(1), opts=InsertOpts(pending=True)), tx=None)
        assert await heard.take() == []
        unique = in_queue("q3", unique_opts=BY_ARGS.unique_opts)
        for expected in (False, True):
            result = await inserter.insert(Welcome(9), unique, tx=None)
            assert result.unique_skipped_as_duplicate is expected
            assert await heard.take() == [due_payload("q3")]


async def test_one_notification_per_queue(schema: Schema, heard: Heard) -> None:
    """1,000 jobs in two queues send two notifications, for each kind of insert (NR-08)."""
    params = [InsertManyParams(Data(n=n), in_queue(f"q{n % 2}")) for n in range(1000)]
    params.append(InsertManyParams(Data(n=0), in_queue("later", scheduled_at=FUTURE)))
    async with inserter_on(schema.url, schema.name) as inserter:
        for send in (inserter.insert_many, inserter.insert_many_fast):
            await send(params, tx=None)
            assert sorted(await heard.take()) == [due_payload("q0"), due_payload("q1")]


async def test_inserts_in_one_interval_share_a_notification(schema: Schema, heard: Heard) -> None:
    """Without `tx`, a queue is notified once per interval. Other queues are notified too
    (NR-08)."""
    async with Client(schema.url, config=Config(schema=schema.name)) as client:
        clock = client._inserter._notify_limiter._clock = FixedClock()
        for opts in [None, BY_ARGS] * 10:
            await client.insert(Welcome(1), opts)
        await client.insert(Welcome(1), in_queue("other"))
        assert await heard.take() == [due_payload("default", 2), due_payload("other", 2)]
        clock.time += NOTIFY_INTERVAL_MIN * 1.5
        await client.insert(Welcome(1))
        assert await heard.take() == [due_payload("default", 2)]


async def test_inserts_over_a_callers_pool_always_notify(schema: Schema, heard: Heard) -> None:
    """Without `tx`, a client on a pool of the caller and a blocking client notify at each insert.
    Neither has a task that could send a notification later."""
    config = Config(schema=schema.name)
    async with (
        asyncpg.create_pool(schema.url, min_size=0, max_size=2) as pool,
        Client(pool, config=config) as client,
    ):
        for opts in (None, None, BY_ARGS):
            await client.insert(Welcome(1), opts)
        await client.insert_many_fast(many(Welcome(1)))
        assert await heard.take() == [due_payload("default")] * 4

    def insert_in_thread() -> None:
        with riverpy.sync.Client(schema.url, config=config) as blocking:
            for _ in range(3):
                blocking.insert(Welcome(1))

    await asyncio.to_thread(insert_in_thread)
    assert await heard.take() == [due_payload("default")] * 3


async def test_transactions_always_notify(schema: Schema, heard: Heard) -> None:
    """With `tx`, each queue is notified once at the commit, and not after a rollback."""
    async with (
        Client(schema.url, config=Config(schema=schema.name)) as client,
        schema.connected() as tx,
    ):
        for _ in range(3):
            async with tx.transaction():
                await client.insert(Welcome(1), tx=tx)
                await client.insert_many(many(Welcome(1)), tx=tx)
                await client.insert_many_fast(many(Welcome(1)), tx=tx)
                assert await heard.take() == []
            assert await heard.take() == [due_payload("default")]
        rollback = tx.transaction()
        await rollback.start()
        await client.insert(Welcome(1), tx=tx)
        await rollback.rollback()
        assert await heard.take() == []


async def test_a_client_that_does_not_notify(schema: Schema, heard: Heard) -> None:
    """With insert_notify=False a client's inserts do not notify, with and without `tx` (NR-08)."""
    config = Config(schema=schema.name, insert_notify=False)
    async with Client(schema.url, config=config) as client, schema.connected() as connection:
        async with connection.transaction():
            for tx in (None, connection):
                await client.insert(Welcome(1), tx=tx)
                await client.insert_many(many(Welcome(1), Data()), tx=tx)
                await client.insert_many_fast(many(Welcome(1)), tx=tx)
        assert await heard.take() == []


async def test_the_channel_without_a_schema(schema: Schema, heard: Heard) -> None:
    """Without a schema setting, the channel has the name of the first schema of the search path."""
    async with inserter_on(schema.url, None, search_path=schema.name) as inserter:
        await inserter.insert(Welcome(1), None, tx=None)
        assert await heard.take() == [due_payload("default")]


def test_limiter_size_is_limited() -> None:
    """The limiter stays small with many queue names."""
    clock = FixedClock()
    limiter = NotifyLimiter(clock)
    for number in range(10_000):
        clock.time += 1
        assert limiter.select_queues([f"q{number}"]).notified_queues == [f"q{number}"]
        assert limiter.select_queues([f"q{number}"]).skipped_queues == [f"q{number}"]
    assert len(limiter._selected_at_by_queue) <= 1001


@pytest.mark.parametrize(("opts", "is_direct"), [(None, False), (None, True), (BY_ARGS, False)])
async def test_a_late_commit_is_notified(
    schema: Schema,
    heard: Heard,
    monkeypatch: pytest.MonkeyPatch,
    opts: InsertOpts | None,
    is_direct: bool,
) -> None:
    """If a statement without a notification commits too late for the claim that follows the last
    notification, a notification follows: after a moment, or when the client closes. This is true
    with a shared statement and without one."""
    clock = FixedClock()
    monkeypatch.setattr(
        shared_statement, "SINGLE_CALL_STATEMENTS_BEFORE_DIRECT_CALL", 0 if is_direct else 10
    )
    async with Client(schema.url, config=Config(schema=schema.name)) as client:
        client._inserter._notify_limiter._clock = clock
        await client.insert(Data(n=0))
        assert await heard.take() == [due_payload("default", 2)]
        await client.insert(Data(n=0))
        assert await heard.take() == []
        async with schema.connected() as blocker, blocker.transaction():
            await blocker.execute("LOCK TABLE river_job IN SHARE MODE")
            late = asyncio.ensure_future(client.insert(Welcome(1), opts))
            while not await schema.fetchval(
                "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)"
                " WHERE NOT granted AND pg_stat_activity.datname = current_database()"
            ):
                await asyncio.sleep(0.002)
            clock.time += NOTIFICATION_COVERAGE_SECONDS * 1.5
        await late
        payloads: list[str] = []
        while opts is None and not payloads:
            await asyncio.sleep(0.002)
            payloads = await heard.take()
    assert (payloads or await heard.take()) == [due_payload("default", 2)]


async def test_a_failed_notification_does_not_count(schema: Schema, heard: Heard) -> None:
    """After a statement that notifies and fails, the next one notifies. A statement that has not
    ended does not count for shared statements."""
    limiter = NotifyLimiter(FixedClock())
    running = limiter.select_queues(["q"])
    assert limiter.select_queues(["q"]).skipped_queues == ["q"]
    assert limiter.select_queues(["q"], counts_running_statements=False).notified_queues == ["q"]
    limiter.record_statement_end(running, is_stored=True)
    assert limiter.select_queues(["q"], counts_running_statements=False).skipped_queues == ["q"]
    await schema.execute("ALTER TABLE river_job ADD CONSTRAINT refused CHECK (kind <> 'welcome')")
    try:
        async with Client(schema.url, config=Config(schema=schema.name)) as client:
            clock = client._inserter._notify_limiter._clock = FixedClock()
            for opts in (None, BY_ARGS):
                with pytest.raises(asyncpg.CheckViolationError):
                    await client.insert(Welcome(1), opts)
                await client.insert(Data(n=0))
                assert await heard.take() == [due_payload("default", 2)]
                clock.time += 1
    finally:
        await schema.execute("ALTER TABLE river_job DROP CONSTRAINT refused")
