"""Stopping: drains, timeouts, hard stops, jobs that do not end, and faults of riverpy."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import pytest

import riverpy
from riverpy import EventKind, Job
from riverpy._log_events import CLIENT_STOP_STARTED, HELD_POOL_CONNECTIONS_CLOSED, JOBS_ABANDONED
from riverpy._work.completer import Completer
from riverpy._work.producer import Producer
from riverpy._work.reconciler import Reconciler
from tests.work.rig import PATIENCE, Task, metadata_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.work.rig import Rig

FOREVER = 3600
AT_ONCE = timedelta(0)


@pytest.fixture(autouse=True)
async def nothing_left() -> AsyncGenerator[None]:
    """Check that no task is left after the client (SC-19)."""
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not {task for task in left if task.get_name() != "abandoned"}


class Jobs:
    """Jobs that wait for the test, and jobs that wait for ever."""

    def __init__(self, rig: Rig) -> None:
        self.started: asyncio.Queue[Job[Task]] = asyncio.Queue()
        self.release = asyncio.Event()
        self.cancelled: list[int] = []

        @rig.job
        async def work(job: Job[Task]) -> None:
            self.started.put_nowait(job)
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled.append(job.id)
                raise


@pytest.fixture
def jobs(rig: Rig) -> Jobs:
    """Register waiting jobs of kind `task`."""
    return Jobs(rig)


async def test_drain(rig: Rig, jobs: Jobs) -> None:
    """A stop claims no more jobs and lets running jobs end. They are completed once (LD-17)."""
    client = rig.client(slots=1)
    async with rig.running(client):
        await client.insert(Task(n=1))
        await jobs.started.get()
        client.stop()
        await client.insert(Task(n=2))
        jobs.release.set()
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED
    assert rig.report is not None
    assert rig.report.is_clean
    rows = await rig.schema.jobs()
    assert [(row["state"], row["attempt"]) for row in rows] == [("completed", 1), ("available", 0)]
    assert jobs.cancelled == []


async def test_interrupted(rig: Rig, jobs: Jobs) -> None:
    """The attempt of a job that a stop interrupts does not count: it has no error, unchanged
    metadata, and is due at once. The next worker completes it (SC-05)."""
    opts = riverpy.InsertOpts(max_attempts=1, metadata={"k": "v"})
    async with rig.working(soft_stop_timeout=AT_ONCE) as client:
        inserted = await client.insert(Task(), opts)
        await jobs.started.get()
        client.stop()
        assert (await rig.event()).kind is EventKind.JOB_INTERRUPTED
    row = await rig.row(inserted.job.id)
    assert (row["state"], row["attempt"], row["errors"]) == ("available", 0, None)
    assert row["finalized_at"] is None
    assert metadata_of(row) == {"k": "v"}
    assert len(row["attempted_by"]) == 1
    jobs.release.set()
    async with rig.working():
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED
    row = await rig.row(inserted.job.id)
    assert (row["state"], row["attempt"], len(row["attempted_by"])) == ("completed", 1, 2)


async def test_interrupted_jobs_may_end_otherwise(rig: Rig) -> None:
    """An interrupted job that returns, fails, snoozes or cancels keeps that outcome."""
    started: asyncio.Queue[int] = asyncio.Queue()

    @rig.job
    async def work(job: Job[Task]) -> None:
        started.put_nowait(job.id)
        try:
            await asyncio.sleep(FOREVER)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            match job.args.n:
                case 1:
                    return
                case 2:
                    raise ValueError("mine") from None
                case 3:
                    raise riverpy.JobSnooze(timedelta(hours=1)) from None
                case 4:
                    raise riverpy.JobCancel("mine") from None
                case _:
                    raise

    await rig.insert_rows(5)
    async with rig.working(soft_stop_timeout=AT_ONCE):
        for _ in range(5):
            await started.get()
    rows = await rig.schema.jobs()
    assert [row["state"] for row in rows] == [
        "completed",
        "available",
        "scheduled",
        "cancelled",
        "available",
    ]
    assert [row["attempt"] for row in rows] == [1, 1, 0, 1, 0]


async def test_rows_that_never_started(rig: Rig, jobs: Jobs) -> None:
    """After a stop no row is running. Rows that waited have no attempt and no error, and the next
    worker claims them at once (LD-11)."""
    await rig.insert_rows(50)
    async with rig.working(slots=2, soft_stop_timeout=AT_ONCE):
        await jobs.started.get()
        await jobs.started.get()
    rows = await rig.schema.jobs()
    assert {(row["state"], row["attempt"], row["errors"]) for row in rows} == {
        ("available", 0, None)
    }
    jobs.release.set()
    async with rig.working():
        await rig.take(50)
    assert await rig.states() == {"completed": 50}


async def test_claim_in_flight_at_a_stop(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim in flight at a stop is completed, and its jobs are worked."""
    import riverpy._work.producer

    claiming, go_on = asyncio.Event(), asyncio.Event()
    claim = riverpy._work.producer.job_claim

    async def slow(*args: Any, **values: Any) -> Any:
        rows = await claim(*args, **values)
        claiming.set()
        await go_on.wait()
        return rows

    rig.register_task()
    monkeypatch.setattr(riverpy._work.producer, "job_claim", slow)
    monkeypatch.setattr(riverpy._work.producer, "CLAIM_TIMEOUT_AFTER_STOP", PATIENCE)
    await rig.insert_rows(3)
    async with rig.working() as client:
        await claiming.wait()
        client.stop()
        await asyncio.sleep(0)
        go_on.set()
    assert await rig.states() == {"completed": 3}


