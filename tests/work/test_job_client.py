"""`riverpy.sync.current_client`: the client of blocking jobs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import riverpy.sync
from riverpy import InsertManyParams, InsertOpts, NotFoundError
from riverpy.testing import require_inserted, require_not_inserted
from tests.work.rig import Task

if TYPE_CHECKING:
    from riverpy import Job, JobInsertParams
    from tests.work.rig import Rig

OTHER = InsertOpts(queue="other")


class Wait:
    """A hook that waits, as hooks may in the worker's event loop."""

    async def insert_begin(self, params: JobInsertParams, /) -> None:
        await asyncio.sleep(0)


async def test_thread(rig: Rig) -> None:
    """In a thread the calls run on the worker's connections, or in a transaction of the job's own,
    which also completes the job. Their errors are raised in the job."""
    pools: list[Any] = []

    @rig.job(executor="thread")
    def work(job: Job[Task]) -> None:
        client = riverpy.sync.current_client()
        first = client.insert(Task(1), OTHER).job
        client.insert_many([InsertManyParams(Task(2), OTHER)])
        assert len([*client.jobs(queues=["other"], page_size=1)]) == 2
        with pytest.raises(NotFoundError):
            client.job_cancel(0)
        with pytest.raises(riverpy.ClientStateError, match="run_once in a blocking job needs tx="):
            client.run_once("key", lambda tx: tx.execute("select 1"))
        pools.append(client)
        with psycopg.connect(rig.schema.url) as connection:
            connection.execute("select 1")
            with pytest.raises(riverpy.ConfigError, match="the hook Wait waits"):
                client.insert(Task(3), OTHER, tx=connection)
            client.job_cancel(first.id, tx=connection)
            connection.rollback()
            connection.execute("select 1")
            client.job_delete(first.id, tx=connection)
            run = client.run_once(
                "key", lambda tx: tx.execute("select 5").fetchone(), tx=connection
            )
            assert run.value == (5,)
            assert job.complete_tx(connection).state == "completed"

    row = await rig.run_one_on_pool(hooks=[Wait()])
    assert row["state"] == "completed", row["errors"]
    await require_inserted(Task(2), queue="other", tx=rig.schema.connection)
    await require_not_inserted(Task(1), queue="other", tx=rig.schema.connection)
    with pytest.raises(riverpy.ClientStateError):
        await asyncio.to_thread(pools[0].queue_list)


async def test_other_jobs(rig: Rig) -> None:
    """An async job and a job in a process have no such client. The errors say what to use."""
    for executor, text in ((None, "riverpy.current_client()"), ("process", "riverpy.sync.Client")):
        function = use_client_in_loop if executor is None else use_client
        rig.job(executor=executor, replace=True)(function)
        (error,) = (await rig.run_one())["errors"]
        assert text in error


async def use_client_in_loop(job: Job[Task]) -> None:
    """Use the client."""
    use_client(job)


def use_client(job: Job[Task]) -> None:
    """Use the client."""
    riverpy.sync.current_client().job_get(job.id)
