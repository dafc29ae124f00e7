"""Recordings: inserts that keep their jobs in a list."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from django.db import connections

import riverpy.django
import riverpy.sync
from riverpy import (
    ArgsError,
    Client,
    Config,
    HookInsertBegin,
    InsertManyParams,
    InsertOpts,
    JobInsertMiddlewareFunc,
    ReplaceOpts,
    UniqueConflictError,
    UniqueOpts,
    UnknownJobKindError,
    Workers,
)
from riverpy.testing import FixedClock, TestWorker, recording
from tests.django import project
from tests.testing.args import Invoice, Payload, Welcome

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from riverpy import JobInsertParams
    from riverpy.testing import RecordedJobs
    from tests._database import Schema

UNIQUE = InsertOpts(unique_opts=UniqueOpts(by_args=True))


@pytest.fixture
def recorded() -> Generator[RecordedJobs]:
    """A recording for the whole test, begun outside of its task."""
    with recording() as recorded:
        yield recorded


@pytest.fixture
def client() -> Client:
    """A client without a database."""
    return Client()


async def test_a_recording_keeps_jobs_as_the_database_would(
    recorded: RecordedJobs, client: Client
) -> None:
    """Async and blocking clients need no database, `tx` is not touched, and the results look like
    stored rows."""
    due = datetime.now(UTC) + timedelta(hours=1)
    results = [
        await client.insert(Welcome(1), tx="not a connection"),  # type: ignore
        *await client.insert_many(
            [InsertManyParams(Invoice(2), InsertOpts(scheduled_at=due, tags=["paper"]))]
        ),
        riverpy.sync.Client().insert(Payload(n=1), InsertOpts(pending=True, metadata={"a": 1})),
    ]
    assert await client.insert_many_fast([InsertManyParams(Welcome(3))], tx=object()) == 1  # type: ignore
    assert [result.job.id for result in results] == [1, 2, 3]
    assert [job.state for job in recorded.jobs] == [
        "available",
        "scheduled",
        "pending",
        "available",
    ]
    recorded.require_many_inserted([Welcome(1), Invoice, Payload(n=1), Welcome])
    job = recorded.require_inserted(Invoice, order_id=2, scheduled_at=due, tags=["paper"])
    assert job.args == Invoice(2)
    recorded.require_not_inserted(Welcome, user_id=2)
    assert [job.args.user_id for job in recorded.inserted(Welcome, queue="mail")] == [1, 3]
    with pytest.raises(AssertionError, match=r"order_id: expected 3, found 2"):
        recorded.require_inserted(Invoice, order_id=3)
    with pytest.raises(riverpy.ClientStateError, match="insert_and_wait needs a job in the data"):
        await client.insert_and_wait(Welcome(4))
    with pytest.raises(riverpy.ClientStateError, match="insert_and_wait needs a job in the data"):
        riverpy.sync.Client().insert_and_wait(Welcome(4))


async def test_inserts_are_checked_and_changed_as_ever(recorded: RecordedJobs) -> None:
    """Refused jobs are not recorded, and hooks and middleware run."""

    class Tagging(HookInsertBegin):
        async def insert_begin(self, params: JobInsertParams) -> None:
            params.tags = [*params.tags, "hooked"]

    seen: list[int] = []

    async def count(params: Any, do_inner: Any) -> Any:
        results = await do_inner()
        seen.append(results[0].job.id)
        return results

    workers = Workers()

    @workers.job
    async def welcome(job: riverpy.Job[Welcome]) -> None:
        """Never called."""

    config = Config(hooks=[Tagging()], middleware=[JobInsertMiddlewareFunc(count)])
    client = Client(workers=workers, config=config)
    with pytest.raises(UnknownJobKindError):
        await client.insert(Invoice(1))
    with pytest.raises(ArgsError):
        await client.insert(Welcome("one"))  # type: ignore
    await client.insert(Welcome(1))
    recorded.require_inserted(Welcome, tags=["hooked"])
    assert (seen, len(recorded)) == ([1], 1)
    riverpy.sync.Client(workers=workers, config=config).insert(Welcome(2))
    assert seen == [1, 2]


async def test_duplicates_are_found_in_the_recording(client: Client) -> None:
    """A second job with the same key is a duplicate, may replace the first one, and is refused by
    COPY. Nothing is left of it after the recording."""
    with recording() as recorded:
        first = await client.insert(Welcome(1), UNIQUE)
        twin, other = await client.insert_many(
            [InsertManyParams(Welcome(1), UNIQUE), InsertManyParams(Welcome(2), UNIQUE)]
        )
        assert (twin.job.id, twin.unique_skipped_as_duplicate) == (first.job.id, True)
        assert (other.job.id, other.unique_skipped_as_duplicate) == (2, False)
        with pytest.raises(UniqueConflictError):
            await client.insert_many_fast([InsertManyParams(Welcome(n), UNIQUE) for n in (3, 1)])
        assert len(recorded) == 2
        later = InsertOpts(
            unique_opts=UNIQUE.unique_opts,
            scheduled_at=datetime.now(UTC) + timedelta(days=2),
            replace=ReplaceOpts(max_wait=timedelta(hours=1), priority=True),
            priority=3,
        )
        replaced = await client.insert(Welcome(1), later)
        assert (replaced.unique_skipped_as_duplicate, replaced.is_replaced) == (True, True)
        job = recorded.require_inserted(Welcome, user_id=1, priority=3, state="scheduled")
        assert job.scheduled_at == first.job.created_at + timedelta(hours=1)
    with recording():
        again = await client.insert(Welcome(1), UNIQUE)
        assert not again.unique_skipped_as_duplicate


async def test_a_clock_moves_unique_periods(recorded: RecordedJobs) -> None:
    """The clock of the config decides the period, also of a recorded row."""
    clock = FixedClock(datetime(2030, 1, 1, 23, 30, tzinfo=UTC))
    client = Client(config=Config(clock=clock))
    daily = InsertOpts(unique_opts=UniqueOpts(by_period=timedelta(days=1)))
    for minutes, is_duplicate in ((0, False), (20, True), (20, False)):
        clock.advance(timedelta(minutes=minutes))
        result = await client.insert(Invoice(1), daily)
        assert result.unique_skipped_as_duplicate is is_duplicate
    assert recorded.jobs[-1].created_at == datetime(2030, 1, 2, 0, 10, tzinfo=UTC)


async def test_a_recording_applies_to_its_context(client: Client) -> None:
    """Tasks of a recording, also those that it has started, give their jobs to it, even if another
    one is newer. A thread without a recording gives them to the newest. After the end, a task that
    still runs is refused as usual."""
    outer_ended = anyio.Event()
    outcomes: list[object] = []

    async def insert_twice() -> None:
        await client.insert(Welcome(1))
        await outer_ended.wait()
        try:
            await client.insert(Welcome(2))
        except riverpy.ClientStateError as error:
            outcomes.append(error)

    async with anyio.create_task_group() as tasks:
        with recording() as outer:
            with recording() as inner:
                tasks.start_soon(insert_twice)
                await anyio.wait_all_tasks_blocked()
            await client.insert(Invoice(1))
            context = contextvars.copy_context()
            with recording() as newest:
                await context.run(asyncio.create_task, client.insert(Invoice(2)))
                thread = threading.Thread(target=riverpy.sync.Client().insert, args=[Payload(n=1)])
                thread.start()
                await anyio.to_thread.run_sync(thread.join)
                await asyncio.to_thread(riverpy.sync.Client().insert, Payload(n=2))
        outer_ended.set()
    inner.require_many_inserted([Welcome(1)])
    outer.require_many_inserted([Invoice(1), Invoice(2)])
    newest.require_many_inserted([Payload(n=1), Payload(n=2)])
    assert [len(one) for one in (inner, outer, newest)] == [1, 2, 2]
    assert len(outcomes) == 1


@pytest.fixture
async def async_recorded() -> AsyncGenerator[RecordedJobs]:
    """A recording in an async fixture."""
    with recording() as recorded:
        yield recorded


async def test_a_recording_of_a_fixture_applies(
    async_recorded: RecordedJobs, recorded: RecordedJobs, client: Client
) -> None:
    """Recordings of fixtures apply to the test, the last one first."""
    await client.insert(Welcome(1))
    assert (len(async_recorded), len(recorded)) == (0, 1)


async def test_a_job_of_a_test_worker_records_its_inserts(
    schema: Schema, recorded: RecordedJobs
) -> None:
    """The test worker inserts its own job into the database, and the jobs that it inserts are
    recorded."""
    workers = Workers()

    @workers.job
    async def welcome(job: riverpy.Job[Welcome]) -> None:
        await riverpy.current_client().insert(Payload(user_id=job.args.user_id))

    config = Config(schema=schema.name, skip_unknown_job_check=True)
    async with schema.connected() as connection, connection.transaction():
        await TestWorker(workers, config).work(Welcome(1), tx=connection)
    recorded.require_many_inserted([Payload(user_id=1)])


async def test_inserts_of_django_are_recorded(recorded: RecordedJobs) -> None:
    """Inserts over Django's connections make no connection, in async code neither."""
    project.set_up()
    riverpy.django.insert(Welcome(1))
    await riverpy.django.ainsert(Welcome(2))
    assert connections["default"].connection is None
    recorded.require_many_inserted([Welcome(1), Welcome(2)])
