"""What clients report about leases with their heartbeats: standbys and lags."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import Client, Config, ConfigError, LeaseManager, MemoryLeases
from riverpy._clients import heartbeat
from riverpy._leases.engine import LeaseEngine
from riverpy._leases.timing import LeaseTiming
from riverpy._postgres import clients, lease_reports
from riverpy._postgres.lease_reports import LeaseReport, ReportedLag
from riverpy._tools.lease_map import LeaseReportMap, read_lease_reports
from riverpy.migrate import Migrator
from tests._time import VirtualTimer, settle
from tests.clients.test_heartbeat import REGISTRATION
from tests.leases.singletons.rig import Task, make_client, running, soon, until

if TYPE_CHECKING:
    from tests._database import Schema

LONG = timedelta(minutes=10)
"""A holder that resigned does not try again during a test."""


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Early heartbeats come at once."""
    monkeypatch.setattr(heartbeat, "EARLY_HEARTBEAT_DELAY", 0.0)


async def read_map(schema: Schema) -> LeaseReportMap:
    """The reports of the live clients."""
    async with schema.connected() as connection:
        return await read_lease_reports(connection, schema.name)


async def next_heartbeat(client: Client) -> None:
    """Write a heartbeat now."""
    run: Any = client._run
    await run._heartbeat._try_to_write_heartbeat()


async def until_standby(schema: Schema, name: str) -> LeaseReportMap:
    """Wait until only client `two` stands by for a lease of client `one`."""
    async with asyncio.timeout(30):
        while True:
            found = await read_map(schema)
            if found.standby_client_ids(name, holder="one") == ["two"]:
                return found
            await asyncio.sleep(0.02)


def make_candidate(schema: Schema, client_id: str, **settings: Any) -> Client:
    """A client that takes part in leader election. Only its early heartbeat is soon."""
    config = Config(schema=schema.name, id=client_id, dead_after=timedelta(hours=1), **settings)
    client = Client(schema.url, config=config)
    client.singleton(client_id, Task())
    return client


async def test_standbys_of_a_singleton(schema: Schema) -> None:
    """A client reports the singletons and leases that it waits for soon after its start, and no
    longer when it holds them, when it may hold no more leases, or when it is stopping. The holder
    never counts as a standby."""
    one = make_client(schema, "one", ttl=3 * LONG, interval=LONG, max_leases=1)
    two = make_client(schema, "two")
    tasks = [Task() for _ in range(3)]
    one.singleton("a", tasks[0])
    two.singleton("a", tasks[1])
    async with running(one):
        held = await soon(tasks[0].began)
        await next_heartbeat(one)
        async with running(two):
            found = await until_standby(schema, "s:a")
            assert found.standby_client_ids("s:a", holder="two") == []
            assert not found.client_ids_without_report

            async def wait_for_lease() -> None:
                async with one.lease("b"):
                    pass

            waiting = asyncio.create_task(wait_for_lease())
            run: Any = one._run
            await until(lambda: "b" in run._client.leases._engine._wake_events)
            await next_heartbeat(one)
            assert "s:b" not in (await read_map(schema)).clients_by_lease  # `max_leases` is 1
            waiting.cancel()
            assert two.stats().singletons["a"].standby
            assert not one.stats().singletons["a"].standby
            run._client.leases._engine.resign_on_request("a", epoch=held.epoch)
            await soon(tasks[1].began)
            await until(lambda: one.stats().singletons["a"].standby)
            await next_heartbeat(two)
            await next_heartbeat(one)
            assert (await read_map(schema)).standby_client_ids("s:a", holder="two") == ["one"]
            assert not two.stats().singletons["a"].standby
            await schema.execute("UPDATE riverpy_client SET state = 'stopping'")
            assert not (await read_map(schema)).clients_by_lease


async def test_standbys_of_leaders(schema: Schema) -> None:
    """Candidates of `default`, of a domain and of the schema's lease report that they stand by."""
    one, two = make_candidate(schema, "one"), make_candidate(schema, "two")
    async with running(one):
        await until(lambda: one.is_leader)
        async with running(two):
            await until_standby(schema, "default")
    one = make_candidate(schema, "one", leader_domain="mail", domain_queues=("mail",))
    two = make_candidate(schema, "two", leader_domain="mail", domain_queues=("mail",))
    async with running(one):
        await until(lambda: one.is_leader)
        async with running(two):
            found = await until_standby(schema, "d:mail")
    assert found.standby_client_ids("@schema", holder="one") == ["two"]


async def test_standby_of_an_engine() -> None:
    """An engine stands by for a lease only if it would acquire the lease soon: not while work of an
    earlier term still runs, nor for a pause of an interval or more."""
    timer, leases = VirtualTimer(), MemoryLeases()
    other = await leases.acquire("a", "other", timedelta(hours=1), timeout=1)
    assert other is not None
    engine = LeaseEngine(leases, holder="me", timing=LeaseTiming(15.0, 5.0), timer=timer)  # type: ignore[arg-type]
    waiting = asyncio.create_task(engine.acquire("a"))
    await settle()
    assert engine.standby_lease_names == ["a"]
    now = timer.seconds_since_boot()
    engine._acquire_paused_until["a"] = now + 5.0
    assert engine.standby_lease_names == []
    engine._acquire_paused_until["a"] = now + 4.9
    assert engine.is_standby_for("a")
    unfinished: Any = [type("Ended", (), {"name": "a", "is_used": True})()]
    engine._leases_with_running_work = unfinished
    assert not engine.is_standby_for("a")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert engine.standby_lease_names == []


