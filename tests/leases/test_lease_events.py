"""Events of leases, singletons and leadership: each term has its events once and in order."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy import Client, Config, EventKind, LeaseEventKind, LeaseLostError, LeaseUse, StopCause
from riverpy._leases import singletons as singleton_runner
from riverpy._postgres.leases import lease_request_resign
from tests.kit.proxy import proxied
from tests.leases.singletons.rig import INTERVAL, LONG, TTL, Task, make_client, running, soon

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy import LeaseChange, Subscription
    from tests._database import Schema

pytestmark = pytest.mark.usefixtures("log")

ACQUIRED, FAILED = LeaseEventKind.ACQUIRED, LeaseEventKind.FAILED
LOST, RELEASED = LeaseEventKind.LOST, LeaseEventKind.RELEASED


async def take(events: Subscription, *kinds: LeaseEventKind, name: str = "s") -> list[LeaseChange]:
    """Return the next events of a lease. Fails if they are not of these kinds in this order."""
    changes: list[LeaseChange] = []
    for kind in kinds:
        with anyio.fail_after(30):
            event = await anext(events)
        while event.lease is not None and event.lease.name != name:
            with anyio.fail_after(30):
                event = await anext(events)
        assert event.lease is not None
        assert (event.kind, event.job, event.queue) == (kind, None, None)
        changes.append(event.lease)
    return changes


async def rest(events: Subscription) -> list[tuple[str, Any]]:
    """Return the names and kinds of the events until the end of the run."""
    with anyio.fail_after(30):
        return [(event.lease.name, event.kind) async for event in events if event.lease]


async def test_singleton_events(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that raises gives FAILED with its error before RELEASED. A takeover gives LOST at
    once, without RELEASED. A request and a stop give RELEASED, with their cause and reason. The
    events of a term have its epoch, and no event comes twice."""
    monkeypatch.setattr(singleton_runner, "FUNCTION_RETRY_DELAY_MIN", timedelta(milliseconds=50))
    task, client = Task(), make_client(schema, "one")
    task.error = LookupError("no such stream")
    client.singleton("s", task)
    async with client.subscribe(*LeaseEventKind) as events, running(client):
        task.may_end.set()
        begun, failed, released = await take(events, ACQUIRED, FAILED, RELEASED)
        assert (begun.use, begun.cause, begun.reason, begun.error) == (
            LeaseUse.SINGLETON,
            None,
            None,
            None,
        )
        assert failed.error is task.error
        assert (released.cause, released.reason) == (None, "the lease was released")
        assert begun.epoch == failed.epoch == released.epoch == task.leases[0].epoch
        task.error, task.may_end = None, anyio.Event()
        (second,) = await take(events, ACQUIRED)
        assert second.epoch > begun.epoch
        task.is_deaf = True
        await schema.execute(
            "update riverpy_lease set epoch = epoch + 1, holder = 'rival', ttl = '300 ms',"
            " expires_at = now() + interval '300 ms' where name = 's:s'"
        )
        (lost,) = await take(events, LOST)
        assert (lost.epoch, lost.cause) == (second.epoch, StopCause.LEASE_LOST)
        assert lost.reason == "another process may hold the lease"
        assert task.ended.qsize() == 1, "LOST comes while the code still runs"
        task.is_deaf = False
        task.may_end.set()
        await soon(task.ended)
        await soon(task.ended)
        task.may_end = anyio.Event()
        (third,) = await take(events, ACQUIRED)
        async with schema.connected() as connection:
            await lease_request_resign(connection, schema.name, name="s:s")
        (requested,) = await take(events, RELEASED)
        assert (requested.epoch, requested.reason) == (third.epoch, "another process requested it")
        (fourth,) = await take(events, ACQUIRED)
        client.stop()
        (stopped,) = await take(events, RELEASED)
        assert (stopped.epoch, stopped.cause) == (fourth.epoch, StopCause.CLIENT_STOP)
        assert await rest(events) == []


async def test_lost_connection(schema: Schema) -> None:
    """A client whose connections are cut publishes LOST before another process can acquire the
    lease."""
    async with proxied(schema.url) as proxy:
        client = make_client(schema, "one", ttl=TTL / 2)
        client.configure(database=proxy.url)
        client.singleton("s", Task())
        async with client.subscribe(*LeaseEventKind) as events, running(client):
            await take(events, ACQUIRED)
            proxy.refusing = True
            proxy.cut()
            (lost,) = await take(events, LOST)
            assert lost.reason == "the lease could not be renewed in time"
            assert await schema.fetchval("select expires_at > clock_timestamp() from riverpy_lease")
            proxy.refusing = False
            client.stop()


