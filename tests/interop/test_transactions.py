"""Effects of one language in a transaction of the caller, and their notifications, reach the other
language at the commit and not before."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from tests.interop.callers import NotThere, Refused
from tests.interop.conform import conform
from tests.interop.notifications import notifications
from tests.interop.read_rows import stored
from tests.interop.working import LANGUAGES, OTHER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests._database import Schema
    from tests.interop.callers import Caller
    from tests.interop.river_go import Row
    from tests.interop.working import Fleet
    from tests.work.rig import Rig

    Callers = dict[str, Caller]

EITHER = pytest.mark.parametrize("language", LANGUAGES)
WAYS = ["insert", "insert_many", "insert_many_fast"]
MOMENT = 1.0
"""Seconds for which a test checks that nothing happens."""
GO_LIMIT = 0.01
"""Seconds after which River in Go notifies of a queue again. It does so once per FetchCooldown
(here 1 ms), even if the first transaction was rolled back."""
TOLD = [("river_insert", {"queue": "default"})]


async def insert(caller: Caller, way: str) -> None:
    """Insert one job in this way."""
    await getattr(caller, way)(conform(message=way))


async def expect_nothing_there(callers: Callers, job_id: int) -> None:
    """Check that neither language finds the job."""
    for caller in callers.values():
        with pytest.raises(NotThere):
            await caller.get(job_id)


@EITHER
async def test_batch(language: str, callers: Callers, schema: Schema) -> None:
    """A batch in a transaction is stored whole at the commit, in order, and not at all at a
    rollback. An empty one is refused, and the transaction continues (CF-017,
    transactional_batch_insertion)."""
    caller, other = callers[language], callers[OTHER[language]]
    jobs = [conform(priority=priority) for priority in (2, 3)]
    for way in ("insert_many", "insert_many_fast"):
        ids = "SELECT array_agg(id ORDER BY id) FROM river_job"
        await caller.begin()
        await getattr(caller, way)(*jobs)
        await caller.rollback()
        assert await schema.fetchval(ids) is None
        await caller.begin()
        with pytest.raises(Refused):
            await getattr(caller, way)()
        await getattr(caller, way)(*jobs)
        await caller.commit()
        rows = [await other.get(job_id) for job_id in await schema.fetchval(ids)]
        assert [row["priority"] for row in rows] == [2, 3]
        await schema.execute("TRUNCATE river_job")


@EITHER
async def test_commit(language: str, callers: Callers, schema: Schema) -> None:
    """A job is visible to its own transaction at once, and to the other language from the commit on
    (CF-018, transaction_commit_visibility)."""
    caller, other = callers[language], callers[OTHER[language]]
    await caller.begin()
    job = await caller.insert(conform())
    assert await caller.get(job["id"]) == job
    with pytest.raises(NotThere):
        await other.get(job["id"])
    await caller.commit()
    assert await other.get(job["id"]) == job == await stored(schema, job["id"])


@EITHER
@pytest.mark.parametrize("fails", [False, True], ids=["rolled back", "aborted"])
async def test_rollback(language: str, callers: Callers, schema: Schema, *, fails: bool) -> None:
    """A job of a transaction that is rolled back, or was aborted before its COMMIT, never existed,
    and no client is notified of it. The client continues to work (CF-019,
    transaction_rollback_visibility; CF-020, transaction_abort_rollback_visibility)."""
    caller = callers[language]
    async with notifications(schema) as sent:
        await caller.begin()
        job = await caller.insert(conform())
        if fails:
            with pytest.raises(Refused, match="zero"):
                await caller.fail()
            with pytest.raises(Refused):
                await caller.commit()
        else:
            await caller.rollback()
        await expect_nothing_there(callers, job["id"])
        assert await sent.take() == []
        await asyncio.sleep(GO_LIMIT)
        again = await caller.insert(conform())
        assert await sent.take() == TOLD
    assert await callers[OTHER[language]].get(again["id"]) == again
    assert await schema.fetchval("SELECT count(*) FROM river_job") == 1


@EITHER
async def test_notification_at_the_commit(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """The other language's worker, which does not poll, is notified once, at the commit, in each
    way of inserting (CF-021, transactional_insert_notification_commit_only)."""
    caller = callers[language]
    async with fleet.worker(OTHER[language]) as worker, notifications(schema) as sent:
        await caller.begin()
        for way in WAYS:
            await insert(caller, way)
        await asyncio.sleep(MOMENT)
        assert await sent.take() == []
        await caller.rollback()
        for way in WAYS:
            await asyncio.sleep(GO_LIMIT)
            await caller.begin()
            await insert(caller, way)
            assert await sent.take() == []
            await caller.commit()
            assert (await worker.until("job_started"))["message"] == way
            await worker.until("job_completed")
            assert await sent.take() == TOLD
    assert await rig.states() == {"completed": 3}


@EITHER
async def test_queue(language: str, callers: Callers, fleet: Fleet, schema: Schema) -> None:
    """The other language reads metadata and a pause of a queue, and its worker is notified of them,
    at the commit and never after a rollback (CF-023, transactional_queue_operations)."""
    caller, other = callers[language], callers[OTHER[language]]
    metadata = {"owner": "é", "limit": 1.5}
    async with fleet.worker(OTHER[language]) as worker, notifications(schema) as sent:
        before = await other.queue_get("default")
        await caller.begin()
        await caller.queue_update("default", metadata)
        await caller.pause("default")
        inside = await caller.queue_get("default")
        assert (inside["metadata"], inside["paused_at"] is None) == (metadata, False)
        assert await other.queue_get("default") == before
        assert await sent.take() == []
        await caller.commit()
        after: Row = await other.queue_get("default")
        assert after == await caller.queue_get("default")
        assert (after["metadata"], after["paused_at"]) == (metadata, inside["paused_at"])
        assert after["updated_at"] > before["updated_at"]
        changed = {"action": "metadata_changed", "metadata": metadata, "queue": "default"}
        assert await sent.take() == [
            ("river_control", changed),
            ("river_control", {"action": "pause", "queue": "default"}),
        ]
        await worker.until("queue_paused", queue="default")

        await caller.begin()
        await caller.resume("default")
        assert (await caller.queue_get("default"))["paused_at"] is None
        await caller.rollback()
        assert (await other.queue_get("default"))["paused_at"] == inside["paused_at"]
        assert await sent.take() == []
        await other.resume("default")
        await worker.until("queue_resumed")
        assert worker.passed("queue_resumed") == []


@EITHER
async def test_cancel_of_a_scheduled_job(language: str, callers: Callers, schema: Schema) -> None:
    """A job that one language cancels in a transaction is cancelled for the other from the commit
    on, and stays scheduled after a rollback (CF-022, transactional_cross_language_cancel)."""
    caller, other = callers[language], callers[OTHER[language]]
    in_an_hour = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    job = await other.insert(conform(scheduled_at=in_an_hour))
    cancelled = [("river_control", {"action": "cancel", "job_id": job["id"], "queue": "default"})]
    async with notifications(schema) as sent:
        for end, expected in ((caller.rollback, []), (caller.commit, cancelled)):
            await caller.begin()
            inside = await caller.cancel(job["id"])
            assert inside == await caller.get(job["id"])
            assert (inside["state"], inside["finalized_at"] is None) == ("cancelled", False)
            assert await other.get(job["id"]) == job
            assert await sent.take() == []
            await end()
            after = await stored(schema, job["id"])
            assert after == await caller.get(job["id"]) == await other.get(job["id"])
            assert after == (inside if expected else job)
            assert await sent.take() == expected


@EITHER
async def test_control(language: str, callers: Callers, fleet: Fleet, schema: Schema) -> None:
    """A cancel of a running job, a pause and metadata of a queue, each in a transaction, reach the
    other language's worker once, at the commit, and never after a rollback (CF-096)."""
    caller, other = callers[language], callers[OTHER[language]]
    async with fleet.worker(OTHER[language]) as worker, notifications(schema) as sent:
        job = await other.insert(conform("signal", message="never"))
        await worker.until("job_started", id=job["id"])
        await sent.take()
        before = await stored(schema, job["id"]), await other.queue_get("default")
        control: dict[str, tuple[Callable[[], Awaitable[object]], Row, str]] = {
            "cancel": (lambda: caller.cancel(job["id"]), {"job_id": job["id"]}, "job_cancelled"),
            "pause": (lambda: caller.pause("default"), {}, "queue_paused"),
            "metadata_changed": (
                lambda: caller.queue_update("default", {"a": 1.5}),
                {"metadata": {"a": 1.5}},
                "",
            ),
        }
        for act, _, _ in control.values():
            await caller.begin()
            await act()
            await caller.rollback()
        assert await sent.take() == []
        marker = await callers["python"].insert(conform())
        await worker.until("job_completed", id=marker["id"])
        assert before == (await stored(schema, job["id"]), await other.queue_get("default"))
        await sent.take()
        for action, (act, payload, event) in control.items():
            await caller.begin()
            await act()
            assert await sent.take() == []
            await caller.commit()
            wanted = {"action": action, "queue": "default"} | payload
            assert await sent.take() == [("river_control", wanted)]
            if event:
                await worker.until(event)
                assert worker.passed(event) == []
    row = await stored(schema, job["id"])
    assert (row["state"], "cancel_attempted_at" in row["metadata"]) == ("cancelled", True)
    assert (await other.queue_get("default"))["metadata"] == {"a": 1.5}
