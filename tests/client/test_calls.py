"""Calls on jobs and queues: what they store, return and notify."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import asyncpg
import msgspec
import pytest

from riverpy import (
    ArgsError,
    Client,
    Config,
    ConfigError,
    EventKind,
    InsertOpts,
    Job,
    JobDamagedError,
    JobRow,
    JobState,
    NotFoundError,
    Queue,
    QueueConfig,
    RawArgs,
    UniqueConflictError,
    UniqueOpts,
    Workers,
)
from tests._notifications import due_payload
from tests.kit.damaged_rows import DAMAGE, damage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from tests._database import Schema


class Task(msgspec.Struct):
    """Args of the jobs here."""

    kind: ClassVar[str] = "task"
    n: int = 0


@asynccontextmanager
async def heard(schema: Schema, topic: str) -> AsyncGenerator[Callable[[], Any]]:
    """What is notified on a topic meanwhile: call it for the next payload."""
    payloads: asyncio.Queue[str] = asyncio.Queue()
    async with schema.connected() as connection:
        await connection.add_listener(
            f"{schema.name}.{topic}", lambda *args: payloads.put_nowait(args[3])
        )

        async def next_payload() -> str:
            with anyio.fail_after(10):
                return await payloads.get()

        yield next_payload
        await schema.execute("select pg_notify($1, 'end')", f"{schema.name}.{topic}")
        assert await next_payload() == "end", "more was notified than the test read"


@pytest.fixture
async def client(schema: Schema) -> AsyncGenerator[Client]:
    """An open client that only inserts."""
    async with Client(schema.url, config=Config(schema=schema.name)) as client:
        yield client


async def test_get_returns_every_column(client: Client) -> None:
    """`job_get` returns every column, decoded, equal to the result of the insert."""
    inserted = await client.insert(
        Task(n=7),
        InsertOpts(
            metadata={"a": [1, None]},
            tags=["one", "two"],
            priority=3,
            max_attempts=4,
            unique_opts=UniqueOpts(by_args=True),
        ),
    )
    job = await client.job_get(inserted.job.id)
    assert json.loads(job.encoded_args) == {"n": 7}
    assert (job.kind, job.queue, job.state, job.attempt) == ("task", "default", "available", 0)
    assert (job.priority, job.max_attempts, job.tags) == (3, 4, ["one", "two"])
    assert (job.metadata, job.errors, job.attempted_by) == ({"a": [1, None]}, [], [])
    assert job.attempted_at is None
    assert job.finalized_at is None
    assert job.created_at == job.scheduled_at == inserted.job.created_at
    assert job.unique_key == inserted.job.unique_key
    assert job.unique_states is not None
    assert JobState.DISCARDED not in job.unique_states
    assert JobState.RUNNING in job.unique_states


async def test_get_is_one_statement(schema: Schema) -> None:
    """A read of one job without `tx` sends no BEGIN and no COMMIT, which cost a round trip each."""
    queries: list[str] = []

    async def record_queries(connection: Any) -> None:
        connection.add_query_logger(lambda record: queries.append(record.query))

    async with (
        asyncpg.create_pool(schema.url, min_size=1, max_size=1, setup=record_queries) as pool,
        Client(pool, config=Config(schema=schema.name)) as client,
    ):
        inserted = await client.insert(RawArgs("mail", "{}"))
        await client.job_cancel(inserted.job.id)
        assert [query for query in queries if query.startswith("BEGIN")]
        queries.clear()
        assert (await client.job_get(inserted.job.id)).id == inserted.job.id
    assert [query for query in queries if query.startswith(("BEGIN", "COMMIT"))] == []


@pytest.mark.parametrize("call", ["job_get", "job_cancel", "job_retry"])
async def test_unknown_job_is_not_found(client: Client, call: str) -> None:
    """A call on a job that does not exist raises NotFoundError (LC14)."""
    with pytest.raises(NotFoundError, match="no job 12345"):
        await getattr(client, call)(12345)


@pytest.mark.parametrize("job_id", ["1", 1.0, None, True, 2**63, -(2**63) - 1])
async def test_refused_ids(client: Client, job_id: Any) -> None:
    """An id that is no integer of 64 bits is refused with its name."""
    for call in (client.job_get, client.job_cancel, client.job_retry, client.job_delete):
        with pytest.raises(ConfigError, match="job_id must be"):
            await call(job_id)
    with pytest.raises(ConfigError, match="job_id must be"):
        await client.job_update(job_id, output=1)


async def test_a_damaged_job_is_named(client: Client, schema: Schema) -> None:
    """A call on a job that the server cannot read raises an error with its id, and so does an
    insert of its duplicate. The transaction stays usable."""
    unique = InsertOpts(unique_opts=UniqueOpts(by_args=True))
    job_id = (await client.insert(Task(), unique)).job.id
    await damage(schema, job_id, "metadata")
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: client.job_get(job_id, tx=tx),
        lambda: client.job_cancel(job_id, tx=tx),
        lambda: client.job_retry(job_id, tx=tx),
        lambda: client.job_update(job_id, output=1, tx=tx),
    ]
    async with schema.connected() as tx, tx.transaction():
        for call in calls:
            with pytest.raises(JobDamagedError, match=f"cannot read job {job_id} .*{DAMAGE}"):
                await call()
        assert await tx.fetchval("SELECT count(*) FROM river_job") == 1
    with pytest.raises(JobDamagedError, match=f"job with the same unique key .*{DAMAGE}"):
        await client.insert(Task(), unique)


@pytest.mark.parametrize("state", ["available", "pending", "scheduled", "retryable"])
async def test_cancel_of_a_waiting_job(client: Client, schema: Schema, state: str) -> None:
    """A job that is not running is cancelled at once. The notification equals River's."""
    job_id = (await client.insert(Task())).job.id
    await schema.execute("update river_job set state = $1::river_job_state", state)
    async with heard(schema, "river_control") as payload:
        job = await client.job_cancel(job_id)
        expected = f'{{"action" : "cancel", "job_id" : {job_id}, "queue" : "default"}}'
        assert await payload() == expected
    assert job.state is JobState.CANCELLED
    assert job.finalized_at is not None
    mark = job.metadata["cancel_attempted_at"]
    assert mark.endswith("Z")
    assert "T" in mark


