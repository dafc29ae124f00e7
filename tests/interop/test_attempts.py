"""The ends of attempts in each language, as both read them."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from tests.interop.conform import conform, error_text
from tests.interop.test_jobs import same_row
from tests.interop.working import LANGUAGES, OTHER

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.interop.callers import Caller
    from tests.interop.river_go import Row
    from tests.interop.working import Fleet, Worker
    from tests.work.rig import Rig

    Callers = dict[str, Caller]

EITHER = pytest.mark.parametrize("language", LANGUAGES)
CAP = 9_223_372_036.854775
"""The longest wait for a retry, in seconds."""
ODD_TEXT = 'two\nlines "quoted" <b>&\' é漢😀 \u2028 \t.'
ERRORS = """
UPDATE river_job SET attempt = $2::int, max_attempts = 32767, state = 'available',
    scheduled_at = now(),
    errors = array_fill('{"at": "2026-01-01T00:00:00Z", "attempt": 1, "error": "", "trace": ""}'
        ::jsonb, ARRAY[$2::int])
WHERE id = $1
"""
DUE_IN = """
SELECT extract(epoch FROM scheduled_at - (errors[array_upper(errors, 1)] ->> 'at')::timestamptz)
    ::float8
FROM river_job WHERE id = $1
"""


@EITHER
async def test_default_retries(
    language: str, callers: Callers, fleet: Fleet, schema: Schema
) -> None:
    """A failed job waits for n^4 seconds, 10 % more or less. After the 310th failure it waits for
    the longest time there is, always the same (CF-044, default_retry_policy_schedule)."""
    caller = callers[OTHER[language]]
    async with fleet.worker(language) as worker:
        for errors, state, least, most in (
            (0, "available", 0.9, 1.1),
            (1, "retryable", 16 * 0.9, 16 * 1.1),
            (308, "retryable", 309**4 * 0.9, min(CAP, 309**4 * 1.1)),
            (309, "retryable", CAP, CAP),
            (400, "retryable", CAP, CAP),
        ):
            job = await caller.insert(conform("fail", message="no", pending=True))
            await schema.execute(ERRORS, job["id"], errors)
            await caller.insert(conform())  # its notification wakes the worker
            await worker.until("job_failed", id=job["id"])
            assert (await same_row(callers, schema, job["id"]))["state"] == state
            due_in = await schema.fetchval(DUE_IN, job["id"])
            # The time of the error is that of the attempt's start.
            assert least - 0.05 <= due_in <= most + 1


@EITHER
async def test_snoozes(language: str, callers: Callers, fleet: Fleet, schema: Schema) -> None:
    """A snooze counts in the metadata and not as an attempt. A short one leaves the job available,
    and no worker claims it before its time (CF-046, snooze_once_metadata_transition)."""
    metadata = {"mine": {"a": [1.5]}}
    async with fleet.worker(language, poll=0.2) as worker:
        once, long, short = await callers[OTHER[language]].insert_many(
            conform("snooze-once", duration_ms=5, metadata=metadata),
            conform("snooze", duration_ms=10_000, metadata=metadata),
            conform("snooze", duration_ms=4_000),
        )
        await worker.until("job_snoozed", id=once["id"])
        await worker.until("job_completed", id=once["id"])
        row = await same_row(callers, schema, once["id"])
        assert json.loads(row["metadata"]) == {"snoozes": 1} | metadata
        assert (row["attempt"], row["errors"], row["attempted_by"]) == (1, [], [worker.id] * 2)

        await worker.until("job_snoozed", id=long["id"])
        row = await same_row(callers, schema, long["id"])
        assert json.loads(row["metadata"]) == {"snoozes": 1} | metadata
        assert (row["state"], row["attempt"], row["finalized_at"]) == ("scheduled", 0, None)
        assert 9.9 <= (row["scheduled_at"] - row["attempted_at"]).total_seconds() < 12

        await worker.until("job_snoozed", id=short["id"])
        row = await same_row(callers, schema, short["id"])
        assert (row["state"], row["attempt"]) == ("available", 0)
        assert 3.9 <= (row["scheduled_at"] - row["attempted_at"]).total_seconds() < 5
        await asyncio.sleep(1)
        assert await same_row(callers, schema, short["id"]) == row


@EITHER
async def test_due_times(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """No attempt starts before its job is due, whichever client made it available, and each job is
    worked once (CF-047, clock_boundary_scheduling)."""
    caller = callers[OTHER[language]]
    soon = (await schema.fetchval("SELECT now() + interval '1 second'")).isoformat()
    async with (
        fleet.worker(language, poll=0.1, candidate=True) as worker,
        fleet.worker(OTHER[language], poll=0.1, queues={"elsewhere": 1}, candidate=True),
    ):
        scheduled, snoozed = await caller.insert_many(
            conform(scheduled_at=soon), conform("snooze-once", duration_ms=2_000)
        )
        await worker.until("job_completed", id=scheduled["id"])
        await worker.until("job_completed", id=snoozed["id"])
    assert await schema.fetchval("SELECT bool_and(attempted_at >= scheduled_at) FROM river_job")
    assert len(worker.passed("job_started", id=scheduled["id"])) == 1
    assert len(worker.passed("job_started", id=snoozed["id"])) == 2


@EITHER
async def test_error_entries(language: str, callers: Callers, fleet: Fleet, schema: Schema) -> None:
    """Both languages read the entry of a panic or an exception alike, whatever its text. A NUL does
    not keep riverpy from storing the result (CF-048, panic_attempt_trace)."""
    texts = {"panic": ODD_TEXT, "fail": ODD_TEXT}
    async with fleet.worker(language) as worker:
        for step, text in texts.items():
            job = await callers[OTHER[language]].insert(conform(step, message=text))
            await worker.until("job_failed", id=job["id"])
            (entry,) = (await same_row(callers, schema, job["id"]))["errors"]
            assert entry.error == error_text(language, text, panics=step == "panic")
            assert entry.attempt == 1
            # Go records a trace only for a panic.
            assert bool(entry.trace) == (language == "python" or step == "panic")


async def wait_for_timeout(
    worker: Worker, caller: Caller, callers: Callers, schema: Schema, **opts: object
) -> Row:
    """Return the row of a job that waits until its timeout."""
    job = await caller.insert(conform("signal", message="never", **opts))
    await worker.until("job_failed", id=job["id"])
    return await same_row(callers, schema, job["id"])


@EITHER
async def test_timeouts(language: str, callers: Callers, fleet: Fleet, schema: Schema) -> None:
    """A job is cancelled at its timeout: discarded, or retried while attempts are left. Its own
    timeout precedes the client's; a job without either has none (CF-042, timeout_cancellation)."""
    caller = callers[OTHER[language]]
    async with fleet.worker(language, job_timeout=0.05) as worker:
        short = {"metadata": {"timeout_ms": 20}}
        row = await wait_for_timeout(worker, caller, callers, schema, max_attempts=1, **short)
        assert (row["state"], row["attempt"], len(row["errors"])) == ("discarded", 1, 1)
        assert 0.02 <= (row["finalized_at"] - row["attempted_at"]).total_seconds() < 2
        later = {"metadata": {"retry_ms": 3_600_000}}
        row = await wait_for_timeout(worker, caller, callers, schema, max_attempts=2, **later)
        assert (row["state"], row["attempt"], row["finalized_at"]) == ("retryable", 1, None)
        long, endless = await caller.insert_many(
            conform("sleep", duration_ms=150, metadata={"timeout_ms": 30_000}),
            conform("sleep", duration_ms=150, metadata={"timeout_ms": -1}),
        )
        await worker.until("job_completed", id=long["id"])
        await worker.until("job_completed", id=endless["id"])


