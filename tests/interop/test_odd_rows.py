"""Rows whose metadata or errors have another form than River's, as SQL by hand leaves them."""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import AttemptError
from tests.interop.conform import conform, error_text
from tests.interop.read_rows import read_by_go
from tests.interop.test_jobs import ended, same_row
from tests.interop.working import LANGUAGES, OTHER
from tests.test_attempt_errors import ODD

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.interop.callers import Caller
    from tests.interop.river_go import RiverGo
    from tests.interop.working import Fleet
    from tests.work.rig import Rig

    Callers = dict[str, Caller]

EITHER = pytest.mark.parametrize("language", LANGUAGES)
NO_OBJECTS: list[Any] = [[1], 1, "x", None]
UPDATES: dict[str, tuple[str, dict[str, Any] | None]] = {
    "return": ("job_completed", None),
    "fail": ("job_failed", None),
    "output": ("job_completed", {"output": {"n": 1}}),
    "snooze": ("job_snoozed", {"snoozes": 1}),
}
"""The ends of a job, and what each adds to its metadata."""
SET_METADATA = "UPDATE river_job SET metadata = $2::jsonb WHERE id = $1"
SET_STATE = "UPDATE river_job SET state = $2::river_job_state WHERE id = $1"
SET_ERRORS = "UPDATE river_job SET errors = $1::text[]::jsonb[], attempt = 3"
ERRORS = "SELECT errors::text FROM river_job"
REQUIRED = ["available", "pending", "running", "scheduled"]


def joined(metadata: Any, update: dict[str, Any]) -> list[Any]:
    """Return metadata that are no object, followed by an update."""
    return [*(metadata if isinstance(metadata, list) else [metadata]), update]


@EITHER
async def test_metadata(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, go: RiverGo
) -> None:
    """Both languages read metadata that are no object, and an attempt that adds nothing leaves them
    alone. An addition of an attempt or an update follows them in a list (CF-107)."""
    caller = callers[OTHER[language]]
    cases = list(product(NO_OBJECTS, UPDATES))
    jobs = await caller.insert_many(
        *[
            conform(end, message="no", duration_ms=3_600_000, max_attempts=1, pending=True)
            for _, end in cases
        ]
    )
    for job, (metadata, _) in zip(jobs, cases, strict=True):
        await schema.execute(SET_METADATA, job["id"], json.dumps(metadata))
        await schema.execute(SET_STATE, job["id"], "available")
        assert json.loads((await same_row(callers, schema, job["id"]))["metadata"]) == metadata
    async with fleet.worker(language) as worker:
        for job, (metadata, end) in zip(jobs, cases, strict=True):
            event, update = UPDATES[end]
            row = await ended(worker, callers, schema, event, job["id"])
            after = metadata if update is None else joined(metadata, update)
            assert json.loads(row["metadata"]) == after
    for metadata in NO_OBJECTS:
        job = await caller.insert(conform(pending=True))
        await schema.execute(SET_METADATA, job["id"], json.dumps(metadata))
        await callers[language].set_output(job["id"], 5)
        row = await same_row(callers, schema, job["id"])
        assert json.loads(row["metadata"]) == joined(metadata, {"output": 5})
    assert len(await go.run("list")) == len(cases) + len(NO_OBJECTS)


@EITHER
async def test_metadata_of_duplicates(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """A leader that discards a due job because another holds its key adds its note behind metadata
    that are no object (CF-107)."""
    jobs: dict[int, Any] = {}
    for metadata in NO_OBJECTS:
        unique = {"by_args": True, "by_state": REQUIRED}
        request = conform(message=str(metadata), queue="nobody", unique=unique)
        job = await callers[language].insert(request)
        await schema.execute(SET_METADATA, job["id"], json.dumps(metadata))
        await schema.execute(SET_STATE, job["id"], "retryable")
        await callers[language].insert(request)
        jobs[job["id"]] = metadata
    async with fleet.worker(language, candidate=True):
        await rig.until_state("discarded", len(jobs))
    note = {"unique_key_conflict": "scheduler_discarded"}
    for job_id, metadata in jobs.items():
        row = await same_row(callers, schema, job_id)
        assert json.loads(row["metadata"]) == joined(metadata, note)


@EITHER
async def test_errors(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, go: RiverGo
) -> None:
    """Both languages read entries of errors of any form alike, whatever is done to the job. Stored
    entries stay unchanged, and new ones follow (CF-110)."""
    caller = callers[language]
    job = await caller.insert(conform("fail", message="no", queue="odd", max_attempts=3))
    await schema.execute(SET_ERRORS, list(ODD))
    stored = await schema.fetchval(ERRORS)
    read = [AttemptError(*values) for values in ODD.values()]
    for act in (caller.get, caller.cancel, caller.retry, caller.get, caller.retry):
        row = await act(job["id"])
        assert row["errors"] == read
        assert await callers[OTHER[language]].get(job["id"]) == row
        assert await schema.fetchval(ERRORS) == stored
    assert (row["state"], row["max_attempts"]) == ("available", 4)
    assert len(await go.run("list")) == 1
    async with fleet.worker(language, queues={"odd": 1}) as worker:
        await worker.until("job_failed", id=job["id"])
    row = await caller.get(job["id"])
    assert await callers[OTHER[language]].get(job["id"]) == row
    assert row["errors"][:-1] == read
    assert row["errors"][-1].error == error_text(language, "no")
    assert (await schema.fetchval(ERRORS)).startswith(stored[:-1])
    (deleted,) = await go.run("delete", job["id"])
    assert read_by_go(deleted) == row
