"""Claims start after the last seen position while claims from the beginning are slow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import riverpy._work.claim_cursor
import riverpy._work.producer
from riverpy import Job
from riverpy._postgres.driver import use_raw_timestamps
from riverpy._postgres.jobs import job_claim
from riverpy._work.claim_cursor import (
    BACKLOG_CLAIM_ROWS_MIN,
    WHOLE_QUEUE_CLAIM_INTERVAL_MAX,
    WHOLE_QUEUE_CLAIM_INTERVAL_MIN,
    WHOLE_QUEUE_CLAIM_TIME_FRACTION_MAX,
    WHOLE_QUEUE_RANGE,
    ClaimCursor,
    QueuePosition,
    QueueRange,
)
from riverpy.job import JobColumn
from tests.work.rig import PATIENCE, Task

if TYPE_CHECKING:
    from tests.work.rig import Rig

FAST, SLOW = 0.001, 0.02
"""Durations of claims in seconds."""
SEEN = 10_000_000
LATE = 1_000_000
"""Raw times: microseconds."""
FIRST = -(2**63)


def row(priority: int, scheduled_at: int, job_id: int) -> list[Any]:
    """Return a claimed row with the columns that define its position."""
    columns: list[Any] = [None] * 18
    columns[JobColumn.PRIORITY] = priority
    columns[JobColumn.SCHEDULED_AT] = scheduled_at
    columns[JobColumn.ID] = job_id
    return columns


def places(cursor: ClaimCursor, now: float) -> list[tuple[int, int] | None]:
    """Return the time and id after which each claim starts; None for a claim from the beginning."""
    ranges = cursor.choose_claim_ranges(now)
    parts = [part for part in ranges if part != WHOLE_QUEUE_RANGE]
    # Each range continues the one before it, and the last one ends with the lowest priority.
    firsts = [part.start_after.priority for part in parts]
    assert [part.last_priority + 1 for part in parts] == ([*firsts[1:], 5] if parts else [])
    return [
        None
        if part == WHOLE_QUEUE_RANGE
        else (part.start_after.scheduled_at, part.start_after.job_id)
        for part in ranges
    ]


def slow_cursor(*rows: list[Any], is_full: bool) -> ClaimCursor:
    """Return a cursor after a fast claim and a slow one at time 0 that returned these rows."""
    cursor = ClaimCursor()
    assert not cursor.record_claim_and_check_slow(WHOLE_QUEUE_RANGE, 0, FAST)
    assert not cursor.record_claim_and_check_slow(WHOLE_QUEUE_RANGE, len(rows), SLOW)
    assert cursor.record_claim_and_check_slow(WHOLE_QUEUE_RANGE, len(rows), SLOW)
    cursor.start_using_positions(
        rows, is_slow=True, is_limit_reached=is_full, server_time=SEEN, duration=SLOW, now=0.0
    )
    return cursor


def test_fast_claims_start_at_the_beginning() -> None:
    """Whether a claim is slow depends on the fastest claim and on the number of rows. A single slow
    claim does not count."""
    cursor = ClaimCursor()
    for rows, took in ((1, 0.3), (1, 0.309), (1, 0.309), (1000, 0.34), (1000, 0.34), (1, 0.32)):
        assert not cursor.record_claim_and_check_slow(WHOLE_QUEUE_RANGE, rows, took)
    assert cursor.record_claim_and_check_slow(WHOLE_QUEUE_RANGE, 1, 0.32)
    assert not cursor.record_claim_and_check_slow(WHOLE_QUEUE_RANGE, 1, 0.3)
    assert not cursor.record_claim_and_check_slow(WHOLE_QUEUE_RANGE, 1, 0.32)
    cursor.update_positions(WHOLE_QUEUE_RANGE, [row(1, 5, 9)], is_limit_reached=True, now=0.0)
    assert places(cursor, 0.0) == [None]
    assert cursor.seconds_until_whole_queue_claim(0.0) is None


def test_slow_claim_that_found_all() -> None:
    """After a slow claim that found everything, the jobs it has seen are skipped in every priority,
    except those of the last second, which may still be committed (FR-09)."""
    cursor = slow_cursor(row(2, 7, 1), is_full=False)
    assert places(cursor, 0.5) == [(SEEN - LATE, 0)] * 4
    cursor = slow_cursor(is_full=False)
    assert places(cursor, 0.5) == [(SEEN - LATE, 0)] * 4


def test_slow_claim_that_is_full() -> None:
    """After a slow claim that returned all it could, the next claims start after its last row, in
    any order of the rows. Lower priorities were not seen. A range that returned less keeps its
    position for jobs that commit late (PF-03)."""
    cursor = slow_cursor(row(2, 7, 1), row(1, 5, 9), is_full=True)
    assert places(cursor, 0.5) == [(SEEN - LATE, 0), (7, 1)]
    part = QueueRange(QueuePosition(2, 7, 1), 2)
    assert not cursor.record_claim_and_check_slow(part, 1, SLOW)
    cursor.update_positions(part, [row(2, 8, 3)], is_limit_reached=True, now=0.6)
    assert places(cursor, 0.7) == [(SEEN - LATE, 0), (8, 3)]
    cursor.update_positions(
        QueueRange(QueuePosition(2, 8, 3), 2), [row(2, 9, 4)], is_limit_reached=False, now=0.7
    )
    assert places(cursor, 0.7) == [(SEEN - LATE, 0), (8, 3)]


def test_claim_from_the_beginning_again() -> None:
    """A claim from the beginning comes last when it is due, and first if the others left no room
    for it. A fast one ends the skipping. A slow and full one sets the position back to its end, so
    that no job is skipped."""
    cursor = slow_cursor(row(2, 7, 1), is_full=True)
    now = cursor.seconds_until_whole_queue_claim(0.0)
    assert now == SLOW / WHOLE_QUEUE_CLAIM_TIME_FRACTION_MAX
    assert places(cursor, now - 0.001)[-1] is not None
    assert places(cursor, now) == [(SEEN - LATE, 0), (7, 1), None]
    cursor.update_positions(
        QueueRange(QueuePosition(2, 7, 1), 2), [row(2, 8, 3)], is_limit_reached=True, now=now
    )
    assert places(cursor, now) == [None]
    cursor.start_using_positions(
        [row(2, 6, 1)],
        is_slow=True,
        is_limit_reached=True,
        server_time=SEEN,
        duration=SLOW,
        now=now,
    )
    assert places(cursor, now) == [(SEEN - LATE, 0), (6, 1)]
    cursor.update_positions(WHOLE_QUEUE_RANGE, [], is_limit_reached=False, now=9.0)
    assert places(cursor, 9.0) == [None]


def test_backlog() -> None:
    """After two large claims in a row that return all jobs that were requested, the next claims
    start after the last row. A claim that is small or finds fewer jobs breaks the series. A claim
    with room for more jobs then reads from the beginning, and claims start there again."""
    cursor, rows = ClaimCursor(), BACKLOG_CLAIM_ROWS_MIN
    large = [row(1, 5, 9)] * rows
    for count, limit in ((rows, rows), (rows - 1, rows - 1), (rows, rows), (rows, rows + 1)):
        assert not cursor.record_claim_and_check_backlog(
            WHOLE_QUEUE_RANGE, [row(1, 5, 9)] * count, limit
        )
        assert cursor.must_claim_alone == (count == limit == rows)
    assert not cursor.record_claim_and_check_backlog(WHOLE_QUEUE_RANGE, large, rows)
    assert cursor.record_claim_and_check_backlog(WHOLE_QUEUE_RANGE, large, rows)
    cursor.start_using_positions(
        [row(2, 7, 1)], is_slow=False, is_limit_reached=True, server_time=SEEN, duration=1, now=0.0
    )
    rest = QueueRange(QueuePosition(2, 7, 1), 4)
    first = QueueRange(QueuePosition(1, SEEN - LATE, 0), 1)
    assert cursor.choose_claim_ranges(0.5) == [first, rest, WHOLE_QUEUE_RANGE]
    assert not cursor.record_claim_and_check_backlog(rest, large, rows)
    cursor.update_positions(rest, [row(4, 1, 3)], is_limit_reached=True, now=0.5)
    assert places(cursor, 0.5) == [(SEEN - LATE, 0), (7, 1), (1, 3), None]
    assert cursor.record_claim_and_check_backlog(WHOLE_QUEUE_RANGE, large, rows)
    assert not cursor.record_claim_and_check_backlog(
        WHOLE_QUEUE_RANGE, [*large[1:], row(2, 7, 1)], rows
    )
    cursor.update_positions(WHOLE_QUEUE_RANGE, [row(2, 9, 9)], is_limit_reached=False, now=1.0)
    assert places(cursor, 1.0) == [None]
    assert not cursor.must_claim_alone


def test_pause_is_bounded() -> None:
    """The interval between claims from the beginning is limited: a skipped job waits only seconds,
    and claims from the beginning stay few."""
    cursor = ClaimCursor()
    cursor.start_using_positions(
        [], is_slow=True, is_limit_reached=False, server_time=SEEN, duration=60.0, now=0.0
    )
    assert cursor.seconds_until_whole_queue_claim(0.0) == WHOLE_QUEUE_CLAIM_INTERVAL_MAX
    cursor.start_using_positions(
        [], is_slow=True, is_limit_reached=False, server_time=SEEN, duration=0.0, now=0.0
    )
    assert cursor.seconds_until_whole_queue_claim(0.0) == WHOLE_QUEUE_CLAIM_INTERVAL_MIN


async def test_range_ends_with_its_priority(rig: Rig) -> None:
    """A claim of one range returns no job of a lower priority, which has its own range."""
    for priority in (1, 2):
        await rig.insert_rows(1, priority=priority)
    async with rig.schema.connected() as connection:
        await use_raw_timestamps(connection)
        found = [
            await job_claim(
                connection,
                rig.schema.name,
                queue="default",
                kinds=None,
                skipped_ids=[],
                after_position=(priority, 0, 0),
                priority_max=priority,
                limit=10,
                client_id="me",
            )
            for priority in (1, 2)
        ]
    assert [[one[JobColumn.ID] for one in rows] for rows in found] == [[1], [2]]


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> list[QueueRange]:
    """Record the range of each claim. Every claim from the beginning counts as slow."""
    seen: list[QueueRange] = []
    claim = riverpy._work.producer.job_claim

    async def spy(
        *args: Any, after_position: QueuePosition, priority_max: int, **values: Any
    ) -> Any:
        seen.append(QueueRange(after_position, priority_max))
        return await claim(
            *args, after_position=after_position, priority_max=priority_max, **values
        )

    monkeypatch.setattr(riverpy._work.claim_cursor, "SLOW_CLAIM_THRESHOLD", -1.0)
    monkeypatch.setattr(riverpy._work.claim_cursor, "SLOW_CLAIM_THRESHOLD_PER_ROW", 0.0)
    monkeypatch.setattr(riverpy._work.producer, "job_claim", spy)
    return seen


async def test_no_job_is_skipped(rig: Rig, claims: list[QueueRange]) -> None:
    """With claims that start after the last rows, every job runs once, also jobs with a higher
    priority or an earlier time that come without a notification (PF-03)."""
    runs: list[int] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        runs.append(job.id)
        if len(runs) == 100:
            await rig.schema.execute(
                "INSERT INTO river_job (kind, max_attempts, args, priority, scheduled_at)"
                " SELECT 'task', 25, '{}'::jsonb, 1, now() FROM generate_series(1, 20) UNION ALL"
                " SELECT 'task', 25, '{}'::jsonb, 2, now() - interval '1 hour'"
                " FROM generate_series(1, 20) UNION ALL"
                " SELECT 'task', 25, '{}'::jsonb, 4, now() - interval '1 hour'"
                " FROM generate_series(1, 20)"
            )

    await rig.schema.execute(
        "INSERT INTO river_job (kind, max_attempts, args, priority)"
        " SELECT 'task', 25, '{}', 2 FROM generate_series(1, 300)"
    )
    async with rig.working(slots=5):
        await rig.take(360)
    assert len(runs) == len(set(runs)) == 360
    assert any(part != WHOLE_QUEUE_RANGE for part in claims)


def is_behind(claim: QueueRange) -> bool:
    """Whether the claim searches only for new jobs of the first priority."""
    return claim.last_priority == 1 and claim.start_after.scheduled_at > FIRST


async def test_other_kinds_are_skipped(rig: Rig, claims: list[QueueRange]) -> None:
    """A claim finds a new job after jobs of other kinds without reading those again. A claim from
    the beginning finds a job that committed late (FR-09)."""
    rig.register_task()
    await rig.schema.execute(
        "INSERT INTO river_job (kind, max_attempts, args, scheduled_at)"
        " SELECT 'other', 25, '{}'::jsonb, now() - interval '1 hour'"
        " FROM generate_series(1, 100)"
    )
    async with rig.working() as client:
        await rig.work(client, Task())  # the claims before it are slow
        before = len(claims)
        with anyio.fail_after(PATIENCE):  # on a busy machine a claim from the beginning may be due
            while not any(is_behind(claim) for claim in claims[before:]):
                before = len(claims)
                await rig.work(client, Task())
        await rig.schema.execute(
            "INSERT INTO river_job (kind, max_attempts, args, scheduled_at)"
            " VALUES ('task', 25, '{}'::jsonb, now() - interval '1 hour')"
        )
        await rig.take(1)
        assert WHOLE_QUEUE_RANGE in claims[before:]
    assert (await rig.states())["available"] == 100


async def test_claims_longer_than_the_pause(
    rig: Rig, claims: list[QueueRange], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If claims after the last rows take longer than the interval between claims from the
    beginning, these still read the whole queue and find a job that committed late (PF-03)."""
    pause, took = 0.02, 0.03
    for name in ("WHOLE_QUEUE_CLAIM_INTERVAL_MIN", "WHOLE_QUEUE_CLAIM_INTERVAL_MAX"):
        monkeypatch.setattr(riverpy._work.claim_cursor, name, pause)
    claim = riverpy._work.producer.job_claim

    async def slow(*args: Any, **values: Any) -> Any:
        if values["after_position"] != WHOLE_QUEUE_RANGE.start_after:
            await anyio.sleep(took)
        return await claim(*args, **values)

    monkeypatch.setattr(riverpy._work.producer, "job_claim", slow)

    rig.register_task()
    async with rig.working(slots=5) as client:
        for jobs in range(11, 16):
            await rig.insert_rows(jobs)
            client._run.producers["default"].wake()  # type: ignore[union-attr]
            await rig.take(jobs)
            await anyio.sleep(4 * took)
            await rig.schema.execute(
                "INSERT INTO river_job (kind, max_attempts, args, scheduled_at)"
                " VALUES ('task', 25, '{}'::jsonb, now() - interval '1 hour')"
            )
            await rig.take(1)