@pytest.mark.parametrize("asker", ["stop_and_cancel", "second call", "both at once"])
async def test_hard_stop(rig: Rig, jobs: Jobs, asker: str) -> None:
    """After many calls of stop and stop_and_cancel the jobs are interrupted and the run ends
    (SC-09)."""
    async with rig.working(soft_stop_timeout=None) as client:
        for n in range(5):
            await client.insert(Task(n=n))
            await jobs.started.get()
        if asker == "second call":
            client.stop()
            await asyncio.sleep(0)
        elif asker == "both at once":
            client.stop_and_cancel()
            client.stop()
        client.stop_and_cancel()
        client.stop_and_cancel()
        await rig.take(5)
    assert rig.report is not None
    assert rig.report.is_clean
    assert len(jobs.cancelled) == 5
    assert await rig.states() == {"available": 5}


@pytest.mark.parametrize("soft", [5.0, None])
async def test_slow_results_are_stored(rig: Rig, jobs: Jobs, soft: float | None) -> None:
    """Slow results may use all the time that is left of the stop, not only a share of the hard stop
    timeout."""
    await rig.schema.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_sleep(0.3); RETURN new; END $$;"
        "CREATE TRIGGER slow BEFORE UPDATE ON river_job FOR EACH ROW"
        " WHEN (new.state = 'completed') EXECUTE FUNCTION slow()"
    )
    hard = timedelta(seconds=0.5 if soft else 3)
    limit = None if soft is None else timedelta(seconds=soft)
    async with rig.working(soft_stop_timeout=limit, hard_stop_timeout=hard) as client:
        for _ in range(5):
            await client.insert(Task())
            await jobs.started.get()
        jobs.release.set()
        client.stop()
    await rig.schema.execute("DROP FUNCTION slow() CASCADE")
    assert rig.report.is_clean
    assert await rig.states() == {"completed": 5}


async def test_stop_without_a_run(rig: Rig, jobs: Jobs) -> None:
    """Stopping a client that does not run does nothing, before and after a run."""
    client = rig.client()
    client.stop()
    client.stop_and_cancel()
    async with rig.running(client):
        pass
    client.stop()
    assert client.running_claims() == []


async def test_client_runs_again(rig: Rig, jobs: Jobs) -> None:
    """A stopped client can run again. A running one cannot run twice."""
    client = rig.client()
    jobs.release.set()
    for n in range(3):
        async with rig.running(client):
            with pytest.raises(riverpy.ClientStateError, match="runs already"):
                await client.run()
            await client.insert(Task(n=n))
            await rig.event()
    assert await rig.states() == {"completed": 3}


