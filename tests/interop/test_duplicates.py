"""Unique jobs whose keys other jobs hold, at an insert and when they are due, and unique options
that are refused."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from structlog.testing import capture_logs

from tests.interop.callers import Refused
from tests.interop.conform import conform
from tests.interop.test_jobs import same_row
from tests.interop.working import LANGUAGES, OTHER, Periodic
from tests.work.rig import PATIENCE

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.interop.callers import Caller
    from tests.interop.river_go import Row
    from tests.interop.working import Fleet
    from tests.work.rig import Rig

    Callers = dict[str, Caller]

EITHER = pytest.mark.parametrize("language", LANGUAGES)
REQUIRED = ["available", "pending", "running", "scheduled"]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"exclude_kind": True}, "(?i)exclude_?kind"),
    *[
        ({"by_args": True, "by_state": [one for one in REQUIRED if one != state]}, f": {state}$")
        for state in REQUIRED
    ],
    ({"by_state": ["available"]}, ": pending, running, scheduled$"),
    ({"by_period_s": 0.999}, "(?i)by_?period"),
]
"""Unique options, and the text of their refusal."""
PERIODIC = "periodic_job_id"
RETRYABLE = """
UPDATE river_job SET state = 'retryable', attempt = 1,
    scheduled_at = now() - $2 * interval '1 minute'
WHERE id = $1
"""


@EITHER
async def test_kind_of_a_duplicate(language: str, callers: Callers, schema: Schema) -> None:
    """The result for a duplicate of a job of another kind is the stored row, unchanged, inserted
    alone and in a batch (CF-015, unique_skip_keeps_existing_kind)."""
    request = conform(message="one", unique={"by_args": True, "exclude_kind": True})
    job = await callers[language].insert(request)
    await schema.execute("UPDATE river_job SET kind = 'renamed'")
    other = callers[OTHER[language]]
    again = [
        *await other.insert_unique(request),
        *await other.insert_unique(request, conform()),
    ]
    assert [row["id"] for row, _ in again] == [job["id"], job["id"], again[2][0]["id"]]
    assert [is_duplicate for _, is_duplicate in again] == [True, True, False]
    row = await same_row(callers, schema, job["id"])
    assert row == job | {"kind": "renamed"} == again[0][0] == again[1][0]


@EITHER
async def test_due_duplicates(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """A leader that makes jobs available discards the unique ones whose key another job holds. Of
    several with one key it discards all but the first (CF-016,
    scheduler_unique_conflict_discard)."""
    caller = callers[language]

    async def retryable(message: str, age: int, **options: Any) -> Row:
        """Return a job that has been due for a retry for this many minutes."""
        job = await caller.insert(conform(message=message, queue="nobody", **options))
        await schema.execute(RETRYABLE, job["id"], age)
        return await caller.get(job["id"])

    unique = {"unique": {"by_args": True, "by_state": REQUIRED}}
    beaten = await retryable("held", 3, **unique)
    holder = await caller.insert(conform(message="held", queue="nobody", **unique))
    second = await retryable("twice", 1, **unique)
    first = await retryable("twice", 2, **unique)
    third = await retryable("twice", 3, priority=2, **unique)
    plain = await retryable("plain", 0)
    async with fleet.worker(OTHER[language], queues={"other": 1}, candidate=True):
        await rig.until("SELECT state::text FROM river_job WHERE id = $1", "available", plain["id"])
        after = {
            job["id"]: await same_row(callers, schema, job["id"])
            for job in (beaten, holder, second, first, third, plain)
        }
    for job in (first, plain):
        assert after[job["id"]] == job | {"state": "available"}
    assert after[holder["id"]] == holder
    for job in (beaten, second, third):
        row = after[job["id"]]
        assert row["finalized_at"] is not None
        assert json.loads(row["metadata"]) == {"unique_key_conflict": "scheduler_discarded"}
        same = {"finalized_at": None, "metadata": "", "state": ""}
        assert row | same == job | same
        assert row["state"] == "discarded"


@EITHER
async def test_refused_options(language: str, callers: Callers, schema: Schema, rig: Rig) -> None:
    """Unique options that make no key, or a key for too short a time, are refused in each place,
    and nothing is stored. The required states alone make a key (CF-111)."""
    caller = callers[language]
    for unique, text in REFUSED:
        request = conform(queue="nobody", unique=unique)
        for requests in ([request], [conform(), request], [request | {"of_kind": True}]):
            with pytest.raises(Refused, match=text):
                await caller.insert_unique(*requests)
        with pytest.raises(Refused, match=text):
            await caller.insert_many_fast(conform(), request)
    assert await rig.states() == {}
    allowed = conform(queue="nobody", unique={"by_state": REQUIRED})
    job = await caller.insert(allowed | {"of_kind": True})
    assert await callers[OTHER[language]].insert_unique(allowed) == [(job, True)]


@EITHER
async def test_refused_periodic_jobs(language: str, fleet: Fleet, rig: Rig) -> None:
    """A leader does not insert a periodic job whose unique options are refused, and inserts others
    (CF-111)."""

    def hourly(kind: str, unique: dict[str, Any]) -> Periodic:
        return Periodic(id=kind, kind=kind, every_ms=3_600_000, run_on_start=True, unique=unique)

    refused = {f"refused_{number}": unique for number, (unique, _) in enumerate(REFUSED)}
    periodic = [hourly("plain", {}), *itertools.starmap(hourly, refused.items())]
    inserted = "SELECT array_agg(kind) FROM river_job"
    with capture_logs() as log, anyio.fail_after(PATIENCE):
        async with fleet.worker(language, queues={"other": 1}, candidate=True, periodic=periodic):
            await rig.until(inserted, ["plain"])
            while language == "python" and refused.keys() != {
                entry[PERIODIC] for entry in log if PERIODIC in entry
            }:
                await asyncio.sleep(0.01)
            await rig.until(inserted, ["plain"])