@pytest.mark.parametrize(
    ("method", "before", "meanwhile"),
    [
        ("job_cancel", "running", "state = 'completed', finalized_at = now()"),
        ("job_retry", "retryable", "state = 'running', attempt = 1, attempted_at = now()"),
    ],
    ids=["cancel", "retry"],
)
async def test_call_that_waits_for_another_session(
    client: Client, schema: Schema, method: str, before: str, meanwhile: str
) -> None:
    """If another session finishes or claims the job first, a call returns the job as that session
    left it. A finished job is not cancelled, and a running one is not run twice."""
    job_id = (await client.insert(Task())).job.id
    await schema.execute(
        "UPDATE river_job SET state = $1::river_job_state, scheduled_at = now() + '1 hour'", before
    )
    jobs: list[JobRow] = []

    async def call() -> None:
        jobs.append(await getattr(client, method)(job_id))

    async with schema.connected() as other, anyio.create_task_group() as tasks:
        await other.execute(f"BEGIN; UPDATE river_job SET {meanwhile}")
        pid = other.get_server_pid()
        tasks.start_soon(call)
        with anyio.fail_after(30, reason="the call does not wait"):
            while not await schema.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))", pid
            ):
                await asyncio.sleep(0.01)
        await other.execute("COMMIT")
    (row,) = await schema.jobs()
    assert jobs[0].state == row["state"] == meanwhile.split("'")[1]
    assert (row["finalized_at"] is None) == (method == "job_retry")