async def test_job_that_ignores_cancellation(rig: Rig, log: list[dict[str, Any]]) -> None:
    """A job that ignores its cancellation cannot delay the stop: it is abandoned and reported, and
    its row stays running. The other results are stored. A later run of the client leaves the row
    alone."""
    started, let_go, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.args.n:
            return
        task = asyncio.current_task()
        assert task is not None
        task.set_name("abandoned")
        started.set()
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue
        ended.set()

    client = rig.client(soft_stop_timeout=AT_ONCE, hard_stop_timeout=timedelta(milliseconds=200))
    async with rig.running(client):
        stubborn = await client.insert(Task(n=0))
        await started.wait()
        (claim_key,) = client.running_claims()
        await client.insert(Task(n=1))
        await rig.event()
        with anyio.fail_after(PATIENCE):
            client.stop()
            while client.is_running:
                await asyncio.sleep(0.01)
    assert rig.report is not None
    assert not rig.report.is_clean
    assert rig.report.abandoned == (claim_key,)
    assert claim_key.id == stubborn.job.id
    assert rig.report.unstored == 0
    assert (await rig.row(stubborn.job.id))["state"] == "running"
    assert JOBS_ABANDONED in [entry["event"] for entry in log]
    assert await client.release_claims([claim_key]) == 1
    row = await rig.row(stubborn.job.id)
    assert (row["state"], row["attempt"]) == ("available", 0)
    assert await client.release_claims([claim_key]) == 0
    let_go.set()
    await ended.wait()
    await asyncio.sleep(0)


async def test_blocked_thread(rig: Rig) -> None:
    """A blocked thread cannot delay the stop either."""
    started, let_go = threading.Event(), threading.Event()

    @rig.job(executor="thread")
    def work(job: Job[Task]) -> None:
        started.set()
        let_go.wait(30)

    client = rig.client(soft_stop_timeout=AT_ONCE, hard_stop_timeout=timedelta(milliseconds=200))
    async with rig.running(client):
        await client.insert(Task())
        await anyio.to_thread.run_sync(started.wait)
    assert rig.report is not None
    assert len(rig.report.abandoned) == 1
    before = asyncio.all_tasks()
    let_go.set()
    async with asyncio.timeout(PATIENCE):
        while any("JobExecutor.work" in repr(task) for task in asyncio.all_tasks() & before):
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("style", ["task", "anyio", "timeout"])
async def test_host_is_cancelled(rig: Rig, jobs: Jobs, style: str) -> None:
    """A cancellation of the task with `working()` stops the client in order. The cancellation is
    raised, and no row is lost."""
    client = rig.client(soft_stop_timeout=AT_ONCE)
    inside = asyncio.Event()

    async def host() -> None:
        async with client, client.working():
            await client.insert(Task())
            await jobs.started.get()
            inside.set()
            await asyncio.sleep(FOREVER)

    async def in_scope() -> None:
        with anyio.CancelScope() as scope:
            asyncio.get_running_loop().call_soon(lambda: None)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(cancel_inside(scope))
                await host()

    async def cancel_inside(scope: anyio.CancelScope) -> None:
        await inside.wait()
        scope.cancel()

    async def in_time() -> None:
        async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as tasks:
            tasks.create_task(expire(limit))
            await host()

    async def expire(limit: asyncio.Timeout) -> None:
        await inside.wait()
        limit.reschedule(asyncio.get_running_loop().time())

    if style == "task":
        task = asyncio.get_running_loop().create_task(host())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif style == "anyio":
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(cancel_inside, scope)
                await host()
        assert scope.cancelled_caught
    else:
        with pytest.raises(TimeoutError):
            await in_time()
    assert not client.is_running
    assert not client.is_open
    assert await rig.states() == {"available": 1}
    row = await rig.row(1)
    assert (row["attempt"], row["errors"]) == (0, None)


async def test_task_of_the_run_is_cancelled(rig: Rig, jobs: Jobs) -> None:
    """A cancellation of the task of `run()` interrupts the jobs and ends the run."""
    client = rig.client(soft_stop_timeout=None)
    await rig.insert_rows(2)
    task = asyncio.get_running_loop().create_task(client.run())
    await jobs.started.get()
    await jobs.started.get()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await rig.states() == {"available": 2}


async def test_run_is_cancelled_while_it_drains(
    rig: Rig, jobs: Jobs, log: list[dict[str, Any]]
) -> None:
    """A run that is stopped, and cancelled while it waits for its jobs, releases the rows of a
    claim whose answer was lost."""
    client = rig.client(soft_stop_timeout=None)
    await rig.insert_rows(1)
    task = asyncio.get_running_loop().create_task(client.run())
    await jobs.started.get()
    assert client._run is not None
    await rig.schema.execute(
        "INSERT INTO river_job"
        " (kind, args, max_attempts, state, attempt, attempted_at, attempted_by)"
        " VALUES ('task', '{}', 25, 'running', 1, now(), array[$1])",
        client.id,
    )
    client._run._reconciler.has_unanswered_claim = True
    client.stop()
    async with asyncio.timeout(PATIENCE):
        while not any(entry["event"] == CLIENT_STOP_STARTED for entry in log):
            await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await rig.states() == {"available": 2}


