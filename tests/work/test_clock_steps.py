"""Steps of the server's clock: no live client is treated as dead, and dead clients are found."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest

from riverpy import Client, Config, Job, QueueConfig, Workers
from riverpy._log_events import WORKER_STARTED
from riverpy.migrate import migrate_all
from tests.cli.worker_process import running_worker
from tests.kit.server_faults import clock_stepped
from tests.kit.stepped_server import SteppedPostgres
from tests.kit.wall_clock import WallClock
from tests.work.test_rescue import JOBS

DEAD_AFTER = timedelta(seconds=3)
STEP = 600
STEPS = 12
INSERT = "INSERT INTO river_job (kind, queue, max_attempts, args) VALUES ('task', $1, 25, '{}')"


@pytest.mark.timeout(120)
async def test_server_clock(tmp_path: Path) -> None:
    """If the server's clock steps by ten minutes, each time within one heartbeat interval, the
    leader rescues none of its own jobs. A worker that is killed before the clock is set back is
    still found dead, and its job runs again."""
    if not WallClock.is_possible():
        pytest.skip("no C compiler, which makes the clock of the server")
    with tempfile.TemporaryDirectory(prefix="rp-", dir="/tmp") as base:
        Path(base).chmod(0o711)
        server = SteppedPostgres(Path(base))
        url = await asyncio.to_thread(server.start)
        try:
            await with_steps(server, url, tmp_path)
        finally:
            await asyncio.to_thread(server.remove)


async def with_steps(server: SteppedPostgres, url: str, directory: Path) -> None:
    """Run the test above with its server."""
    connection = await asyncpg.connect(url)
    await migrate_all(connection)
    ran: list[int] = []
    release = asyncio.Event()
    workers = Workers()

    @workers.job(kind="task", timeout=None)
    async def task(job: Job) -> None:  # type: ignore[type-arg]
        ran.append(job.id)
        if job.queue == "mine":
            await release.wait()

    leader = Client(
        url,
        workers=workers,
        queues={"mine": QueueConfig(max_workers=1)},
        config=Config(
            elect_interval=timedelta(milliseconds=200),
            leader_ttl=timedelta(seconds=30),
            dead_after=DEAD_AFTER,
            durable_claims=True,
        ),
    )

    async def until(sql: str, expected: Any) -> None:
        with anyio.fail_after(60, reason=f"{sql} is not {expected}"):
            while await connection.fetchval(sql) != expected:
                await anyio.sleep(0.02)

    async with leader, leader.working():
        await connection.execute(INSERT, "mine")
        await until("SELECT count(*) FROM river_job WHERE state = 'running'", 1)
        with anyio.fail_after(60):
            while not in_contact(leader):
                await anyio.sleep(0.02)
        for _ in range(STEPS):  # the rescuer runs between a step and a heartbeat
            server.clock.step(STEP)
            await anyio.sleep(DEAD_AFTER.total_seconds() / STEPS)
        arguments = ("jobs:client", "--database-url", url, "--dead-after=3s")
        async with running_worker(directory, *arguments, code=JOBS, MY_SCHEMA="public") as worker:
            await worker.until_logged(WORKER_STARTED)
            await connection.execute(INSERT, "default")
            await worker.until_printed("began 2")
            worker.send(signal.SIGKILL)
            await worker.exit_code()
        async with clock_stepped(server.clock, -STEP):
            await until("SELECT state::text FROM river_job WHERE id = 2", "available")
        row = await connection.fetchrow("SELECT state::text, attempt, errors FROM river_job")
        release.set()
    await connection.close()
    assert ran == [1]
    assert row is not None
    assert tuple(row) == ("running", 1, None)


def in_contact(client: Client) -> bool:
    """Whether the client is the leader and could detect a dead client."""
    run: Any = client._run
    return (
        client.is_leader and run._heartbeat.unbroken_contact_seconds() > DEAD_AFTER.total_seconds()
    )