async def test_one_statement(schema: Schema) -> None:
    """A heartbeat reports in the same statement, which changes its row in place, or inserts the row
    again after it was deleted. A client without a report, and one with a report of an unknown form,
    are not known."""
    lag = ReportedLag(7, 3, 1.5, 0.5)
    report = LeaseReport.make(["s:b", "s:a"], {"s:c": lag})
    async with schema.connected() as connection, connection.transaction():
        at = await clients.client_register(connection, schema.name, REGISTRATION)
        assert at is not None
        for _ in range(10):
            assert await clients.client_write_heartbeat(
                connection, schema.name, REGISTRATION, registered_at=at, lease_report=report
            )
        updates = await connection.fetchval(
            "SELECT pg_stat_get_xact_tuples_hot_updated('riverpy_client'::regclass)"
        )
    assert updates == 10
    await schema.execute("DELETE FROM riverpy_client")
    async with schema.connected() as connection:
        assert await clients.client_write_heartbeat(
            connection, schema.name, REGISTRATION, registered_at=at, lease_report=report
        )
    stored = await schema.fetchval("SELECT leases FROM riverpy_client")
    assert json.loads(stored)["standby"] == ["s:a", "s:b"]
    found = await read_map(schema)
    assert found.standby_client_ids("s:b", holder="x") == ["me"]
    known = found.find_reported_lag("s:c", holder="me", epoch=7)
    assert known is not None
    assert (known.count, known.age) == (3, 1.5)
    assert known.reported_ago >= 0.5
    assert (
        found.find_reported_lag("s:c", holder="me", epoch=8) is None
    )  # a later term of the same client
    assert found.find_reported_lag("s:c", holder="x", epoch=7) is None  # a later holder
    for text in ("NULL", "'[]'", """'{"standby": 1}'""", """'{"standby": [], "left_out": 1}'"""):
        await schema.execute(f"UPDATE riverpy_client SET leases = {text}")
        assert (await read_map(schema)).client_ids_without_report == {"me"}


def test_limit_of_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report has a limited number of names. It says how many standbys were left out."""
    monkeypatch.setattr(lease_reports, "REPORTED_LEASES_MAX", 2)
    lag = ReportedLag(1, 1, None, 0.0)
    report = LeaseReport.make(["c", "a", "b", "a"], {"z": lag, "x": lag, "y": lag})
    assert (report.standby, list(report.lags), report.left_out) == (["a", "b"], ["x", "y"], 1)


async def test_removed_column(schema: Schema) -> None:
    """If `migrate down` removes the column, a running client writes heartbeats without it. A client
    that starts without the column works, and is not known."""
    client = make_client(schema, "one")
    task = Task()
    client.singleton("a", task)
    migrator = Migrator(schema.url, schema=schema.name, line="riverpy")
    async with running(client):
        await soon(task.began)
        await migrator.down(target=7)
        run: Any = client._run
        before = await schema.fetchval("SELECT heartbeat_at FROM riverpy_client")
        await next_heartbeat(client)
        assert not run._heartbeat.has_lost_client_id
        assert await schema.fetchval("SELECT heartbeat_at FROM riverpy_client") > before
    async with running(client):
        await next_heartbeat(client)
        assert (await read_map(schema)).client_ids_without_report == {"one"}
    await migrator.up()


async def test_lag(schema: Schema) -> None:
    """The lag that a holder reports is in the stats at once, and in the database with the next
    heartbeat. After the end of the lease it is not shown."""
    client = make_client(schema, "one", ttl=3 * LONG, interval=LONG)
    other = make_client(schema, "two")
    task, next_task = Task(), Task()
    client.singleton("a", task)
    other.singleton("a", next_task)
    async with running(client):
        lease = await soon(task.began)
        assert lease.lag is None
        assert client.stats().singletons["a"].lag is None
        lease.report_lag(count=5)
        await asyncio.to_thread(lease.report_lag, count=40, age=timedelta(minutes=2))
        shown = client.stats()
        lag = shown.singletons["a"].lag
        assert lag is not None
        assert (lag.count, lag.age) == (40, 120.0)
        assert shown.leases.lags.keys() == {"a"}
        assert 0 < (shown.singletons["a"].valid_for or 0) <= 3 * LONG.total_seconds()
        await next_heartbeat(client)
        found = await read_map(schema)
        stored = found.find_reported_lag("s:a", holder="one", epoch=lease.epoch)
        assert stored is not None
        assert (stored.count, stored.age) == (40, 120.0)
        async with running(other):
            run: Any = client._run
            task.is_deaf = True  # the function still runs after the end of the lease
            run._client.leases._engine.resign_on_request("a", epoch=lease.epoch)
            ended = client.stats()
            await next_heartbeat(client)
            task.may_end.set()
            assert ended.singletons["a"].running
            assert ended.singletons["a"].lag is None
            assert ended.leases.lags == {}
            await soon(next_task.began)
            client_report = (await read_map(schema)).clients_by_id["one"].report
            assert client_report is not None
            assert client_report.lags == {}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"count": -1},
        {"count": True},
        {"count": 1.0},
        {"count": 2**63},
        {"count": "1"},
        {"age": -0.1},
        {"age": timedelta(seconds=-1)},
        {"age": False},
        {"age": float("nan")},
        {"age": float("inf")},
        {"age": "1"},
    ],
)
async def test_wrong_lag(values: dict[str, Any]) -> None:
    """A lag that is no number of items or no age is refused, and the report before stays."""
    async with LeaseManager(MemoryLeases()) as manager, manager.hold("a") as lease:
        lease.report_lag(count=0, age=0)
        with pytest.raises(ConfigError, match=r"count|age"):
            lease.report_lag(**values)
        assert lease.lag is not None
        assert (lease.lag.count, lease.lag.age) == (0, 0.0)
