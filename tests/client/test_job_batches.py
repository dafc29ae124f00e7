"""Deletes, and changes of many jobs in batches: what they change, count, notify and leave alone."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import pytest

from riverpy import (
    Client,
    Config,
    ConfigError,
    InsertManyParams,
    InsertOpts,
    JobChanges,
    JobRunningError,
    JobState,
    NotFoundError,
    RawArgs,
    UniqueOpts,
)
from riverpy._calls import batched_change
from tests._notifications import due_payload
from tests.client.test_calls import heard
from tests.kit.damaged_rows import DAMAGE, damage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy import JobFilters
    from tests._database import Schema

ROWS = """
INSERT INTO river_job
  (id, state, kind, args, attempt, max_attempts, scheduled_at, finalized_at, metadata, queue)
SELECT id, state::river_job_state, 'task', '{}', attempt, 3, now() + due, finalized_at,
  '{"cancel_attempted_at": "then", "kept": 1}', 'q' || id % 2
FROM (VALUES
  (1, 'available', 0, interval '-1 min', NULL),
  (2, 'scheduled', 0, '1 hour', NULL),
  (3, 'retryable', 1, '1 hour', NULL),
  (4, 'pending', 0, '1 hour', NULL),
  (5, 'running', 1, '-1 min', NULL),
  (6, 'completed', 1, '-1 min', now()),
  (7, 'cancelled', 1, '-1 min', now()),
  (8, 'discarded', 3, '-1 min', now())
) AS v (id, state, attempt, due, finalized_at)
"""
MANY = """
INSERT INTO river_job (id, state, kind, args, max_attempts, finalized_at)
SELECT i, 'discarded', 'task', '{}', 3, now() FROM generate_series(1, $1::int) AS i
"""
ALL: JobFilters = {"states": list(JobState)}


@pytest.fixture
async def client(schema: Schema) -> AsyncGenerator[Client]:
    """An open client that only inserts."""
    async with Client(schema.url, config=Config(schema=schema.name)) as client:
        yield client


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change 10 jobs at a time, read 30 ids at a time, and do not wait long for locks."""
    monkeypatch.setattr(batched_change, "JOBS_PER_BATCH", 10)
    monkeypatch.setattr(batched_change, "JOB_IDS_PER_READ", 30)
    monkeypatch.setattr(batched_change, "LOCKED_JOB_RETRY_DELAYS", (0.01, 0.01))


async def copy_of_rows(schema: Schema) -> list[dict[str, Any]]:
    """Return all rows, with the transaction's time as a word."""
    rows = await schema.fetch(
        "SELECT id, state::text, attempt, max_attempts, finalized_at IS NOT NULL AS ended,"
        " scheduled_at <= now() AS due, metadata - 'cancel_attempted_at' AS metadata,"
        " metadata ->> 'cancel_attempted_at' AS mark FROM river_job ORDER BY id"
    )
    return [
        {**row, "mark": row["mark"] if row["mark"] in {None, "then"} else "now"} for row in rows
    ]


@pytest.mark.parametrize("verb", ["retry", "cancel"])
async def test_many_as_one(client: Client, schema: Schema, verb: str) -> None:
    """A change of many jobs leaves the rows that the call on each single job leaves."""
    await schema.execute(ROWS)
    for job_id in range(1, 9):
        await getattr(client, f"job_{verb}")(job_id)
    expected = await copy_of_rows(schema)
    await schema.execute("DELETE FROM river_job")
    await schema.execute(ROWS)
    changes = await getattr(client, f"job_{verb}_many")(**ALL)
    assert await copy_of_rows(schema) == expected
    if verb == "retry":
        assert changes == JobChanges(changed=6, running=1, unchanged=2)
    else:
        assert changes == JobChanges(changed=5, running=1, unchanged=3)
    assert changes.done == 8


async def test_notifications(client: Client, schema: Schema) -> None:
    """A retry notifies each queue once for each batch. A cancel notifies the workers of running
    jobs. Nothing is sent before the caller's commit."""
    await schema.execute(ROWS)
    async with heard(schema, "river_control") as payload:
        await client.job_cancel_many(kinds=["task"])
        assert await payload() == '{"action" : "cancel", "job_id" : 5, "queue" : "q1"}'
    async with heard(schema, "river_insert") as payload:
        await client.job_retry_many(kinds=["task"])
        assert {await payload(), await payload()} == {due_payload("q0"), due_payload("q1")}
    async with heard(schema, "river_insert"), schema.connected() as tx:
        await tx.execute("BEGIN; UPDATE river_job SET state = 'pending' WHERE id < 5")
        assert (await client.job_retry_many(ids=[1, 2], tx=tx)).changed == 2
        await tx.execute("ROLLBACK")