@pytest.mark.parametrize("state", ["completed", "cancelled", "discarded"])
async def test_cancel_of_a_final_job_changes_nothing(
    client: Client, schema: Schema, state: str
) -> None:
    """Cancelling a finished job changes nothing and notifies no client."""
    job_id = (await client.insert(Task())).job.id
    await schema.execute(
        "update river_job set state = $1::river_job_state, finalized_at = now()", state
    )
    before = await schema.fetchrow("select * from river_job")
    async with heard(schema, "river_control"):
        job = await client.job_cancel(job_id)
    assert job.state == state
    assert await schema.fetchrow("select * from river_job") == before


async def test_cancel_of_a_running_job_marks_it_each_time(client: Client, schema: Schema) -> None:
    """Cancelling a running job marks it; its state stays running. Each repetition notifies its
    client. The time of the mark has no trailing zeros."""
    job_id = (await client.insert(Task())).job.id
    await schema.execute(
        "update river_job set state = 'running', attempt = 1, attempted_at = now()"
    )
    async with heard(schema, "river_control") as payload:
        for _ in range(2):
            job = await client.job_cancel(job_id)
            assert job.state is JobState.RUNNING
            mark = job.metadata["cancel_attempted_at"]
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{0,5}[1-9])?Z", mark)
            assert json.loads(await payload())["job_id"] == job_id


async def test_cancel_in_a_transaction_takes_effect_at_its_commit(
    client: Client, schema: Schema
) -> None:
    """With `tx=`, a cancel and its notification take effect at the commit (LC13)."""
    job_id = (await client.insert(Task())).job.id
    async with heard(schema, "river_control") as payload, schema.connected() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await client.job_cancel(job_id, tx=connection)
        await transaction.rollback()
        assert (await client.job_get(job_id)).state is JobState.AVAILABLE
        async with connection.transaction():
            await client.job_cancel(job_id, tx=connection)
        assert json.loads(await payload())["action"] == "cancel"
    assert (await client.job_get(job_id)).state is JobState.CANCELLED


async def test_retry_makes_a_final_job_available(client: Client, schema: Schema) -> None:
    """Retrying a discarded job adds an attempt, removes its cancel mark and notifies its queue."""
    job_id = (await client.insert(Task(), InsertOpts(max_attempts=1))).job.id
    await schema.execute(
        "update river_job set state = 'discarded', attempt = 1, finalized_at = now(),"
        ' metadata = \'{"cancel_attempted_at": "2026-01-01T00:00:00Z", "k": 1}\''
    )
    async with heard(schema, "river_insert") as payload, heard(schema, "river_control"):
        job = await client.job_retry(job_id)
        assert await payload() == due_payload("default")
    assert (job.state, job.max_attempts, job.attempt) == ("available", 2, 1)
    assert job.finalized_at is None
    assert job.metadata == {"k": 1}


@pytest.mark.parametrize(
    ("attempt", "max_attempts", "after"),
    [(3, 3, 4), (2, 3, 3), (32_767, 32_767, 32_767)],
    ids=["used up", "some left", "end of the type"],
)
async def test_retry_gives_an_attempt_where_none_is_left(
    client: Client, schema: Schema, attempt: int, max_attempts: int, after: int
) -> None:
    """A retried job has at least one attempt left. The number stays in the range of its type."""
    job_id = (await client.insert(Task(), InsertOpts(max_attempts=max_attempts))).job.id
    await schema.execute(
        "UPDATE river_job SET state = 'cancelled', attempt = $1, finalized_at = now()", attempt
    )
    job = await client.job_retry(job_id)
    assert (job.state, job.attempt, job.max_attempts) == ("available", attempt, after)


async def test_retry_leaves_running_and_due_jobs_alone(client: Client, schema: Schema) -> None:
    """A retry does not change a running job or a job that is due. It makes a snoozed job due."""
    job_id = (await client.insert(Task())).job.id
    await schema.execute("update river_job set scheduled_at = now() - interval '1 hour'")
    before = await schema.fetchrow("select * from river_job")
    await client.job_retry(job_id)
    assert await schema.fetchrow("select * from river_job") == before
    await schema.execute("update river_job set state = 'running'")
    assert (await client.job_retry(job_id)).state is JobState.RUNNING
    await schema.execute(
        "update river_job set state = 'scheduled', scheduled_at = now() + interval '1 hour'"
    )
    job = await client.job_retry(job_id)
    assert job.state is JobState.AVAILABLE
    assert job.scheduled_at < job.created_at + timedelta(minutes=1)


