"""The connection on which the waits and subscriptions of a client listen."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import pytest

from riverpy import Client, Config
from riverpy._waiting import listener as listener_module
from tests.kit.proxy import proxied
from tests.work.rig import PATIENCE, Rig

if TYPE_CHECKING:
    from tests._database import Schema

TOPIC = "riverpy_test"
LISTENERS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name = 'riverpy listener'"
)


class Subscriber:
    """Counts resyncs, and keeps payloads."""

    def __init__(self) -> None:
        self.payloads: asyncio.Queue[str] = asyncio.Queue()
        self.resyncs: asyncio.Queue[None] = asyncio.Queue()

    def listening(self, client: Client) -> Any:
        return client._listener.listening(
            TOPIC, self.payloads.put_nowait, lambda: self.resyncs.put_nowait(None)
        )

    async def resynced(self) -> None:
        with anyio.fail_after(PATIENCE, reason="no resync"):
            await self.resyncs.get()

    async def expect(self, schema: Schema, payload: str) -> None:
        """Send a payload, and wait for it."""
        await schema.execute("SELECT pg_notify($1, $2)", f"{schema.name}.{TOPIC}", payload)
        with anyio.fail_after(PATIENCE, reason=f"no notification {payload!r}"):
            assert await self.payloads.get() == payload


async def test_own_connection(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first subscriber opens a connection, and all share it. A lost one is made again, and then
    each subscriber is called. After the last subscriber it is closed."""
    monkeypatch.setattr(listener_module, "UNUSED_LISTENER_TIMEOUT", 0.05)
    schema, first, second = rig.schema, Subscriber(), Subscriber()
    async with proxied(schema.url) as proxy:
        async with Client(proxy.url, config=Config(schema=schema.name)) as client:
            assert not client._listener.is_listening_on(TOPIC)
            with first.listening(client):
                await first.resynced()
                assert client._listener.is_listening_on(TOPIC)
                with second.listening(client):
                    await second.resynced()
                    await first.expect(schema, "a")
                    assert await second.payloads.get() == "a"
                    assert await schema.fetchval(LISTENERS) == 1
                    assert proxy.cut("riverpy listener") == 1
                    for one in (first, second):
                        await one.resynced()
                await first.expect(schema, "b")
                assert second.payloads.empty()
            await rig.until(LISTENERS, 0)
            with second.listening(client):
                await second.resynced()
                await second.expect(schema, "c")
        await rig.until(LISTENERS, 0)
    assert first.resyncs.empty()
    assert second.resyncs.empty()


async def test_connection_of_the_run(rig: Rig) -> None:
    """While the client works, it has one listening connection. Subscribers move to it at the start
    of the work, and to an own one at its end."""
    rig.register_task()
    subscriber, schema = Subscriber(), rig.schema
    client = rig.client()
    async with client:
        with subscriber.listening(client):
            await subscriber.resynced()
            async with client.working():
                await subscriber.resynced()
                await subscriber.expect(schema, "a")
                await rig.until(LISTENERS, 1)
            await subscriber.resynced()
            await subscriber.expect(schema, "b")
            await rig.until(LISTENERS, 1)
            async with client.working():
                await subscriber.resynced()
            await subscriber.resynced()
        async with client.working():
            with subscriber.listening(client):
                await subscriber.resynced()
                await subscriber.expect(schema, "c")
    await rig.until(LISTENERS, 0)


@pytest.mark.parametrize("size", [1, 3])
async def test_pool_of_the_caller(rig: Rig, size: int) -> None:
    """A client with a pool listens on a connection of the pool, if another one is left for the
    statements. The pool is usable afterwards."""
    subscriber, schema = Subscriber(), rig.schema
    async with asyncpg.create_pool(schema.url, min_size=0, max_size=size) as pool:
        async with Client(pool, config=Config(schema=schema.name)) as client:
            with subscriber.listening(client):
                if size > 1:
                    await subscriber.resynced()
                    await subscriber.expect(schema, "a")
                assert client._listener.is_listening_on(TOPIC) is (size > 1)
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
            for _ in range(size * 2):
                tasks.create_task(pool.fetchval("SELECT 1"))


@pytest.mark.parametrize("settings", [{"poll_only": True}, {"pooler": True}])
async def test_no_connection(rig: Rig, settings: dict[str, Any]) -> None:
    """A client that must not listen, and one behind a pooler without a `listen_url`, opens no
    connection, so its waits poll."""
    async with Client(rig.url, config=Config(schema=rig.schema.name, **settings)) as client:
        with Subscriber().listening(client):
            assert client._listener._subscribed_notifier is None
            assert not client._listener.is_listening_on(TOPIC)


async def test_first_connection_fails(rig: Rig, log: list[Any]) -> None:
    """If the first connection cannot be made, the listener tries again, and the outage is logged
    once."""
    async with proxied(rig.url) as proxy:
        settings = Config(schema=rig.schema.name, listen_url=proxy.url)
        async with Client(rig.url, config=settings) as client:
            proxy.refusing = True
            subscriber = Subscriber()
            with subscriber.listening(client):
                await rig.until("SELECT true")
                with anyio.fail_after(PATIENCE):
                    while not log:
                        await asyncio.sleep(0.005)
                proxy.refusing = False
                await subscriber.resynced()
    assert [entry["event"] for entry in log] == ["connection lost", "connection restored"]