@EITHER
@pytest.mark.parametrize("do", ["cancel", "panic"])
async def test_error_handler(
    language: str, do: str, callers: Callers, fleet: Fleet, schema: Schema
) -> None:
    """An error handler can cancel the job, whose error keeps its text. A handler that fails changes
    nothing (CF-043, error_handler_cancel_override)."""
    async with fleet.worker(language, error_handler=do) as worker:
        for step in ("fail", "panic"):
            job = await callers[OTHER[language]].insert(
                conform(step, message="boom", max_attempts=3, metadata={"retry_ms": 3_600_000})
            )
            call = await worker.until("error_handler", id=job["id"])
            assert (call["attempt"], call["state"], call["error"]) == (1, "running", "boom")
            await worker.until("job_cancelled" if do == "cancel" else "job_failed", id=job["id"])
            row = await same_row(callers, schema, job["id"])
            assert row["state"] == ("cancelled" if do == "cancel" else "retryable")
            assert [one.error for one in row["errors"]] == [
                error_text(language, "boom", panics=step == "panic")
            ]
        assert worker.passed("error_handler") == []


@EITHER
async def test_stuck_job(language: str, callers: Callers, fleet: Fleet, schema: Schema) -> None:
    """A job that ignores its timeout is reported as stuck once. Other jobs continue, and its result
    is stored when it ends (CF-049, stuck_job_detection)."""
    caller = callers[OTHER[language]]
    async with fleet.worker(language, job_timeout=0.05, stuck_threshold=0.1) as worker:
        stuck = await caller.insert(conform("insist", message="end"))
        report = await worker.until("job_stuck")
        assert (report["id"], report["kind"], report["total"]) == (stuck["id"], "conform", 1)
        other = await caller.insert(
            conform("swallow", duration_ms=500, metadata={"timeout_ms": -1})
        )
        await worker.until("job_completed", id=other["id"])
        worker.release("end")
        await worker.until("job_completed", id=stuck["id"])
        assert worker.passed("job_stuck") == []
    row = await same_row(callers, schema, stuck["id"])
    assert (row["state"], row["attempt"], row["errors"]) == ("completed", 1, [])


