"""Jobs that complete themselves in a transaction of their worker, in each language."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.interop.conform import conform
from tests.interop.test_jobs import same_row
from tests.interop.working import LANGUAGES, OTHER

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.interop.callers import Caller
    from tests.interop.working import Fleet

    Callers = dict[str, Caller]


@pytest.mark.parametrize("language", LANGUAGES)
async def test_ends_after_the_commit(
    language: str, callers: Callers, fleet: Fleet, schema: Schema
) -> None:
    """Once the transaction is committed, the job is completed with what it recorded, and the event
    says so, whatever the code does afterwards. The metadata that it records then are merged."""
    ends = ("return", "fail", "cancel", "snooze", "output fail", "signal")
    async with fleet.worker(language) as worker:
        jobs = await callers[OTHER[language]].insert_many(
            *(
                conform(f"output complete print {end}", message="m", output=1, duration_ms=60_000)
                for end in ends
            )
        )
        for job, end in zip(jobs, ends, strict=True):
            if end != "signal":
                await worker.until("job_completed", id=job["id"])
        await worker.until("effect", id=jobs[-1]["id"])
        worker.stop_hard()
        await worker.until("job_completed", id=jobs[-1]["id"])
        await worker.stopped()
    for job, end in zip(jobs, ends, strict=True):
        row = await same_row(callers, schema, job["id"])
        assert (row["state"], row["attempt"], row["errors"]) == ("completed", 1, []), end
        assert row["attempted_at"] <= row["finalized_at"]
        metadata = json.loads(row["metadata"])
        assert metadata.pop("snoozes", 1) == 1
        assert metadata == {"output": 1}, end
