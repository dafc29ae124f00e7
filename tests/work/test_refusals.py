"""Results that the database refuses for a reason of its own: only their rows wait."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import riverpy._work.completer
import riverpy._work.producer
import riverpy._work.reconciler
from riverpy import ArgsError, EventKind, InsertOpts, Job
from riverpy._log_events import JOB_RESULTS_REJECTED
from riverpy._postgres import jobs
from riverpy.job import OUTPUT_SIZE_MAX
from tests.kit.proxy import proxied
from tests.work.rig import PATIENCE, Task

if TYPE_CHECKING:
    from tests.work.rig import Rig


@pytest.fixture
def plain(rig: Rig) -> None:
    """Jobs of kind `task` complete at once."""
    rig.register_task()


async def refuse(rig: Rig, condition: str, body: str) -> None:
    """Make a user's trigger run `body` when a matching job is no longer running."""
    await rig.schema.execute(
        "CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF {condition} THEN {body} END IF; RETURN NEW; END $$"
    )
    await rig.schema.execute(
        "CREATE TRIGGER meddle BEFORE UPDATE ON river_job FOR EACH ROW"
        " WHEN (OLD.state = 'running') EXECUTE FUNCTION meddle()"
    )


async def allow(rig: Rig) -> None:
    """Remove the trigger."""
    await rig.schema.execute("DROP FUNCTION meddle CASCADE")


@pytest.mark.usefixtures("plain")
async def test_one_row_is_refused_by_a_trigger(rig: Rig, log: list[dict[str, Any]]) -> None:
    """An error of a user's trigger delays one result and no other. It is logged once, and the
    result is stored when the trigger allows it."""
    await rig.insert_rows(40)
    await refuse(rig, "OLD.id = 20", "RAISE EXCEPTION 'not this one';")
    async with rig.working(slots=40):
        events = await rig.take(39)
        assert {event.job.id for event in events if event.job} == {*range(1, 41)} - {20}
        (said,) = [entry for entry in log if entry["event"] == JOB_RESULTS_REJECTED]
        assert said["job_ids"] == [20]
        assert "not this one" in said["error"]
        await allow(rig)
        event = await rig.event()
        assert event.job is not None
        assert event.job.id == 20
    row = await rig.row(20)
    assert (row["state"], row["attempt"], row["errors"]) == ("completed", 1, None)


