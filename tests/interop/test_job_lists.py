"""Lists, cursors and deletions of jobs by both languages, on the same rows."""

from __future__ import annotations

import asyncio
import itertools
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from tests.interop.callers import NotThere, Refused, Running, both_callers
from tests.interop.conform import conform
from tests.interop.inserting import request
from tests.interop.working import LANGUAGES, OTHER

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.interop.callers import Caller, Page
    from tests.interop.river_go import RiverGo
    from tests.interop.working import Fleet

    Callers = dict[str, Caller]

EITHER = pytest.mark.parametrize("language", LANGUAGES)
WAITING = """
SELECT count(*) FROM pg_stat_activity WHERE $1::int = ANY(pg_blocking_pids(pid))
"""
"""The number of sessions that wait for a lock of this session."""
FINAL = ["completed", "cancelled", "discarded"]
ORDER_ROWS = """
INSERT INTO river_job
  (id, state, kind, max_attempts, args, scheduled_at, attempted_at, finalized_at)
SELECT i, state::river_job_state, 'k', 25, '{}',
  timestamptz '2026-01-01 00:00:00.1Z' + i / 4 * interval '1 hour',
  CASE WHEN i % 4 < 2
    THEN timestamptz '2026-01-02 00:00:00.123456Z' + i / 8 * interval '1 hour' END,
  CASE WHEN state IN ('cancelled', 'completed', 'discarded')
    THEN timestamptz '2026-01-03Z' + i / 12 * interval '1 hour' END
FROM (
  SELECT i, (enum_range(NULL::river_job_state))[1 + i / 2 % 8]::text AS state
  FROM generate_series(1, 32) AS i
) AS numbered
"""


async def same_page(callers: Callers, **params: Any) -> Page:
    """Check that both languages list the same rows with the same cursor, and return the page."""
    pages = [await caller.list_jobs(**params) for caller in callers.values()]
    assert pages[0] == pages[1], params
    return pages[0]


@EITHER
async def test_job_calls(language: str, callers: Callers) -> None:
    """One language inserts, cancels and deletes, the other reads, updates and retries. Both read
    and list the same rows (CF-024, differential_job_crud)."""
    one, other = callers[language], callers[OTHER[language]]
    wanted = request("{}", priority=3, tags=["one", "two"], metadata={"region": "eu"})
    inserted = await one.insert(wanted)
    job_id = inserted["id"]
    assert await other.get(job_id) == inserted
    await one.insert(request("{}", tags=["one"]))
    page = await same_page(callers, ids=[job_id], tags_all=["two", "one"])
    assert page.rows == [inserted]
    updated = await other.set_output(job_id, [1])
    assert await one.get(job_id) == updated
    assert json.loads(updated["metadata"]) == {"region": "eu", "output": [1]}
    assert (await one.cancel(job_id))["state"] == "cancelled"
    retried = await other.retry(job_id)
    assert (retried["state"], retried["finalized_at"]) == ("available", None)
    assert json.loads(retried["metadata"]) == {"region": "eu", "output": [1]}
    assert await one.delete(job_id) == retried
    for caller in (one, other):
        for call in (caller.get, caller.delete):
            with pytest.raises(NotThere):
                await call(job_id)


@EITHER
async def test_delete_many(language: str, callers: Callers, schema: Schema) -> None:
    """A deletion of many passes over running and locked jobs before its limit, returns the rows in
    the order of their ids, and needs a filter or an explicit wish (CF-025, bulk_delete_safety)."""
    caller = callers[language]
    ids = [job["id"] for job in await caller.insert_many(*[conform()] * 5)]
    await schema.execute(
        "UPDATE river_job SET state = 'running', attempted_at = now() WHERE id = $1", ids[1]
    )
    rows = [await caller.get(job_id) for job_id in ids]
    for limit in (0, 10_001):
        with pytest.raises(Refused):
            await caller.delete_many(ids=ids, limit=limit)
    with pytest.raises(Refused):
        await caller.delete_many()
    assert await caller.delete_many(ids=ids[1:3], limit=1) == [rows[2]]
    async with schema.connected() as connection:
        await connection.execute(f"BEGIN; SELECT FROM river_job WHERE id = {ids[4]} FOR UPDATE")
        assert await caller.delete_many(ids=[ids[4], ids[3], ids[1], ids[0]]) == [rows[0], rows[3]]
    assert await caller.delete_many(states=["running"]) == []
    assert await caller.delete_many(unsafe_all=True) == [rows[4]]
    assert (await same_page(callers)).rows == [rows[1]]
    assert await caller.delete_many(unsafe_all=True, queues=["none"]) == []


