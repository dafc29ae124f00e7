"""Rows that are slow, or that make the server fail: claims and results of other rows continue."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import riverpy._postgres.connection
from riverpy import InsertOpts, QueueConfig
from riverpy._log_events import (
    CONNECTION_LOST,
    JOB_CLAIM_FAILED,
    JOB_RESULTS_REJECTED,
    JOB_RESULTS_TIMED_OUT,
    QUEUE_RENEWAL_FAILED,
)
from riverpy._postgres.jobs import ClaimKey
from riverpy._timestamps import encode_timestamp
from tests.work.rig import PATIENCE, Rig, Task

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

LIMIT = 0.5
"""Seconds after which the server ends a statement here. The client's timeout is a little longer."""
CLAIM, RESULT = "NEW.state = 'running'", "OLD.state = 'running'"
NAMED = {
    CLAIM: JOB_CLAIM_FAILED,
    RESULT: JOB_RESULTS_REJECTED,
}
SLOW = {
    CLAIM: NAMED[CLAIM],
    RESULT: JOB_RESULTS_TIMED_OUT,
}
CLASSES = ["40001", "53200", "55000", "57014", "58030", "08001", "XX000"]


@pytest.fixture
def plain(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of kind `task` complete at once. Rows that are set aside are soon tried again."""
    monkeypatch.setattr("riverpy._postgres.skipped_rows.RETRY_DELAY_MIN", 0.05)

    rig.register_task()


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit statements to half a second."""
    short = riverpy._postgres.connection.timedelta(seconds=LIMIT)
    limit = riverpy._postgres.connection.set_statement_timeout

    async def sooner(connection: Any, _limit: Any) -> None:
        await limit(connection, short)

    monkeypatch.setattr(riverpy._postgres.connection, "set_statement_timeout", sooner)
    monkeypatch.setattr("riverpy._work.completer.RESULT_STATEMENT_TIMEOUT", 2 * LIMIT)
    monkeypatch.setattr("riverpy._work.producer.CLAIM_TIMEOUT", 2 * LIMIT)


@asynccontextmanager
async def trigger(rig: Rig, when: str, body: str) -> AsyncGenerator[None]:
    """Make a user's trigger run `body` before claims or results are stored."""
    await rig.schema.execute(
        "CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN {body} RETURN NEW; END $$;"
        " CREATE TRIGGER meddle BEFORE UPDATE ON river_job FOR EACH ROW"
        f" WHEN ({when}) EXECUTE FUNCTION meddle()"
    )
    try:
        yield
    finally:
        await rig.schema.execute("DROP FUNCTION IF EXISTS meddle CASCADE")


def events_of(log: list[dict[str, Any]]) -> list[str]:
    """Return the logged events."""
    return [entry["event"] for entry in log if entry["log_level"] != "debug"]


async def until_named(log: list[dict[str, Any]], event: str) -> dict[str, Any]:
    """Wait until a row is logged."""
    with anyio.fail_after(PATIENCE):
        while True:
            for entry in log:
                if entry["event"] == event:
                    return entry
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("plain", "limits")
@pytest.mark.parametrize(("jobs", "seconds"), [(600, 0.001), (80, 0.01), (12, 0.1)])
@pytest.mark.parametrize("when", [CLAIM, RESULT])
async def test_each_row_is_slow(
    rig: Rig, log: list[dict[str, Any]], when: str, jobs: int, seconds: float
) -> None:
    """If a full batch takes far longer than the timeout, claims and results continue in smaller
    batches, whether a row takes 1, 10 or 100 ms. The log has no lost connection and no row."""
    await rig.insert_rows(jobs)
    async with (
        trigger(rig, when, f"PERFORM pg_sleep({seconds});"),
        rig.working(slots=2 * jobs),
    ):
        await rig.take(jobs)
    assert await rig.states() == {"completed": jobs}
    assert not {CONNECTION_LOST, *NAMED.values(), *SLOW.values()} & {*events_of(log)}


@pytest.mark.usefixtures("plain", "limits")
@pytest.mark.parametrize("when", [CLAIM, RESULT])
async def test_one_row_is_too_slow(rig: Rig, log: list[dict[str, Any]], when: str) -> None:
    """A single row that takes longer than the limit is set aside and logged. All others are worked.
    The row is tried again automatically."""
    await rig.insert_rows(120)
    sleep = "IF NEW.id = 60 THEN PERFORM pg_sleep(15); END IF;"
    async with trigger(rig, when, sleep), rig.working(slots=120):
        events = await rig.take(119)
        assert 60 not in {event.job.id for event in events if event.job}
        entry = await until_named(log, SLOW[when])
        assert entry.get("job_id", entry.get("job_ids")) in (60, [60])
        assert "statement timeout" in entry["error"]
        await rig.schema.execute("DROP FUNCTION meddle CASCADE")
        await rig.take(1)
    assert await rig.states() == {"completed": 120}
    assert CONNECTION_LOST not in events_of(log)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("sqlstate", CLASSES)
@pytest.mark.parametrize("when", [CLAIM, RESULT])
async def test_one_row_fails(rig: Rig, log: list[dict[str, Any]], when: str, sqlstate: str) -> None:
    """An error for one row stops no other, whatever its class. The row is logged and tried again
    automatically. The log has no lost connection."""
    await rig.insert_rows(200)
    fail = f"IF NEW.id = 60 THEN RAISE 'not this one' USING ERRCODE = '{sqlstate}'; END IF;"
    async with trigger(rig, when, fail), rig.working(slots=200) as client:
        events = await rig.take(199)
        assert 60 not in {event.job.id for event in events if event.job}
        entry = await until_named(log, (SLOW if sqlstate == "57014" else NAMED)[when])
        stats = client.stats()
        aside = stats.queues["default"].set_aside if when == CLAIM else stats.results_set_aside
        assert aside == (60,)
        assert entry.get("job_id", entry.get("job_ids")) in (60, [60])
        assert "not this one" in entry["error"]
        await rig.schema.execute("DROP FUNCTION meddle CASCADE")
        await rig.take(1)
    assert await rig.states() == {"completed": 200}
    assert CONNECTION_LOST not in events_of(log)


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("when", [CLAIM, RESULT])
async def test_one_row_ends_its_session(rig: Rig, log: list[dict[str, Any]], when: str) -> None:
    """A row that ends its session, as in a crash, is found as well."""
    await rig.insert_rows(50)
    end = "IF NEW.id = 20 THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF;"
    async with trigger(rig, when, end), rig.working(slots=50):
        events = await rig.take(49)
        assert 20 not in {event.job.id for event in events if event.job}
        await until_named(log, NAMED[when])
        await rig.schema.execute("DROP FUNCTION meddle CASCADE")
        await rig.take(1)
    assert await rig.states() == {"completed": 50}


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("sqlstate", ["P0001", "XX000"])
async def test_lost_claims_beside_one_that_fails(
    rig: Rig, log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, sqlstate: str
) -> None:
    """Claims whose answer was lost are released although the server fails for one of them."""
    monkeypatch.setattr("riverpy._work.reconciler.CLAIM_TIMEOUT", 0.0)
    monkeypatch.setattr("riverpy._work.reconciler.RECONCILE_RETRY_DELAY", 0.05)
    await rig.insert_rows(20)
    fail = f"IF OLD.id = 7 THEN RAISE 'not this one' USING ERRCODE = '{sqlstate}'; END IF;"
    async with trigger(rig, RESULT, fail):
        client = rig.client()
        await rig.schema.execute(
            "UPDATE river_job SET state = 'running', attempt = 1, attempted_by = array[$1],"
            " attempted_at = now() - interval '1 minute'",
            client.id,
        )
        async with rig.running(client):
            assert client._run is not None
            client._run._reconciler.schedule_check_after_failed_claim()
            events = await rig.take(19)
            assert 7 not in {event.job.id for event in events if event.job}
            await rig.schema.execute("DROP FUNCTION meddle CASCADE")
            await rig.take(1)
    assert await rig.states() == {"completed": 20}


@pytest.mark.usefixtures("plain")
async def test_one_queue_cannot_be_renewed(rig: Rig, log: list[dict[str, Any]]) -> None:
    """A queue whose row cannot be written is logged, and still worked."""
    await rig.schema.execute(
        "CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE 'not this one'; END $$;"
        " CREATE TRIGGER meddle BEFORE INSERT ON river_queue FOR EACH ROW"
        " WHEN (NEW.name = 'second') EXECUTE FUNCTION meddle()"
    )
    queues = {name: QueueConfig(max_workers=2) for name in ("default", "second")}
    try:
        async with rig.working(queues=queues) as client:
            entry = await until_named(log, QUEUE_RENEWAL_FAILED)
            assert entry["queue"] == "second"
            await client.insert(Task(), InsertOpts(queue="second"))
            await rig.take(1)
        assert await rig.schema.fetchval("SELECT array_agg(name) FROM river_queue") == ["default"]
    finally:
        await rig.schema.execute("DROP FUNCTION meddle CASCADE")


@pytest.mark.usefixtures("plain", "limits")
async def test_queues_are_slow_to_renew(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a check has no time for the rows of all queues, the next checks renew the others."""
    for name, seconds in {
        "STATEMENT_TIMEOUT": LIMIT,
        "RECONCILE_STEP_TIMEOUT": LIMIT,
        "RECONCILE_INTERVAL": 0.0,
    }.items():
        monkeypatch.setattr(f"riverpy._work.reconciler.{name}", seconds)
    names = {f"queue_{number}" for number in range(12)}
    await rig.schema.execute(
        "CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_sleep(0.2); RETURN NEW; END $$;"
        " CREATE TRIGGER meddle BEFORE INSERT OR UPDATE ON river_queue FOR EACH ROW"
        " EXECUTE FUNCTION meddle()"
    )
    try:
        async with rig.working(queues={name: QueueConfig(max_workers=2) for name in names}):
            with anyio.fail_after(PATIENCE):
                while names - {row["name"] for row in await rig.schema.fetch("TABLE river_queue")}:
                    await asyncio.sleep(0.05)
    finally:
        await rig.schema.execute("DROP FUNCTION meddle CASCADE")


async def test_last_release_beside_rows_that_fail(rig: Rig) -> None:
    """The last statement of a process releases its jobs although one row is refused and another
    takes too long."""
    await rig.insert_rows(100)
    await rig.schema.execute("UPDATE river_job SET state = 'running', attempt = 1")
    await rig.schema.execute("UPDATE river_job SET attempted_at = '2026-01-01 00:00:00Z'")
    at = encode_timestamp(datetime(2026, 1, 1, tzinfo=UTC))
    fail = (
        "IF OLD.id = 7 THEN RAISE 'not this one'; END IF;"
        " IF OLD.id = 80 THEN PERFORM pg_sleep(15); END IF;"
    )
    async with trigger(rig, RESULT, fail):
        claim_keys = [ClaimKey(job_id, 1, at) for job_id in range(1, 101)]
        assert await rig.client().release_claims(claim_keys) == 98
    assert await rig.states() == {"available": 98, "running": 2}
