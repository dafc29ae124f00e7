"""Maintenance by a leader of either language: cleaning, scheduling, reindexing."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.interop.conform import conform
from tests.interop.working import FOR_EVER, LANGUAGES, OTHER, Periodic, Retention

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema
    from tests.interop.callers import Caller
    from tests.interop.working import Fleet
    from tests.work.rig import Rig

    Callers = dict[str, Caller]

EITHER = pytest.mark.parametrize("language", LANGUAGES)
HOUR = 3600.0
ENDED = """
INSERT INTO river_job (kind, args, max_attempts, state, finalized_at, queue)
SELECT 'nobody_knows', '{}', 1, $1::text::river_job_state, now() - $2::text::interval, $4::text
FROM generate_series(1, $3::int)
"""
MANY = 10_500
"""More jobs than one statement of either language deletes."""
QUEUE = """
INSERT INTO river_queue (name, metadata, updated_at, paused_at)
VALUES ($1, $2, now() - $3::text::interval, CASE WHEN $4 THEN now() - interval '25 hours' END)
"""
HOLD = """
CREATE FUNCTION hold_delete() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(4711);
    RETURN OLD;
END $$;
CREATE TRIGGER hold_delete BEFORE DELETE ON river_job
    FOR EACH ROW EXECUTE FUNCTION hold_delete();