async def test_filters_and_cursors(callers: Callers) -> None:
    """Both languages list the same jobs with the same cursors, byte for byte, and each continues
    behind the other's cursor (CF-030, differential_job_list_filters_and_cursors)."""
    jobs = [
        await callers["go"].insert(
            request(
                "{}",
                kind="mail",
                queue="q",
                priority=number,
                tags=["red"],
                metadata={"tenant": "a"},
                scheduled_at=f"2099-01-01T00:00:0{number}Z",
            )
        )
        for number in (1, 2, 3)
    ]
    odd = await callers["python"].insert(request("{}", kind="other", priority=4, tags=["blue"]))
    ids = [job["id"] for job in jobs]
    filters: dict[str, Any] = {
        "kinds": ["mail"],
        "queues": ["q", "r"],
        "priorities": [1, 2, 3],
        "states": ["scheduled"],
        "ids": ids,
        "tags_all": ["red"],
        "tags_any": ["red", "green"],
        "metadata": {"tenant": "a"},
    }
    for chosen in ({name: value} for name, value in filters.items()):
        assert (await same_page(callers, **chosen)).ids == ids, chosen
    page = await same_page(callers, **filters, order="scheduled_at", descending=True, limit=2)
    assert page.ids == ids[:0:-1]
    page = await same_page(
        callers, **filters, order="scheduled_at", descending=True, limit=2, after=page.cursor
    )
    assert page.ids == ids[:1]
    page = await same_page(
        callers, **filters, order="scheduled_at", descending=True, after=page.cursor
    )
    assert page == ([], None)
    assert (await same_page(callers)).ids == [*ids, odd["id"]]
    for caller in callers.values():
        for limit in (0, 10_001):
            with pytest.raises(Refused):
                await caller.list_jobs(limit=limit)


async def test_orders(callers: Callers, schema: Schema) -> None:
    """Both languages list the same jobs in each order, in both directions and at every limit, also
    with equal and empty times, and each continues behind the other's cursor. They refuse the end as
    the order of jobs that have not ended (CF-103)."""
    await schema.execute(ORDER_ROWS)
    cases: list[dict[str, Any]] = [
        {"order": "id"},
        {"order": "scheduled_at"},
        {"order": "time"},
        {"order": "time", "states": ["running"]},
        {"order": "time", "states": ["running", "completed", "pending"]},
        {"order": "time", "states": ["cancelled", "running"]},
        {"order": "time", "states": FINAL},
        {"order": "time", "states": ["pending", "running"]},
        {"order": "finalized_at"},
        {"order": "finalized_at", "states": ["completed", "discarded"]},
    ]
    for params in cases:
        whole = {one: await same_page(callers, **params, descending=one) for one in (False, True)}
        assert whole[True].ids == whole[False].ids[::-1]
        for descending, page in whole.items():
            for limit in (1, 2, 3, 4, 5):
                turns = itertools.cycle(callers.values())
                found: list[int] = []
                cursor: dict[str, str] = {}
                while len(found) < len(page.ids):
                    caller = next(turns) if limit > 1 else callers["python"]
                    part = await caller.list_jobs(
                        **params, descending=descending, limit=limit, **cursor
                    )
                    found += part.ids
                    assert part.cursor is not None
                    cursor = {"after": part.cursor}
                assert found == page.ids, (params, descending, limit)
    for caller in callers.values():
        with pytest.raises(Refused):
            await caller.list_jobs(order="finalized_at", states=["completed", "running"])


