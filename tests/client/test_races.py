"""Two sessions that change one job at the same time: the second returns the row as the first
committed it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import msgspec
import pytest

from riverpy import Client, Config, NotFoundError
from tests._notifications import due_payload
from tests.client.test_calls import heard

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy import JobRow
    from tests._database import Schema

WAITING = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE wait_event_type = 'Lock' AND query LIKE '%\"' || $1 || '\".river_job%'"
)
COMPLETE = "UPDATE river_job SET state = 'completed', finalized_at = now(), priority = 4"
FAIL = (
    "UPDATE river_job SET state = 'available', attempt = 2, scheduled_at = now() - interval '1 s'"
)


class Task(msgspec.Struct):
    """Args of the jobs here."""

    kind: ClassVar[str] = "task"


@pytest.fixture
async def client(schema: Schema) -> AsyncGenerator[Client]:
    """An open client that only inserts."""
    async with Client(schema.url, config=Config(schema=schema.name)) as client:
        yield client


async def race(
    schema: Schema, client: Client, winner: str, second_call: str, job_id: int
) -> JobRow:
    """The answer of the second_call, which waits for the winner's open transaction to commit."""
    answers: list[JobRow] = []

    async def lose() -> None:
        answers.append(await getattr(client, second_call)(job_id))

    async with (
        schema.connected() as connection,
        anyio.create_task_group() as tasks,
        connection.transaction(),
    ):
        if winner.startswith("job_"):
            await getattr(client, winner)(job_id, tx=connection)
        else:
            await connection.execute(winner)
        tasks.start_soon(lose)
        with anyio.fail_after(20, reason="the second_call does not wait"):
            while not await schema.fetchval(WAITING, schema.name):
                await anyio.sleep(0.01)
    return answers[0]


async def columns(schema: Schema, job_id: int) -> dict[str, Any]:
    """Some columns of the row as it is now."""
    row = await schema.fetchrow("SELECT * FROM river_job WHERE id = $1", job_id)
    assert row is not None
    return {name: row[name] for name in ("state", "finalized_at", "scheduled_at", "priority")}


@pytest.mark.parametrize(
    ("before", "winner", "second_call", "state"),
    [
        ("available", "job_cancel", "job_cancel", "cancelled"),
        ("available", COMPLETE, "job_cancel", "completed"),
        ("running", COMPLETE, "job_cancel", "completed"),
        ("discarded", "job_retry", "job_retry", "available"),
        ("running", FAIL, "job_retry", "available"),
        ("discarded", "job_retry", "job_cancel", "cancelled"),
        ("scheduled", "job_cancel", "job_retry", "available"),
    ],
)
async def test_second_session_returns_the_committed_row(
    schema: Schema, client: Client, before: str, winner: str, second_call: str, state: str
) -> None:
    """A cancel or retry that waits for another session's transaction returns the row after that
    session's commit, even if it changes nothing itself."""
    job_id = (await client.insert(Task())).job.id
    await schema.execute(
        "UPDATE river_job SET state = $1::text::river_job_state, attempt = 1, attempted_at = now(),"
        " finalized_at = CASE WHEN $1 = 'discarded' THEN now() END,"
        " scheduled_at = now() + interval '1 hour'",
        before,
    )
    answer = await race(schema, client, winner, second_call, job_id)
    assert answer.state == state
    stored = await columns(schema, job_id)
    assert {name: getattr(answer, name) for name in stored} == stored


@pytest.mark.parametrize("second_call", ["job_cancel", "job_retry"])
async def test_job_that_is_deleted_first(schema: Schema, client: Client, second_call: str) -> None:
    """A cancel or retry raises NotFoundError if another session deletes the job first."""
    job_id = (await client.insert(Task())).job.id
    with pytest.raises(ExceptionGroup) as caught:
        await race(schema, client, "DELETE FROM river_job", second_call, job_id)
    assert caught.group_contains(NotFoundError)


async def test_retry_notifies_the_queue(schema: Schema, client: Client) -> None:
    """Retries notify each queue once per transaction, at its commit. A retry that changes nothing
    does not notify."""
    ids = [(await client.insert(Task())).job.id for _ in range(3)]
    await schema.execute(
        "UPDATE river_job SET state = 'discarded', attempt = 25, finalized_at = now()"
    )
    async with heard(schema, "river_insert") as payload, schema.connected() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await client.job_retry(ids[0], tx=connection)
        await transaction.rollback()
        async with connection.transaction():
            for job_id in ids:
                await client.job_retry(job_id, tx=connection)
            await schema.execute("SELECT pg_notify($1, 'first')", f"{schema.name}.river_insert")
        assert await payload() == "first"
        assert await payload() == due_payload("default")
        for job_id in ids:  # these jobs are due
            await client.job_retry(job_id)
        await schema.execute("UPDATE river_job SET state = 'running'")
        await client.job_retry(ids[0])


async def test_retry_at_the_maximum_attempts(schema: Schema, client: Client) -> None:
    """A job with 32,767 attempts can be retried: the number does not exceed the column's limit."""
    job_id = (await client.insert(Task())).job.id
    await schema.execute(
        "UPDATE river_job SET state = 'discarded', attempt = 32767, max_attempts = 32767,"
        " finalized_at = now()"
    )
    job = await client.job_retry(job_id)
    assert (job.state, job.attempt, job.max_attempts) == ("available", 32767, 32767)
