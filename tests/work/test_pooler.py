"""Everything through PgBouncer in transaction mode, with few connections that all share."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import pytest

import riverpy
from riverpy import EventKind, InsertManyParams
from riverpy.migrate import Migrator, migrate_all
from tests.kit.pgbouncer import is_installed, pooled
from tests.work.rig import PATIENCE, Task

if TYPE_CHECKING:
    from collections.abc import Generator

    from riverpy import Client, Job
    from tests.work.rig import Rig

pytestmark = pytest.mark.skipif(not is_installed(), reason="pgbouncer or setpriv is not installed")

SOON = timedelta(milliseconds=50)
COUNT = 500


@pytest.fixture
def pooler_url(database_url: str) -> Generator[str]:
    """A pooler before this worker's database, with fewer connections than one client has."""
    with pooled(database_url, size=3) as url:
        yield url


async def insert_in_every_way(client: Client, pooler_url: str) -> int:
    """Returns how many jobs that makes."""
    await client.insert(Task())
    await client.insert_many([InsertManyParams(Task(n)) for n in range(COUNT)])
    await client.insert_many_fast([InsertManyParams(Task(n)) for n in range(COUNT)])
    connection = await asyncpg.connect(pooler_url, statement_cache_size=0)
    try:
        async with connection.transaction():
            await client.insert(Task(), tx=connection)
            await client.insert_many([InsertManyParams(Task(n)) for n in range(2)], tx=connection)
            await client.insert_many_fast([InsertManyParams(Task())], tx=connection)
    finally:
        connection.terminate()
    return 2 * COUNT + 5


def told(log: list[dict[str, Any]]) -> list[str]:
    """What an operator is warned of, and what is said about the pooler."""
    return [
        str(entry["event"])
        for entry in log
        if entry["log_level"] in {"warning", "error", "critical"} or "pooler" in entry["event"]
    ]


async def test_past_pooler(rig: Rig, pooler_url: str, log: list[dict[str, Any]]) -> None:
    """PB-01, PB-02: with a `listen_url` nothing is missing and no statement is refused: jobs that
    are inserted in every way are worked at once, a cancel arrives, a leader is elected and keeps
    the house, its reindexer included. Two clients share three connections."""

    @rig.job
    async def task(job: Job[Any]) -> None: ...

    @rig.job(kind="forever", args=dict)
    async def forever(job: Job[Any]) -> None:
        await anyio.sleep_forever()

    settings: dict[str, Any] = {"url": pooler_url, "pooler": True, "listen_url": rig.url}
    async with rig.working(**settings) as client, client.leadership() as changes:
        async with rig.client(queues={}, **settings) as other:
            count = await insert_in_every_way(other, pooler_url)
            events = await rig.take(count)
            assert {event.kind for event in events} == {EventKind.JOB_COMPLETED}
            stuck = await other.insert(riverpy.RawArgs("forever", "{}"))
            await rig.until_state("running")
            await other.job_cancel(stuck.job.id)
            assert (await rig.event()).kind is EventKind.JOB_CANCELLED
        with anyio.fail_after(PATIENCE):
            async for change in changes:
                if change.is_leader:
                    break
        await rig.until("SELECT leader_id FROM river_leader", client.id)
    assert rig.report is not None
    assert not rig.report.abandoned
    assert await rig.states() == {"completed": count, "cancelled": 1}
    assert told(log) == []


async def test_through_pooler_alone(
    rig: Rig, pooler_url: str, log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PB-05: without a `listen_url` the client says that it hears nothing and rebuilds no index,
    and polls: jobs are worked and cancelled all the same."""
    monkeypatch.setattr("riverpy._cluster.notifier.PROBE_TIMEOUT", 0.2)
    monkeypatch.setattr("riverpy._work.reconciler.INTERVAL_DEAF", 0.1)

    @rig.job
    async def task(job: Job[Any]) -> None:
        if job.args.n == -1:
            await anyio.sleep_forever()

    settings: dict[str, Any] = {"url": pooler_url, "pooler": True, "fetch_poll_interval": SOON}
    async with rig.working(**settings) as client:
        count = await insert_in_every_way(client, pooler_url)
        await rig.take(count)
        stuck = await client.insert(Task(-1))
        await rig.until_state("running")
        await client.job_cancel(stuck.job.id)
        assert (await rig.event()).kind is EventKind.JOB_CANCELLED
        await rig.until("SELECT leader_id FROM river_leader", client.id)
    deaf, no_reindexing = sorted(set(told(log)))
    assert deaf.startswith("LISTEN hears nothing")
    assert no_reindexing.startswith("no indexes are rebuilt")


async def test_migrate(fresh_database_url: str) -> None:
    """PB-02: the migrator goes through a pooler, up and down."""
    with pooled(fresh_database_url, size=1) as url:
        await migrate_all(url)
        assert await migrate_all(url) is not None
        for line in ("riverpy", "main"):
            await Migrator(url, line=line).down(target=0)