@pytest.mark.usefixtures("fast_claims")
@pytest.mark.parametrize("interval", [0.0, math.inf], ids=["due", "not due"])
async def test_jobs_that_a_backlog_leaves_behind(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, interval: float
) -> None:
    """While a client works through a backlog, a job of a higher priority runs next. Jobs with an
    earlier time, and a job whose row was locked, run when a claim from the beginning is due. Until
    then they wait for the jobs that came before, but not for a poll, and a pause changes nothing
    (PF-03)."""
    for name in ("WHOLE_QUEUE_CLAIM_INTERVAL_MIN", "WHOLE_QUEUE_CLAIM_INTERVAL_MAX"):
        monkeypatch.setattr(riverpy._work.claim_cursor, name, interval)
    monkeypatch.setattr(riverpy._work.claim_cursor, "BACKLOG_CLAIM_ROWS_MIN", 0.1)
    runs: list[int] = []

    async with rig.schema.connected() as other:
        lock = other.transaction()

        @rig.job
        async def work(job: Job[Task]) -> None:
            runs.append(job.id)
            if len(runs) == 10:
                await lock.rollback()
                await other.execute(
                    "INSERT INTO river_job (id, kind, max_attempts, args, priority, scheduled_at)"
                    " VALUES (101, 'task', 25, '{}', 1, now()), (103, 'task', 25, '{}', 3, now()),"
                    " (102, 'task', 25, '{}', 2, now() - interval '1 hour')"
                )
                await client.queue_pause("default")
                await client.queue_resume("default")

        await rig.insert_rows(40, priority=2)
        await lock.start()
        await other.execute("SELECT FROM river_job WHERE id = 5 FOR UPDATE")
        async with rig.working(slots=1, candidate=False) as client:
            await rig.take(45)  # 43 jobs, a pause and its end
    others = [job for job in runs if job not in {5, 102}]
    assert others == [*range(1, 5), *range(6, 12), 101, *range(12, 41), 103]
    assert {5, 102} <= set(runs[-2:] if interval else runs[11:15])
    assert runs.index(102) < runs.index(5)
