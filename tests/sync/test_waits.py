"""Waits of `riverpy.sync.Client`, which poll."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import psycopg
import psycopg_pool
import pytest

import riverpy.sync
from riverpy import (
    Config,
    Job,
    JobNotCompletedError,
    NotFoundError,
    TransactionError,
    WaitTimeoutError,
)
from tests.sessions.kinds import blocking_engine
from tests.work.rig import PATIENCE, Rig, Task

SOON = timedelta(milliseconds=50)
LONG = timedelta(seconds=PATIENCE)


def wait_for_all_outcomes(client: riverpy.sync.Client, ids: dict[str, int]) -> None:
    """Wait for jobs of each outcome in a thread."""
    assert riverpy.result(client.insert_and_wait(Task(1), timeout=LONG)) == 1
    rows = client.wait_many([ids["done"], ids["done"]], timeout=LONG)
    assert [row.output for row in rows] == [7, 7]
    assert client.wait_many([]) == []
    with pytest.raises(NotFoundError, match="there is no job 99999"):
        client.wait_many([ids["done"], 99999], timeout=LONG)
    with pytest.raises(WaitTimeoutError, match=r"scheduled\) did not end within 0.05 s") as raised:
        client.wait_many([ids["done"], ids["later"]], timeout=SOON)
    assert raised.value.job_ids == [ids["later"]]
    assert [row.id for row in raised.value.ended_jobs] == [ids["done"]]
    assert isinstance(raised.value, TimeoutError)
    client.job_cancel(ids["later"])
    row = client.wait(ids["later"], timeout=LONG)
    with pytest.raises(JobNotCompletedError, match="was cancelled"):
        riverpy.result(row)


@pytest.mark.parametrize("kind", ["engine", "pool", "url", "connection"])
async def test_waits(rig: Rig, kind: str) -> None:
    """A client waits in threads, over each kind of database."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        job.record_output(job.args.n)

    config = Config(schema=rig.schema.name)
    async with rig.working() as client:
        done = (await client.insert(Task(7))).job.id
        opts = riverpy.InsertOpts(scheduled_at=datetime(2100, 1, 1, tzinfo=UTC))
        later = (await client.insert(Task(8), opts)).job.id
        ids = {"done": done, "later": later}

        def run() -> None:
            if kind == "engine":
                with blocking_engine(rig.url, "psycopg") as engine:
                    wait_for_all_outcomes(riverpy.sync.Client(engine, config=config), ids)
            elif kind == "pool":
                with psycopg_pool.ConnectionPool(rig.url, max_size=1, min_size=1) as pool:
                    wait_for_all_outcomes(riverpy.sync.Client(pool, config=config), ids)
            elif kind == "connection":
                with psycopg.connect(rig.url) as connection:
                    blocking = riverpy.sync.Client(connection, config=config)
                    wait_for_all_outcomes(blocking, ids)
                    connection.execute("SELECT 1")
                    with pytest.raises(TransactionError, match="in a transaction"):
                        blocking.wait(done)
            else:
                with riverpy.sync.Client(rig.url, config=config) as blocking:
                    wait_for_all_outcomes(blocking, ids)

        await asyncio.to_thread(run)


async def test_wait_without_a_connection(rig: Rig) -> None:
    """Waits in many threads share a pool of one connection, since they keep none between two reads.
    In a blocking job, the client of the job waits."""

    @rig.job(executor="thread")
    def work_in_thread(job: Job[Task]) -> list[int]:
        if not job.args.n:
            return [0]
        inner = riverpy.sync.current_client().insert_and_wait(Task(job.args.n - 1), timeout=LONG)
        return [*riverpy.result(inner, type=list[int]), job.args.n]

    def run() -> None:
        with psycopg_pool.ConnectionPool(rig.url, max_size=1, min_size=1) as pool:
            blocking = riverpy.sync.Client(pool, config=Config(schema=rig.schema.name))
            with ThreadPoolExecutor(4) as threads:
                calls = [
                    threads.submit(blocking.insert_and_wait, Task(n), timeout=LONG)
                    for n in range(4)
                ]
            assert [call.result().output for call in calls] == [
                list(range(n + 1)) for n in range(4)
            ]

    async with rig.working():
        await asyncio.to_thread(run)
