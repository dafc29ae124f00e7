"""Rows that cannot be claimed: they are logged, and the others of their queue are claimed."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import riverpy._postgres.skipped_rows
import riverpy._work.producer
import riverpy._work.unclaimable
from riverpy import EventKind, Job, QueueConfig
from riverpy._log_events import CLAIMING_FAILED, CLAIMING_RESTORED, JOB_CLAIM_FAILED
from riverpy._postgres.jobs import job_lock_and_get_claim_position, job_lock_next
from riverpy.migrate import Migrator
from tests._database import (
    Schema,
    connected,
    drop_database,
    new_database_name,
    with_database,
)
from tests.work.rig import PATIENCE, Rig, Task

SOON = timedelta(milliseconds=20)


def said(log: list[dict[str, Any]], event: str) -> list[Any]:
    """Return the job ids of the warnings with this event."""
    return [
        entry.get("job_id")
        for entry in log
        if (entry["event"], entry["log_level"]) == (event, "warning")
    ]


async def refuse(rig: Rig, condition: str) -> None:
    """Make a user's trigger refuse the claims of these jobs, and count the attempts."""
    await rig.schema.execute(
        "CREATE SEQUENCE tries; CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql"
        " SET search_path FROM CURRENT AS"
        " $$ BEGIN PERFORM nextval('tries'); RAISE EXCEPTION 'not this one'; END $$;"
        " CREATE TRIGGER meddle BEFORE UPDATE ON river_job FOR EACH ROW"
        f" WHEN (NEW.state = 'running' AND ({condition})) EXECUTE FUNCTION meddle()"
    )


async def allow(rig: Rig) -> None:
    """Allow the claims again."""
    await rig.schema.execute("DROP FUNCTION meddle CASCADE; DROP SEQUENCE tries")


async def tries(rig: Rig) -> int:
    """Return how often a claim was refused."""
    return await rig.schema.fetchval(
        "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM tries"
    )


async def test_attempt_at_the_end_of_its_type(rig: Rig) -> None:
    """A job whose attempt number is the largest that the column holds is tried once more."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.id == 1:
            raise ValueError("again")

    await rig.insert_rows(3)
    await rig.schema.execute("UPDATE river_job SET attempt = 32767 WHERE id <= 2")
    async with rig.working():
        await rig.take(3)
    rows = await rig.schema.jobs()
    assert [(row["state"], row["attempt"]) for row in rows] == [
        ("discarded", 32767),
        ("completed", 32767),
        ("completed", 1),
    ]


@pytest.mark.parametrize("slots", [1, 50])
async def test_trigger_that_refuses(
    rig: Rig, log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """Jobs whose claims a user's trigger refuses are skipped, logged once, and tried again later.
    All others are worked, and no claim counts as lost."""
    rig.register_task()
    monkeypatch.setattr(riverpy._postgres.skipped_rows, "RETRY_DELAY_MIN", 60.0)
    await rig.insert_rows(120)
    await refuse(rig, "NEW.id IN (1, 60, 61, 120)")
    try:
        async with rig.working(slots=slots) as client:
            await rig.take(116)
            assert await rig.states() == {"completed": 116, "available": 4}
            await rig.work(client, Task())
            assert sorted(said(log, JOB_CLAIM_FAILED)) == [1, 60, 61, 120]
            assert said(log, CLAIMING_FAILED) == []
            refused = await tries(rig)
            for _ in range(20):
                await rig.work(client, Task())
            assert await tries(rig) == refused
            assert client._run is not None
            assert not client._run._reconciler.has_unanswered_claim
            aside = client._run.producers["default"].unclaimable_jobs.skipped_jobs
            assert sorted(one.row for one in aside) == [1, 60, 61, 120]
    finally:
        await allow(rig)
    assert await rig.states() == {"completed": 137, "available": 4}


async def test_refused_row_that_comes_in_between(
    rig: Rig, log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another job is inserted before the next row between its read and its claim, and is
    refused, the row that was read is claimed and not set aside."""
    look = riverpy._work.producer.job_lock_next
    looks = 0

    async def looking(*args: Any, **kwargs: Any) -> Any:
        nonlocal looks
        found = await look(*args, **kwargs)
        looks += 1
        if looks == 2:  # by a transaction that started before
            await rig.insert_rows(1, priority=2, scheduled_at=datetime(2026, 1, 1, tzinfo=UTC))
        return found

    rig.register_task()
    monkeypatch.setattr(riverpy._work.producer, "job_lock_next", looking)
    await rig.insert_rows(1, priority=2)
    await rig.insert_rows(1, priority=3)
    await refuse(rig, "NEW.priority = 2")
    try:
        async with rig.working() as client:
            assert (await rig.event()).kind is EventKind.JOB_COMPLETED
            client._run.producers["default"].wake()  # type: ignore[union-attr]
            async with asyncio.timeout(PATIENCE):
                while len(said(log, JOB_CLAIM_FAILED)) < 2:
                    await asyncio.sleep(0.005)
    finally:
        await allow(rig)
    assert said(log, JOB_CLAIM_FAILED) == [1, 3]


