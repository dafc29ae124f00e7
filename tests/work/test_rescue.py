"""Jobs of killed workers run again on other workers in time. Jobs of live workers never do."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import pytest

from riverpy import Client, Config, Job, QueueConfig, Workers
from riverpy._log_events import JOBS_OF_EARLIER_RUN_RESCUED, JOBS_RESCUED, WORKER_STARTED
from riverpy._postgres.job_maintenance import RESCUE_ERROR_TEXT
from riverpy.embedded import EmbeddedPostgres
from riverpy.migrate import migrate_all
from tests.cli.worker_process import running_worker
from tests.kit.proxy import proxied
from tests.work.rig import PATIENCE, Task, errors_of, metadata_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.cli.worker_process import WorkerProcess
    from tests.work.rig import Rig

DEAD_AFTER = timedelta(seconds=2)
BOUND = DEAD_AFTER.total_seconds() + 15
"""Seconds within which the jobs of a killed worker run again."""
QUICK: dict[str, Any] = {
    "elect_interval": timedelta(milliseconds=200),
    "leader_ttl": timedelta(milliseconds=900),
    "dead_after": DEAD_AFTER,
}
JOBS = """
import os, time
from datetime import timedelta
from typing import Annotated, ClassVar
import asyncio, json
import msgspec, riverpy

workers = riverpy.Workers()


