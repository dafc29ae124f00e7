"""Jobs of one language's worker that the other language cancels while they run, and jobs that run
when their worker is stopped."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any
from unittest.mock import ANY

import pytest

from riverpy._postgres import jobs as job_statements
from riverpy._postgres.job_maintenance import RESCUE_ERROR_TEXT
from riverpy._work import reconciler
from tests.interop.conform import conform, error_text
from tests.interop.inserting import SILENT_CANCEL
from tests.interop.notifications import notifications
from tests.interop.test_jobs import ended, same_row
from tests.interop.test_wakeups import KILL, LISTENS, NAMES
from tests.interop.working import LANGUAGES, OTHER

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.interop.callers import Caller
    from tests.interop.river_go import Row
    from tests.interop.working import Fleet
    from tests.work.rig import Rig

    Callers = dict[str, Caller]

EITHER = pytest.mark.parametrize("language", LANGUAGES)
NOTIFICATION_TIMEOUT = 5.0
"""Seconds within which a notification must reach a worker."""
POLLED = 6.0
"""Seconds within which a worker that polls every two seconds must act."""
MARK = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{0,8}[1-9])?Z")
MARK_BY_SQL = """
UPDATE river_job SET metadata = metadata || '{"cancel_attempted_at": "2026-01-01T00:00:00Z"}'
WHERE id = $1
"""
PAUSE_BY_SQL = "UPDATE river_queue SET paused_at = now(), updated_at = now() WHERE name = $1"
STUCK = """
UPDATE river_job SET state = 'running', attempt = 1, attempted_at = now() - interval '2 hours',
    attempted_by = ARRAY['dead']
WHERE id = $1
"""
WITH_ERROR = "UPDATE river_job SET errors = ARRAY[$2::jsonb] WHERE id = $1"
HAS_LISTENER = """
SELECT count(*) > 0 FROM pg_stat_activity
WHERE datname = current_database() AND query ILIKE 'LISTEN%'
"""
BEFORE = '{"at": "2026-01-01T00:00:00Z", "attempt": 1, "error": "before", "trace": ""}'
REMOTE = "JobCancelError: job cancelled remotely"


def mark_of(row: Row) -> str:
    """Return the cancel mark in a row's metadata."""
    return json.loads(row["metadata"])["cancel_attempted_at"]


@EITHER
async def test_running_job(language: str, callers: Callers, fleet: Fleet, schema: Schema) -> None:
    """A cancel of a running job marks its row and reaches its worker at once; the job ends as
    cancelled. Another cancel before that changes nothing (CF-037, remote_cancel_notification)."""
    caller = callers[OTHER[language]]
    async with fleet.worker(language) as worker, notifications(schema) as sent:
        plain = await caller.insert(conform("signal", message="never"))
        slow = await caller.insert(conform("cancelled insist end", message="end"))
        for job in (plain, slow):
            await worker.until("job_started", id=job["id"])
        await sent.take()
        async with asyncio.timeout(NOTIFICATION_TIMEOUT):
            marked = await caller.cancel(plain["id"])
            await worker.until("job_cancelled", id=plain["id"])
            first = await caller.cancel(slow["id"])
            await worker.until("cancel_noticed", id=slow["id"])
        second = await caller.cancel(slow["id"])
        worker.release("end")
        await worker.until("job_cancelled", id=slow["id"])
        control = {"action": "cancel", "queue": "default"}
        assert await sent.take() == [
            ("river_control", control | {"job_id": job_id})
            for job_id in (plain["id"], slow["id"], slow["id"])
        ]
        assert second | {"metadata": ""} == first | {"metadata": ""}
        assert mark_of(first) < mark_of(second)
        for answer in (marked, second):
            assert (answer["state"], answer["finalized_at"]) == ("running", None)
            assert MARK.fullmatch(mark_of(answer))
            row = await same_row(callers, schema, answer["id"])
            assert (row["state"], row["attempt"]) == ("cancelled", 1)
            assert row["finalized_at"] is not None
            assert row["metadata"] == answer["metadata"]
            assert [one.error for one in row["errors"]] == [REMOTE]
        assert worker.passed("job_failed") == worker.passed("job_cancelled") == []


