"""Claims that start where the last one ended, while those from the beginning are slow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import riverpy._work.front
import riverpy._work.producer
from riverpy import Job
from riverpy._work.front import BEGINNING, LOOK_INTERVAL_MAX, Front, Position
from riverpy.job import JobColumn
from tests.work.rig import Task  # noqa: TC001 (the registry reads the annotation)

if TYPE_CHECKING:
    from tests.work.rig import Rig

SLOW_CLAIM = 0.1
"""Seconds."""


def row(priority: int, scheduled_at: int, job_id: int) -> list[Any]:
    """A claimed row, as far as its place goes."""
    columns: list[Any] = [None] * 18
    columns[JobColumn.PRIORITY] = priority
    columns[JobColumn.SCHEDULED_AT] = scheduled_at
    columns[JobColumn.ID] = job_id
    return columns


def slow_front() -> Front:
    """A front after a slow claim from the beginning at time 0, which is looked at again at 1."""
    front = Front()
    rows = [row(2, 7, 1), row(1, 5, 9)]
    front.claimed(rows, start=BEGINNING, is_full=True, took=SLOW_CLAIM, now=0.0)
    return front


def test_quick_claims_start_at_the_beginning() -> None:
    """Also one of many rows, which takes its time."""
    front = Front()
    assert front.start(0.0) == BEGINNING
    front.claimed([row(1, 5, 9)], start=BEGINNING, is_full=True, took=0.01, now=0.0)
    assert front.start(0.0) == BEGINNING
    front.claimed([row(1, 5, 9)] * 1000, start=BEGINNING, is_full=True, took=0.1, now=0.0)
    assert front.start(0.0) == BEGINNING
    assert front.look_in(0.0) == 0.0


def test_slow_claim_moves_the_front() -> None:
    """PF-03: the next ones start behind its last row, whatever the order of the rows, and go on
    from there until it is time to look from the beginning."""
    front = slow_front()
    assert front.start(0.5) == Position(2, 7, 1)
    assert front.look_in(0.5) == 0.5
    front.claimed([row(2, 8, 3)], start=Position(2, 7, 1), is_full=True, took=0.01, now=0.6)
    assert front.start(0.7) == Position(2, 8, 3)
    assert front.start(1.0) == BEGINNING


def test_look_from_the_beginning() -> None:
    """One that is quick again ends it; a slow and full one goes back to where it ended, so that
    nothing is passed over; a slow one that found all that waits leaves the front where it was."""
    front = slow_front()
    front.claimed([row(1, 1, 1)], start=BEGINNING, is_full=True, took=SLOW_CLAIM, now=1.0)
    assert front.start(1.5) == Position(1, 1, 1)
    front = slow_front()
    front.claimed([row(1, 1, 1)], start=BEGINNING, is_full=False, took=SLOW_CLAIM, now=1.0)
    assert front.start(1.5) == Position(2, 7, 1)
    front.claimed([], start=BEGINNING, is_full=False, took=SLOW_CLAIM, now=2.0)
    assert front.start(2.5) == Position(2, 7, 1)
    front.claimed([row(1, 1, 1)], start=BEGINNING, is_full=True, took=0.001, now=3.0)
    assert front.start(3.0) == BEGINNING


def test_look_is_bounded() -> None:
    """However slow claims are, a job before the front waits for seconds at most."""
    front = Front()
    front.claimed([row(1, 5, 9)], start=BEGINNING, is_full=True, took=60.0, now=0.0)
    assert front.look_in(0.0) == LOOK_INTERVAL_MAX


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[Position]:
    """Where each claim started; every one from the beginning counts as slow."""
    seen: list[Position] = []
    claim = riverpy._work.producer.job_claim

    async def spy(*args: Any, after: Position, **values: Any) -> Any:
        seen.append(after)
        return await claim(*args, after=after, **values)

    monkeypatch.setattr(riverpy._work.front, "SLOW", 0.0)
    monkeypatch.setattr(riverpy._work.front, "SLOW_PER_ROW", 0.0)
    monkeypatch.setattr(riverpy._work.producer, "job_claim", spy)
    return seen


async def test_nothing_is_passed_over(rig: Rig, places: list[Position]) -> None:
    """PF-03: with claims that start behind the last one's rows, every job runs once, also those
    that come before these, of a higher priority and of an earlier time, though nobody tells of
    them."""
    runs: list[int] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        runs.append(job.id)
        if len(runs) == 100:
            await rig.schema.execute(
                "INSERT INTO river_job (kind, max_attempts, args, priority, scheduled_at)"
                " SELECT 'task', 25, '{}'::jsonb, 1, now() FROM generate_series(1, 20) UNION ALL"
                " SELECT 'task', 25, '{}'::jsonb, 2, now() - interval '1 hour'"
                " FROM generate_series(1, 20)"
            )

    await rig.schema.execute(
        "INSERT INTO river_job (kind, max_attempts, args, priority)"
        " SELECT 'task', 25, '{}', 2 FROM generate_series(1, 300)"
    )
    async with rig.working(slots=5):
        await rig.take(340)
    assert len(runs) == len(set(runs)) == 340
    assert any(place != BEGINNING for place in places)