class Task(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "task"
    n: Annotated[int, riverpy.Unique] = 0


@workers.job(timeout=None)
async def task(job: riverpy.Job[Task]) -> None:
    print("began", job.id, flush=True)
    if job.args.n >= 100:
        time.sleep(job.args.n / 1000)
    else:
        await asyncio.sleep(3600)


client = riverpy.Client(
    workers=workers,
    queues={"default": riverpy.QueueConfig(max_workers=20)},
    config=riverpy.Config(
        schema=os.environ["MY_SCHEMA"],
        id=os.environ.get("MY_ID"),
        candidate="MY_CANDIDATE" in os.environ,
        elect_interval=timedelta(milliseconds=200),
        leader_ttl=timedelta(milliseconds=900),
        durable_claims=True,
    ),
)
"""


def victim(rig: Rig, directory: Path, *args: str, url: str | None = None, **environ: str) -> Any:
    """Return a worker process on the rig's schema whose jobs never end, or block the loop for n
    ms."""
    return running_worker(
        directory,
        "jobs:client",
        "--database-url",
        url or rig.url,
        f"--dead-after={DEAD_AFTER.total_seconds():g}s",
        *args,
        code=JOBS,
        MY_SCHEMA=rig.schema.name,
        **environ,
    )


async def ten_running(rig: Rig, worker: WorkerProcess) -> None:
    """Let the process start ten jobs."""
    await worker.until_logged(WORKER_STARTED)
    await rig.insert_rows(10)
    for job_id in range(1, 11):
        await worker.until_printed(f"began {job_id}")


async def until_completed(rig: Rig, count: int, since: float) -> None:
    """Wait until the jobs have run again, within the limit."""
    with anyio.fail_after(since + BOUND - time.monotonic(), reason="not rescued in time"):
        sql = "SELECT count(*) FROM river_job WHERE state = 'completed'"
        while await rig.schema.fetchval(sql) < count:
            await asyncio.sleep(0.01)


@pytest.fixture
def working_rig(rig: Rig) -> Rig:
    """Return a rig whose clients complete the jobs that hang in the process."""
    rig.register_task()
    return rig


@pytest.mark.parametrize("case", ["peer leads", "leader dies", "same name", "same id", "nobody"])
async def test_killed_worker(
    working_rig: Rig, tmp_path: Path, log: list[dict[str, Any]], case: str
) -> None:
    """Ten running jobs of a killed worker run again elsewhere within `dead_after` and 15 seconds,
    each with exactly one more attempt. It does not matter which client was the leader, what the
    next worker's name or id is, or whether there was one at the time (LD-07)."""
    rig, settings, environ = working_rig, dict(QUICK), {}
    if case == "same name":
        settings["name"] = "here"
    if case == "same id":
        settings["id"] = environ["MY_ID"] = "fixed"
    if case != "peer leads":
        environ["MY_CANDIDATE"] = "yes"
    args = ["--name=here"] if case == "same name" else []
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(victim(rig, tmp_path, *args, **environ))
        await ten_running(rig, worker)
        if case == "leader dies":
            await rig.until("SELECT count(*) FROM river_leader WHERE expires_at > now()", 1)
        if case in {"peer leads", "leader dies"}:
            await stack.enter_async_context(rig.working(**settings))
        if case == "peer leads":
            await rig.until("SELECT count(*) FROM river_leader WHERE expires_at > now()", 1)
        worker.send(signal.SIGKILL)
        await worker.exit_code()
        killed = time.monotonic()
        if case not in {"peer leads", "leader dies"}:
            await stack.enter_async_context(rig.working(**settings))
        await until_completed(rig, 10, killed)
    rows = await rig.schema.jobs()
    assert [row["attempt"] for row in rows] == [2] * 10
    assert all(
        len(row["attempted_by"]) >= 2 for row in rows
    )  # a client that was frozen releases its jobs
    assert [[entry["error"] for entry in errors_of(row)] for row in rows] == [
        [RESCUE_ERROR_TEXT]
    ] * 10
    said = JOBS_OF_EARLIER_RUN_RESCUED if case == "same id" else JOBS_RESCUED
    assert sum(entry["count"] for entry in log if entry["event"] == said) == 10
    assert [metadata_of(row) for row in rows] == [{"river:rescue_count": 1}] * 10


async def test_same_id_keeps_its_own(rig: Rig) -> None:
    """Jobs that a dead client claimed under the same id are rescued at the start, in every queue.
    Jobs of this run, or left running by an earlier run of this process, are not (LD-07)."""
    release = asyncio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        for _ in range(20 if job.args.n == 1 else 0):  # ignores every stop
            with suppress(asyncio.CancelledError):
                await release.wait()

    client = rig.client(
        id="me", soft_stop_timeout=timedelta(0), hard_stop_timeout=timedelta(milliseconds=50)
    )
    await rig.insert_rows(1)  # n = 1
    async with rig.running(client):
        await rig.until_state("running")
    assert rig.report is not None
    assert rig.report.abandoned
    await rig.schema.execute("UPDATE river_job SET kind = 'abandoned'")
    for queue in ("default", "others"):
        await rig.schema.execute(
            "INSERT INTO river_job (kind, queue, max_attempts, args, state, attempt, attempted_by,"
            " attempted_at) VALUES ('task', $1, 25, '{}', 'running', 1, '{me}', now())",
            queue,
        )
    try:
        async with rig.running(client):
            await rig.until("SELECT state::text FROM river_job WHERE id = 2", "completed")
            await rig.until("SELECT state::text FROM river_job WHERE id = 3", "available")
            row = await rig.row(1)
            assert (row["state"], row["attempt"], row["errors"]) == ("running", 1, None)
    finally:
        release.set()
    rows = await rig.schema.jobs()
    assert [row["attempt"] for row in rows] == [1, 2, 1]
    assert [len(row["errors"] or ()) for row in rows] == [0, 1, 1]


async def until_leading(client: Client) -> None:
    """Wait until the client is the leader. On a busy machine a short term may just have ended."""
    with anyio.fail_after(PATIENCE):
        while not client.is_leader:
            await asyncio.sleep(0.01)


async def server_time_passes(rig: Rig, seconds: float) -> None:
    """Wait until so much time has passed on the server."""
    now = await rig.schema.fetchval("SELECT now()")
    until = now + timedelta(seconds=seconds)
    await rig.until("SELECT now() >= $1", True, until)


async def completed_once(rig: Rig, runs: list[int]) -> None:
    """Check that every job has run once and was not changed in between. (A client that is frozen
    while it claims a job releases it before it runs.)"""
    assert sorted(runs) == [row["id"] for row in await rig.schema.jobs()]
    for row in await rig.schema.jobs():
        assert (row["state"], row["attempt"]) == ("completed", 1)
        assert (row["errors"], metadata_of(row)) == (None, {})


@pytest.mark.parametrize("frozen", ["riverpy reserved", "riverpy claims", "riverpy results"])
async def test_frozen_connection(rig: Rig, frozen: str) -> None:
    """If one connection of a worker is frozen for twice `dead_after`, its jobs are not rescued, and
    end once (LD-14)."""
    began, release = asyncio.Event(), asyncio.Event()
    runs: list[int] = []

    @rig.job(timeout=None)
    async def work(job: Job[Task]) -> None:
        runs.append(job.id)
        began.set()
        await release.wait()

    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(proxied(rig.url))
        leader = await stack.enter_async_context(leading(rig))
        worker = await stack.enter_async_context(
            rig.working(url=proxy.url, candidate=False, **QUICK)
        )
        await worker.insert(Task())
        await began.wait()
        proxy.hold(frozen)
        await server_time_passes(rig, 2 * DEAD_AFTER.total_seconds() + 1)
        await until_leading(leader)
        assert await rig.states() == {"running": 1}
        await proxy.release()
        release.set()
        await rig.until_state("completed")
    await completed_once(rig, runs)


@asynccontextmanager
async def leading(rig: Rig, url: str | None = None, **settings: Any) -> AsyncGenerator[Client]:
    """Run a client on another queue that is the leader."""
    workers = Workers()

    @workers.job(kind="other")
    async def other(job: Job) -> None:  # type: ignore[type-arg]
        pass

    client = Client(
        url or rig.url,
        workers=workers,
        queues={"others": QueueConfig(max_workers=1)},
        config=Config(
            schema=rig.schema.name, hard_stop_timeout=timedelta(seconds=1), **(settings or QUICK)
        ),
    )
    async with client, client.working():
        await rig.until("SELECT count(*) FROM river_leader WHERE expires_at > now()", 1)
        yield client


@pytest.mark.timeout(180)
async def test_outage(rig: Rig) -> None:
    """After an outage of twice `dead_after`, in which no client could write a heartbeat, no running
    job is rescued, although the leader reconnects before the worker does. The leader had no contact
    either (LD-18)."""
    began, release = asyncio.Event(), asyncio.Event()
    settings = {**QUICK, "dead_after": timedelta(seconds=5)}
    runs: list[int] = []

    @rig.job(timeout=None)
    async def work(job: Job[Task]) -> None:
        runs.append(job.id)
        began.set()
        await release.wait()

    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(proxied(rig.url)) for _ in range(2)]
        leader = await stack.enter_async_context(leading(rig, proxies[0].url, **settings))
        worker = await stack.enter_async_context(
            rig.working(url=proxies[1].url, candidate=False, **settings)
        )
        await worker.insert(Task())
        await began.wait()
        for proxy in proxies:
            proxy.refusing = True
            proxy.cut()
        await server_time_passes(rig, 10)
        proxies[0].refusing = False
        back = await rig.schema.fetchval("SELECT clock_timestamp()")
        await rig.until("SELECT count(*) FROM river_leader WHERE elected_at > $1", 1, back)
        await server_time_passes(rig, 1.5)  # its rescuer runs within that time
        proxies[1].refusing = False
        await server_time_passes(rig, 5)
        await until_leading(leader)
        assert await rig.states() == {"running": 1}
        release.set()
        await rig.until_state("completed")
    await completed_once(rig, runs)


