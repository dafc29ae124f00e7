"""The job cleaner: what it deletes, what it keeps, and how it ends."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy import JobRetention
from riverpy._clock import Clock
from riverpy._leading.queue_scope import NO_QUEUES, only_queues
from riverpy._lifecycle import ServiceGroup
from riverpy._maintenance import batch_runner
from riverpy._maintenance.job_cleaner import READ_POSITION_RESET_INTERVAL, RUN_INTERVAL, JobCleaner
from riverpy.config import SETTING_DURATION_MAX
from riverpy.errors import FencedOutError
from tests.leading.term_context import held_term
from tests.maintenance.rows import (
    ENDED,
    accept_many,
    ids_of,
    insert_ended,
    insert_jobs,
    refuse_many,
)

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.leading.term_context import HeldTerm

FOREVER = JobRetention(cancelled=None, completed=None, discarded=None)


def hours(count: float) -> JobRetention:
    """All states are kept so long."""
    age = timedelta(hours=count)
    return JobRetention(cancelled=age, completed=age, discarded=age)


async def test_old_jobs(held: HeldTerm, schema: Schema, log: list[dict[str, Any]]) -> None:
    """JC1: jobs past their state's retention are deleted, which is logged; newer ones and those in
    other states stay."""
    kept = {
        await insert_ended(schema, "cancelled", "23 hours 59 min"),
        await insert_ended(schema, "completed", "23 hours 59 min"),
        await insert_ended(schema, "discarded", "6 days 23 hours"),
    }
    for state in ("available", "running", "scheduled", "retryable", "pending"):
        kept |= set(
            await insert_jobs(
                schema,
                state=f"'{state}'",
                attempted_at="now() - interval '1 year'",
                scheduled_at="now() - interval '1 year'",
                created_at="now() - interval '1 year'",
            )
        )
    for state, age in (("cancelled", "25 h"), ("completed", "25 h"), ("discarded", "8 days")):
        await insert_ended(schema, state, age, 2)
    assert await held.run(JobCleaner(held.context)) == RUN_INTERVAL
    assert await ids_of(schema) == kept
    assert [(entry["state"], entry["count"]) for entry in log] == [(one, 2) for one in ENDED]
    assert {entry["log_level"] for entry in log} == {"info"}


async def test_nothing_to_delete(held: HeldTerm, log: list[dict[str, Any]]) -> None:
    """A pass that deletes nothing says nothing."""
    await held.run(JobCleaner(held.context))
    assert log == []


async def test_all_kept(schema: Schema) -> None:
    """JC2: if all is kept for ever, no statement is sent, not even the one that a deposed leader
    would be refused by."""
    async with held_term(
        schema, retention=FOREVER, retention_by_queue={"q": FOREVER}, retention_by_kind={}
    ) as held:
        kept = {await insert_ended(schema, state, "10 years") for state in ENDED}
        await held.take_over()
        await held.run(JobCleaner(held.context))
    assert await ids_of(schema) == kept


async def test_no_queue_is_meant(held: HeldTerm, schema: Schema) -> None:
    """JC6: a cleaner of no queue sends no statement."""
    kept = {await insert_ended(schema, "completed", "10 years")}
    await held.take_over()
    held.scope = NO_QUEUES
    await held.run(JobCleaner(held.context))
    assert await ids_of(schema) == kept


@pytest.mark.parametrize("state", ENDED)
async def test_one_state_kept(schema: Schema, state: str) -> None:
    """JC3: each state can be kept for ever by itself."""
    ids = {one: await insert_ended(schema, one, "10 years") for one in ENDED}
    async with held_term(schema, retention=JobRetention(**{state: None})) as held:
        await held.run(JobCleaner(held.context))
    assert await ids_of(schema) == {ids[state]}


@pytest.mark.parametrize("retention", [timedelta(0), SETTING_DURATION_MAX])
async def test_extremes(schema: Schema, retention: timedelta) -> None:
    """No retention at all deletes what has ended; the longest that there is, nothing."""
    old = await insert_ended(schema, "completed", "1 s")
    async with held_term(schema, retention=JobRetention(completed=retention)) as held:
        await held.run(JobCleaner(held.context))
    assert await ids_of(schema) == ({old} if retention else set())


async def test_retention_by_queue(schema: Schema) -> None:
    """JC4: queues with a retention of their own keep it, longer, shorter or for ever."""
    async with held_term(
        schema,
        retention_by_queue={"short": hours(1), "long": hours(1000), "ever": FOREVER},
    ) as held:
        for state in ENDED:
            kept = {
                await insert_ended(schema, state, "30 min", queue="'short'"),
                await insert_ended(schema, state, "999 hours", queue="'long'"),
                await insert_ended(schema, state, "10 years", queue="'ever'"),
                await insert_ended(schema, state, "2 hours", queue="'default'"),
            }
            await insert_ended(schema, state, "2 hours", queue="'short'")
            await insert_ended(schema, state, "1001 hours", queue="'long'")
            await insert_ended(schema, state, "10 days", queue="'default'")
            await held.run(JobCleaner(held.context))
            assert await ids_of(schema) == kept
            await schema.execute("TRUNCATE river_job")


async def test_retention_by_kind(schema: Schema) -> None:
    """A retention of a kind counts whatever its queue says."""
    async with held_term(
        schema,
        retention_by_queue={"q": hours(10)},
        retention_by_kind={"ever": FOREVER, "short": hours(1), "long": hours(100)},
    ) as held:
        kept = {
            await insert_ended(schema, "completed", "10 years", kind="'ever'", queue="'q'"),
            await insert_ended(schema, "completed", "10 years", kind="'ever'"),
            await insert_ended(schema, "completed", "30 min", kind="'short'", queue="'q'"),
            await insert_ended(schema, "completed", "99 hours", kind="'long'", queue="'q'"),
            await insert_ended(schema, "completed", "9 hours", kind="'other'", queue="'q'"),
            await insert_ended(schema, "completed", "23 hours", kind="'other'"),
        }
        for kind, queue, age in (
            ("short", "q", "2 hours"),
            ("short", "default", "2 hours"),
            ("long", "q", "101 hours"),
            ("other", "q", "11 hours"),
            ("other", "default", "25 hours"),
        ):
            await insert_ended(schema, "completed", age, kind=f"'{kind}'", queue=f"'{queue}'")
        await held.run(JobCleaner(held.context))
    assert await ids_of(schema) == kept


async def test_some_queues(schema: Schema) -> None:
    """A cleaner of some queues leaves those of others alone, whatever rule they fall under."""
    async with held_term(
        schema,
        retention_by_queue={"a": hours(1), "b": hours(1)},
        retention_by_kind={"kk": hours(2)},
    ) as held:
        kept = {
            await insert_ended(schema, "completed", "10 days", queue="'b'"),
            await insert_ended(schema, "completed", "10 days", queue="'b'", kind="'kk'"),
            await insert_ended(schema, "completed", "10 days", queue="'d'"),
            await insert_ended(schema, "completed", "90 min", queue="'a'", kind="'kk'"),
            await insert_ended(schema, "completed", "23 hours", queue="'c'"),
        }
        await insert_ended(schema, "completed", "90 min", queue="'a'")
        await insert_ended(schema, "completed", "3 hours", queue="'a'", kind="'kk'")
        await insert_ended(schema, "completed", "3 hours", queue="'c'", kind="'kk'")
        await insert_ended(schema, "completed", "25 hours", queue="'c'")
        held.scope = only_queues({"a", "c"})
        await held.run(JobCleaner(held.context))
    assert await ids_of(schema) == kept


async def test_batches(held: HeldTerm, schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """MC7: more jobs than a batch has are all deleted, each batch in a transaction of its own."""
    monkeypatch.setattr(batch_runner, "BATCH_ROWS_MAX", 10)
    await insert_ended(schema, "completed", "25 hours", 35)
    await refuse_many(schema, 10)
    try:
        await held.run(JobCleaner(held.context))
    finally:
        await accept_many(schema)
    assert await ids_of(schema) == set()


async def test_batches_of_a_sweep(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """MC7: so are those of a scope, also where many ended in one moment and most are kept."""
    monkeypatch.setattr(batch_runner, "BATCH_ROWS_MAX", 4)
    await insert_ended(
        schema, "completed", "25 hours", 50, kind="case when i % 5 = 0 then 'kk' else 'kept' end"
    )
    async with held_term(schema, retention_by_kind={"kept": FOREVER}) as held:
        await held.run(JobCleaner(held.context))
    assert await schema.fetchval("SELECT count(*) FROM river_job WHERE kind = 'kept'") == 40
    assert await schema.fetchval("SELECT count(*) FROM river_job") == 40


async def test_sweeps(schema: Schema) -> None:
    """Jobs that are kept longer are looked at once an hour, not in each pass: a job that is hidden
    among them meanwhile is found then."""
    async with held_term(schema, retention_by_kind={"kept": FOREVER}) as held:
        await insert_ended(schema, "completed", "25 hours", 3, kind="'kept'")
        cleaner = JobCleaner(held.context)
        await held.run(cleaner)
        hidden = await insert_ended(schema, "completed", "26 hours")
        newer = await insert_ended(schema, "completed", "24 hours 1 min")
        await held.run(cleaner)
        ids = await ids_of(schema)
        assert hidden in ids
        assert newer not in ids
        held.timer.skipped = READ_POSITION_RESET_INTERVAL
        await held.run(cleaner)
        assert hidden not in await ids_of(schema)


async def test_locked_rows(held: HeldTerm, schema: Schema) -> None:
    """A job that another transaction has locked holds up no other, and goes in a later pass."""
    locked = await insert_ended(schema, "completed", "30 hours")
    await insert_ended(schema, "completed", "25 hours", 5)
    cleaner = JobCleaner(held.context)
    async with schema.connected() as other, other.transaction():
        await other.execute("SELECT FROM river_job WHERE id = $1 FOR UPDATE", locked)
        await held.run(cleaner)
        assert await ids_of(schema) == {locked}
    await held.run(cleaner)
    assert await ids_of(schema) == set()


@pytest.mark.parametrize("skew", [timedelta(minutes=10), timedelta(minutes=-10)])
async def test_skewed_clock(
    held: HeldTerm, schema: Schema, skew: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's clock decides what is old, not the one of the leader (MC10) (SK-19)."""
    now = Clock.now
    monkeypatch.setattr(Clock, "now", lambda self: now(self) + skew)
    kept = await insert_ended(schema, "completed", "23 hours 59 min")
    await insert_ended(schema, "completed", "24 hours 1 min")
    await held.run(JobCleaner(held.context))
    assert await ids_of(schema) == {kept}


