"""Faults that break or block the storing of results: locks, errors, killed backends, broken
connections, and more jobs than connections. Each job is still completed at its first attempt."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from tests.interop.conform import EFFECTS, conform
from tests.interop.proxied_worker import proxied_worker
from tests.interop.working import LANGUAGES
from tests.work.rig import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from tests._database import Schema
    from tests.interop.callers import Caller
    from tests.interop.working import Fleet, Worker
    from tests.work.rig import Rig

    Callers = dict[str, Caller]

EITHER = pytest.mark.parametrize("language", LANGUAGES)
BATCH = 50
CONNECTIONS = 20
"""The maximum number of connections of a client. In Go that is its pool and its listener."""
COMPLETIONS = """
CREATE TABLE completions (xid xid8);
CREATE FUNCTION note_completion() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('INSERT INTO %I.completions VALUES (pg_current_xact_id())', TG_TABLE_SCHEMA);
    RETURN NULL;
END $$;
CREATE TRIGGER note_completion AFTER UPDATE ON river_job
    FOR EACH ROW WHEN (NEW.state = 'completed') EXECUTE FUNCTION note_completion();
"""
NO_COMPLETIONS = "DROP FUNCTION note_completion CASCADE; DROP TABLE completions"
FAILURE = """
CREATE SEQUENCE failures;
CREATE FUNCTION fail_once() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF nextval(format('%I.failures', TG_TABLE_SCHEMA)::regclass) = 1 THEN
        {action};
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER fail_once BEFORE UPDATE ON river_job FOR EACH ROW
    WHEN (OLD.state = 'running' AND NEW.state = 'completed') EXECUTE FUNCTION fail_once();