@pytest.mark.usefixtures("plain")
async def test_refused_row_is_tried_at_the_stop(
    rig: Rig, log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a stop, a refused result is tried once more at once, however far off its next attempt is.
    So it is not left running unnecessarily."""
    monkeypatch.setattr("riverpy._postgres.skipped_rows.RETRY_DELAY_MIN", 60.0)
    await rig.insert_rows(1)
    await refuse(rig, "true", "RAISE EXCEPTION 'not this one';")
    async with rig.working():
        async with asyncio.timeout(PATIENCE):
            while not any(entry["event"] == JOB_RESULTS_REJECTED for entry in log):
                await asyncio.sleep(0.01)
        await allow(rig)
    assert (await rig.row(1))["state"] == "completed"


@pytest.mark.usefixtures("plain")
async def test_all_rows_are_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all results are refused, the search for the refused row soon pauses. The first success
    ends the pause, and all are stored."""
    statements: list[int] = []
    complete = jobs.job_complete

    async def spy(*args: Any, **values: Any) -> set[int]:
        statements.append(len(values["ids"]))
        return await complete(*args, **values)

    monkeypatch.setattr(jobs, "job_complete", spy)
    await rig.insert_rows(500)
    await refuse(rig, "true", "RAISE EXCEPTION 'closed';")
    async with rig.working(slots=500) as client:
        completer = client._run._completer  # type: ignore[union-attr]
        await rig.until("SELECT count(*) FROM river_job WHERE state = 'running'", 500)
        while completer._completion_sender.can_send_now or not statements:
            completer.flushed.init()
            await completer.flushed.wait()
        assert len(statements) < 100
        await allow(rig)
        assert len(await rig.take(500)) == 500
    assert await rig.states() == {"completed": 500}


@pytest.mark.usefixtures("plain")
async def test_trigger_with_lock_nowait(rig: Rig) -> None:
    """A trigger that finds a row of its own locked delays its result and no other."""
    await rig.schema.execute("CREATE TABLE meddled AS SELECT 1 AS id")
    try:
        await rig.insert_rows(10)
        await refuse(
            rig, "OLD.id = 5", f"PERFORM 1 FROM {rig.schema.name}.meddled FOR UPDATE NOWAIT;"
        )
        async with rig.schema.connected() as other:
            transaction = other.transaction()
            await transaction.start()
            await other.execute("SELECT 1 FROM meddled FOR UPDATE")
            async with rig.working():
                assert len(await rig.take(9)) == 9
                await transaction.rollback()
                await rig.take(1)
    finally:
        await allow(rig)
        await rig.schema.execute("DROP TABLE meddled")
    assert await rig.states() == {"completed": 10}


async def test_locked_table(rig: Rig) -> None:
    """A lock on the whole table, such as that of CREATE INDEX, only delays results."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        await locked.start()
        await other.execute("LOCK TABLE river_job IN SHARE MODE")

    await rig.insert_rows(1)
    async with rig.schema.connected() as other:
        locked = other.transaction()
        async with rig.working() as client:
            completer = client._run._completer  # type: ignore[union-attr]
            while not completer.results_to_retry:
                completer.flushed.init()
                await completer.flushed.wait()
            await locked.rollback()
            assert (await rig.event()).kind is EventKind.JOB_COMPLETED


async def test_large_results_go_in_parts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One statement carries only as much as it can store in its time, and at least one result."""
    parts: list[int] = []
    settle = jobs.job_store_results

    async def spy(connection: Any, schema: Any, results: Any) -> dict[int, str]:
        parts.append(sum(len(one.metadata_updates or "") for one in results))
        return await settle(connection, schema, results)

    monkeypatch.setattr(jobs, "job_store_results", spy)
    monkeypatch.setattr(riverpy._work.completer, "CHARACTERS_PER_STATEMENT_MAX", 1000)

    @rig.job
    async def work(job: Job[Task]) -> None:
        job.record_output("x" * (3000 if job.id == 7 else 300))

    await rig.insert_rows(20)
    async with rig.working():
        await rig.take(20)
    assert await rig.states() == {"completed": 20}
    assert max(parts) > 3000
    assert sorted(parts)[-2] < 1100


async def test_metadata_has_a_limit(rig: Rig) -> None:
    """A metadata value has the same size limit as the output (BI-07)."""
    caught: list[Exception] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        try:
            job.set_metadata("k", "x" * OUTPUT_SIZE_MAX)
        except ArgsError as error:
            caught.append(error)

    assert (await rig.run_one())["state"] == "completed"
    assert "33554432" in str(caught[0])


async def test_event_with_deep_metadata(rig: Rig) -> None:
    """Metadata that is nested too deeply for Python prevents neither its event nor that of another
    job."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        job.record_output(1)

    await rig.insert_rows(1)
    await rig.schema.execute(
        "UPDATE river_job SET metadata = $1::text::jsonb", '{"a":' * 1500 + "1" + "}" * 1500
    )
    async with rig.working() as client:
        await rig.until_state("completed")
        await client.insert(Task(n=2), InsertOpts(metadata={"fine": True}))
        events = [await rig.event(), await rig.event()]
    assert [event.job and event.job.id for event in events] == [1, 2]


async def test_drain_waits_for_a_lost_claim(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost claim leaves jobs that no client works. A drain ends only after they were released and
    worked (LD-16)."""
    for module in (riverpy._work.producer, riverpy._work.reconciler):
        monkeypatch.setattr(module, "CLAIM_TIMEOUT", 0.5)
    started, release = asyncio.Event(), asyncio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.id == 1:
            started.set()
            await release.wait()

    await rig.insert_rows(1)
    async with (
        proxied(rig.url) as proxy,
        rig.running(rig.client(url=proxy.url), drain=True) as client,
    ):
        await started.wait()
        await client.queue_pause("default")
        assert (await rig.event()).kind is EventKind.QUEUE_PAUSED
        async with client._run._connections.claims.acquire("seeing no claim in flight", 10):  # type: ignore[union-attr]
            await client.insert(Task())
        proxy.hold("riverpy claims")
        await client.queue_resume("default")
        assert (await rig.event()).kind is EventKind.QUEUE_RESUMED
        await rig.until_state("running", 2)
        proxy.cut("riverpy claims")
        await proxy.release()
        release.set()
        await rig.take(2)
    assert rig.report is not None
    assert rig.report.is_clean
    assert await rig.states() == {"completed": 2}
