"""The job expirer: which waiting jobs are cancelled, and what their rows show."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from riverpy._log_events import EXPIRED_JOBS_CANCELLED
from riverpy._maintenance import batch_runner, job_expirer
from riverpy._maintenance.job_expirer import RUN_INTERVAL_MIN, JobExpirer
from riverpy._postgres.job_maintenance import (
    EXPIRED_JOB_ERROR_TEXT,
    job_cancel_expired,
    job_list_expired,
)
from riverpy._work.expiry import EXPIRED_ERROR_TEXT
from riverpy.errors import FencedOutError
from tests._damage import DAMAGED_EXPIRIES
from tests.maintenance.rows import insert_jobs, states_of

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.leading.term_context import HeldTerm

WAITING = ("available", "pending", "retryable", "scheduled")
PAST, FUTURE = "interval '-1 second'", "interval '1 minute'"


def expiring(by: str) -> str:
    """The metadata of a job that expires at the server's time plus `by`."""
    text = f"to_char((now() + {by}) at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')"
    return f"jsonb_build_object('a', 1, 'riverpy:expires_at', {text})"


async def test_cancels_waiting_jobs(
    held: HeldTerm, schema: Schema, log: list[dict[str, Any]]
) -> None:
    """Waiting jobs that have expired are cancelled with the error of an expired claim. Their
    attempts and all else stay as they are. Other jobs stay, and the count is logged."""
    assert f"JobCancelError: {EXPIRED_ERROR_TEXT}" == EXPIRED_JOB_ERROR_TEXT
    expired = [
        (await insert_jobs(schema, state=f"'{state}'", metadata=expiring(PAST), attempt="2"))[0]
        for state in WAITING
    ]
    others: list[int] = []
    for state in WAITING:
        others += await insert_jobs(schema, state=f"'{state}'", metadata=expiring(FUTURE))
    others += await insert_jobs(schema, state="'running'", metadata=expiring(PAST))
    others += await insert_jobs(
        schema, state="'completed'", finalized_at="now()", metadata=expiring(PAST)
    )
    for metadata in DAMAGED_EXPIRIES:
        others += await insert_jobs(schema, metadata=f"'{metadata}'")
    before = {row["id"]: dict(row) for row in await schema.jobs()}
    assert await held.run(JobExpirer(held.context)) == RUN_INTERVAL_MIN
    after = {row["id"]: dict(row) for row in await schema.jobs()}
    for job_id in expired:
        row = after[job_id]
        (error,) = map(json.loads, row["errors"])
        assert error.pop("at").endswith("Z")
        assert error == {"attempt": 2, "error": EXPIRED_JOB_ERROR_TEXT, "trace": ""}
        changed = {"state": "cancelled"} | {key: row[key] for key in ("finalized_at", "errors")}
        assert row == before[job_id] | changed
        assert row["finalized_at"] is not None
    assert {job_id: after[job_id] for job_id in others} == {n: before[n] for n in others}
    assert [(entry["event"], entry["count"]) for entry in log] == [(EXPIRED_JOBS_CANCELLED, 4)]


async def test_jobs_that_change_after_the_read(schema: Schema) -> None:
    """The statement that cancels the found jobs checks each of them again. So a job that has
    started, ended or been retried since it was found stays as it is, and so does one that another
    session changes at this time. Jobs whose time is damaged are neither found nor cancelled."""
    past, running, ended, retried, changing = await insert_jobs(schema, 5, metadata=expiring(PAST))
    damaged = [
        (await insert_jobs(schema, metadata=f"'{metadata}'"))[0] for metadata in DAMAGED_EXPIRIES
    ]
    async with schema.connected() as claiming, schema.connected() as leader:
        ids = await job_list_expired(
            leader, schema.name, queue_filter=None, skipped_ids=[], limit=10
        )
        assert ids == [past, running, ended, retried, changing]
        await schema.execute("UPDATE river_job SET state = 'running' WHERE id = $1", running)
        await schema.execute(
            "UPDATE river_job SET state = 'completed', finalized_at = now() WHERE id = $1", ended
        )
        await schema.execute(
            f"UPDATE river_job SET metadata = {expiring(FUTURE)} WHERE id = $1", retried
        )
        async with claiming.transaction():
            await claiming.execute("UPDATE river_job SET state = 'running' WHERE id = $1", changing)
            assert await job_cancel_expired(leader, schema.name, [*ids, *damaged]) == {past}
    assert await states_of(schema) == {
        past: "cancelled",
        running: "running",
        ended: "completed",
        retried: "available",
        changing: "running",
        **dict.fromkeys(damaged, "available"),
    }


async def test_pages_and_locked_rows(
    held: HeldTerm, schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More jobs than a page and a batch hold are all cancelled, except for a locked one, which the
    next run cancels. Many reads of one run end although a job cannot be cancelled."""
    monkeypatch.setattr(batch_runner, "BATCH_ROWS_MAX", 3)
    monkeypatch.setattr(job_expirer, "PAGE_ROWS_MAX", 4)
    ids = await insert_jobs(schema, 11, metadata=expiring(PAST))
    service = JobExpirer(held.context)
    async with schema.connected() as one, one.transaction():
        await one.execute("SELECT FROM river_job WHERE id = $1 FOR UPDATE", ids[1])
        await held.run(service)
        states = await states_of(schema)
        assert [job_id for job_id in ids if states[job_id] != "cancelled"] == [ids[1]]
    await held.run(service)
    assert set((await states_of(schema)).values()) == {"cancelled"}


async def test_former_leader(held: HeldTerm, schema: Schema) -> None:
    """A client that is no longer the leader cancels nothing."""
    await insert_jobs(schema, metadata=expiring(PAST))
    await schema.execute("UPDATE river_leader SET leader_id = 'other'")
    with pytest.raises(FencedOutError):
        await JobExpirer(held.context).batch_runner.send_in_batches(list(await states_of(schema)))
    assert set((await states_of(schema)).values()) == {"available"}


async def test_interval_after_slow_reads(held: HeldTerm, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a slow read the next run comes later, so that reads take a small part of the time."""
    monkeypatch.setattr(job_expirer, "RUN_INTERVAL_PER_READ_SECOND", 1e9)
    assert await held.run(JobExpirer(held.context)) > RUN_INTERVAL_MIN
