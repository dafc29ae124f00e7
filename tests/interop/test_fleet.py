"""Three workers, one in Go and two in Python: they share jobs, replace each other, and survive
faults."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from tests._database import Schema
from tests.interop.conform import EFFECTS, conform
from tests.interop.mixed_fleet import holders, mixed_fleet
from tests.interop.proxied_worker import proxied_worker
from tests.interop.river_go import RiverGo
from tests.interop.working import LANGUAGES, OTHER, Fleet, Periodic
from tests.work.rig import Rig, errors_of, metadata_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from tests.interop.callers import Caller
    from tests.interop.working import ProcessWorker, Worker
    from tests.kit.proxy import Proxy

    Callers = dict[str, Caller]

ENGINES = ("go", "python", "python")
CONNECTIONS = 20
"""The maximum number of connections of a client. In Go that is its pool and its listener."""
NOTIFICATION_TIMEOUT = 5.0
"""Seconds within which a notification must have its effect."""
LISTENERS = """
SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'LISTEN %'
"""


@pytest.fixture
async def effects(schema: Schema) -> AsyncGenerator[None]:
    """Create the table of side effects."""
    await schema.execute(EFFECTS)
    yield
    await schema.execute("DROP TABLE effects")


@asynccontextmanager
async def three(fleet: Fleet, **settings: Any) -> AsyncGenerator[list[ProcessWorker]]:
    """Start three worker processes. Each has a queue of its own, `own-N`, besides `default`."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                fleet.process(engine, queues={"default": 8, f"own-{n}": 2}, **settings)
            )
            for n, engine in enumerate(ENGINES)
        ]


async def insert_all(callers: Callers, number: int, behavior: str, **opts: Any) -> None:
    """Insert this many jobs by each of three inserters."""
    for engine in ENGINES:
        await callers[engine].insert_many(*[conform(behavior, **opts)] * number)


async def all_once(schema: Schema, number: int) -> set[str]:
    """Check that this many jobs were completed, with one attempt and one side effect each, and
    return their workers."""
    rows = await schema.jobs()
    assert len(rows) == number
    for row in rows:
        assert (row["state"], row["attempt"], row["errors"] or []) == ("completed", 1, []), row
        assert len(row["attempted_by"]) == 1
    done = await schema.fetch("SELECT job_id FROM effects")
    assert sorted(row["job_id"] for row in done) == [row["id"] for row in rows]
    return {row["attempted_by"][0] for row in rows}


@pytest.mark.usefixtures("effects")
async def test_competition(callers: Callers, fleet: Fleet, schema: Schema, rig: Rig) -> None:
    """Three processes share jobs that are inserted in turn: each job is worked once, and each
    process works some (CF-079, multi_engine_competition)."""
    async with three(fleet, poll=0.2) as workers:
        await insert_all(callers, 150, "effect sleep", duration_ms=5)
        await rig.until_state("completed", 450)
        assert await all_once(schema, 450) == {worker.id for worker in workers}


async def test_directed(callers: Callers, fleet: Fleet, schema: Schema, rig: Rig) -> None:
    """A job in the queue of a process wakes it by the notification alone, whichever language
    inserts it, and a cancel reaches the job while it runs (CF-080,
    multi_engine_directed_candidate_work_notification_cancellation)."""
    async with three(fleet, poll=60) as workers:
        for n, worker in enumerate(workers):
            for caller in callers.values():
                job = await caller.insert(conform("signal", queue=f"own-{n}"))
                with anyio.fail_after(NOTIFICATION_TIMEOUT):
                    await worker.until("job_started", id=job["id"])
                    asked = await caller.cancel(job["id"])
                    await worker.until("job_cancelled", id=job["id"])
                row = await rig.row(job["id"])
                assert asked["state"] == "running"
                assert (row["state"], row["attempt"]) == ("cancelled", 1)
                assert row["attempted_by"] == [worker.id]
                (error,) = errors_of(row)
                assert error["error"] == "JobCancelError: job cancelled remotely"
                assert list(metadata_of(row)) == ["cancel_attempted_at"]


@pytest.mark.parametrize("language", LANGUAGES)
async def test_faults(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig, go_binary: Path
) -> None:
    """The listener of one worker is killed, all connections of a second are cut, and a third is
    left alone. Each job is worked once, and notifications wake all three afterwards (CF-081,
    multi_engine_fault_recovery)."""
    slots = 4
    async with AsyncExitStack() as stack:
        before = {row["pid"] for row in await schema.fetch(LISTENERS)}
        deaf = await stack.enter_async_context(
            fleet.worker(language, queues={"default": slots, "deaf": 1}, poll=0.5)
        )
        listeners = {row["pid"] for row in await schema.fetch(LISTENERS)} - before
        queues = {"default": slots, "cut": 1}
        cut, proxy = await stack.enter_async_context(
            proxied_worker(
                go_binary,
                schema,
                lambda fleet: fleet.worker(OTHER[language], queues=queues, poll=0.5),
            )
        )
        whole = await stack.enter_async_context(
            fleet.worker("python", queues={"default": slots, "whole": 1}, poll=0.5)
        )
        workers = (deaf, cut, whole)
        # All slots are taken, so that no claim is lost. Go would leave lost claims to the rescue.
        await callers["go"].insert_many(*[conform("signal", message="all")] * slots * 3)
        await rig.until_state("running", slots * 3)
        await insert_all(callers, 26, "sleep", duration_ms=20)
        killed = await schema.fetch("SELECT pg_terminate_backend(unnest($1::int[]))", listeners)
        assert len(killed) == 1
        assert proxy.cut() > 0
        for worker in workers:
            worker.release("all")
        await rig.until_state("completed", 90)
        rows = await schema.jobs()
        assert {(row["attempt"], len(row["attempted_by"])) for row in rows} == {(1, 1)}
        assert {row["attempted_by"][0] for row in rows} == {worker.id for worker in workers}
        for worker, queue in zip(workers, ("deaf", "cut", "whole"), strict=True):
            job = await callers["go"].insert(conform(queue=queue))
            await worker.until("job_completed", id=job["id"])