async def test_error_in_the_block(rig: Rig, jobs: Jobs) -> None:
    """An error of the host's own code stops the client and is raised unchanged."""
    client = rig.client(soft_stop_timeout=AT_ONCE)
    with pytest.raises(LookupError, match="of the host"):  # noqa: PT012
        async with client, client.working():
            await client.insert(Task())
            await jobs.started.get()
            raise LookupError("of the host")
    assert await rig.states() == {"available": 1}


@pytest.mark.parametrize("service", [Producer, Reconciler, Completer])
async def test_fault_of_ours(
    rig: Rig, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, service: type
) -> None:
    """An unexpected error in a service interrupts the jobs and is raised by the run. It is never
    swallowed, and never leaves an idle client (SC-14)."""
    method = {
        Producer: "_wait_until_next_claim",
        Reconciler: "_check_paused_queues",
        Completer: "_send_batches",
    }[service]
    monkeypatch.setattr("riverpy._work.reconciler.RECONCILE_INTERVAL", 0.05)

    async def broken(*args: Any, **values: Any) -> None:
        raise ZeroDivisionError("a fault of ours")

    if service is Producer:
        await rig.insert_rows(1)
    else:
        await rig.insert_rows(20)
    monkeypatch.setattr(service, method, broken)
    if service is Completer:
        jobs.release.set()
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        async with asyncio.timeout(PATIENCE):
            await rig.client().run()
    states = await rig.states()
    assert set(states) <= {"available", "running"} if service is Completer else {"available"}


async def test_fault_inside_working(rig: Rig, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error in a service cancels the block of `working()` and is raised by it
    (SC-14)."""

    async def broken(*args: Any) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(Producer, "_wait_until_next_claim", broken)
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        async with rig.client() as client, client.working():
            await asyncio.sleep(FOREVER)


async def test_pool_with_a_leak(rig: Rig, jobs: Jobs, log: list[dict[str, Any]]) -> None:
    """A connection of the client's pool that is never released does not delay the stop. A pool of
    the caller is never closed (SC-13)."""
    jobs.release.set()
    client = rig.client()
    async with rig.running(client):
        assert client._pool is not None
        leaked = await client._pool.acquire()
    assert HELD_POOL_CONNECTIONS_CLOSED in [entry["event"] for entry in log]
    assert leaked is not None
    async with asyncpg.create_pool(rig.url, min_size=1, max_size=1) as pool:
        config = riverpy.Config(schema=rig.schema.name)
        async with riverpy.Client(pool, config=config) as inserting:
            await inserting.insert(Task())
        assert await pool.fetchval("SELECT 1") == 1


async def test_no_spinning_during_a_stop(rig: Rig) -> None:
    """While a stop waits for a job in a shielded scope, the process does not spin: it uses less
    than half of the time that passes (SC-15)."""
    started, release = asyncio.Event(), asyncio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        with anyio.CancelScope(shield=True):
            started.set()
            try:
                await release.wait()
            except asyncio.CancelledError:
                await release.wait()

    async with rig.working(soft_stop_timeout=AT_ONCE) as client:
        await client.insert(Task())
        await started.wait()
        client.stop()
        asyncio.get_running_loop().call_later(0.4, release.set)
        used, began = time.process_time(), time.monotonic()
        await rig.event()
        used, passed = time.process_time() - used, time.monotonic() - began
    assert used < passed / 2


async def test_connections_are_closed(rig: Rig, jobs: Jobs) -> None:
    """After a run it has no connections to the database."""
    jobs.release.set()
    async with rig.working() as client:
        await client.insert(Task())
        await rig.event()
        names = "riverpy claims,riverpy inserts,riverpy listener,riverpy reserved,riverpy results"
        await rig.until(
            "SELECT string_agg(DISTINCT application_name, ',' ORDER BY application_name)"
            " FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name ~ '^riverpy'"
            " AND application_name !~ '^riverpy( maintenance| cleaning| reindex)?$'",
            names,
        )
    await rig.until(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name ~ '^riverpy'",
        0,
    )