async def test_retry_of_a_job_whose_key_is_taken(client: Client) -> None:
    """A retry raises UniqueConflictError if another job has the same unique key."""
    opts = InsertOpts(unique_opts=UniqueOpts(by_args=True))
    first = (await client.insert(Task(), opts)).job.id
    await client.job_cancel(first)
    second = await client.insert(Task(), opts)
    assert not second.unique_skipped_as_duplicate
    with pytest.raises(UniqueConflictError, match="another job has the same unique key"):
        await client.job_retry(first)


async def test_pause_and_resume_notify_as_river(client: Client, schema: Schema) -> None:
    """The payloads of pause and resume equal River's, even if the queue is already paused or
    resumed (OP-09)."""
    await schema.execute("insert into river_queue (name, updated_at) values ('default', now())")
    async with heard(schema, "river_control") as payload:
        await client.queue_pause("default")
        assert await payload() == '{"action":"pause","queue":"default"}'
        paused = await schema.fetchrow("select * from river_queue")
        assert paused is not None
        assert paused["paused_at"] is not None
        await client.queue_pause("default")
        assert await payload() == '{"action":"pause","queue":"default"}'
        assert await schema.fetchrow("select * from river_queue") == paused
        await client.queue_resume("*")
        assert await payload() == '{"action":"resume","queue":"*"}'
        resumed = await schema.fetchrow("select * from river_queue")
        assert resumed is not None
        assert resumed["paused_at"] is None
        await client.queue_resume("default")
        assert await payload() == '{"action":"resume","queue":"default"}'
        assert await schema.fetchrow("select * from river_queue") == resumed


async def test_pause_of_an_unknown_queue(client: Client, schema: Schema) -> None:
    """Pausing an unknown queue raises NotFoundError and notifies no client. `*` never raises."""
    async with heard(schema, "river_control") as payload:
        with pytest.raises(NotFoundError, match="nowhere"):
            await client.queue_pause("nowhere")
        await client.queue_pause("*")
        assert await payload() == '{"action":"pause","queue":"*"}'


async def test_pause_reaches_a_working_client(schema: Schema) -> None:
    """A paused queue is not worked until it is resumed. Pause and resume are events (LC17)."""
    workers = Workers()

    @workers.job
    async def work(job: Job[Task]) -> None:
        del job

    client = Client(
        schema.url,
        workers=workers,
        queues={"default": QueueConfig(), "other": QueueConfig()},
        config=Config(schema=schema.name, fetch_poll_interval=timedelta(minutes=10)),
    )
    kinds = (EventKind.QUEUE_PAUSED, EventKind.QUEUE_RESUMED, EventKind.JOB_COMPLETED)
    async with client, client.subscribe(*kinds) as events, client.working():
        with anyio.fail_after(15):
            await client.queue_pause("default")
            event = await anext(events)
            assert (event.kind, event.queue) == (EventKind.QUEUE_PAUSED, "default")
            assert client._run is not None
            async with client._run._connections.claims.acquire("seeing no claim in flight", 10):
                pass
            waiting = (await client.insert(Task())).job.id
            other = (await client.insert(Task(), InsertOpts(queue="other"))).job.id
            event = await anext(events)
            assert event.job is not None
            assert event.job.id == other
            assert (await client.job_get(waiting)).state is JobState.AVAILABLE
            await client.queue_resume("*")
            event = await anext(events)
            assert (event.kind, event.queue) == (EventKind.QUEUE_RESUMED, "default")
            event = await anext(events)
            assert event.job is not None
            assert event.job.id == waiting


# -- queues