@EITHER
async def test_code_that_ignores_a_cancel(
    language: str, callers: Callers, fleet: Fleet, schema: Schema
) -> None:
    """Code that continues after its job is cancelled is not interrupted. If it returns, the job is
    completed; if the job would run again, it is cancelled (CF-038,
    cooperative_remote_cancellation)."""
    caller = callers[OTHER[language]]
    behaviors = {
        "cancelled swallow print end": ("cancelled", [REMOTE]),
        "cancelled swallow print fail": ("cancelled", [REMOTE]),
        "cancelled return": ("completed", []),
        "cancelled snooze": ("cancelled", [REMOTE]),
        "insist snooze": ("cancelled", ANY),  # whether or not the worker was notified
        "insist fail": ("cancelled", ANY),
    }
    found: dict[str, Any] = {}
    async with fleet.worker(language) as worker:
        jobs = {
            behavior: await caller.insert(conform(behavior, message=behavior, duration_ms=200))
            for behavior in behaviors
        }
        for job in jobs.values():
            await worker.until("job_started", id=job["id"])
        for behavior, job in jobs.items():
            mark = mark_of(await caller.cancel(job["id"]))
            worker.release(behavior)
            if "print" in behavior:
                await worker.until("cancel_noticed", id=job["id"])
                await worker.until("effect", id=job["id"])
            event = behaviors[behavior][0]
            row = await ended(worker, callers, schema, f"job_{event}", job["id"])
            assert mark_of(row) == mark
            assert (row["attempt"], row["finalized_at"] is None) == (1, False)
            found[behavior] = (row["state"], [one.error for one in row["errors"]])
        assert found == behaviors
        assert worker.passed("job_failed") == []


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record for how many running jobs each Python statement reads the marks."""
    numbers: list[int] = []
    read = job_statements.job_find_cancel_requested

    async def noting(connection: Any, schema: Any, ids: list[int]) -> list[int]:
        numbers.append(len(ids))
        return await read(connection, schema, ids)

    monkeypatch.setattr(job_statements, "job_find_cancel_requested", noting)
    return numbers


@EITHER
async def test_poll_only(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, asked: list[int]
) -> None:
    """A worker that does not listen, with 500 running jobs, finds by polling the inserts, cancels
    and pauses of the other language, and marks and pauses by SQL alone. Python reads the marks of
    all jobs by one statement (CF-039, poll_only_remote_cancellation; CF-097)."""
    caller = callers[OTHER[language]]
    number = 500
    queues = {"default": number, "other": 1}
    async with fleet.worker(language, poll_only=True, poll=0.5, queues=queues) as worker:
        await caller.insert_many_fast(*[conform("signal", message="all")] * number)
        started = [(await worker.until("job_started"))["id"] for _ in range(number)]
        assert not await schema.fetchval(HAS_LISTENER)
        async with asyncio.timeout(POLLED):
            job = await caller.insert(conform(queue="other"))
            await worker.until("job_completed", id=job["id"])
        cancelled = started[7:9]
        async with asyncio.timeout(POLLED):
            await caller.cancel(cancelled[0])
            await schema.execute(MARK_BY_SQL, cancelled[1])
            await caller.pause("default")
            await schema.execute(PAUSE_BY_SQL, "other")
            for job_id in cancelled:
                await worker.until("job_cancelled", id=job_id)
            for queue in queues:
                await worker.until("queue_paused", queue=queue)
        for job_id in cancelled:
            row = await same_row(callers, schema, job_id)
            assert (row["state"], [one.error for one in row["errors"]]) == ("cancelled", [REMOTE])
        worker.release("all")
        for _ in range(number - len(cancelled)):
            await worker.until("job_completed")
        assert worker.passed("job_cancelled") == []
    assert language == "go" or max(asked) == number


@pytest.mark.parametrize("reconnects", [True, False])
async def test_lost_notification(
    callers: Callers,
    fleet: Fleet,
    schema: Schema,
    monkeypatch: pytest.MonkeyPatch,
    *,
    reconnects: bool,
) -> None:
    """A Python worker finds a cancel and a pause whose notification was lost when its listener
    connects again, and every 30 s otherwise (CF-097)."""
    assert reconciler.RECONCILE_INTERVAL <= 30
    if not reconnects:
        monkeypatch.setattr(reconciler, "RECONCILE_INTERVAL", 0.1)
    async with fleet.worker("python") as worker:
        job = await callers["go"].insert(conform("signal", message="never"))
        await worker.until("job_started", id=job["id"])
        await schema.execute(MARK_BY_SQL, job["id"])
        await schema.execute(PAUSE_BY_SQL, "default")
        if reconnects:
            await schema.execute(KILL, NAMES["python"], LISTENS[True])
        async with asyncio.timeout(NOTIFICATION_TIMEOUT):
            row = await ended(worker, callers, schema, "job_cancelled", job["id"])
            await worker.until("queue_paused", queue="default")
    assert (row["state"], [one.error for one in row["errors"]]) == ("cancelled", [REMOTE])


@EITHER
async def test_stop(language: str, callers: Callers, fleet: Fleet, schema: Schema) -> None:
    """A soft stop lets running jobs end. A hard stop cancels them: one that ends by it is released
    for another worker, one that fails or returns ends as usual (CF-041,
    hard_shutdown_soft_stop_classification)."""
    caller = callers[OTHER[language]]
    async with fleet.worker(language) as worker:
        soft = await caller.insert_many(
            conform("signal", message="soft"), conform("signal fail", message="soft")
        )
        for job in soft:
            await worker.until("job_started", id=job["id"])
        worker.stop()
        worker.release("soft")
        await worker.until("job_completed", id=soft[0]["id"])
        await worker.until("job_failed", id=soft[1]["id"])
        await worker.stopped()
        assert worker.passed("job_interrupted") == []
    async with fleet.worker(language) as worker:
        jobs = await caller.insert_many(
            *[
                conform(behavior, message=behavior, max_attempts=1, pending=True)
                for behavior in ("signal", "cancelled fail", "cancelled return")
            ]
        )
        await schema.execute(WITH_ERROR, jobs[0]["id"], BEFORE)
        for job in jobs:
            await caller.retry(job["id"])
        await caller.insert(conform())  # Go does not notify of a retry
        for job in jobs:
            await worker.until("job_started", id=job["id"])
        claimed = [await caller.get(job["id"]) for job in jobs]
        worker.stop_hard()
        rows = [
            await ended(worker, callers, schema, event, job["id"])
            for event, job in zip(
                ("job_interrupted", "job_failed", "job_completed"), jobs, strict=True
            )
        ]
        await worker.stopped()
    assert [(row["state"], row["attempt"]) for row in rows] == [
        ("available", 0),
        ("discarded", 1),
        ("completed", 1),
    ]
    assert [[one.error for one in row["errors"]] for row in rows] == [
        ["before"],
        [error_text(language, "cancelled fail")],
        [],
    ]
    assert [row["attempted_at"] for row in rows] == [row["attempted_at"] for row in claimed]
    assert rows[0]["metadata"] == "{}"
    async with fleet.worker(OTHER[language]) as worker:
        worker.release("signal")
        row = await ended(worker, callers, schema, "job_completed", jobs[0]["id"])
        assert (row["attempt"], [one.error for one in row["errors"]]) == (1, ["before"])


@EITHER
@pytest.mark.usefixtures("mark_silently")
async def test_mark_against_outcome(
    language: str, callers: Callers, fleet: Fleet, schema: Schema
) -> None:
    """A job with a mark that its worker has not noticed is cancelled if it would run again, and
    keeps its attempt and its error. Any other end counts (CF-100)."""
    failure = error_text(language, "no")
    ends: list[tuple[str, dict[str, Any], str, list[str]]] = [
        ("return", {}, "completed", []),
        ("cancel", {}, "cancelled", ["JobCancelError: no"]),
        ("fail", {"max_attempts": 1}, "discarded", [failure]),
        ("fail", {}, "cancelled", [failure]),
        ("snooze", {"duration_ms": 1}, "cancelled", []),
        ("snooze", {"duration_ms": 3_600_000}, "cancelled", []),
        ("fail", {"metadata": SILENT_CANCEL | {"retry_ms": -1000}}, "cancelled", [failure]),
        ("signal", {}, "cancelled", []),  # interrupted by the stop
    ]
    requests = [
        conform(behavior, message="no", **{"metadata": SILENT_CANCEL} | options)
        for behavior, options, *_ in ends
    ]
    async with fleet.worker(language) as worker:
        jobs = await callers[OTHER[language]].insert_many(*requests)
        for job in jobs:
            await worker.until("job_started", id=job["id"])
        worker.stop_hard()
        await worker.stopped()
    found: list[Any] = []
    for job in jobs:
        row = await same_row(callers, schema, job["id"])
        assert "cancel_attempted_at" in json.loads(row["metadata"])
        assert (row["attempt"], row["finalized_at"] is None) == (1, False)
        found.append((row["state"], [one.error for one in row["errors"]]))
    assert found == [(state, errors) for *_, state, errors in ends]


@EITHER
async def test_mark_of_a_dead_worker(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """The rescue cancels a job with a mark whose worker is dead, with the error of a rescue
    (CF-100)."""
    job = await callers[OTHER[language]].insert(conform(pending=True))
    await schema.execute(STUCK, job["id"])
    await schema.execute(MARK_BY_SQL, job["id"])
    async with fleet.worker(language, candidate=True):
        await rig.until_state("cancelled")
    row = await same_row(callers, schema, job["id"])
    assert (row["attempt"], row["finalized_at"] is None) == (1, False)
    assert [one.error for one in row["errors"]] == [RESCUE_ERROR_TEXT]