"""
NO_FAILURE = "DROP FUNCTION fail_once CASCADE; DROP SEQUENCE failures"
FAILURES = {
    "serialization": "RAISE EXCEPTION 'serialization' USING ERRCODE = '40001'",
    "deadlock": "RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'",
    "killed backend": "PERFORM pg_terminate_backend(pg_backend_pid())",
}
MARK = """
UPDATE river_job SET metadata = metadata || '{"cancel_attempted_at": "2026-01-01T00:00:00Z"}'
WHERE id = $1
"""
WAITS = """
SELECT count(*) > 0 FROM pg_stat_activity
WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0
"""


@asynccontextmanager
async def having(schema: Schema, create: str, drop: str) -> AsyncGenerator[None]:
    """Create more objects in the schema for the block."""
    await schema.execute(create)
    try:
        yield
    finally:
        await schema.execute(drop)


async def all_completed_at_once(schema: Schema, number: int) -> None:
    """Check that there are this many jobs, each completed at its first attempt and without
    errors."""
    rows = await schema.jobs()
    assert len(rows) == number
    for row in rows:
        found = (row["state"], row["attempt"], row["errors"] or [], len(row["attempted_by"]))
        assert found == ("completed", 1, [], 1), dict(row)


async def test_completions_share_transactions(
    callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """A thousand jobs that end together are stored by fewer than 250 transactions (CF-071,
    completion_batching)."""
    number = 1000
    async with (
        having(schema, COMPLETIONS, NO_COMPLETIONS),
        fleet.worker("python", queues={"default": number}) as worker,
    ):
        await callers["go"].insert_many_fast(*[conform("signal", message="all")] * number)
        await rig.until_state("running", number)
        worker.release("all")
        await rig.until_state("completed", number)
        assert await schema.fetchval("SELECT count(*) FROM completions") == number
        assert await schema.fetchval("SELECT count(DISTINCT xid) FROM completions") < 250
    await all_completed_at_once(schema, number)


@EITHER
@pytest.mark.parametrize("marks", [False, True], ids=["locks", "marks"])
async def test_locked_row(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig, *, marks: bool
) -> None:
    """The result of a job whose row a transaction has locked is kept and stored after the unlock,
    also if that transaction marked it to be cancelled. Python stores the results of other jobs
    before; in Go their batch waits (CF-072, completion_row_lock_wait)."""
    async with fleet.worker(language) as worker, schema.connected() as locker:
        # Together: of two inserts within a moment Go notifies the workers only of the first.
        jobs = (conform("signal", message="locked"), conform("signal", message="other"))
        locked, other = [row["id"] for row in await callers["go"].insert_many(*jobs)]
        await rig.until_state("running", 2)
        async with locker.transaction():
            await locker.execute("SELECT FROM river_job WHERE id = $1 FOR UPDATE", locked)
            if marks:
                await locker.execute(MARK, locked)
            worker.release("locked")
            if language == "python":
                worker.release("other")
                await worker.until("job_completed", id=other)
            else:
                await rig.until(WAITS)
                worker.release("other")
        for job_id in {locked, other} if language == "go" else {locked}:
            await worker.until("job_completed", id=job_id)
    await all_completed_at_once(schema, 2)


@EITHER
@pytest.mark.parametrize("failure", FAILURES)
async def test_transient_failure(
    language: str, failure: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """A statement that stores results and fails once is sent again. Each job is completed, and has
    one event (CF-073, completion_transient_failure_retry)."""
    create = FAILURE.format(action=FAILURES[failure])
    async with (
        having(schema, create, NO_FAILURE),
        fleet.worker(language, queues={"default": BATCH}) as worker,
    ):
        await callers["go"].insert_many(*[conform("signal", message="all")] * BATCH)
        await rig.until_state("running", BATCH)
        worker.release("all")
        for _ in range(BATCH):
            await worker.until("job_completed")
        assert await schema.fetchval("SELECT last_value FROM failures") > 1
        worker.stop()
        await worker.stopped()
        assert worker.passed("job_completed") == []
    await all_completed_at_once(schema, BATCH)


@EITHER
async def test_server_away(
    language: str, callers: Callers, schema: Schema, go_binary: Path, rig: Rig
) -> None:
    """While all connections are cut and new ones refused, a running job ends and another is
    inserted. Both are completed once the server is reachable again (CF-074,
    database_unavailable_reconnect)."""
    async with proxied_worker(
        go_binary, schema, lambda fleet: fleet.worker(language, poll=0.5)
    ) as (
        worker,
        proxy,
    ):
        running = await callers["go"].insert(conform("signal", message="end"))
        await worker.until("job_started", id=running["id"])
        proxy.refusing = True
        assert proxy.cut() > 0
        worker.release("end")
        tried = proxy.accepted
        inserted = await callers["python"].insert(conform())
        with anyio.fail_after(PATIENCE, reason="no new connection is tried"):
            while proxy.accepted < tried + 3:
                await asyncio.sleep(0.01)
        assert await rig.states() == {"running": 1, "available": 1}
        proxy.refusing = False
        for job in (running, inserted):
            await worker.until("job_completed", id=job["id"])
    await all_completed_at_once(schema, 2)


async def test_few_connections(callers: Callers, schema: Schema, go_binary: Path, rig: Rig) -> None:
    """With many more slots than connections, and jobs that need connections too, each job is worked
    once by a worker of either language, no worker exceeds its connections, and a pause still
    reaches both soon (CF-075, pool_pressure_completion)."""
    jobs = [conform("effect sleep effect", duration_ms=20)] * 300
    queues = {"default": 100, "other": 1}
    flags = ["--connections", str(CONNECTIONS - 1)]
    async with having(schema, EFFECTS, "DROP TABLE effects"), AsyncExitStack() as stack:
        workers: list[Worker] = []
        proxies: list[Any] = []
        for language in LANGUAGES:
            entered = proxied_worker(
                go_binary,
                schema,
                lambda fleet, language=language: fleet.worker(
                    language, queues=queues, flags=flags, poll=0.2
                ),
            )
            worker, proxy = await stack.enter_async_context(entered)
            workers.append(worker)
            proxies.append(proxy)
        for caller in callers.values():
            await caller.insert_many_fast(*jobs)
        await workers[0].until("job_completed")
        await callers["python"].pause("other")
        with anyio.fail_after(5):
            for worker in workers:
                await worker.until("queue_paused")
        await rig.until_state("completed", 600)
        effects = await schema.fetch("SELECT job_id, count(*), language FROM effects GROUP BY 1, 3")
        assert [row["count"] for row in effects] == [2] * 600
        assert {row["language"] for row in effects} == set(LANGUAGES)
        most = [proxy.most for proxy in proxies]
        assert max(most) <= CONNECTIONS, most
    await all_completed_at_once(schema, 600)