async def test_unreleased_lease(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that does not reach the database gives LOST, because the lease is not free."""
    client = make_client(schema, "one")
    async with client, client.subscribe(*LeaseEventKind) as events:
        async with client.lease("s"):
            engine = await client._lease_engine.open()

            async def refuse(*_args: object, **_options: object) -> bool:
                raise ConnectionResetError

            monkeypatch.setattr(engine._store, "release", refuse)
        await take(events, ACQUIRED, LOST)


async def test_block_events(schema: Schema) -> None:
    """A block of `client.lease` has the events of a lease. An error of the block gives FAILED, and
    the end of its lease does not. The subscription of a client that does not run ends when the
    client is closed, after the events of the blocks that this ends."""
    client = make_client(schema, "one")
    async with client.subscribe(*LeaseEventKind) as events:
        async with client:
            async with client.lease("s"):
                pass
            begun, ended = await take(events, ACQUIRED, RELEASED)
            assert (begun.use, ended.epoch) == (LeaseUse.LEASE, begun.epoch)
            with pytest.raises(LookupError):
                async with client.lease("s"):
                    raise LookupError("in the block")
            _, failed, _ = await take(events, ACQUIRED, FAILED, RELEASED)
            assert str(failed.error) == "in the block"

            async def hold() -> None:
                async with client.lease("s"):
                    await anyio.sleep_forever()

            task = asyncio.create_task(hold())
            await take(events, ACQUIRED)
        with pytest.raises(LeaseLostError):
            await task
        assert await rest(events) == [("s", RELEASED)]


async def test_no_subscriber_of_other_kinds(schema: Schema) -> None:
    """A subscription to all kinds of jobs and queues receives no event of leases. A full
    subscription drops the newest events and counts them."""
    client = make_client(schema, "one")
    async with (
        client.subscribe(*EventKind) as jobs,
        client.subscribe(*LeaseEventKind, size=3) as leases,
    ):
        async with client:
            for _ in range(2):
                async with client.lease("s"):
                    pass
        assert await rest(leases) == [("s", ACQUIRED), ("s", RELEASED), ("s", ACQUIRED)]
        assert leases.dropped == 1
        assert await rest(jobs) == []
        assert client._subscription_manager.dropped_item_count == 1


@asynccontextmanager
async def leading(schema: Schema, domain: str | None) -> AsyncGenerator[tuple[Client, Any, Any]]:
    """Run a client that becomes leader, with its events of leases and of leadership."""
    config = Config(
        schema=schema.name, id="one", leader_domain=domain, leader_ttl=LONG, elect_interval=INTERVAL
    )
    client = Client(schema.url, config=config)
    client.singleton("s", Task(), candidate=False)
    async with (
        client.subscribe(*LeaseEventKind) as events,
        client.leadership() as changes,
        running(client),
    ):
        assert not (await anext(changes)).is_leader
        yield client, events, changes


@pytest.mark.parametrize("domain", [None, "mail"])
async def test_leader_events(schema: Schema, domain: str | None) -> None:
    """A leader has the events of a lease with the name of its domain, and the holder of the schema
    lease has them too. `client.leadership` reports the same kinds."""
    async with leading(schema, domain) as (client, events, changes):
        name = domain or "default"
        if domain:
            begun = [await anext(events), await anext(events)]
            assert {one.lease.name for one in begun} == {name, "@schema"}
        else:
            (change,) = await take(events, ACQUIRED, name=name)
            assert change.use is LeaseUse.LEADER
        became = await anext(changes)
        assert (became.is_leader, became.event, became.reason) == (True, ACQUIRED, None)
        client.stop()
        ended = await anext(changes)
        assert (ended.is_leader, ended.event, ended.error) == (False, RELEASED, None)
        assert ended.reason == "this client is stopping"
        assert sorted(await rest(events)) == sorted(
            (one, RELEASED) for one in {name, "@schema" if domain else name}
        )


@pytest.mark.parametrize("how", ["failed", "lost"])
async def test_end_of_leadership(schema: Schema, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Maintenance that cannot run gives FAILED with its error before RELEASED. A leader whose row
    has expired gives LOST. `client.leadership` reports FAILED or LOST."""
    if how == "failed":

        def fail(*_args: object) -> None:
            raise LookupError("no services")

        monkeypatch.setattr("riverpy._work.elections.make_domain_services", fail)
        monkeypatch.setattr("riverpy._leading.term_runner.CONSECUTIVE_FAILURES_MAX", 1)
    async with leading(schema, None) as (client, events, changes):
        assert (await anext(changes)).event is ACQUIRED
        if how == "lost":
            await take(events, ACQUIRED, name="default")
            await schema.execute("update river_leader set expires_at = now() - interval '1 s'")
            await take(events, LOST, name="default")
        else:
            _, failed, released = await take(events, ACQUIRED, FAILED, RELEASED, name="default")
            assert str(failed.error) == "no services"
            assert released.reason == "its maintenance failed"
        ended = await anext(changes)
        assert (ended.is_leader, ended.event) == (False, FAILED if how == "failed" else LOST)
        assert (ended.error is not None) == (how == "failed")
        client.stop()