"""
HELD = "SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711"
SHORTEN = """
UPDATE river_leader SET expires_at = least(expires_at, now() + interval '6 seconds')
RETURNING expires_at
"""
LEADER = "SELECT leader_id, elected_at FROM river_leader"
FILENODE = "SELECT pg_relation_filenode(to_regclass($1))"


async def insert_ended(
    schema: Schema, state: str, age: str, number: int = 1, queue: str = "default"
) -> None:
    """Insert jobs that finished this long ago."""
    await schema.execute(ENDED, state, age, number, queue)


@asynccontextmanager
async def deletes_held(schema: Schema) -> AsyncGenerator[None]:
    """Block every delete of a job during the block."""
    await schema.execute(HOLD)
    try:
        async with schema.connected() as holder:
            await holder.execute("SELECT pg_advisory_lock(4711)")
            yield
    finally:
        await schema.execute("DROP FUNCTION hold_delete CASCADE")


@EITHER
async def test_renewal_beside_a_slow_cleaner(
    language: str, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """While the job cleaner waits for a lock, for longer than the lease lasts, the leader renews
    the lease, and no other client becomes leader (CF-062,
    leadership_renewal_under_slow_maintenance)."""
    await insert_ended(schema, "cancelled", "30 days")
    settings: dict[str, Any] = {"candidate": True, "leader_ttl": 6}
    waits = HELD + " AND NOT granted"
    async with (
        deletes_held(schema),
        fleet.worker(language, id="first", **settings),
    ):
        await rig.until(waits)
        async with fleet.worker(OTHER[language], id="second", **settings):
            leader = await schema.fetchrow(LEADER)
            # A lease that expires in time for the test. Go's lasts 15 s and is renewed every 5 s.
            first_end = ends = await schema.fetchval(SHORTEN)
            for _ in range(2):
                await rig.until("SELECT expires_at > $1 FROM river_leader", True, ends)
                ends = await schema.fetchval(SHORTEN)
            await rig.until("SELECT now() > $1", True, first_end)
            assert await schema.fetchrow(LEADER) == leader
            await rig.until(waits)
            assert leader is not None
            assert leader["leader_id"] == "first"


@EITHER
async def test_job_cleaner(language: str, fleet: Fleet, schema: Schema, rig: Rig) -> None:
    """Finished jobs are deleted when they are older than the retention of their state, however many
    they are. Those of a state without a retention time stay (CF-063,
    maintenance_job_cleaner_retention)."""
    for state in ("cancelled", "completed", "discarded"):
        for age in ("2 hours", "1 minute"):
            await insert_ended(schema, state, age)
    await insert_ended(schema, "discarded", "2 hours", MANY)
    await rig.insert_rows(1, state="running", attempted_at=await schema.fetchval("SELECT now()"))
    retention = Retention(completed=FOR_EVER, cancelled=HOUR, discarded=HOUR)
    async with fleet.worker(language, candidate=True, retention=retention):
        old = "SELECT count(*) FROM river_job WHERE finalized_at < now() - interval '1 hour'"
        await rig.until(old, 1)
    assert await rig.states() == {"cancelled": 1, "completed": 2, "discarded": 1, "running": 1}


@EITHER
async def test_queue_cleaner(language: str, fleet: Fleet, schema: Schema, rig: Rig) -> None:
    """A queue without a worker for a day is deleted. River also deletes it if it is paused or has
    metadata; riverpy does not (CF-065, maintenance_queue_cleaner_keeps_active_queues)."""
    for name, metadata, age, is_paused in (
        ("old", "{}", "25 hours", False),
        ("young", "{}", "1 hour", False),
        ("default", "{}", "25 hours", False),
        ("other", "{}", "25 hours", False),
        ("paused", "{}", "25 hours", True),
        ("described", '{"owner": "me"}', "25 hours", False),
    ):
        await schema.execute(QUEUE, name, metadata, age, is_paused)
    kept = {"default", "other", "young"}
    if language == "python":
        kept |= {"paused", "described"}
    async with (
        fleet.worker(OTHER[language], queues={"other": 1}),
        fleet.worker(language, candidate=True),
    ):
        await rig.until("SELECT count(*) FROM river_queue", len(kept))
        # Both clients write their queues' rows when they start, before the first pass.
        assert {row["name"] for row in await schema.fetch("SELECT name FROM river_queue")} == kept


@EITHER
async def test_reindexer(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """An index that does not exist, and one with a valid left-over of a rebuild, are skipped.
    Others are rebuilt while jobs are worked (CF-066, maintenance_reindexer_skips_artifacts)."""
    beside, ordinary = "river_job_kind", "river_job_prioritized_fetching_index"
    artifact = f"{beside}_ccnew1"
    await schema.execute(f"CREATE INDEX {artifact} ON river_job (kind)")
    names = [f"{schema.name}.{name}" for name in (beside, ordinary, artifact)]
    before = [await schema.fetchval(FILENODE, name) for name in names]
    try:
        names_given = f"river_job_nothing,{beside},{ordinary}"
        async with fleet.worker(language, candidate=True, reindex=names_given) as worker:
            for _ in range(2):  # two runs, so that one has ended
                was = await schema.fetchval(FILENODE, names[1])
                await rig.until(FILENODE + " <> $2::oid", True, names[1], was)
                job = await callers[OTHER[language]].insert(conform())
                await worker.until("job_completed", id=job["id"])
            after = [await schema.fetchval(FILENODE, name) for name in names]
        assert [was == now for was, now in zip(before, after, strict=True)] == [True, False, True]
    finally:
        await schema.execute(f"DROP INDEX {artifact}")
        await schema.execute(f"DROP INDEX IF EXISTS {ordinary}_ccnew, {ordinary}_ccold")


@EITHER
async def test_all_kinds(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """A client that claims only known kinds still schedules, cleans and periodically inserts jobs
    of all kinds (for stuck jobs see CF-057). It works its own kinds beside them (CF-106)."""
    foreign = "nobody_knows"
    due = await schema.fetchval("SELECT now() - interval '1 minute'")
    await rig.insert_rows(1, kind=foreign, state="scheduled", scheduled_at=due)
    await insert_ended(schema, "completed", "30 days")
    periodic = [Periodic(id="foreign", kind=foreign, every_ms=1000)]
    async with fleet.worker(
        language, candidate=True, known_kinds_only=True, periodic=periodic
    ) as worker:
        available = "SELECT count(*) > 1 FROM river_job WHERE state = 'available' AND kind = $1"
        await rig.until(available, True, foreign)
        await rig.until("SELECT count(*) FROM river_job WHERE state = 'completed'", 0)
        job = await callers[OTHER[language]].insert(conform(priority=4))
        await worker.until("job_completed", id=job["id"])
    assert set(await rig.states()) == {"available", "completed"}
    untouched = await schema.fetchval(
        "SELECT bool_and(attempt = 0 AND attempted_by IS NULL AND errors IS NULL) FROM river_job"
        " WHERE kind = $1",
        foreign,
    )
    assert untouched is True
