"""Tables that change after statements on them were prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from riverpy import EventKind, InsertManyParams, Job
from tests.work.rig import PATIENCE, Task

if TYPE_CHECKING:
    from typing import Any

    import asyncpg

    from riverpy import Client
    from tests.work.rig import Rig

ADD_COLUMN = "ALTER TABLE river_job ADD COLUMN colour text DEFAULT 'green'"
DROP_COLUMN = "ALTER TABLE river_job DROP COLUMN colour"


async def insert_in_transaction(client: Client, connection: asyncpg.Connection[Any]) -> int:
    """Insert in each way in one transaction of the caller, beside other work."""
    async with connection.transaction():
        await connection.execute("INSERT INTO mine VALUES (1)")
        await client.insert(Task(), tx=connection)
        await client.insert_many([InsertManyParams(Task()) for _ in range(2)], tx=connection)
        await client.insert_many_fast([InsertManyParams(Task()) for _ in range(2)], tx=connection)
    return 5


async def test_table_changes(rig: Rig) -> None:
    """After the table of jobs gained and lost a column, a worker and a caller's connection with
    prepared statements continue: each claim, result, insert and call succeeds at once, and the
    caller's transaction keeps its work (PB-04)."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.args.n == 1:
            raise ValueError("no luck")

    await rig.schema.execute("CREATE TABLE mine (n int)")
    rounds = 0
    async with rig.schema.connected() as connection, rig.working() as client:
        for statement in ("SELECT 1", ADD_COLUMN, DROP_COLUMN):
            with anyio.fail_after(PATIENCE):
                await rig.schema.execute(statement)
            for _ in range(3):  # often enough to be prepared with a generic plan
                rounds += 1
                count = await insert_in_transaction(client, connection)
                failing = await client.insert(Task(1))
                kinds = [event.kind for event in await rig.take(count + 1)]
                assert sorted(kinds) == [EventKind.JOB_COMPLETED] * count + [EventKind.JOB_FAILED]
                assert (await client.job_get(failing.job.id)).attempt == 1
                await client.job_cancel(failing.job.id)
    assert await rig.schema.fetchval("SELECT count(*) FROM mine") == rounds
    await rig.schema.execute("DROP TABLE mine")