async def test_batches(client: Client, schema: Schema) -> None:
    """Each batch is a transaction of its own, and its counts are reported. Jobs that are inserted
    during the call are left alone. An error of the callback ends the call between two batches."""
    await schema.execute(MANY, 75)
    reports: list[JobChanges] = []
    count = "SELECT count(*) FROM river_job WHERE state = 'available'"

    def note(changes: JobChanges) -> None:
        reports.append(changes)
        if changes.changed == 40:
            raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        await client.job_retry_many(kinds=["task"], states=["discarded"], on_progress=note)
    assert [one.changed for one in reports] == [10, 20, 30, 40]
    assert await schema.fetchval(count) == 40
    assert await client.job_retry_many(kinds=["task"], states=["discarded"]) == JobChanges(
        changed=35
    )
    assert await schema.fetchval(count) == 75


async def test_cancelled_call(client: Client, schema: Schema) -> None:
    """A call that is cancelled finishes its batch first, so the last report is true."""
    await schema.execute(MANY, 75)
    reports: list[JobChanges] = []

    def note(changes: JobChanges) -> None:
        reports.append(changes)
        if len(reports) == 1:  # the cancellation arrives during the second batch
            asyncio.get_running_loop().call_soon(task.cancel)

    retry = client.job_retry_many(ids=range(1, 76), on_progress=note)
    task = asyncio.get_running_loop().create_task(retry)
    with pytest.raises(asyncio.CancelledError):
        await task
    count = "SELECT count(*) FROM river_job WHERE state = 'available'"
    assert await schema.fetchval(count) == 20


async def test_in_a_transaction(client: Client, schema: Schema) -> None:
    """With `tx`, all batches are part of the caller's transaction. A failed call has changed
    nothing, and the transaction stays usable."""
    await schema.execute(MANY, 25)
    counts = "SELECT count(*) FROM river_job WHERE state = 'available'"

    def fail(changes: JobChanges) -> None:
        if changes.done == 20:
            raise LookupError

    async with schema.connected() as tx, tx.transaction():
        with pytest.raises(LookupError):
            await client.job_retry_many(kinds=["task"], on_progress=fail, tx=tx)
        assert await tx.fetchval(counts) == 0
        assert (await client.job_retry_many(kinds=["task"], tx=tx)).changed == 25
        assert (await client.job_cancel_many(ids=[1, 2, 99], tx=tx)) == JobChanges(
            changed=2, missing=1
        )
        assert len(await client.job_delete_many(kinds=["task"], limit=5, tx=tx)) == 5
        assert await tx.fetchval(counts) == 20
        assert await schema.fetchval(counts) == 0
    assert await schema.fetchval(counts) == 20


async def test_unique_keys(client: Client, schema: Schema) -> None:
    """Of discarded jobs with one key the first is retried, unless another job has the key. The
    others are refused by name, and so is one whose key an open transaction takes."""
    unique = InsertOpts(unique_opts=UniqueOpts(by_args=True))
    ids: list[list[int]] = []
    for _ in range(3):
        params = [InsertManyParams(RawArgs("task", f'{{"n":{n}}}'), unique) for n in range(6)]
        ids.append([one.job.id for one in await client.insert_many(params)])
        await client.job_cancel_many(ids=ids[-1])
    await client.insert(RawArgs("task", '{"n":0}'), unique)  # has the key of the first three
    await schema.execute(
        "UPDATE river_job SET state = 'scheduled', finalized_at = NULL WHERE id = $1", ids[2][1]
    )
    async with schema.connected() as tx:
        await tx.execute("BEGIN")
        await client.insert(RawArgs("task", '{"n":2}'), unique, tx=tx)
        async with anyio.create_task_group() as group:
            changes: list[JobChanges] = []

            async def retry() -> None:
                changes.append(
                    await client.job_retry_many(kinds=["task"], states=["cancelled", "scheduled"])
                )

            group.start_soon(retry)
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            while not await schema.fetchval(waits):
                await anyio.sleep(0.01)
            await tx.execute("COMMIT")
    retried = {ids[2][1], *ids[0][3:]}
    refused = {one for batch in ids for one in batch} - retried
    assert changes == [
        JobChanges(
            changed=4,
            refused=14,
            reasons=dict.fromkeys(sorted(refused), batched_change.UNIQUE_CONFLICT_REASON),
        )
    ]
    rows = await client.job_list(states=["available"], kinds=["task"])
    assert retried < {job.id for job in rows.jobs}
    assert len(rows.jobs) == 6


