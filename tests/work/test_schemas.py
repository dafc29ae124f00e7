"""Several schemas in one database, and a schema outside the search path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from riverpy import EventKind, Job
from riverpy.migrate import migrate_all
from tests._database import Schema, connected
from tests.work.rig import PATIENCE, Rig, Task

if TYPE_CHECKING:
    from riverpy import Client

NAMES = ("MixedCase_1", "mixedcase_1")


def notices(client: Client) -> list[str]:
    """Return a list that receives the queues of later notifications."""
    told: list[str] = []
    producer: Any = client._run.producers["default"]  # type: ignore[union-attr]
    notify = producer.wake_after_notification

    def spy(notify_interval_ms: float | None = None) -> None:
        told.append(producer.queue)
        notify(notify_interval_ms)

    producer.wake_after_notification = spy
    return told


async def test_two_schemas_of_one_database(fresh_database_url: str) -> None:
    """With an empty search path, two clients on schemas whose names differ only in case become
    leaders, insert, work, cancel and pause. Neither receives the other's jobs, lease or
    notifications (MG-05)."""
    async with connected(fresh_database_url) as connection:
        database = await connection.fetchval("SELECT current_database()")
        await connection.execute(f"ALTER DATABASE \"{database}\" SET search_path = ''")
    for name in NAMES:
        async with connected(fresh_database_url) as connection:
            await connection.execute(f'CREATE SCHEMA "{name}"')
        await migrate_all(fresh_database_url, schema=name)
    async with connected(fresh_database_url) as connection:
        mine, other = (Rig(Schema(fresh_database_url, name, connection)) for name in NAMES)
        for rig in (mine, other):

            @rig.job
            async def work(job: Job[Task]) -> None:
                if job.args.n:
                    await anyio.sleep_forever()

        async with mine.working() as client, other.working() as stranger:
            for one, name in ((client, NAMES[0]), (stranger, NAMES[1])):
                with anyio.fail_after(PATIENCE):
                    while not one.is_leader:
                        await anyio.sleep(0.005)
                leaders = await connection.fetch(f'SELECT leader_id FROM "{name}".river_leader')
                assert [row[0] for row in leaders] == [one.id]
            told = notices(stranger)
            await client.insert(Task(0))
            assert (await mine.event()).kind is EventKind.JOB_COMPLETED
            stuck = await client.insert(Task(1))
            running = f"SELECT state = 'running' FROM \"{NAMES[0]}\".river_job WHERE id = $1"
            await mine.until(running, True, stuck.job.id)
            await client.job_cancel(stuck.job.id)
            assert (await mine.event()).kind is EventKind.JOB_CANCELLED
            await client.queue_pause("*")
            assert (await mine.event()).kind is EventKind.QUEUE_PAUSED
            assert told == []
            await stranger.insert(Task(0))
            assert (await other.event()).kind is EventKind.JOB_COMPLETED
            assert told
            jobs = f'SELECT count(*) FROM "{NAMES[1]}".river_job'
            assert await connection.fetchval(jobs) == 1
