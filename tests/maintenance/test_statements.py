"""Statements of maintenance: what each reads, and that what writes checks again what was read."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from riverpy._postgres.job_maintenance import (
    JobFilter,
    job_delete_ended,
    job_get_stuck,
    job_list_ended,
    job_list_running_of_clients,
    job_list_states_to_clean,
    job_list_stuck_ids,
    job_schedule,
)
from riverpy._postgres.queues import queue_delete_unused
from riverpy._postgres.sql_files import QueueFilter
from riverpy.job import JobColumn
from tests.maintenance.rows import insert_ended, insert_jobs, states_of

if TYPE_CHECKING:
    from tests._database import Schema

DAY, HOUR = timedelta(days=1), timedelta(hours=1)
OLD = "now() - interval '2 days'"


async def test_ended_jobs(schema: Schema) -> None:
    """Only jobs that ended in this state longer ago than the retention are read, the oldest first,
    and deleted: a job that was retried since it was read stays."""
    newer = await insert_ended(schema, "completed", "2 days")
    oldest = await insert_ended(schema, "completed", "3 days")
    await insert_ended(schema, "completed", "1 hour")
    await insert_ended(schema, "cancelled", "2 days")
    await insert_ended(schema, "discarded", "1 hour")
    await insert_jobs(schema, created_at=OLD)
    ids = list(await states_of(schema))
    days = dict.fromkeys(("cancelled", "completed", "discarded"), DAY)
    async with schema.connected() as connection:
        states = await job_list_states_to_clean(connection, schema.name, days)
        found = await job_list_ended(
            connection,
            schema.name,
            state="completed",
            retention=DAY,
            job_filter=JobFilter(),
            after_cursor=None,
            limit=10,
        )
        deleted = await job_delete_ended(
            connection, schema.name, ids=ids, state="completed", retention=DAY
        )
    assert states == {"cancelled", "completed"}
    assert [one.cursor.job_id for one in found] == [oldest, newer]
    assert deleted == {oldest, newer}


@pytest.mark.parametrize(
    ("within", "expected"),
    [
        (None, ["a", "b"]),
        (QueueFilter(("a",), is_allow_list=True), ["a"]),
        (QueueFilter(("a",), is_allow_list=False), ["b"]),
    ],
    ids=["all", "some", "others"],
)
async def test_running_jobs(
    schema: Schema, within: QueueFilter | None, expected: list[str]
) -> None:
    """Only running jobs are read, in these queues: those that a client claimed last, and those that
    run for longer than the age; page by page, and but for the skipped ones."""
    for queue in ("a", "b"):
        for state, by, at in (
            ("running", "array['x', 'dead']", OLD),
            ("running", "array['dead', 'x']", "now()"),
            ("running", "array['dead']", "null"),
            ("retryable", "array['x', 'dead']", OLD),
        ):
            await insert_jobs(
                schema, state=f"'{state}'", queue=f"'{queue}'", attempted_by=by, attempted_at=at
            )
    ids = [{"a": 1, "b": 5}[queue] for queue in expected]
    async with schema.connected() as connection:

        async def claimed(after: int, limit: int, *skipped: int) -> list[int]:
            rows = await job_list_running_of_clients(
                connection,
                schema.name,
                client_ids=["dead"],
                queue_filter=within,
                after_id=after,
                limit=limit,
                skipped_ids=skipped,
            )
            return [row.claim_key.id for row in rows]

        async def stuck(after: int, limit: int) -> list[int]:
            return await job_list_stuck_ids(
                connection,
                schema.name,
                running_longer_than=HOUR,
                queue_filter=within,
                after_id=after,
                limit=limit,
            )

        assert await claimed(0, 10) == await stuck(0, 10) == ids
        assert await claimed(0, 1) == await stuck(0, 1) == ids[:1]
        assert await claimed(ids[0], 10) == await stuck(ids[0], 10) == ids[1:]
        assert await claimed(0, 10, ids[0]) == ids[1:]
        rows = await job_get_stuck(
            connection, schema.name, ids=range(1, 9), running_longer_than=HOUR
        )
        assert [row[JobColumn.ID] for row in rows] == [1, 5]


async def test_due_jobs(schema: Schema) -> None:
    """A job that was cancelled, or put off, since it was found due stays as it is."""
    (due,) = await insert_jobs(schema, state="'retryable'", scheduled_at=OLD)
    (later,) = await insert_jobs(
        schema, state="'scheduled'", scheduled_at="now() + interval '1 day'"
    )
    cancelled = await insert_ended(schema, "cancelled", "1 second", scheduled_at=OLD)
    async with schema.connected() as connection:
        moved = await job_schedule(
            connection, schema.name, ids=[due, later, cancelled], lookahead=HOUR
        )
    assert (moved.available_count, moved.discarded_count, moved.unchanged_job_ids) == (
        1,
        0,
        [later, cancelled],
    )
    assert await states_of(schema) == {due: "available", later: "scheduled", cancelled: "cancelled"}


async def test_unused_queues(schema: Schema) -> None:
    """A queue that was worked, paused or described since it was found unused stays."""
    await schema.execute(
        "INSERT INTO river_queue (name, metadata, updated_at, paused_at) VALUES"
        f" ('unused', '{{}}', {OLD}, null), ('worked', '{{}}', now(), null),"
        f" ('paused', '{{}}', {OLD}, now()), ('described', '{{\"a\": 1}}', {OLD}, null)"
    )
    names = ["unused", "worked", "paused", "described"]
    async with schema.connected() as connection:
        forgotten = await queue_delete_unused(connection, schema.name, names=names, unused_for=DAY)
    assert forgotten == {"unused"}