async def test_attempted_by(callers: Callers, fleet: Fleet, schema: Schema) -> None:
    """Of a job that was claimed more than a hundred times the last hundred names are kept, oldest
    first, whichever language claimed it. Python keeps the largest attempt number as it is
    (CF-093)."""
    names = [f"client-{number}" for number in range(100)]
    job = await callers["go"].insert(conform("fail", message="no", pending=True))
    await schema.execute(
        "UPDATE river_job SET attempted_by = $2, attempt = 32764, max_attempts = 32767"
        " WHERE id = $1",
        job["id"],
        names,
    )
    claims = 0
    async with (
        fleet.worker("go", queues={"go": 1}) as in_go,
        fleet.worker("python", queues={"python": 1}) as in_python,
    ):
        for worker, attempt in (
            (in_go, 32765),
            (in_python, 32766),
            (in_go, 32767),
            (in_python, 32767),  # Go cannot: its claims of the whole queue fail then
        ):
            await schema.execute(
                "UPDATE river_job SET state = 'available', scheduled_at = now(), queue = $1,"
                " finalized_at = NULL",
                worker.language,
            )
            await callers[OTHER[worker.language]].insert(
                conform("return", queue=worker.language, priority=4)
            )
            await worker.until("job_failed", id=job["id"], attempt=attempt)
            await worker.until("job_completed")
            await schema.execute("DELETE FROM river_job WHERE id <> $1", job["id"])
            names.append(worker.id)
            claims += 1
            row = await same_row(callers, schema, job["id"])
            assert row["attempted_by"] == names[-100:]
            assert len(row["errors"]) == claims
        assert (row["state"], row["attempt"]) == ("discarded", 32767)


async def test_job_log(callers: Callers, fleet: Fleet, schema: Schema) -> None:
    """A Python attempt between two of Go adds its entry to Go's job log, and all stay in their
    order beside its other metadata (CF-108)."""
    metadata = {"retry_ms": 3_600_000, "mine": [1.5]}
    job = await callers["python"].insert(
        conform("log output fail", message="said", pending=True, metadata=metadata)
    )
    async with (
        fleet.worker("go", queues={"go": 1}, flags=["--job-log"]) as in_go,
        fleet.worker("python", queues={"python": 1}) as in_python,
    ):
        for attempt, worker in enumerate((in_go, in_python, in_go), 1):
            await schema.execute(
                "UPDATE river_job SET state = 'available', scheduled_at = now(), queue = $1",
                worker.language,
            )
            await callers["python"].insert(conform(queue=worker.language, priority=4))
            await worker.until("job_failed", id=job["id"], attempt=attempt)
            await worker.until("job_completed")
            await schema.execute("DELETE FROM river_job WHERE id <> $1", job["id"])
    found = json.loads((await same_row(callers, schema, job["id"]))["metadata"])
    assert found.pop("output") == {"n": 1}
    log = found.pop("river:log")
    assert found == metadata
    assert [list(entry) for entry in log] == [["log", "attempt"]] * 3
    assert [entry["attempt"] for entry in log] == [1, 2, 3]
    assert all("said" in entry["log"] for entry in log)
