"""All functions through PgBouncer in transaction mode, with few shared connections."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import pytest

import riverpy
from riverpy import ConfigError, EventKind, InsertManyParams
from riverpy._log_events import (
    CONNECTION_LOST,
    CONNECTION_RESTORED,
    NOTIFICATIONS_NOT_RECEIVED,
    REINDEXING_DISABLED,
)
from riverpy._postgres.driver import connect
from riverpy.migrate import Migrator, migrate_all
from tests._database import connected
from tests.kit.pgbouncer import is_installed, pooled, pooler
from tests.kit.stalls import is_stall
from tests.work.rig import PATIENCE, Task, errors_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from riverpy import Client, Job
    from tests.work.rig import Rig

pytestmark = pytest.mark.skipif(not is_installed(), reason="pgbouncer or setpriv is not installed")

SOON = timedelta(milliseconds=50)
COUNT = 500


@pytest.fixture
def pooler_url(database_url: str) -> Generator[str]:
    """Yield the URL of a pooler for this worker's database, with fewer connections than one client
    uses."""
    with pooled(database_url, size=3) as url:
        yield url


@asynccontextmanager
async def unprepared(url: str) -> AsyncGenerator[asyncpg.Connection[Any]]:
    """Yield a connection that works through a pooler."""
    connection = await asyncpg.connect(url, statement_cache_size=0)
    try:
        yield connection
    finally:
        connection.terminate()


async def insert_in_every_way(client: Client, pooler_url: str) -> int:
    """Insert jobs in each way. Returns how many."""
    await client.insert(Task())
    await client.insert_many([InsertManyParams(Task(n)) for n in range(COUNT)])
    await client.insert_many_fast([InsertManyParams(Task(n)) for n in range(COUNT)])
    async with unprepared(pooler_url) as connection, connection.transaction():
        await client.insert(Task(), tx=connection)
        await client.insert_many([InsertManyParams(Task(n)) for n in range(2)], tx=connection)
        await client.insert_many_fast([InsertManyParams(Task())], tx=connection)
    return 2 * COUNT + 5


async def until_said(log: list[dict[str, Any]], event: str) -> None:
    """Wait for an event in the log."""
    with anyio.fail_after(PATIENCE, reason=f"{event!r} was not said"):
        while all(entry["event"] != event for entry in log):
            await anyio.sleep(0.005)


async def backends_of(url: str) -> int:
    """Return the process id of the server that serves a pooler's next transaction."""
    async with unprepared(url) as connection:
        pid: int = await connection.fetchval("SELECT pg_backend_pid()")
        return pid


def told(log: list[dict[str, Any]]) -> list[str]:
    """Return the warnings and the events about the pooler."""
    return [
        str(entry["event"])
        for entry in log
        if entry["log_level"] in {"warning", "error", "critical"}
        or entry["event"] == REINDEXING_DISABLED
        if not is_stall(entry)
    ]


async def test_past_pooler(rig: Rig, pooler_url: str, log: list[dict[str, Any]]) -> None:
    """With a `listen_url` everything works and no statement is refused: jobs inserted in each way
    are worked at once, a cancel arrives, and an elected leader runs maintenance, including the
    reindexer. Two clients share three connections (PB-01, PB-02)."""

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
    """Without a `listen_url` the client logs that it receives no notifications and does not rebuild
    indexes. It polls, so jobs are still worked and cancelled (PB-05)."""
    monkeypatch.setattr("riverpy._postgres.notifier.PROBE_TIMEOUT", 0.2)
    monkeypatch.setattr("riverpy._work.reconciler.RECONCILE_INTERVAL_WHEN_POLLING", 0.1)

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
    assert deaf == NOTIFICATIONS_NOT_RECEIVED
    assert no_reindexing == REINDEXING_DISABLED


