"""The keys that River's clients write into the metadata of a job."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.interop.conform import conform
from tests.interop.test_rescue import RESCUE
from tests.interop.working import LANGUAGES, OTHER, Periodic

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.interop.callers import Caller
    from tests.interop.working import Fleet, Worker
    from tests.work.rig import Rig

    Callers = dict[str, Caller]

MINE = """
{"mine": {"n": 12345678901234567890.10, "small": 0.30, "list": [], "é": null}, "retry_ms": 3600000}
"""
"""The user's keys."""
KEPT = """
SELECT bool_and((metadata -> key)::text = value::text) FROM river_job, jsonb_each($2::jsonb)
WHERE id = $1
"""
KEYS = """
SELECT jsonb_object_keys(metadata - array(SELECT jsonb_object_keys($2::jsonb))) FROM river_job
WHERE id = $1
"""
BEHAVIOR = """
UPDATE river_job SET queue = $2, args = jsonb_set(args, '{behavior}', to_jsonb($3::text))
WHERE id = $1 RETURNING attempt
"""
NOBODY = "UPDATE river_job SET queue = 'none' WHERE id = $1"
UNIQUE = {"by_args": True, "by_state": ["available", "pending", "running", "scheduled"]}
STATE = "SELECT state::text FROM river_job WHERE id = $1"


class Metadata:
    """The metadata of one job that goes from client to client."""

    def __init__(self, schema: Schema, job_id: int) -> None:
        self._schema = schema
        self.job_id = job_id

    async def keys(self) -> set[str]:
        """Return the keys except the user's, and check that those are unchanged."""
        assert await self._schema.fetchval(KEPT, self.job_id, MINE) is True
        return {row[0] for row in await self._schema.fetch(KEYS, self.job_id, MINE)}

    async def attempt(self, worker: Worker, caller: Caller, behavior: str) -> None:
        """Let the caller retry it, and let the worker start an attempt with these steps."""
        await self.retry(caller)
        attempt = await self._schema.fetchval(BEHAVIOR, self.job_id, worker.language, behavior)
        await worker.until("job_started", id=self.job_id, attempt=attempt + 1)

    async def retry(self, caller: Caller) -> None:
        """Let the caller retry it in a queue without a worker."""
        await self._schema.execute(NOBODY, self.job_id)
        await caller.retry(self.job_id)


EITHER = pytest.mark.parametrize("language", LANGUAGES)


@EITHER
async def test_reserved_keys(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """All operations of either client on a job add the keys below and no others, and the user's
    keys stay unchanged (CF-051, reserved_metadata_cross_engine)."""
    one, other = callers[language], callers[OTHER[language]]
    job = await one.insert(conform(message="no", duration_ms=5, queue="none"))
    await schema.execute("UPDATE river_job SET metadata = $1", MINE)
    metadata = Metadata(schema, job["id"])
    async with (
        fleet.worker("go", queues={"go": 1}, poll=0.2, flags=["--job-log"]) as in_go,
        fleet.worker("python", queues={"python": 1}, poll=0.2) as in_python,
    ):
        workers = {"go": in_go, "python": in_python}
        await metadata.attempt(workers[language], other, "snooze-once output fail")
        await workers[language].until("job_snoozed", id=job["id"])
        await workers[language].until("job_failed", id=job["id"], attempt=1)
        assert await metadata.keys() == {"output", "snoozes"}
        await metadata.attempt(in_go, one, "log fail")
        await in_go.until("job_failed", id=job["id"], attempt=2)
        kept = {"output", "river:log", "snoozes"}
        assert await metadata.keys() == kept
        await metadata.attempt(in_python, other, "output fail")
        await in_python.until("job_failed", id=job["id"], attempt=3)
        assert await metadata.keys() == kept
        for worker, caller, others in ((in_python, one, other), (in_go, other, one)):
            await metadata.attempt(worker, caller, "signal")
            await others.cancel(job["id"])
            await worker.until("job_cancelled", id=job["id"])
            assert await metadata.keys() == {"cancel_attempted_at", *kept}
            await metadata.retry(others)
            assert await metadata.keys() == kept

        await schema.execute(
            "UPDATE river_job SET state = 'running', attempted_at = now() - interval '2 hours',"
            " attempted_by = ARRAY['gone'] WHERE id = $1",
            job["id"],
        )
        displaced = await one.insert(conform("x", queue="none", unique=UNIQUE))
        await schema.execute(
            "UPDATE river_job SET state = 'retryable', scheduled_at = now() WHERE id = $1",
            displaced["id"],
        )
        await other.insert(conform("x", queue="none", unique=UNIQUE))
        periodic = Periodic(id="periodic", queue="none", every_ms=3_600_000, run_on_start=True)
        async with fleet.worker(language, queues={"idle": 1}, periodic=[periodic], **RESCUE):
            await rig.until(STATE, "retryable", job["id"])
            await rig.until(STATE, "discarded", displaced["id"])
            await rig.until("SELECT count(*) FROM river_job WHERE metadata ? 'periodic'", 1)
        kept.add("river:rescue_count")
        assert await metadata.keys() == kept
        row = await other.get(displaced["id"])
        assert json.loads(row["metadata"]) == {"unique_key_conflict": "scheduler_discarded"}
        text = await schema.fetchval("SELECT metadata FROM river_job WHERE metadata ? 'periodic'")
        metadata_of_run = json.loads(text)
        metadata_of_run.pop("riverpy:periodic_run", None)  # River ignores it
        assert metadata_of_run == {"periodic": True, "river:periodic_job_id": "periodic"}

        await metadata.attempt(in_python, other, "return")
        await in_python.until("job_completed", id=job["id"])
        assert await metadata.keys() == kept
        found: dict[str, Any] = json.loads((await one.get(job["id"]))["metadata"])
        assert [entry["attempt"] for entry in found["river:log"]] == [2]


@EITHER
async def test_code_of_jobs(language: str, callers: Callers, fleet: Fleet) -> None:
    """The code of a job cannot set one of River's keys (CF-051, reserved_metadata_cross_engine)."""
    async with fleet.worker(language) as worker:
        job = await callers[OTHER[language]].insert(conform("reserved", max_attempts=1))
        await worker.until("job_failed", id=job["id"])
    row = await callers[language].get(job["id"])
    assert "river:" in row["errors"][0].error
    assert json.loads(row["metadata"]) == {}
