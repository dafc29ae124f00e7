"""Jobs that one language inserts and the other works, as both read them before, during and
after."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests.interop.callers import Refused
from tests.interop.conform import EFFECTS, conform, error_text
from tests.interop.inserting import request
from tests.interop.read_rows import TIMES, stored
from tests.interop.working import LANGUAGES, OTHER

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.interop.callers import Caller
    from tests.interop.river_go import Row
    from tests.interop.working import Fleet, Worker
    from tests.work.rig import Rig

    Callers = dict[str, Caller]

EITHER = pytest.mark.parametrize("language", LANGUAGES)
OUTPUT = {"null": None, "empty": [], "deep": {"a": [1, {"b": [], "c": 2.5}]}}
UNKNOWN = "job kind is not registered in the client's Workers bundle: nobody_knows"
COLUMNS = """
SELECT jsonb_build_object(
    'state', state, 'attempt', attempt, 'max_attempts', max_attempts, 'priority', priority,
    'args', args::text, 'attempted_by', attempted_by::text, 'errors', errors::text, 'kind', kind,
    'metadata', regexp_replace(
        metadata::text, '("cancel_attempted_at": )"[0-9T:.-]{20,29}Z"', '\\1"a time"'
    ),
    'queue', queue, 'tags', tags::text, 'unique_key', unique_key::text,
    'unique_states', unique_states::text, 'attempted_at', attempted_at,
    'scheduled', round(extract(epoch FROM scheduled_at - created_at) / 60),
    'finalized', round(extract(epoch FROM finalized_at - created_at) / 60)
)::text
FROM river_job ORDER BY id
"""
"""The rows as text without ids. Times are minutes after the insert."""
MOMENT = 1.0
"""Seconds for which a test checks that nothing happens."""


async def same_row(callers: Callers, schema: Schema, job_id: int) -> Row:
    """Check that both languages read the stored row alike, and return it."""
    row = await stored(schema, job_id)
    for caller in callers.values():
        assert await caller.get(job_id) == row, caller.language
    return row


async def ended(worker: Worker, callers: Callers, schema: Schema, event: str, job_id: int) -> Row:
    """Return the row of a job once its worker has reported this end."""
    await worker.until(event, id=job_id)
    return await same_row(callers, schema, job_id)


@EITHER
async def test_worked_by_the_other(
    language: str, callers: Callers, fleet: Fleet, schema: Schema
) -> None:
    """One language works what the other inserts, with the same args, and changes nothing else
    (CF-001, reference_insert_candidate_work; CF-002, candidate_insert_reference_work)."""
    plain = await callers[language].insert(conform(message="<é>&\u2028"))
    echoed = await callers[language].insert(conform("output", output=OUTPUT))
    before = await same_row(callers, schema, plain["id"])
    assert before == plain
    assert before["created_at"] == before["scheduled_at"]
    assert {name: before[name] for name in before if name not in {"id", "args", *TIMES}} == {
        "state": "available",
        "attempt": 0,
        "max_attempts": 25,
        "priority": 1,
        "attempted_by": [],
        "errors": [],
        "kind": "conform",
        "metadata": "{}",
        "queue": "default",
        "tags": [],
        "unique_key": None,
        "unique_states": None,
    }
    assert (before["attempted_at"], before["finalized_at"]) == (None, None)
    async with fleet.worker(OTHER[language]) as worker:
        after = await ended(worker, callers, schema, "job_completed", plain["id"])
        row = await ended(worker, callers, schema, "job_completed", echoed["id"])
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"state", "attempt", "attempted_at", "attempted_by", "finalized_at"}
    assert (after["state"], after["attempt"], after["attempted_by"]) == (
        "completed",
        1,
        [worker.id],
    )
    assert after["attempted_at"] <= after["finalized_at"]
    assert json.loads(row["metadata"]) == {"output": OUTPUT}


@EITHER
async def test_running_until_released(
    language: str, callers: Callers, fleet: Fleet, schema: Schema
) -> None:
    """The other language reads a waiting job as running, and the job is worked once (CF-003,
    barrier_wait_and_release)."""
    async with fleet.worker(language) as worker:
        job = await callers[OTHER[language]].insert(conform("signal", message="go on"))
        await worker.until("job_started", id=job["id"])
        for _ in range(5):
            row = await same_row(callers, schema, job["id"])
            assert (row["state"], row["attempt"], row["finalized_at"]) == ("running", 1, None)
            assert row["attempted_at"] is not None
            await asyncio.sleep(MOMENT / 5)
        worker.release("go on")
        row = await ended(worker, callers, schema, "job_completed", job["id"])
        assert (row["state"], row["attempt"]) == ("completed", 1)
        assert worker.passed("job_started") == []


@EITHER
async def test_outcomes(language: str, callers: Callers, fleet: Fleet, schema: Schema) -> None:
    """Both languages store a job that returns, records output, fails for good or cancels itself
    alike (CF-004, single_implementation_worker_outcomes)."""
    caller = callers[OTHER[language]]
    async with fleet.worker(language) as worker:
        jobs = await caller.insert_many(
            conform("return"),
            conform("output"),
            conform("fail", message="boom", max_attempts=1),
            conform("cancel", message="no"),
        )
        events = ["job_completed", "job_completed", "job_failed", "job_cancelled"]
        rows = [
            await ended(worker, callers, schema, event, job["id"])
            for event, job in zip(events, jobs, strict=True)
        ]
    assert [row["state"] for row in rows] == ["completed", "completed", "discarded", "cancelled"]
    assert [json.loads(row["metadata"]) for row in rows] == [{}, {"output": {"n": 1}}, {}, {}]
    assert [[one.error for one in row["errors"]] for row in rows] == [
        [],
        [],
        [error_text(language, "boom")],
        ["JobCancelError: no"],
    ]
    assert all(row["attempt"] == 1 and row["finalized_at"] is not None for row in rows)


async def test_every_column(callers: Callers, schema: Schema) -> None:
    """Both read every column of a full row alike, and an output that either writes changes nothing
    else (CF-005, job_row_round_trip_all_fields)."""
    trace = 'a "trace"\n<of>&\tlines é\u2028'
    await schema.execute(
        """
        INSERT INTO river_job (
            id, state, attempt, max_attempts, attempted_at, created_at, finalized_at, scheduled_at,
            priority, args, attempted_by, errors, kind, metadata, queue, tags, unique_key,
            unique_states
        )
        VALUES (
            77, 'completed', 3, 7, '2026-01-02 03:04:05.678901Z', '2026-01-01 00:00:00.000001Z',
            '2026-01-02 03:04:06.999999Z', '2026-01-02 03:00:00.123456Z', 4,
            '{"n": 12345678901234567890.10, "s": "<é>"}', ARRAY['one', 'two'],
            ARRAY[jsonb_build_object(
                'at', '2026-01-02T03:04:05.678901234Z', 'attempt', 2, 'error', $1::text,
                'trace', $1::text)],
            'conform', '{"output": {"a": 1}, "river:rescue_count": 2, "mine": 1.50}', 'q',
            ARRAY['one', 'two'], decode(repeat('a5', 32), 'hex'), B'11110101'
        )
        """,
        trace,
    )
    before = await same_row(callers, schema, 77)
    assert before["unique_states"] == 0b11110101
    assert [(one.error, one.trace) for one in before["errors"]] == [(trace, trace)]
    others = (
        "SELECT (to_jsonb(river_job) - 'metadata')::text || (metadata - 'output')::text"
        " FROM river_job"
    )
    untouched = await schema.fetchval(others)
    for language, caller in callers.items():
        await caller.set_output(77, {"by": [language, 1.5, None]})
        row = await same_row(callers, schema, 77)
        assert json.loads(row["metadata"])["output"] == {"by": [language, 1.5, None]}
        assert await schema.fetchval(others) == untouched


@EITHER
async def test_claim_order(language: str, callers: Callers, fleet: Fleet, schema: Schema) -> None:
    """Jobs start by priority, then by their time, then by their id (CF-006, claim_order)."""
    now = datetime.now(UTC)
    wanted = [(1, 2), (1, 1), (2, 3), (2, 3), (3, 2), (3, 1)]
    mixed = [4, 2, 0, 5, 3, 1]  # the two equal ones, 2 and 3, keep their order
    for index in mixed:
        priority, minutes = wanted[index]
        await schema.execute(
            """
            INSERT INTO river_job (kind, args, max_attempts, priority, scheduled_at)
            VALUES ('conform', jsonb_build_object('message', $1::text), 5, $2, $3)
            """,
            str(index),
            priority,
            now - timedelta(minutes=minutes),
        )
    async with fleet.worker(language, queues={"default": 1}) as worker:
        began = [(await worker.until("job_started"))["message"] for _ in wanted]
        while await schema.fetchval("SELECT count(*) FROM river_job WHERE state <> 'completed'"):
            await asyncio.sleep(0.01)
    assert began == ["0", "1", "2", "3", "4", "5"]
    rows = await schema.fetch(
        "SELECT args ->> 'message' AS message FROM river_job ORDER BY attempted_at, priority,"
        " scheduled_at, id"
    )
    assert [row["message"] for row in rows] == began


@EITHER
async def test_scheduled_in_the_past(
    language: str, callers: Callers, fleet: Fleet, schema: Schema
) -> None:
    """A job with a scheduled time, even a past one, is stored as scheduled, until the scheduler of
    a leader of either language moves it (CF-006, claim_order)."""
    past = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    jobs = [
        await caller.insert(conform("output", scheduled_at=past)) for caller in callers.values()
    ]
    for job in jobs:
        assert (await same_row(callers, schema, job["id"]))["state"] == "scheduled"
    async with fleet.worker(language, candidate=True) as worker:
        for job in jobs:
            await worker.until("job_completed", id=job["id"])


async def test_competition(callers: Callers, fleet: Fleet, schema: Schema, rig: Rig) -> None:
    """Two workers of two languages on one queue do each job once, and skip rows that a transaction
    has locked (CF-007, mixed_skip_locked_competition)."""
    await schema.execute(EFFECTS)
    each = [conform("effect sleep", duration_ms=5)] * 150
    for caller in callers.values():
        await caller.insert_many(*each)
    try:
        async with (
            schema.connected() as locker,
            fleet.worker("go", queues={"default": 8}, poll=0.2),
            fleet.worker("python", queues={"default": 8}, poll=0.2),
        ):
            async with locker.transaction():
                locked = await locker.fetch(
                    "SELECT id FROM river_job WHERE state = 'available' ORDER BY id DESC LIMIT 5"
                    " FOR UPDATE SKIP LOCKED"
                )
                await rig.until_state("completed", 300 - len(locked))
                assert await rig.states() == {"available": 5, "completed": 295}
            await rig.until_state("completed", 300)
        effects = await schema.fetch("SELECT job_id, language FROM effects")
        assert len(effects) == len({row["job_id"] for row in effects}) == 300
        assert {row["language"] for row in effects} == set(LANGUAGES)
        assert await schema.fetchval(
            "SELECT bool_and(attempt = 1 AND cardinality(attempted_by) = 1) FROM river_job"
        )
    finally:
        await schema.execute("DROP TABLE effects")


@EITHER
async def test_unknown_kind(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """A worker without a filter of kinds fails jobs of unknown kinds by the default policy, and
    works the others (CF-008, mixed_unknown_kind_error)."""
    caller = callers[OTHER[language]]
    async with fleet.worker(language) as worker:
        last, again, known = await caller.insert_many(
            request("{}", kind="nobody_knows", max_attempts=1),
            request("{}", kind="nobody_knows", max_attempts=5),
            conform(),
        )
        await worker.until("job_completed", id=known["id"])
        row = await ended(worker, callers, schema, "job_failed", last["id"])
        assert (row["state"], row["attempt"]) == ("discarded", 1)
        assert [one.error for one in row["errors"]] == [UNKNOWN]

        await worker.until("job_failed", id=again["id"])
        due_in = await schema.fetchval(
            """
            SELECT extract(epoch FROM scheduled_at - attempted_at)::float8 FROM river_job
            WHERE id = $1 AND state = 'available'
            """,
            again["id"],
        )
        assert 0.9 <= due_in < 2
        await rig.until(
            "SELECT scheduled_at <= now() FROM river_job WHERE id = $1", True, again["id"]
        )
        await caller.insert(conform())  # its notification wakes the worker
        row = await ended(worker, callers, schema, "job_failed", again["id"])
    assert (row["state"], row["attempt"], row["finalized_at"]) == ("retryable", 2, None)
    assert row["attempted_by"] == [worker.id] * 2
    assert [one.error for one in row["errors"]] == [UNKNOWN] * 2
    assert 14 < (row["scheduled_at"] - row["attempted_at"]).total_seconds() < 18.5


async def test_same_job_of_both(callers: Callers, schema: Schema) -> None:
    """Both languages store the same job alike, with any options, in a batch and by COPY, and also
    when it was cancelled, and then retried (CF-095)."""
    in_an_hour = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    args = '{"name": "<é>&\u2028\\"/", "addr": {"street": "s", "zip": "", "city": "c"}, "note": ""}'
    every: dict[str, Any] = {
        "max_attempts": 3,
        "metadata": {"b": [1, 2.5, None], "a": "<é>"},
        "priority": 4,
        "queue": "q-2",
        "tags": ["one", "two"],
    }
    options: list[dict[str, Any]] = [
        {},
        every,
        {"pending": True},
        {"scheduled_at": in_an_hour},
        {"unique": {"by_args": True, "by_queue": True}},
    ]
    requests = [request(args, struct="nested", **({"queue": "nobody"} | one)) for one in options]
    stored_by: dict[str, list[list[str]]] = {}
    for language, caller in callers.items():
        stored_by[language] = []

        async def note(rows: list[list[str]] = stored_by[language]) -> None:
            rows.append([row[0] for row in await schema.fetch(COLUMNS)])

        jobs = [await caller.insert(one) for one in requests]
        await note()
        for act in (caller.cancel, caller.retry):
            for job in jobs:
                await act(job["id"])
            await note()
        await schema.execute("TRUNCATE river_job")
        await caller.insert_many(*requests)
        await note()
        await schema.execute("TRUNCATE river_job")
        await caller.insert_many_fast(*requests)
        await note()
        await schema.execute("TRUNCATE river_job")
    assert stored_by["go"] == stored_by["python"]


async def test_attempt_limits(callers: Callers, schema: Schema) -> None:
    """Both languages store the smallest and the largest number of attempts. Beyond them River cuts
    what is too large and takes 0 as its default; riverpy refuses both (CF-094)."""
    for caller in callers.values():
        for most in (1, 32_767):
            job = await caller.insert(conform(max_attempts=most))
            assert (await same_row(callers, schema, job["id"]))["max_attempts"] == most
        with pytest.raises(Refused):
            await caller.insert(conform(max_attempts=-1))
    for given, stored_in_go in ((40_000, 32_767), (0, 25)):
        assert (await callers["go"].insert(conform(max_attempts=given)))[
            "max_attempts"
        ] == stored_in_go
        before = await schema.fetchval("SELECT count(*) FROM river_job")
        with pytest.raises(Refused):
            await callers["python"].insert(conform(max_attempts=given))
        assert await schema.fetchval("SELECT count(*) FROM river_job") == before


async def test_retry_after_the_last_attempt(callers: Callers, schema: Schema) -> None:
    """riverpy's retry of a job with the largest number of attempts changes neither number. In Go it
    fails, and changes nothing (CF-094)."""
    job = await callers["go"].insert(conform(max_attempts=32_767))
    await schema.execute(
        "UPDATE river_job SET attempt = 32767, state = 'discarded', finalized_at = now()"
    )
    before = await same_row(callers, schema, job["id"])
    with pytest.raises(Refused, match="smallint out of range"):
        await callers["go"].retry(job["id"])
    assert await same_row(callers, schema, job["id"]) == before
    row = await callers["python"].retry(job["id"])
    assert row == await same_row(callers, schema, job["id"])
    assert (row["state"], row["attempt"], row["max_attempts"]) == ("available", 32_767, 32_767)