async def test_unique_keys_that_are_taken(
    client: Client, schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job whose key an open transaction takes is refused after a short wait, and does not hold up
    the others. Conflicts among the jobs themselves cost no further statement."""
    monkeypatch.setattr(batched_change, "UNIQUE_KEY_LOCK_TIMEOUT", timedelta(milliseconds=20))
    unique = InsertOpts(unique_opts=UniqueOpts(by_args=True))
    for _ in range(2):
        params = [InsertManyParams(RawArgs("task", f'{{"n":{n}}}'), unique) for n in range(3)]
        ids = [one.job.id for one in await client.insert_many(params)]
        await client.job_cancel_many(ids=ids)
    with monkeypatch.context() as patch:
        patch.setattr(batched_change, "split_batch", None)
        async with schema.connected() as tx:
            await tx.execute("BEGIN")
            changes = await client.job_retry_many(kinds=["task"], tx=tx)
            await tx.execute("ROLLBACK")
    assert (changes.changed, sorted(changes.reasons)) == (3, ids)
    async with schema.connected() as tx:
        await tx.execute("BEGIN")
        await client.insert(RawArgs("task", '{"n":1}'), unique, tx=tx)
        changes = await client.job_retry_many(kinds=["task"])
        assert (changes.changed, changes.refused) == (2, 4)
        assert changes.reasons[2] == batched_change.JOB_LOCKED_REASON
        await schema.execute(
            "UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE id > 0"
        )
        monkeypatch.setattr(batched_change, "LOCK_WAITS_PER_BATCH_MAX", 3)
        changes = await client.job_retry_many(kinds=["task"])
        assert changes.done == 6
        assert changes.reasons[2] == batched_change.JOB_LOCKED_REASON
        await tx.execute("ROLLBACK; BEGIN; LOCK TABLE river_job")
        with pytest.raises(asyncpg.LockNotAvailableError):
            await client.job_retry_many(ids=range(1, 7))


async def test_limit(client: Client, schema: Schema) -> None:
    """With a limit only the first jobs by id are changed."""
    await schema.execute(MANY, 75)
    assert (await client.job_retry_many(kinds=["task"], limit=33)).changed == 33
    assert (await client.job_cancel_many(ids=range(70, 0, -1), limit=5)).changed == 5
    assert (await client.job_delete_in_batches(states=["discarded"], limit=30)).changed == 30
    rows = await schema.fetch("SELECT id FROM river_job WHERE state = 'discarded' ORDER BY id")
    assert [row["id"] for row in rows] == list(range(64, 76))
    for limit in (0, True, 1.5):
        with pytest.raises(ConfigError, match="limit must be a whole number"):
            await client.job_retry_many(kinds=["task"], limit=limit)


async def test_locked_changed_and_damaged_rows(client: Client, schema: Schema) -> None:
    """A locked job is tried again and then refused; one that no longer passes the filters, or was
    deleted, is left alone; one that the server cannot read or change is refused by name. The others
    are changed."""
    await schema.execute(MANY, 25)
    await damage(schema, 7, "metadata")
    await schema.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN RAISE check_violation USING message = 'not this one'; END$$;"
        "CREATE TRIGGER refuse BEFORE UPDATE ON river_job FOR EACH ROW WHEN (old.id = 9)"
        " EXECUTE FUNCTION refuse()"
    )
    reports: list[JobChanges] = []
    try:
        async with schema.connected() as other, schema.connected() as third:
            await other.execute("BEGIN; UPDATE river_job SET priority = 2 WHERE id IN (3, 24)")
            await third.execute("BEGIN; UPDATE river_job SET priority = 3 WHERE id = 4")

            change = anyio.Event()

            def note(changes: JobChanges) -> None:
                reports.append(changes)
                if len(reports) == 1:
                    change.set()

            async def interfere() -> None:
                await change.wait()
                await third.execute("UPDATE river_job SET state = 'completed' WHERE id = 4; COMMIT")

            async with anyio.create_task_group() as group:
                group.start_soon(interfere)
                changes = await client.job_retry_many(
                    ids=[*range(1, 26), 99], states=["discarded"], on_progress=note
                )
    finally:
        await schema.execute("DROP TRIGGER refuse ON river_job; DROP FUNCTION refuse")
    assert DAMAGE in changes.reasons.pop(7)
    assert changes.reasons == {
        3: batched_change.JOB_LOCKED_REASON,
        9: "not this one",
        24: batched_change.JOB_LOCKED_REASON,
    }
    assert (changes.refused, changes.done) == (4, 26)
    assert changes.unchanged == 1  # the third session completed job 4
    assert (changes.missing, changes.changed) == (1, 20)
    assert reports[-1].done == 26


@pytest.mark.parametrize(
    "call",
    ["job_retry_many", "job_cancel_many", "job_delete_many", "job_delete_in_batches"],
)
async def test_refusals(call: str) -> None:
    """Without a filter, or with one that is not allowed, nothing is sent (CF-025)."""
    client = Client("postgres://nowhere")
    with pytest.raises(ConfigError, match=f"{call} without a filter would change all jobs"):
        await getattr(client, call)()
    with pytest.raises(ConfigError, match="kinds is empty"):
        await getattr(client, call)(kinds=[])

    async def note(changes: object) -> None: ...

    for on_progress in (5, note):
        if call != "job_delete_many":
            with pytest.raises(ConfigError, match="on_progress must be"):
                await getattr(client, call)(ids=[1], on_progress=on_progress)
    with pytest.raises(ConfigError, match="limit must be"):
        await client.job_delete_many(ids=[1], limit=0)


async def test_delete(client: Client, schema: Schema) -> None:
    """A job in each state but running is deleted and returned as it was; a running one is refused,
    also if it began while the call waited for its lock (CF-104)."""
    await schema.execute(ROWS)
    for job_id in (1, 2, 3, 4, 6, 7, 8):
        before = await client.job_get(job_id)
        job = await client.job_delete(job_id)
        assert tuple(job.get_encoded_values()) == tuple(before.get_encoded_values())
        with pytest.raises(NotFoundError, match=f"no job {job_id}"):
            await client.job_delete(job_id)
    with pytest.raises(JobRunningError, match="job 5 is running"):
        await client.job_delete(5)
    await schema.execute("UPDATE river_job SET state = 'available'")
    async with schema.connected() as other, anyio.create_task_group() as group:
        await other.execute("BEGIN; UPDATE river_job SET state = 'running'")

        async def delete() -> None:
            with pytest.raises(JobRunningError):
                await client.job_delete(5)

        group.start_soon(delete)
        while not await schema.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
            await anyio.sleep(0.01)
        await other.execute("COMMIT")
    assert await schema.fetchval("SELECT state::text FROM river_job") == "running"


async def test_delete_many(client: Client, schema: Schema) -> None:
    """The first jobs by id are deleted and returned in their order. Running and locked jobs are
    passed over before the limit counts. `unsafe_all` allows a call without a filter (CF-025)."""
    await schema.execute(ROWS)
    async with schema.connected() as other:
        await other.execute("BEGIN; SELECT FROM river_job WHERE id = 1 FOR UPDATE")
        jobs = await client.job_delete_many(ids=[5, 3, 1, 2], limit=1)
        assert [(job.id, job.state, job.queue) for job in jobs] == [(2, "scheduled", "q0")]
    assert await client.job_delete_many(states=["running"]) == []
    jobs = await client.job_delete_many(
        ids=[8, 4, 3], metadata={"kept": 1}, unsafe_all=True, queues=["q0"]
    )
    assert [job.id for job in jobs] == [4, 8]
    changes = await client.job_delete_in_batches(ids=[1, 5, 6, 9])
    assert changes == JobChanges(changed=2, running=1, unchanged=1, missing=1)
    assert [job.id for job in await client.job_delete_many(unsafe_all=True)] == [3, 7]
    assert [job.id for job in (await client.job_list()).jobs] == [5]
