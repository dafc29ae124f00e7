"""Ids above the range of a 32-bit integer and of exact floats."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from riverpy import InsertManyParams, Job, JobCancel
from riverpy._maintenance.job_rescuer import JobRescuer
from riverpy.cli import main
from tests.leading.term_context import QuickTimer, held_term
from tests.work.rig import Task

if TYPE_CHECKING:
    from tests.work.rig import Rig

LARGE = [2**31, 2**53 + 1, 2**63 - 50]


@pytest.mark.parametrize("first", LARGE)
async def test_insert_and_work(rig: Rig, first: int) -> None:
    """Jobs with such ids can be inserted in each way, worked to each outcome, cancelled and
    retried, singly and in batches, and keep their ids (PF-07)."""
    seen: dict[int, int] = {}

    @rig.job(next_retry=lambda job: timedelta(hours=1))
    async def work(job: Job[Task]) -> None:
        seen[job.args.n] = job.id
        if job.args.n == 1:
            raise ValueError("fails")
        if job.args.n == 2:
            raise JobCancel("no")
        if job.args.n == 3:
            await asyncio.sleep(3600)

    await rig.schema.execute("SELECT setval('river_job_id_seq', $1, false)", first)
    poll = timedelta(milliseconds=50)  # no notification announces a retry
    async with rig.working(slots=10, fetch_poll_interval=poll) as client:
        ids = [(await client.insert(Task(n=n))).job.id for n in range(4)]
        assert (await client.job_get(first)).id == first
        many = await client.insert_many([InsertManyParams(Task(n=n)) for n in range(4, 8)])
        ids += [one.job.id for one in many]
        assert await client.insert_many_fast([InsertManyParams(Task(n=n)) for n in (8, 9)]) == 2
        events = await rig.take(9)
        assert (await client.job_cancel(ids[3])).id == ids[3]
        events.append(await rig.event())
        ids += [first + 8, first + 9]
        assert ids == [first + n for n in range(10)]
        assert seen == dict(enumerate(ids))
        assert sorted(event.job.id for event in events if event.job) == ids
        assert (await client.job_retry(ids[1])).id == ids[1]
        await rig.event()
    assert {row["id"]: row["state"] for row in await rig.schema.jobs()} == {
        **dict.fromkeys(ids, "completed"),
        ids[1]: "retryable",
        ids[2]: "cancelled",
        ids[3]: "cancelled",
    }


@pytest.mark.parametrize("first", LARGE)
async def test_rescue(rig: Rig, first: int) -> None:
    """Jobs with large ids are rescued from a dead client (PF-07)."""
    await rig.schema.execute("SELECT setval('river_job_id_seq', $1, false)", first)
    await rig.insert_rows(3)
    await rig.schema.execute(
        "UPDATE river_job SET state = 'running', attempt = 1, attempted_at = now(),"
        " attempted_by = array['gone']"
    )
    await rig.schema.execute(
        "INSERT INTO riverpy_client (client_id, queues, kinds, candidate, poll_only, version,"
        " dead_after, started_at, heartbeat_at) VALUES ('gone', '{}', '{}', true, false, '1',"
        " '10 milliseconds', now() - interval '1 hour', now() - interval '1 hour')"
    )
    async with held_term(rig.schema, dead_after=timedelta(milliseconds=100)) as held:
        rescuer = JobRescuer(held.context, lambda: 3600.0)
        await held.run(rescuer)
        assert isinstance(held.timer, QuickTimer)
        held.timer.skipped += 1
        await held.run(rescuer)
    rows = await rig.schema.jobs()
    assert [(row["id"], row["state"]) for row in rows] == [
        (first + n, "available") for n in range(3)
    ]


@pytest.mark.parametrize("first", LARGE)
async def test_command(rig: Rig, first: int) -> None:
    """The command line shows large ids unchanged, in text and in JSON (PF-07)."""
    await rig.schema.execute("SELECT setval('river_job_id_seq', $1, false)", first)
    await rig.insert_rows(1)

    async def riverpy(*args: str) -> str:
        options = ("--database-url", rig.url, "--schema", rig.schema.name)
        result = await asyncio.to_thread(CliRunner().invoke, main, [*args, *options])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert str(first) in await riverpy("job", "list")
    assert json.loads(await riverpy("job", "list", "--json"))["jobs"][0]["id"] == first
    assert str(first) in await riverpy("job", "show", str(first))
    assert json.loads(await riverpy("job", "show", str(first), "--json"))["id"] == first
