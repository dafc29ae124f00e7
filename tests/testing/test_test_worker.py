"""TestWorker: single jobs in the transaction of a test."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import anyio
import asyncpg
import msgspec
import pytest

import riverpy
from riverpy import Config, EventKind, InsertOpts, Job, JobCancel, JobSnooze, JobState, Workers
from riverpy.testing import TestWorker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from riverpy.testing import WorkResult
    from tests._database import Schema

workers = Workers()
test_worker = TestWorker(workers)


class Task(msgspec.Struct, frozen=True):
    """The args of most jobs here."""

    kind: ClassVar[str] = "task"
    outcome: str = "complete"
    n: Annotated[int, riverpy.Unique] = 0

    def insert_opts(self) -> InsertOpts:
        return InsertOpts(unique_opts=riverpy.UniqueOpts(by_args=True))


@workers.job(timeout=timedelta(milliseconds=20))
async def work(job: Job[Task]) -> None:
    job.record_output(job.args.n)
    match job.args.outcome:
        case "fail":
            raise ValueError("no luck")
        case "snooze":
            raise JobSnooze(timedelta(hours=1))
        case "cancel":
            raise JobCancel("not wanted")
        case "hang":
            await hang()
        case _:
            pass


async def hang() -> None:
    """Wait until the task is cancelled."""
    await anyio.Event().wait()


@pytest.fixture
async def tx(schema: Schema) -> AsyncGenerator[asyncpg.Connection[Any]]:
    """A connection in a transaction that is rolled back."""
    async with schema.connected() as connection:
        transaction = connection.transaction()
        await transaction.start()
        yield connection
        await transaction.rollback()


@pytest.mark.parametrize(
    ("outcome", "kind", "state", "error"),
    [
        ("complete", EventKind.JOB_COMPLETED, JobState.COMPLETED, None),
        ("fail", EventKind.JOB_FAILED, JobState.AVAILABLE, ValueError),
        ("snooze", EventKind.JOB_SNOOZED, JobState.SCHEDULED, JobSnooze),
        ("cancel", EventKind.JOB_CANCELLED, JobState.CANCELLED, JobCancel),
        ("hang", EventKind.JOB_FAILED, JobState.AVAILABLE, TimeoutError),
    ],
)
async def test_outcomes(
    tx: asyncpg.Connection[Any],
    schema: Schema,
    outcome: str,
    kind: EventKind,
    state: JobState,
    error: type[BaseException] | None,
) -> None:
    """Each outcome has its event, its row and its error. Nothing is committed."""
    result = await test_worker.work(
        Task(outcome, 7),
        InsertOpts(scheduled_at=datetime.now(UTC) + timedelta(days=1)),
        tx=tx,
    )
    assert result.event.kind is kind
    assert result.event.job is not None
    assert (result.event.job.id, result.event.job.state) == (result.job.id, state)
    assert (result.job.state, result.output) == (state, 7)
    assert result.job.attempt == (0 if outcome == "snooze" else 1)
    assert type(result.error) is (error or type(None))
    row = await tx.fetchrow("select * from river_job where id = $1", result.job.id)
    assert row is not None
    assert (row["state"], row["unique_key"]) == (state, None)
    assert await schema.jobs() == []
    if error is None:
        assert result.require_completed() is result
    else:
        with pytest.raises(AssertionError, match=rf"task\) is {state} .* {error.__name__}"):
            result.require_completed()


async def test_job_uses_the_transaction(tx: asyncpg.Connection[Any], schema: Schema) -> None:
    """Calls of the job's client and of the job run in the transaction of the test: an insert
    without tx, kept steps, and complete_tx."""
    seen: list[object] = []

    async def code(job: Job[Any]) -> None:
        client = riverpy.current_client()
        assert riverpy.current_job() is job
        inserted = await client.insert(Task(n=5))
        again = await client.insert(Task(n=5))
        assert (again.job.id, again.unique_skipped_as_duplicate) == (inserted.job.id, True)
        seen.append((await client.job_get(inserted.job.id)).state)
        seen.append(await job.step("paid", lambda: 7, keep=True))
        async with tx.transaction():
            await job.complete_tx(tx)
        raise ValueError("after the completion")

    result = await work_code(code, tx)
    assert seen == ["available", 7]
    assert (result.event.kind, result.job.state) == ("job_completed", "completed")
    assert isinstance(result.error, ValueError)
    assert await tx.fetchval("select count(*) from river_job") == 2
    assert await schema.jobs() == []


async def test_failed_statement(tx: asyncpg.Connection[Any]) -> None:
    """A statement of the job that fails aborts the transaction. What the job did is undone, and its
    failure is stored."""

    async def code(job: Job[Any]) -> None:
        await tx.execute("create table written (n int)")
        await tx.execute("select 1 / 0")

    result = await work_code(code, tx)
    assert (result.job.state, result.job.attempt) == ("available", 1)
    assert "division by zero" in result.job.errors[0].error
    assert await tx.fetchval("select to_regclass('written')") is None


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("select 1 / 0", "returned after an error that aborted"),
        ("commit", "has committed or rolled back"),
        ("delete from river_job", "deleted or changed the row"),
    ],
)
async def test_lost_transaction(schema: Schema, statement: str, message: str) -> None:
    """A job that leaves the transaction unusable, or deletes its row, is a clear error."""

    async def code(job: Job[Any]) -> None:
        with suppress(asyncpg.PostgresError):
            await tx.execute(statement)

    async with schema.connected() as tx:
        await tx.execute("begin")
        with pytest.raises(riverpy.TransactionError, match=message):
            await work_code(code, tx)
        await tx.execute("rollback")
    await schema.execute("delete from river_job")


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_job_that_does_not_end(tx: asyncpg.Connection[Any], is_cancelled: bool) -> None:
    """A blocking job that ignores its timeout fails the test, and a cancelled test cancels its
    job."""
    began, may_end = anyio.Event(), threading.Event()
    ends: list[str] = []

    async def code(job: Job[Any]) -> None:
        began.set()
        try:
            await anyio.Event().wait()
        except asyncio.CancelledError:
            ends.append(job.state)
            raise

    if is_cancelled:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work_code, code, tx)
            await began.wait()
            tasks.cancel_scope.cancel()
        assert ends == ["running"]
        return
    blocking = Workers()

    @blocking.blocking_job(timeout=timedelta(milliseconds=1))
    def work(job: Job[Task]) -> None:
        may_end.wait()

    config = Config(job_stuck_threshold=timedelta(milliseconds=1))
    try:
        with pytest.raises(riverpy.ClientStateError, match=r"still runs 0\.001 s after"):
            await TestWorker(blocking, config).work(Task(), tx=tx)
    finally:
        may_end.set()


async def test_existing_jobs(tx: asyncpg.Connection[Any]) -> None:
    """`work_job` works a job that waits, until its last attempt, and refuses others."""
    client = riverpy.Client(workers=workers)
    inserted = await client.insert(Task("fail"), InsertOpts(max_attempts=2), tx=tx)
    first = await test_worker.work_job(inserted.job, tx=tx)
    second = await test_worker.work_job(inserted.job.id, tx=tx)
    assert (first.job.state, second.job.state) == ("available", "discarded")
    assert [entry.attempt for entry in second.job.errors] == [1, 2]
    for job_id, error, message in (
        (second.job.id, riverpy.ClientStateError, "is discarded, so it cannot be worked"),
        (2**40, riverpy.NotFoundError, "there is no job"),
    ):
        with pytest.raises(error, match=message):
            await test_worker.work_job(job_id, tx=tx)
    with pytest.raises(riverpy.ClientStateError, match="is pending"):
        await test_worker.work(Task(), InsertOpts(pending=True), tx=tx)
    unique = await test_worker.work(Task(n=3), unique=True, tx=tx)
    with pytest.raises(riverpy.UniqueConflictError, match=f"job {unique.job.id} has the same"):
        await test_worker.work(Task(n=3), unique=True, tx=tx)
    with pytest.raises(riverpy.UnknownJobKindError):
        await test_worker.work(riverpy.RawArgs("unknown", "{}"), tx=tx)


async def work_code(code: Callable[[Job[Any]], Awaitable[None]], tx: Any) -> WorkResult:
    """Work a job with this code."""
    own = Workers()

    @own.job
    async def work(job: Job[Task]) -> None:
        await code(job)

    return await TestWorker(own).work(Task(), tx=tx)
