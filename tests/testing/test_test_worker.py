"""TestWorker: single jobs in the transaction of a test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import anyio
import msgspec
import pytest

import riverpy
from riverpy import EventKind, InsertOpts, Job, JobCancel, JobSnooze, JobState, Workers
from riverpy.testing import TestWorker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import asyncpg

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