async def test_stays_deaf(
    rig: Rig, database_url: str, log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pooler with one connection uses the listening session for the listener's own probes, so
    that notifications seem to arrive. The client still detects the pooler, at each retry, and warns
    once (PB-05)."""
    monkeypatch.setattr("riverpy._postgres.notifier.PROBE_TIMEOUT", 0.5)
    monkeypatch.setattr("riverpy._postgres.notifier.FAILED_PROBE_INTERVAL", 0.02)

    @rig.job
    async def task(job: Job[Any]) -> None: ...

    heard: list[bool] = []
    with pooled(database_url, size=1) as url:
        async with rig.working(url=url, pooler=True, candidate=False) as client:
            listening: Any = client._run._notifier  # type: ignore[union-attr]
            check, is_enough = listening._check_delivery, anyio.Event()

            async def spy(**options: Any) -> bool:
                heard.append(await check(**options))
                if len(heard) == 4:
                    is_enough.set()
                return heard[-1]

            monkeypatch.setattr(listening, "_check_delivery", spy)
            with anyio.fail_after(PATIENCE):
                await is_enough.wait()
    assert not any(heard)
    assert told(log).count(NOTIFICATIONS_NOT_RECEIVED) == 1


async def test_pooler_that_is_restarted(
    rig: Rig, database_url: str, log: list[dict[str, Any]]
) -> None:
    """A pooler that is killed and restarted is an outage like any other: its start and its end are
    logged once. The job that ran in between is stored, and inserts and work continue (PB-01)."""
    go_on, runs = anyio.Event(), 0

    @rig.job
    async def task(job: Job[Any]) -> None:
        nonlocal runs
        runs += 1
        if job.args.n == 1:
            await go_on.wait()

    with pooler(database_url, size=3) as made:
        async with rig.working(url=made.url, pooler=True, listen_url=rig.url) as client:
            await client.insert(Task(1))
            await rig.until_state("running")
            made.kill()
            go_on.set()
            await until_said(log, CONNECTION_LOST)
            made.start()
            assert (await rig.event()).kind is EventKind.JOB_COMPLETED
            await client.insert(Task())
            assert (await rig.event()).kind is EventKind.JOB_COMPLETED
            await until_said(log, CONNECTION_RESTORED)
    said = [
        entry["event"] for entry in log if entry["event"] in {CONNECTION_LOST, CONNECTION_RESTORED}
    ]
    assert said == [CONNECTION_LOST, CONNECTION_RESTORED]
    assert runs == 2


async def test_pooler_that_resets_and_renews(rig: Rig, database_url: str) -> None:
    """Server connections that are reset after each transaction and closed after a second change
    nothing (PB-01)."""

    @rig.job
    async def task(job: Job[Any]) -> None: ...

    settings: dict[str, Any] = {
        "server_lifetime": 1,
        "server_idle_timeout": 1,
        "server_reset_query": "DISCARD ALL",
        "server_reset_query_always": 1,
    }
    with pooler(database_url, size=3, **settings) as made:
        backends = (
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND pid = ANY($1)"
        )
        first = await backends_of(made.url)
        async with rig.working(url=made.url, pooler=True, listen_url=rig.url) as client:
            while await rig.schema.fetchval(backends, [first]):
                await client.insert(Task())
                await rig.event()
            await client.insert(Task())
            await rig.event()


async def test_pooler_without_a_free_connection(
    rig: Rig, database_url: str, log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another session holds the pooler's only connection, nothing waits for ever: claims time
    out and are logged as an outage. When the connection is free again, everything continues
    (PB-09)."""
    monkeypatch.setattr("riverpy._work.producer.CLAIM_TIMEOUT", 1.0)

    @rig.job
    async def task(job: Job[Any]) -> None: ...

    settings: dict[str, Any] = {"pooler": True, "listen_url": rig.url, "candidate": False}
    with pooled(database_url, size=1) as url:
        async with (
            unprepared(url) as keeper,
            rig.working(url=url, fetch_poll_interval=SOON, **settings) as client,
        ):
            transaction = keeper.transaction()
            await transaction.start()
            await rig.insert_rows(1)
            await until_said(log, CONNECTION_LOST)
            await transaction.commit()
            assert (await rig.event()).kind is EventKind.JOB_COMPLETED
            await client.insert(Task())
            assert (await rig.event()).kind is EventKind.JOB_COMPLETED
            await until_said(log, CONNECTION_RESTORED)


async def test_pooler_without_its_setting(rig: Rig, database_url: str) -> None:
    """A client or a caller's transaction without the setting for the pooler gets an error that
    names the setting. A worker does not start (PB-01, PB-02)."""

    @rig.job
    async def task(job: Job[Any]) -> None: ...

    async def insert_in(connection: asyncpg.Connection[Any]) -> None:
        async with connection.transaction():
            await client.insert(Task(), tx=connection)

    with pooled(database_url, size=2) as url:
        setting = r"unsupported startup parameter.*Config\(pooler=True\)"
        with pytest.raises(ConfigError, match=setting):
            await rig.client(url=url).run()
        parameter = "unsupported startup parameter: search_path.*leave this parameter out"
        with pytest.raises(ConfigError, match=parameter):
            await connect(f"{url}&search_path=public", through_pooler=True)
        async with (
            unprepared(url) as keeper,
            connected(url) as connection,
            rig.client(url=url, queues={}, pool_size=1) as client,
        ):
            await client.insert(Task())
            await insert_in(connection)
            async with keeper.transaction():  # the others get another session
                with pytest.raises(ConfigError, match=r"Config\(pooler=True\)"):
                    await client.insert(Task())
                with pytest.raises(ConfigError, match="statement_cache_size=0"):
                    await insert_in(connection)


async def test_json(rig: Rig, pooler_url: str) -> None:
    """Without prepared statements JSON is sent and read unchanged: args, metadata, output and
    errors (PB-03)."""
    args = {"n": 1, "text": "ä \u2028 \\ \" ' $1", "deep": [{"x": [1.5, None, True]}]}
    seen: list[Any] = []

    @rig.job(kind="json", args=dict)
    async def work(job: Job[Any]) -> None:
        seen.append((job.args, job.metadata))
        job.record_output(job.args)
        if len(seen) == 3:
            raise ValueError(args["text"])

    raw = riverpy.RawArgs("json", json.dumps(args))
    opts = riverpy.InsertOpts(metadata=args)
    settings: dict[str, Any] = {"url": pooler_url, "pooler": True, "listen_url": rig.url}
    async with rig.working(slots=1, **settings) as client:
        await client.insert(raw, opts)
        await rig.event()
        await client.insert_many([InsertManyParams(raw, opts)])
        await rig.event()
        await client.insert_many_fast([InsertManyParams(raw, opts)])
        await rig.event()
    assert seen == [(args, args)] * 3
    rows = await rig.schema.jobs()
    assert [json.loads(row["args"]) for row in rows] == [args] * 3
    assert [json.loads(row["metadata"]) for row in rows] == [args | {"output": args}] * 3
    assert errors_of(rows[2])[0]["error"] == f"ValueError: {args['text']}"


async def test_migrate(fresh_database_url: str) -> None:
    """Migrations work through a pooler, up and down (PB-02)."""
    with pooled(fresh_database_url, size=1) as url:
        await migrate_all(url)
        assert await migrate_all(url) is not None
        for line in ("riverpy", "main"):
            await Migrator(url, line=line).down(target=0)