async def test_handler_blocks_the_loop(rig: Rig, tmp_path: Path) -> None:
    """If a handler blocks the event loop for half of `dead_after`, its job is not rescued, and its
    result is stored (LM-14)."""
    dead_after = 2 * DEAD_AFTER.total_seconds()  # a busy machine makes the handler slower
    async with leading(rig), victim(rig, tmp_path, f"--dead-after={dead_after:g}s") as worker:
        await worker.until_logged(WORKER_STARTED)
        blocked = round(dead_after * 500)
        await rig.schema.execute(
            "INSERT INTO river_job (kind, max_attempts, args)"
            " VALUES ('task', 25, json_build_object('n', $1::int))",
            blocked,
        )
        await rig.until_state("completed")
        await server_time_passes(rig, dead_after)
    await completed_once(rig, [int(line.split()[1]) for line in worker.printed])


@pytest.mark.parametrize("minutes", [10, -10])
async def test_clock_of_a_client(rig: Rig, monkeypatch: pytest.MonkeyPatch, minutes: int) -> None:
    """A client whose clock is ten minutes off becomes leader, works new jobs, starts none before
    its time, rescues no live job, and ends none before its start (SK-19)."""

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + timedelta(minutes=minutes)

    for module in ("_clock", "_work.failure"):
        monkeypatch.setattr(f"riverpy.{module}.datetime", Shifted)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 60 * minutes)
    release = asyncio.Event()
    runs: list[int] = []

    @rig.job(timeout=None)
    async def work(job: Job[Task]) -> None:
        runs.append(job.id)
        if job.args.n == 0:
            await release.wait()

    poll = timedelta(milliseconds=100)
    async with rig.working(fetch_poll_interval=poll, **QUICK) as client:
        await client.insert(Task())
        await rig.until_state("running")
        await rig.schema.execute(
            "INSERT INTO river_job (kind, max_attempts, args, state, scheduled_at)"
            """ SELECT 'task', 25, '{"n": 1}', 'scheduled', now() + i * interval '0.5 seconds'"""
            " FROM generate_series(1, 4) AS i"
        )
        await client.insert(Task(n=2))
        await rig.until_state("completed", 5)
        await server_time_passes(rig, DEAD_AFTER.total_seconds() + 1)
        await until_leading(client)
        release.set()
        await rig.until_state("completed", 6)
    await completed_once(rig, runs)
    for row in await rig.schema.jobs():
        assert row["scheduled_at"] <= row["attempted_at"] <= row["finalized_at"]