@pytest.mark.usefixtures("effects")
async def test_rolling_replacement(
    callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """A worker of each language is stopped and replaced while jobs are inserted before, without and
    with it. Each job is worked once, the replacements work some, and one of them is the leader
    (CF-077, rolling_deployment_same_protocol). `scripts/interop` runs this with other versions of
    River."""
    batch = [conform("effect sleep", duration_ms=20)] * 20
    settings: dict[str, Any] = {"poll": 0.2, "candidate": True, "queues": {"default": 4}}
    inserted = 0
    async with AsyncExitStack() as stack:

        async def insert() -> None:
            nonlocal inserted
            await callers[LANGUAGES[inserted // 20 % 2]].insert_many(*batch)
            inserted += len(batch)

        async def start(language: str) -> ProcessWorker:
            return await stack.enter_async_context(fleet.process(language, **settings))

        old = [await start(language) for language in LANGUAGES]
        new: list[ProcessWorker] = []
        for worker in old:
            await insert()
            worker.stop()
            await insert()
            await worker.stopped()
            await insert()
            new.append(await start(worker.language))
            await insert()
        await insert()
        await rig.until_state("completed", inserted)
        found = await all_once(schema, inserted)
        ids = {worker.id for worker in new}
        assert found & ids
        assert found <= ids | {worker.id for worker in old}
        await rig.until("SELECT leader_id = any($1) FROM river_leader", True, list(ids))


async def test_leaders_stop_in_turn(
    go_binary: Path, fresh_database_url: str, tmp_path: Path
) -> None:
    """Of three clients the leader stops, then the next, then the last. Each time one of the others
    becomes leader, no two terms overlap, and a periodic job that runs on start is inserted once per
    term (CF-084, multi_engine_leader_failover)."""
    url = fresh_database_url
    async with mixed_fleet(go_binary, url, tmp_path, each=0) as recorded, AsyncExitStack() as stack:
        connection = recorded.connection
        schema = Schema(url, "public", connection)
        rig = Rig(schema)
        fleet = Fleet(RiverGo(go_binary, f"{url}&application_name=go", "public"), schema)
        workers: dict[str, Worker] = {}
        periodic = [Periodic(id="start", kind="start", every_ms=3_600_000, run_on_start=True)]
        for n, engine in enumerate(ENGINES):
            worker = await stack.enter_async_context(
                fleet.worker(
                    engine, id=f"{engine}-{n}", candidate=True, leader_ttl=3, periodic=periodic
                )
            )
            workers[worker.id] = worker
        for term in (1, 2, 3):
            await rig.until("SELECT count(*) FROM river_job WHERE kind = 'start'", term)
            leader_id = await connection.fetchval("SELECT leader_id FROM river_leader")
            leader = workers.pop(leader_id)
            leader.stop()
            await leader.stopped()
        assert await connection.fetchval("SELECT count(*) FROM river_leader") == 0
        assert await connection.fetchval("SELECT count(*) FROM river_job WHERE kind = 'start'") == 3
        rows = await connection.fetch("SELECT * FROM leader_history ORDER BY number")
        assert len(holders(rows)) == len({row["leader_id"] for row in rows}) == 3


async def test_connections(callers: Callers, schema: Schema, rig: Rig, go_binary: Path) -> None:
    """In two rounds of start, load, pause, cancel and stop no process has more connections than
    its pool and its listener, and none after its stop (CF-076, mixed_connection_pool_bound; CF-087,
    multi_engine_resource_bound)."""
    flags = ["--connections", str(CONNECTIONS - 1)]
    for _ in range(2):
        async with AsyncExitStack() as stack:
            pairs: list[tuple[ProcessWorker, Proxy]] = [
                await stack.enter_async_context(
                    proxied_worker(
                        go_binary,
                        schema,
                        lambda fleet, engine=engine, n=n: fleet.process(
                            engine,
                            queues={"default": 50, f"own-{n}": 1},
                            flags=flags,
                            poll=0.2,
                            candidate=True,
                        ),
                    )
                )
                for n, engine in enumerate(ENGINES)
            ]
            await insert_all(callers, 50, "sleep", duration_ms=5)
            for n, (worker, _proxy) in enumerate(pairs):
                job = await callers["go"].insert(conform("signal", queue=f"own-{n}"))
                await worker.until("job_started", id=job["id"])
                await callers["python"].cancel(job["id"])
                await worker.until("job_cancelled", id=job["id"])
                await callers["go"].pause(f"own-{n}")
                await worker.until("queue_paused", queue=f"own-{n}")
                await callers["python"].resume(f"own-{n}")
            await rig.until_state("completed", 150)
            for worker, proxy in pairs:
                worker.stop()
                await worker.stopped()
                await rig.until("SELECT count(*) FROM river_job WHERE state = 'running'", 0)
                assert 1 < proxy.most <= CONNECTIONS
                with anyio.fail_after(NOTIFICATION_TIMEOUT):
                    while proxy.connections:
                        await anyio.sleep(0.01)
        await schema.execute("DELETE FROM river_job")