async def test_cursor_texts(callers: Callers, schema: Schema) -> None:
    """Each language reads the cursors of the other, and writes the same ones, for kinds in any
    letters, times with any fraction, and the largest id. riverpy refuses the cursor of another
    order, which Go takes by its id alone (CF-102)."""
    kinds = [
        "a<>&b",
        "line\u2028sep\u2029",
        'quo"te\\',
        "größe-事-😀",
        "tab\tbell\b\f\x1f\x7f/",
        "~~~",
    ]
    fractions = ["", ".1", ".123456", ".000001", ".10", ".999999"]
    for number, (kind, fraction) in enumerate(zip(kinds, fractions, strict=True)):
        await schema.execute(
            "INSERT INTO river_job (id, kind, queue, max_attempts, args, scheduled_at)"
            " VALUES ($1, $2, $2, 25, '{}', $3::text::timestamptz)",
            2**63 - len(kinds) + number,
            kind,
            f"2026-02-03 04:05:0{number}{fraction}Z",
        )
    for order in ("id", "scheduled_at", "time"):
        cursor: dict[str, Any] = {}
        for number in range(len(kinds)):
            page = await same_page(callers, order=order, limit=1, **cursor)
            assert page.ids == [2**63 - len(kinds) + number]
            cursor = {"after": page.cursor}
    first = await same_page(callers, order="id", limit=1)
    by_id = await callers["go"].list_jobs(order="scheduled_at", after=first.cursor)
    assert len(by_id.ids) == len(kinds) - 1
    with pytest.raises(Refused, match="ordered by id, not by scheduled_at"):
        await callers["python"].list_jobs(order="scheduled_at", after=first.cursor)


async def test_cursors_between_three(callers: Callers, schema: Schema, go: RiverGo) -> None:
    """Pages of one list, asked in turn from Go and two clients in Python, each with the cursor of
    the one before, join to the whole (CF-082, multi_engine_job_list_cursor_interchange)."""
    now = datetime.now(UTC)
    requests = [
        request("{}", scheduled_at=(now + timedelta(hours=n // 2)).isoformat()) for n in range(9)
    ]
    ids = [job["id"] for job in await callers["go"].insert_many(*requests)]
    async with both_callers(go, schema) as others:
        engines = [callers["go"], callers["python"], others["python"]]
        found: list[int] = []
        cursor: dict[str, Any] = {}
        for caller in itertools.islice(itertools.cycle(engines), len(ids)):
            params = {"order": "scheduled_at", "descending": True, "limit": 1, **cursor}
            page = await caller.list_jobs(**params)
            assert page == await callers["go"].list_jobs(**params)
            found += page.ids
            cursor = {"after": page.cursor}
    assert found == ids[::-1]


@EITHER
async def test_delete_of_one(language: str, callers: Callers, fleet: Fleet, schema: Schema) -> None:
    """A running job is refused with an error of its own, and stays, also if it began while the call
    waited for its lock. A worker whose job is deleted by SQL ends it without a crash and without an
    event (CF-104)."""
    caller = callers[OTHER[language]]
    job = await caller.insert(conform())
    async with schema.connected() as connection, asyncio.TaskGroup() as group:
        await connection.execute("BEGIN; UPDATE river_job SET state = 'running'")

        async def delete() -> None:
            if caller.language == "python":
                with pytest.raises(Running):
                    await caller.delete(job["id"])
            else:  # Go deletes nothing, but returns the row from before the other's commit
                assert (await caller.delete(job["id"]))["state"] == "available"

        group.create_task(delete())
        with anyio.fail_after(30):
            while not await schema.fetchval(WAITING, connection.get_server_pid()):
                await anyio.sleep(0.01)
        await connection.execute("COMMIT")
    assert (await caller.get(job["id"]))["state"] == "running"
    for state in ("available", "pending", "retryable", "scheduled", *FINAL):
        await schema.execute(
            "INSERT INTO river_job (id, kind, args, max_attempts, state, finalized_at) VALUES (99,"
            " 'k', '{}', 1, $1::text::river_job_state, CASE WHEN $1 = ANY($2::text[]) THEN now()"
            " END)",
            state,
            FINAL,
        )
        before = await caller.get(99)
        assert await caller.delete(99) == before
    await schema.execute("DELETE FROM river_job")
    async with fleet.worker(language) as worker:
        held = await caller.insert(conform("signal", message="go on"))
        await worker.until("job_started", id=held["id"])
        with pytest.raises(Running):
            await caller.delete(held["id"])
        await schema.execute("DELETE FROM river_job")
        worker.release("go on")
        marker = await caller.insert(conform())
        await worker.until("job_completed", id=marker["id"])
        assert worker.passed("job_completed") == []
        assert worker.passed("job_failed") == []