async def test_queue_get_and_list(schema: Schema, client: Client) -> None:
    """A queue exists after a client has worked it. `queue_get` and `queue_list` return its row."""
    with pytest.raises(NotFoundError, match="there is no queue 'mail'"):
        await client.queue_get("mail")
    assert await client.queue_list() == []
    await schema.execute(
        f"insert into {schema.name}.river_queue (name, created_at, metadata, paused_at, updated_at)"
        " values ('mail', '2026-01-01Z', '{\"a\": 1}', '2026-01-02Z', '2026-01-03Z'),"
        " ('a', now(), '[1]', null, now()), ('zoo', now(), '{}', null, now())"
    )
    mail = await client.queue_get("mail")
    assert mail == Queue(
        name="mail",
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        metadata={"a": 1},
        paused_at=datetime(2026, 1, 2, tzinfo=UTC),
        updated_at=datetime(2026, 1, 3, tzinfo=UTC),
    )
    assert [queue.name for queue in await client.queue_list()] == ["a", "mail", "zoo"]
    assert [queue.name for queue in await client.queue_list(limit=2)] == ["a", "mail"]
    assert (await client.queue_get("a")).metadata == {}
    with pytest.raises(ConfigError, match="limit must be 1 or more"):
        await client.queue_list(limit=0)


async def test_metadata_of_a_queue(schema: Schema, client: Client) -> None:
    """`queue_update` replaces the metadata and notifies all clients at commit. The notification
    equals River's."""
    await schema.execute(
        f"insert into {schema.name}.river_queue (name, metadata, updated_at)"
        " values ('mail', '{\"old\": 1}', '2026-01-01Z')"
    )
    async with heard(schema, "river_control") as payload:
        queue = await client.queue_update("mail", metadata={"k": "v", "é": [None]})
        assert await payload() == (
            '{"action":"metadata_changed","metadata":{"k":"v","é":[null]},"queue":"mail"}'
        )
        assert queue == await client.queue_get("mail")
        assert queue.metadata == {"k": "v", "é": [None]}
        assert queue.updated_at.year > 2026 or queue.updated_at.month > 1
        with pytest.raises(NotFoundError, match="there is no queue 'other'"):
            await client.queue_update("other", metadata={})
        for wrong in ([1], "text", {"a": {1, 2}}):
            with pytest.raises(ArgsError):
                await client.queue_update("mail", metadata=wrong)  # type: ignore[arg-type]
        with pytest.raises(ArgsError, match="one notification with them has at most 7,999"):
            await client.queue_update("mail", metadata={"a": "é" * 4000})
        async with schema.connected() as connection:
            transaction = connection.transaction()
            await transaction.start()
            await client.queue_update("mail", metadata={"lost": True}, tx=connection)
            await transaction.rollback()
    assert (await client.queue_get("mail")).metadata == {"k": "v", "é": [None]}


async def test_output_of_a_job(schema: Schema, client: Client) -> None:
    """`job_update` adds the output to the metadata of a job in any state, and changes nothing
    else."""
    inserted = (await client.insert(Task(), InsertOpts(metadata={"a": 1, "output": 0}))).job
    job = await client.job_update(inserted.id, output={"sum": [1, 2.5, "ü"]})
    assert job.output == {"sum": [1, 2.5, "ü"]}
    assert job.metadata == {"a": 1, "output": {"sum": [1, 2.5, "ü"]}}
    assert (job.state, job.attempt, job.scheduled_at) == (
        inserted.state,
        inserted.attempt,
        inserted.scheduled_at,
    )
    await client.job_cancel(inserted.id)
    assert (await client.job_update(inserted.id, output=None)).metadata["output"] is None
    with pytest.raises(NotFoundError):
        await client.job_update(10**12, output=1)
    with pytest.raises(ArgsError):
        await client.job_update(inserted.id, output=float("nan"))
    with pytest.raises(ArgsError, match="at most 33554432 bytes"):
        await client.job_update(inserted.id, output="x" * 33554432)
    async with schema.connected() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await client.job_update(inserted.id, output="lost", tx=connection)
        await transaction.rollback()
    assert (await client.job_get(inserted.id)).output is None
