"""Waits for the end of jobs, from clients that only insert and from clients that work."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from riverpy import Client, Config, Job, NotFoundError
from tests.work.rig import PATIENCE, Rig, Task

LONG = timedelta(seconds=PATIENCE)


def make_inserting_client(rig: Rig, **settings: Any) -> Client:
    """A client that works no jobs."""
    return Client(rig.url, config=Config(schema=rig.schema.name, **settings))


async def test_insert_and_wait(rig: Rig) -> None:
    """A client that only inserts gets the final row of each job. All of its waits share one
    connection that listens."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        job.record_output(job.args.n)

    async with rig.working(), make_inserting_client(rig) as client:
        row = await client.insert_and_wait(Task(100), timeout=LONG)
        assert (row.state, row.output) == ("completed", 100)
        async with asyncio.TaskGroup() as tasks:
            waits = [tasks.create_task(client.insert_and_wait(Task(n))) for n in range(20)]
        assert [wait.result().output for wait in waits] == list(range(20))
        with pytest.raises(NotFoundError, match="987"):
            await client.wait(987)
        job = (await client.insert(Task(1))).job
        assert (await client.wait(job.id)).output == 1
