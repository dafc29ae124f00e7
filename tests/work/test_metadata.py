"""Metadata that is not an object, or whose keys have other types than River's, as SQL by hand and
other programs write it."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from riverpy import Job, JobCancel, JobSnooze
from riverpy._postgres.driver import use_raw_timestamps
from riverpy._postgres.job_maintenance import JobRescue, job_rescue, job_schedule
from riverpy._postgres.jobs import (
    AttemptResult,
    ClaimKey,
    job_find_cancel_requested,
    job_release,
    job_store_results,
)
from riverpy.cli import main
from riverpy.job import JobState
from tests.tools.doctor.conftest import run_doctor
from tests.work.rig import Rig, Task

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy import Client
    from tests._database import Schema

NO_OBJECTS = [
    "[]",
    '["cancel_attempted_at"]',
    '["a", {"cancel_attempted_at": 1}]',
    '"cancel_attempted_at"',
    '"x"',
    "1",
    "null",
    "true",
]
ODD_OBJECTS = [
    '{"snoozes": "x", "output": [], "river:rescue_count": "x", "tags": null}',
    '{"snoozes": -1e400, "river:rescue_count": -1.5, "a": 1e400}',
    '{"snoozes": null, "river:rescue_count": {}}',
    '{"snoozes": true, "river:rescue_count": 1e400, "deep": ' + "[" * 2000 + "]" * 2000 + "}",
]
ALL = NO_OBJECTS + ODD_OBJECTS
ERROR = '{"at": "2026-01-01T00:00:00Z", "attempt": 1, "error": "x", "trace": ""}'


@pytest.fixture
def rig(schema: Schema) -> Rig:
    return Rig(schema)


@pytest.fixture
async def client(rig: Rig) -> AsyncGenerator[Client]:
    async with rig.client() as client:
        yield client


async def add(schema: Schema, state: str, texts: list[str] = ALL) -> dict[int, str]:
    """Insert a job in this state for each of these metadata. Returns them by id."""
    rows = await schema.fetch(
        "INSERT INTO river_job (kind, args, max_attempts, state, attempt, attempted_at,"
        " scheduled_at, metadata, finalized_at)"
        " SELECT 'task', '{}', 3, $1::text::river_job_state, 1, now(), now() - interval '1 h',"
        " given::jsonb, CASE WHEN $1 IN ('cancelled', 'completed', 'discarded') THEN now() END"
        " FROM unnest($2::text[]) AS given RETURNING id",
        state,
        texts,
    )
    return dict(zip([row["id"] for row in rows], texts, strict=True))


async def claim_keys(schema: Schema) -> list[ClaimKey]:
    async with schema.connected() as connection:
        await use_raw_timestamps(connection)
        rows = await connection.fetch(
            "SELECT id, attempt, attempted_at FROM river_job WHERE state = 'running'"
        )
        return [ClaimKey(*row) for row in rows]


async def states(schema: Schema) -> set[str]:
    return {row["state"] for row in await schema.jobs()}


async def check_kept(schema: Schema, jobs: dict[int, str]) -> None:
    """Check that metadata other than an object is unchanged, and that an object keeps each key."""
    for job_id, text in jobs.items():
        operator = "@>" if text in ODD_OBJECTS else "="
        found = await schema.fetchval(
            f"SELECT metadata {operator} $2::text::jsonb FROM river_job WHERE id = $1", job_id, text
        )
        assert found, text[:80]


async def check_joined(schema: Schema, job_id: int, text: str, updates: str) -> None:
    """Check that the metadata is what `||` of a current PostgreSQL makes of both."""
    joined = (
        "SELECT metadata = CASE WHEN jsonb_typeof(old) IN ('object', 'array') THEN old"
        " ELSE jsonb_build_array(old) END || $2::text::jsonb"
        " FROM river_job, (SELECT $3::text::jsonb AS old) AS before WHERE id = $1"
    )
    assert await schema.fetchval(joined, job_id, updates, text), text[:80]


async def test_text_is_no_mark(schema: Schema) -> None:
    """The text `cancel_attempted_at` in metadata that is not an object cancels no job, in all
    statements that read the mark."""
    jobs = await add(schema, "running")
    running = await claim_keys(schema)
    async with schema.connected() as connection:
        await use_raw_timestamps(connection)
        assert await job_find_cancel_requested(connection, schema.name, list(jobs)) == []
        settled = await job_store_results(
            connection,
            schema.name,
            [AttemptResult(*one, "retryable", None, 0.0, 1, 1.0, ERROR, None) for one in running],
        )
        assert settled == dict.fromkeys(jobs, "retryable")
        await schema.execute("UPDATE river_job SET state = 'running'")
        assert await job_release(connection, schema.name, running) == set(jobs)
        assert await states(schema) == {"available"}
        await schema.execute("UPDATE river_job SET state = 'running', attempt = 1")
        await check_kept(schema, jobs)
        rescues = [JobRescue(one, None, 10.0) for one in running]
        rescued = await job_rescue(connection, schema.name, rescues)
        assert rescued == dict.fromkeys(jobs, "retryable")


async def test_updates_of_any_metadata(schema: Schema) -> None:
    """Each result that records something is stored for any metadata. If that is not an object, it
    is kept, and the updates follow it in a list."""
    jobs = await add(schema, "running")
    running = await claim_keys(schema)
    async with schema.connected() as connection:
        await use_raw_timestamps(connection)
        updates = '{"output": 5}'
        settled = await job_store_results(
            connection,
            schema.name,
            [
                AttemptResult(*one, "completed", True, 0.0, 1, None, None, updates)
                for one in running
            ],
        )
    assert settled == dict.fromkeys(jobs, "completed")
    for job_id, text in jobs.items():
        await check_joined(schema, job_id, text, updates)


async def test_due_jobs_of_any_metadata(schema: Schema) -> None:
    """The scheduler makes each due job available, and discards each whose key another job holds.
    Its note does not replace the metadata."""
    jobs = await add(schema, "scheduled")
    twins = await add(schema, "scheduled")
    await schema.execute(
        "UPDATE river_job SET unique_states = B'01110101', unique_key ="
        f" decode(lpad(to_hex(id % {len(ALL)}), 64, '0'), 'hex')"
    )
    async with schema.connected() as connection:
        ids = [*jobs, *twins]
        done = await job_schedule(connection, schema.name, ids=ids, lookahead=timedelta(0))
    assert (done.available_count, done.discarded_count) == (len(ALL), len(ALL))
    await check_kept(schema, jobs)
    for job_id, text in twins.items():
        await check_joined(schema, job_id, text, '{"unique_key_conflict": "scheduler_discarded"}')


@pytest.mark.parametrize("text", ALL, ids=range(len(ALL)))
async def test_verbs(schema: Schema, client: Client, text: str) -> None:
    """A job with any metadata can be read, cancelled, retried and given an output. Metadata of a
    job that does not run stays. The cancel mark of a running job is found, and metadata that is not
    an object is kept under a key."""
    for state in ("available", "scheduled", "pending", "retryable"):
        jobs = await add(schema, state, [text])
        (job_id,) = jobs
        assert (await client.job_get(job_id)).id == job_id
        assert (await client.job_cancel(job_id)).state is JobState.CANCELLED
        await check_kept(schema, jobs)
        assert (await client.job_retry(job_id)).state is JobState.AVAILABLE
        await check_kept(schema, jobs)
    jobs = await add(schema, "running", [text])
    (job_id,) = jobs
    assert (await client.job_cancel(job_id)).state is JobState.RUNNING
    async with schema.connected() as connection:
        assert await job_find_cancel_requested(connection, schema.name, [job_id]) == [job_id]
    if text in NO_OBJECTS:
        sql = "SELECT metadata -> 'riverpy:metadata' = $2::text::jsonb FROM river_job WHERE id = $1"
        assert await schema.fetchval(sql, job_id, text)
    assert (await client.job_cancel(job_id)).state is JobState.RUNNING
    assert (await client.job_retry(job_id)).state is JobState.RUNNING
    await client.job_update(job_id, output=7)
    sql = "SELECT (metadata ->> 'output')::int FROM river_job WHERE id = $1"
    assert await schema.fetchval(sql, job_id) == 7
    (waiting,) = await add(schema, "pending", [text])
    await client.job_update(waiting, output=7)
    await check_joined(schema, waiting, text, '{"output": 7}')


async def test_attempts(rig: Rig, schema: Schema) -> None:
    """Jobs with any metadata are worked, for each outcome."""
    await add(schema, "available")
    ends: dict[int, int] = {}

    @rig.job
    async def work(job: Job[Task]) -> None:
        assert isinstance(job.metadata, dict)
        ends[job.id] = ends.get(job.id, 0) + 1
        match job.id % 4, ends[job.id]:
            case 0, 1:
                raise ValueError("once")
            case 1, 1:
                raise JobSnooze(timedelta(0))
            case 2, _:
                raise JobCancel("enough")
            case _:
                job.record_output(1)

    await rig.work_due_jobs(with_scheduled=True)
    assert await states(schema) == {"completed", "cancelled"}


async def test_commands(schema: Schema) -> None:
    """A row whose metadata is not an object, or that a trigger refuses, does not affect the other
    rows in list, show, cancel, retry and doctor."""
    jobs = await add(schema, "pending")
    await schema.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'not this one'; END $$"
    )
    await schema.execute(
        "CREATE TRIGGER refuse BEFORE UPDATE ON river_job FOR EACH ROW"
        f" WHEN (old.id = {min(jobs)}) EXECUTE FUNCTION refuse()"
    )
    where = [f"--database-url={schema.url}", f"--schema={schema.name}", "--json"]
    ids = list(map(str, jobs))
    for command in (["cancel", *ids], ["retry", *ids], ["list"], ["show", ids[-1]]):
        result = await asyncio.to_thread(CliRunner().invoke, main, ["job", *command, *where])
        if len(command) > 2:
            assert result.exit_code == 1
            done = [one["action"] for one in json.loads(result.stdout)["jobs"]]
            assert done[0] == "failed"
            assert set(done[1:]) == {"cancelled" if command[0] == "cancel" else "retried"}
        else:
            assert result.exit_code == 0, result.output
    await schema.execute("DROP FUNCTION refuse CASCADE")
    report = await run_doctor(*where[:2])
    assert not [one for one in report.findings if "this check failed" in one["text"]]