async def test_claims_of_one_job(rig: Rig) -> None:
    """If jobs are claimed one by one, the next is the first in the claim order with a known kind
    that is not set aside. A job that was set aside is claimed only while it can be claimed from
    this queue."""
    await rig.schema.execute(
        "INSERT INTO river_job (kind, queue, max_attempts, args, priority, state, scheduled_at)"
        " SELECT kind, queue, 25, '{}'::jsonb, priority, state::river_job_state, now() + due FROM"
        " (VALUES ('task', 'default', 2, 'available', interval '-3 h'),"
        " ('task', 'default', 1, 'available', '-1 h'),"
        " ('task', 'default', 1, 'available', '-2 h'),"
        " ('other', 'default', 1, 'available', '-3 h'),"
        " ('task', 'default', 1, 'retryable', '-3 h'),"
        " ('task', 'default', 1, 'available', '1 h'),"
        " ('task', 'mail', 1, 'available', '-3 h'))"
        " AS given (kind, queue, priority, state, due)"
    )
    order: list[int] = []
    async with rig.schema.connected() as connection:
        schema, kinds = rig.schema.name, ["task"]
        while found := await job_lock_next(
            connection, schema, queue="default", kinds=kinds, skipped_ids=order
        ):
            order.append(found[2])
        places = [
            await job_lock_and_get_claim_position(connection, schema, n, queue="default")
            for n in range(1, 8)
        ]
    assert order == [3, 2, 1]
    assert [place[2] for place in places if place is not None] == [1, 2, 3, 4]


async def test_refused_row_is_tried_again(
    rig: Rig, log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused row is tried again automatically, and worked when nothing refuses it."""
    monkeypatch.setattr(riverpy._postgres.skipped_rows, "RETRY_DELAY_MIN", 0.02)
    monkeypatch.setattr(riverpy._postgres.skipped_rows, "RETRY_DELAY_MAX", 0.02)

    rig.register_task()
    await rig.insert_rows(5)
    await refuse(rig, "NEW.id IN (2, 3)")
    async with rig.working(queues={"default": QueueConfig(fetch_poll_interval=SOON)}):
        await rig.take(3)
        await rig.until("SELECT last_value > 20 FROM tries")
        await allow(rig)
        events = await rig.take(2)
        assert {event.kind for event in events} == {EventKind.JOB_COMPLETED}
    assert sorted(said(log, JOB_CLAIM_FAILED)) == [2, 3]


async def test_every_row_is_refused(
    rig: Rig, log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If too many rows are refused, this is logged once and not for each row. Claiming resumes when
    the reason is gone."""
    monkeypatch.setattr(riverpy._work.unclaimable, "SKIPPED_JOBS_MAX", 8)

    rig.register_task()
    await rig.insert_rows(50)
    await refuse(rig, "true")
    async with rig.working():
        async with asyncio.timeout(PATIENCE):
            while not said(log, CLAIMING_FAILED):
                await asyncio.sleep(0.005)
        await allow(rig)
        await rig.take(50)
    assert len(said(log, JOB_CLAIM_FAILED)) == 8
    assert len(said(log, CLAIMING_FAILED)) == 1


async def test_claims_that_are_not_permitted(rig: Rig, log: list[dict[str, Any]]) -> None:
    """A refusal that no row causes is logged once, and so is its end. It names no row."""
    rig.register_task()
    async with rig.working() as client:
        await rig.schema.execute("ALTER TABLE river_job RENAME TO elsewhere")
        assert client._run is not None
        client._run.producers["default"].wake()
        async with asyncio.timeout(PATIENCE):
            while not said(log, CLAIMING_FAILED):
                await asyncio.sleep(0.005)
        await rig.schema.execute("ALTER TABLE elsewhere RENAME TO river_job")
        await rig.work(client, Task())
    assert said(log, JOB_CLAIM_FAILED) == []
    assert len(said(log, CLAIMING_FAILED)) == 1
    assert [entry["event"] for entry in log].count(CLAIMING_RESTORED) == 1


async def test_text_that_cannot_cross(server_url: str, log: list[dict[str, Any]]) -> None:
    """A database of encoding SQL_ASCII may hold texts that are not UTF-8. Such a row is skipped and
    logged and not left running. The others are worked."""
    name = new_database_name()
    async with connected(server_url) as connection:
        await connection.execute(
            f"CREATE DATABASE \"{name}\" TEMPLATE template0 ENCODING 'SQL_ASCII'"
            " LC_COLLATE 'C' LC_CTYPE 'C'"
        )
    try:
        url = with_database(server_url, name)
        async with connected(url) as connection:
            await Migrator(connection).up()
            rig = Rig(Schema(url, "public", connection))

            @rig.job
            async def work(job: Job[Task]) -> None:
                pass

            await rig.insert_rows(9)
            await rig.schema.execute(
                "UPDATE river_job SET kind = convert_from('\\x61ff'::bytea, 'SQL_ASCII')"
                " WHERE id = 5"
            )
            async with rig.working(known_kinds_only=False):
                await rig.take(8)
                assert await rig.states() == {"completed": 8, "available": 1}
                assert said(log, JOB_CLAIM_FAILED) == [5]
    finally:
        await drop_database(server_url, name)


async def test_drain_ends_beside_a_refused_row(rig: Rig) -> None:
    """A drain does not wait for a row that cannot be claimed (LD-16)."""
    rig.register_task()
    await rig.insert_rows(5)
    await refuse(rig, "NEW.id = 3")
    await rig.client().run(drain=True)
    assert await rig.states() == {"completed": 4, "available": 1}
    await allow(rig)
