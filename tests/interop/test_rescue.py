"""Jobs of dead workers, and their rescue by a leader of either language."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from riverpy._postgres.job_maintenance import RESCUE_ERROR_TEXT
from tests.interop.conform import KIND, conform
from tests.interop.test_jobs import same_row
from tests.interop.working import LANGUAGES, PythonWorker
from tests.maintenance.dead_clients import register

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.interop.callers import Caller
    from tests.interop.river_go import Row
    from tests.interop.working import Fleet
    from tests.work.rig import Rig

    Callers = dict[str, Caller]

EITHER = pytest.mark.parametrize("language", LANGUAGES)
LIMIT = 1.5
"""Seconds after which a job counts as stuck."""
RESCUE: dict[str, Any] = {
    "poll": 0.2,
    "candidate": True,
    "job_timeout": LIMIT,
    "rescue_after": LIMIT,
}
"""A leader that rescues soon."""
MINE = '{"mine": {"n": 1.5, "list": []}}'
MARK = '{"cancel_attempted_at": "2026-01-01T00:00:00Z"}'
IS_STUCK = "SELECT bool_and(now() - attempted_at > $1 * interval '1 second') FROM river_job"
WAITS = """
SELECT count(*) > 0 FROM pg_stat_activity
WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0
"""


async def insert_stuck(schema: Schema, kind: str = KIND, **columns: object) -> int:
    """Insert a job that the client `gone` has been running for two hours."""
    values = {"attempt": 1, "max_attempts": 5, "metadata": MINE, "args": "{}"} | columns
    names = "".join(f", {name}" for name in values)
    marks = "".join(f", ${index}" for index in range(2, len(values) + 2))
    return await schema.fetchval(
        f"INSERT INTO river_job (kind, state, attempted_at, scheduled_at, attempted_by{names})"
        " VALUES ($1, 'running', now() - interval '2 hours', now() - interval '3 hours',"
        f" ARRAY['gone']{marks}) RETURNING id",
        kind,
        *values.values(),
    )


def is_rescued(row: Row) -> bool:
    """Check the columns that every rescue writes."""
    (error,) = row["errors"]
    assert (error.error, error.attempt, error.trace) == (RESCUE_ERROR_TEXT, row["attempt"], "")
    metadata = json.loads(row["metadata"])
    assert metadata.pop("river:rescue_count") == 1
    return metadata.items() >= json.loads(MINE).items()


@pytest.mark.parametrize("killed", LANGUAGES)
@EITHER
async def test_killed_worker(
    language: str, killed: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """The job of a killed leader is worked again by the next leader, at a second attempt, with one
    error, and its other metadata are kept. It is due by the retry policy of its kind, from the time
    of the rescue; at once if riverpy knows that its own client is dead. The next leader may be the
    same one, started again with the same id (CF-054, candidate_process_kill_reference_rescue;
    CF-055, reference_process_kill_candidate_rescue; CF-056, process_kill_restart_and_rescue)."""
    is_same = killed == language
    async with fleet.process(killed, id=killed, candidate=True) as victim:
        metadata = json.loads(MINE)
        job = await callers[language].insert(conform("first signal", metadata=metadata))
        await victim.until("job_started", id=job["id"])
        await rig.until("SELECT leader_id FROM river_leader", killed)
        victim.process.kill()
        await victim.stopped()
    await schema.execute("UPDATE river_leader SET expires_at = now()")
    await rig.until(IS_STUCK, True, LIMIT)
    assert (await rig.row(job["id"]))["state"] == "running"
    async with fleet.worker(language, id=language, **RESCUE) as rescuer:
        await rescuer.until("job_completed", id=job["id"])
        assert len(rescuer.passed("job_started")) == 1
    row = await same_row(callers, schema, job["id"])
    assert is_rescued(row | {"attempt": 1})
    assert (row["attempt"], row["attempted_by"]) == (2, [killed, language])
    delay = (row["scheduled_at"] - row["errors"][0].at).total_seconds()
    at_once = is_same and language == "python"
    assert abs(delay) < 0.1 if at_once else 0.85 < delay < 1.15


@EITHER
async def test_states_after_a_rescue(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """A stuck job is retried by the policy of its kind, discarded without an attempt left, and
    cancelled with a mark. One of an unknown kind is discarded by River, and left by riverpy, even
    if the leader claims only known kinds (CF-057, rescuer_unknown_kind_discard; CF-106)."""
    hour = json.dumps({"retry_ms": 3_600_000} | json.loads(MINE))
    retried = await insert_stuck(schema, metadata=hour)
    used_up = await insert_stuck(schema, attempt=5)
    marked = await insert_stuck(schema, metadata=json.dumps(json.loads(MARK) | json.loads(MINE)))
    unknown = await insert_stuck(schema, kind="nobody_knows")
    before = await same_row(callers, schema, unknown)
    async with fleet.worker(language, known_kinds_only=True, **RESCUE):
        for job_id in (retried, used_up, marked):
            await rig.until("SELECT state <> 'running' FROM river_job WHERE id = $1", True, job_id)
        if language == "go":
            await rig.until("SELECT state::text FROM river_job WHERE id = $1", "discarded", unknown)
    rows = {
        job_id: await same_row(callers, schema, job_id)
        for job_id in (retried, used_up, marked, unknown)
    }
    states = [row["state"] for row in rows.values()]
    assert states[:3] == ["retryable", "discarded", "cancelled"]
    finals = [used_up, marked]
    if language == "go":
        assert states[3] == "discarded"
        finals.append(unknown)
    else:
        assert rows.pop(unknown) == before
    assert all(is_rescued(row) for row in rows.values())
    for job_id in finals:
        assert rows[job_id]["finalized_at"] is not None
        kept = rows[job_id]["attempted_at"] - rows[job_id]["scheduled_at"]
        assert kept == timedelta(hours=1)
    wait = rows[retried]["scheduled_at"] - rows[retried]["errors"][0].at
    assert 3599 < wait.total_seconds() < 3601
    assert rows[retried]["finalized_at"] is None


async def test_unknown_kind_of_a_dead_client(
    callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """A leader of riverpy does not know the kind of a job, but the client that ran it is dead: a
    worker in Go with the kind works it (CF-057, rescuer_unknown_kind_discard)."""
    await register(schema, "gone", dead_after="100 milliseconds")
    job_id = await insert_stuck(schema, kind="noop")
    async with (
        fleet.worker("python", known_kinds_only=True, dead_after=0.3, **RESCUE),
        fleet.worker("go") as worker,
    ):
        await worker.until("job_completed", id=job_id, attempt=2)
    row = await same_row(callers, schema, job_id)
    assert is_rescued(row | {"attempt": 1})
    assert row["attempted_by"] == ["gone", worker.id]


@EITHER
async def test_rows_that_change(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """A stuck job that ends, or is claimed again, before the rescuer writes keeps its new state;
    others are rescued (CF-058, maintenance_rescuer_stale_selection)."""
    hour = json.dumps({"retry_ms": 3_600_000} | json.loads(MINE))
    ended, claimed, stuck = [await insert_stuck(schema, metadata=hour) for _ in range(3)]
    both = "SELECT * FROM river_job WHERE id = any($1) ORDER BY id"
    is_rescued_row = "SELECT state = 'retryable' FROM river_job WHERE id = $1"
    async with schema.connected() as locker:
        await locker.execute("BEGIN")
        await locker.execute(
            "UPDATE river_job SET state = 'completed', finalized_at = now() WHERE id = $1", ended
        )
        await locker.execute(
            "UPDATE river_job SET attempt = 2, attempted_at = clock_timestamp(),"
            " attempted_by = ARRAY['gone', 'back'] WHERE id = $1",
            claimed,
        )
        kept = await locker.fetch(both, [ended, claimed])
        async with fleet.worker(language, **RESCUE | {"rescue_after": 60}):
            if language == "go":  # it waits for the two rows
                await rig.until(WAITS)
            else:  # it skips the two rows
                await rig.until(is_rescued_row, True, stuck)
            await locker.execute("COMMIT")
            await rig.until(is_rescued_row, True, stuck)
    assert await schema.fetch(both, [ended, claimed]) == kept
    assert is_rescued(await same_row(callers, schema, stuck))


async def test_ignored_cancellation(
    callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """A job that ignores its cancellation does not delay a hard stop. `riverpy worker` releases it,
    and a worker in Go works it as if it had not started (CF-040,
    ignored_cancellation_hard_abort)."""
    async with fleet.process("python", hard_stop_timeout=0.3) as worker:
        job = await callers["go"].insert(conform("insist", message="end"))
        await worker.until("job_started", id=job["id"])
        worker.stop_hard()
        await worker.stopped()
    row = await same_row(callers, schema, job["id"])
    assert (row["state"], row["attempt"], row["errors"]) == ("available", 0, [])
    async with fleet.worker("go") as other:
        await other.until("job_started", id=job["id"])
        other.release("end")
        await other.until("job_completed", id=job["id"], attempt=1)


async def test_ignored_cancellation_in_a_library(
    callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """A client inside another program reports the attempts that it leaves running at a hard stop.
    They are rescued (CF-040, ignored_cancellation_hard_abort)."""
    settings: dict[str, Any] = {"hard_stop_timeout": 0.1, "dead_after": 1}
    async with fleet.worker("python", id="left", **settings) as worker:
        assert isinstance(worker, PythonWorker)
        job = await callers["go"].insert(conform("first insist", message="end"))
        await worker.until("job_started", id=job["id"])
        worker.stop_hard()
        await worker.stopped()
        assert worker.report is not None
        assert [claim_key.id for claim_key in worker.report.abandoned] == [job["id"]]
        await rig.until(IS_STUCK, True, LIMIT)
        assert (await rig.row(job["id"]))["state"] == "running"
        async with fleet.worker("python", dead_after=1, **RESCUE) as rescuer:
            await rescuer.until("job_completed", id=job["id"], attempt=2)
    row = await same_row(callers, schema, job["id"])
    assert (row["attempted_by"][0], row["attempted_by"][-1]) == ("left", rescuer.id)
    assert [error.error for error in row["errors"]] == [RESCUE_ERROR_TEXT]