async def test_two_leaders(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """MC11: two cleaners at once do no harm to each other, and delete all."""
    monkeypatch.setattr(batch_runner, "BATCH_ROWS_MAX", 20)
    await insert_ended(schema, "completed", "25 hours", 400)
    async with (
        held_term(schema) as held,
        held_term(schema, term=held.term) as second,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(held.run, JobCleaner(held.context))
        tasks.start_soon(second.run, JobCleaner(second.context))
    assert await ids_of(schema) == set()


async def test_deposed(held: HeldTerm, schema: Schema) -> None:
    """A deposed leader deletes nothing."""
    kept = await insert_ended(schema, "completed", "25 hours")
    await held.take_over()
    with pytest.raises(FencedOutError):
        await held.run(JobCleaner(held.context))
    assert await ids_of(schema) == {kept}


async def test_lost_between_batches(
    held: HeldTerm, schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LeaseValidity is looked at before each batch: the batch after its end is not sent."""
    monkeypatch.setattr(batch_runner, "BATCH_ROWS_MAX", 10)
    await insert_ended(schema, "completed", "25 hours", 35)

    async def sleep(_seconds: float) -> None:
        held.pass_deadline()

    monkeypatch.setattr(held.timer, "sleep", sleep)
    with pytest.raises(FencedOutError):
        await held.run(JobCleaner(held.context))
    assert len(await ids_of(schema)) == 25


async def test_slow_deletes(
    held: HeldTerm,
    schema: Schema,
    monkeypatch: pytest.MonkeyPatch,
    log: list[dict[str, Any]],
) -> None:
    """Where a batch does not fit into the statement's limit, the first pass continues with smaller
    ones and deletes all (LM-12)."""
    monkeypatch.setattr(batch_runner, "BATCH_ROWS_MAX", 100)
    await insert_ended(schema, "completed", "25 hours", 95)
    await refuse_many(schema, 10)
    try:
        await held.run(JobCleaner(held.context))
    finally:
        await accept_many(schema)
    assert await ids_of(schema) == set()
    assert [entry["event"] for entry in log if entry["log_level"] == "warning"] == []


async def test_stop_within_a_batch(held: HeldTerm, schema: Schema) -> None:
    """A stop in the middle of a batch waits for no statement, and the server ends what was sent:
    nothing of it is deleted afterwards (LM-16)."""
    await insert_ended(schema, "completed", "25 hours", 10)
    await schema.execute(
        "CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_sleep(50); RETURN OLD; END $$;"
        " CREATE TRIGGER dawdle BEFORE DELETE ON river_job FOR EACH ROW EXECUTE FUNCTION dawdle()"
    )
    active = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'context leader'"
        " AND datname = current_database() AND state <> 'idle' AND query ~ 'delete from'"
    )
    try:
        with anyio.fail_after(20):
            async with ServiceGroup() as group:
                await group.start(JobCleaner(held.context))
                while not await schema.fetchval(active):
                    await anyio.sleep(0.01)
            while await schema.fetchval(active):
                await anyio.sleep(0.01)
    finally:
        await schema.execute("DROP FUNCTION dawdle CASCADE")
    assert len(await ids_of(schema)) == 10


async def test_stop_between_batches(
    held: HeldTerm, schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop between two batches begins no other (LM-16)."""
    monkeypatch.setattr(batch_runner, "BATCH_ROWS_MAX", 10)
    await insert_ended(schema, "completed", "25 hours", 35)
    paused = anyio.Event()

    async def sleep(seconds: float) -> None:
        if len(await ids_of(schema)) < 35:
            paused.set()
            await anyio.sleep_forever()

    monkeypatch.setattr(held.timer, "sleep", sleep)
    with anyio.fail_after(20):
        async with ServiceGroup() as group:
            await group.start(JobCleaner(held.context))
            await paused.wait()
    assert len(await ids_of(schema)) == 25
