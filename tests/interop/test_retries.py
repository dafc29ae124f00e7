"""Retries of jobs in each state by either language."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from tests.interop.callers import Refused
from tests.interop.conform import conform, error_text
from tests.interop.test_jobs import ended, same_row
from tests.interop.working import LANGUAGES, OTHER

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.interop.callers import Caller
    from tests.interop.working import Fleet

    Callers = dict[str, Caller]

EITHER = pytest.mark.parametrize("language", LANGUAGES)
ENTRY = '{"at": "2026-01-01T00:00:00Z", "attempt": 5, "error": "before", "trace": ""}'
FINAL = ("cancelled", "completed", "discarded")
WAITING = ("pending", "retryable", "scheduled")
USED_UP = """
UPDATE river_job SET state = $2::river_job_state, attempt = 5, max_attempts = 5,
    attempted_at = now() - interval '1 minute', attempted_by = ARRAY['gone'],
    scheduled_at = now() + interval '1 hour', errors = ARRAY[$3::jsonb],
    finalized_at = CASE WHEN $2 IN ('cancelled', 'completed', 'discarded') THEN now() END
WHERE id = $1
"""
WITH_METADATA = "UPDATE river_job SET metadata = $2::jsonb WHERE id = $1"
AVAILABLE = "UPDATE river_job SET state = 'available' WHERE id = $1"
FAILURE = {"go": "job_cancelled", "python": "job_failed"}
"""The end of a failing job with an old mark."""
MARK = {"cancel_attempted_at": "2026-01-01T00:00:00Z"}
KEPT = {
    "snoozes": 2,
    "river:rescue_count": 1,
    "unique_key_conflict": "scheduler_discarded",
    "output": {"n": 1},
    "mine": [1.5, None],
    "retry_ms": 3_600_000,
}
REQUIRED = ["available", "pending", "running", "scheduled"]


async def wake(callers: Callers) -> None:
    """Notify the worker. Go does not notify of a retry, and of inserts at most ten times per
    second."""
    await callers["python"].insert(conform())


@EITHER
async def test_exhausted(language: str, callers: Callers, fleet: Fleet, schema: Schema) -> None:
    """A retry gives a job without attempts left one more. One with attempts left, one that runs and
    one that is due get none (CF-026, exhausted_job_retry)."""
    caller = callers[OTHER[language]]
    async with fleet.worker(language) as worker:
        job = await caller.insert(conform("first fail", message="no", max_attempts=1))
        before = await ended(worker, callers, schema, "job_failed", job["id"])
        assert before["state"] == "discarded"
        await caller.begin()
        retried = await caller.retry(job["id"])
        assert retried == before | {
            "state": "available",
            "finalized_at": None,
            "max_attempts": 2,
            "scheduled_at": retried["scheduled_at"],
        }
        assert (retried["attempt"], len(retried["errors"])) == (1, 1)
        assert retried["scheduled_at"] > before["finalized_at"]
        await caller.commit()
        await wake(callers)
        row = await ended(worker, callers, schema, "job_completed", job["id"])
        assert (row["attempt"], row["max_attempts"], len(row["errors"])) == (2, 2, 1)

        running, cancelled, due = await caller.insert_many(
            conform("signal", message="end"),
            conform(max_attempts=3, pending=True),
            conform(queue="nobody"),
        )
        await worker.until("job_started", id=running["id"])
        await caller.cancel(cancelled["id"])
        assert (await caller.retry(cancelled["id"]))["max_attempts"] == 3
        for job in (running, due):
            row = await same_row(callers, schema, job["id"])
            assert await caller.retry(job["id"]) == row
            assert await same_row(callers, schema, job["id"]) == row
        worker.release("end")
        await worker.until("job_completed", id=running["id"])


@EITHER
async def test_from_every_state(language: str, callers: Callers, schema: Schema) -> None:
    """A job in any state except running and available is due at once, with one more attempt if all
    were used, and keeps its errors (CF-099)."""
    for state in (*FINAL, *WAITING):
        job = await callers[OTHER[language]].insert(conform(queue="nobody"))
        await schema.execute(USED_UP, job["id"], state, ENTRY)
        before = await same_row(callers, schema, job["id"])
        began = await schema.fetchval("SELECT clock_timestamp()")
        after = await callers[language].retry(job["id"])
        assert after == await same_row(callers, schema, job["id"])
        assert after == before | {
            "state": "available",
            "finalized_at": None,
            "max_attempts": 6,
            "scheduled_at": after["scheduled_at"],
        }
        assert abs(after["scheduled_at"] - began) < timedelta(seconds=1)


@EITHER
async def test_held_key(language: str, callers: Callers, schema: Schema) -> None:
    """The unique index refuses the retry of a unique job whose key another job holds, and nothing
    changes (CF-099)."""
    unique = {"by_args": True, "by_state": REQUIRED}
    for state in (*FINAL, "retryable"):
        request = conform(message=state, queue="nobody", unique=unique)
        job = await callers[language].insert(request)
        await schema.execute(USED_UP, job["id"], state, ENTRY)
        holder = await callers[OTHER[language]].insert(request)
        assert holder["id"] != job["id"]
        before = await same_row(callers, schema, job["id"])
        with pytest.raises(Refused, match="unique"):
            await callers[language].retry(job["id"])
        assert await same_row(callers, schema, job["id"]) == before
        assert await same_row(callers, schema, holder["id"]) == holder


@EITHER
async def test_mark(language: str, callers: Callers, fleet: Fleet, schema: Schema) -> None:
    """A retry by either language removes the cancel mark and no other key, so the next failure is a
    failure. A retry of a running job leaves the mark. Python's claim drops a mark that an older
    River left on a due job; Go's claim keeps it, and the next failure is a cancellation
    (CF-098)."""
    async with fleet.worker(language) as worker:
        for caller in callers.values():
            job = await caller.insert(conform("fail", message="no", pending=True))
            await schema.execute(WITH_METADATA, job["id"], json.dumps(KEPT))
            await caller.cancel(job["id"])
            retried = await caller.retry(job["id"])
            assert json.loads(retried["metadata"]) == KEPT
            await wake(callers)
            row = await ended(worker, callers, schema, "job_failed", job["id"])
            assert (row["state"], row["attempt"]) == ("retryable", 1)
            assert [one.error for one in row["errors"]] == [error_text(language, "no")]
            assert json.loads(row["metadata"]) == KEPT

            running = await caller.insert(conform("cancelled insist end", message=caller.language))
            await wake(callers)
            await worker.until("job_started", id=running["id"])
            marked = await caller.cancel(running["id"])
            assert await caller.retry(running["id"]) == marked
            worker.release(caller.language)
            row = await ended(worker, callers, schema, "job_cancelled", running["id"])
            assert row["metadata"] == marked["metadata"]

        for behavior, event in (("return", "job_completed"), ("fail", FAILURE[language])):
            old = await callers["go"].insert(conform(behavior, message="no", pending=True))
            await schema.execute(WITH_METADATA, old["id"], json.dumps(KEPT | MARK))
            await schema.execute(AVAILABLE, old["id"])
            await wake(callers)
            row = await ended(worker, callers, schema, event, old["id"])
            assert json.loads(row["metadata"]) == KEPT | (MARK if language == "go" else {})