async def test_server_restarts(tmp_path: Path) -> None:
    """A worker is killed while its server restarts after a crash. Its jobs run again when the
    server is back. Those of a worker that survived do not (LD-07, LD-18)."""
    ran: list[int] = []
    release = asyncio.Event()
    workers = Workers()

    @workers.job(kind="task", timeout=None)
    async def task(job: Job) -> None:  # type: ignore[type-arg]
        ran.append(job.id)
        if job.queue == "mine":
            await release.wait()

    with tempfile.TemporaryDirectory(prefix="rp-", dir="/tmp") as base:
        Path(base).chmod(0o711)
        server = EmbeddedPostgres("rescue", base_dir=Path(base), settings={"fsync": "off"})
        url = await asyncio.to_thread(server.start)
        try:
            await with_restart(server, url, tmp_path, workers, ran, release)
        finally:
            await asyncio.to_thread(server.remove)


async def with_restart(
    server: EmbeddedPostgres,
    url: str,
    directory: Path,
    workers: Workers,
    ran: list[int],
    release: asyncio.Event,
) -> None:
    """Run the test above with its server."""
    insert = "INSERT INTO river_job (kind, queue, max_attempts, args) VALUES ('task', $1, 25, '{}')"
    connection = await asyncpg.connect(url)
    await migrate_all(connection)
    client = Client(
        url,
        workers=workers,
        queues={"mine": QueueConfig(max_workers=1)},
        config=Config(
            soft_stop_timeout=timedelta(0),
            hard_stop_timeout=timedelta(seconds=1),
            durable_claims=True,
            **QUICK,
        ),
    )
    arguments = ("jobs:client", "--database-url", url, "--dead-after=2s")
    async with (
        running_worker(directory, *arguments, code=JOBS, MY_SCHEMA="public") as worker,
        client,
        client.working(),
    ):
        await worker.until_logged(WORKER_STARTED)
        await connection.executemany(insert, [["default"], ["mine"]])
        await worker.until_printed("began 1")
        while not ran:
            await asyncio.sleep(0.01)
        await connection.close()
        pid = int((server.directory / "data" / "postmaster.pid").read_text().split()[0])
        await anyio.run_process(["kill", "-QUIT", str(pid)])
        worker.send(signal.SIGKILL)
        await worker.exit_code()
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(server.start) == url
        connection = await asyncpg.connect(url)
        with anyio.fail_after(BOUND, reason="not rescued in time"):
            while await connection.fetchval("SELECT state::text FROM river_job WHERE id = 1") != (
                "available"
            ):
                await asyncio.sleep(0.01)
        row = await connection.fetchrow("SELECT * FROM river_job WHERE id = 2")
        assert row is not None
        assert (row["state"], row["attempt"]) == ("running", 1)
        release.set()
        with anyio.fail_after(BOUND, reason="not stored in time"):
            while await connection.fetchval("SELECT state::text FROM river_job WHERE id = 2") != (
                "completed"
            ):
                await asyncio.sleep(0.01)
    row = await connection.fetchrow("SELECT * FROM river_job WHERE id = 1")
    await connection.close()
    assert row is not None
    assert [json.loads(text)["error"] for text in row["errors"]] == [RESCUE_ERROR_TEXT]
    assert ran == [2]
