"""Jobs that expire: no attempt of an expired job runs code."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import EventKind, InsertOpts, JobState, WorkerMiddleware
from riverpy._timestamps import PG_EPOCH, format_raw_timestamp
from riverpy._work.expiry import is_job_expired
from tests._damage import DAMAGED_EXPIRIES
from tests.work.rig import Task, errors_of

if TYPE_CHECKING:
    from riverpy import Job
    from riverpy.middleware import WorkInner
    from tests.work.rig import Rig

HOUR = timedelta(hours=1)
PAST = "jsonb_build_object('riverpy:expires_at', '2020-01-31T18:00:00.000000Z')"


def test_which_times_count() -> None:
    """A time counts from its microsecond on, in the form that inserts write. Other values, and the
    key inside other values, are ignored."""
    now = 795_000_000_123_456
    text = format_raw_timestamp(now)
    assert text == f"{(PG_EPOCH + timedelta(microseconds=now)).replace(tzinfo=None).isoformat()}Z"
    metadata = f'{{"a": [1], "riverpy:expires_at": "{text}"}}'
    assert [is_job_expired(metadata, now + by) for by in (-1, 0, 1)] == [False, True, True]
    for value in (f'"{text[:-1]}"', '""', "1", "null", f'["{text}"]', '"0000"'):
        assert not is_job_expired(f'{{"riverpy:expires_at": {value}}}', now + 1)
    for other in (*DAMAGED_EXPIRIES, "{}", "nonsense"):
        assert not is_job_expired(other, now + 1)
    assert not is_job_expired('{"riverpy:expires_at": ' + "[" * 100_000, now)


@pytest.mark.parametrize("earlier_attempts", [0, 1])
async def test_expired_jobs_do_not_run(rig: Rig, earlier_attempts: int) -> None:
    """A job that has expired when it is claimed is cancelled with the error `expired`, also before
    a retry. Its code and its middleware do not run, and subscribers receive the event. A job that
    expires later runs."""
    ran: list[int] = []

    class Middleware(WorkerMiddleware):
        async def work(self, job: Job[Any], do_inner: WorkInner, /) -> None:
            ran.append(-1)
            await do_inner()

    @rig.job
    async def work(job: Job[Task]) -> None:
        ran.append(job.args.n)

    opts = InsertOpts(expires_in=HOUR)
    expired = (await rig.insert(Task(1), opts)).job.id
    await rig.insert(Task(2), opts)
    await rig.schema.execute(
        f"UPDATE river_job SET metadata = {PAST}, attempt = $2 WHERE id = $1",
        expired,
        earlier_attempts,
    )
    results = await rig.work_due_jobs(middleware=[Middleware()])
    assert ran == [-1, 2]
    kinds = [result.event.kind for result in results]
    assert kinds == [EventKind.JOB_CANCELLED, EventKind.JOB_COMPLETED]
    row = await rig.row(expired)
    assert (row["state"], row["attempt"]) == (JobState.CANCELLED, earlier_attempts + 1)
    assert row["finalized_at"] is not None
    (error,) = errors_of(row)
    assert (error["attempt"], error["error"]) == (
        earlier_attempts + 1,
        "JobCancelError: expired",
    )


async def test_damaged_expiries(rig: Rig) -> None:
    """Jobs whose metadata other programs have damaged run like jobs without an expiry, also after
    `job_retry` and `job_retry_many`. A job that has expired is still cancelled beside them."""
    rig.register_task()
    async with rig.client() as client:
        ids = [(await client.insert(Task(n))).job.id for n in range(len(DAMAGED_EXPIRIES) + 1)]
        for job_id, metadata in zip(ids[1:], DAMAGED_EXPIRIES, strict=True):
            await rig.schema.execute(
                "UPDATE river_job SET metadata = $1::text::jsonb, state = 'cancelled',"
                " finalized_at = now() WHERE id = $2",
                metadata,
                job_id,
            )
        await rig.schema.execute(f"UPDATE river_job SET metadata = {PAST} WHERE id = $1", ids[0])
        for job_id in ids[1:5]:
            await client.job_retry(job_id)
        await client.job_retry_many(ids=ids[5:])
    assert len(await rig.work_due_jobs()) == len(ids)
    states = {row["id"]: row["state"] for row in await rig.schema.jobs()}
    assert states == {ids[0]: "cancelled"} | dict.fromkeys(ids[1:], "completed")


async def test_retry_of_an_expired_job(rig: Rig) -> None:
    """A job that has expired runs after `job_retry` and `job_retry_many`: they remove the time."""
    ran: list[int] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        ran.append(job.args.n)

    async with rig.client() as client:
        one, two = [(await client.insert(Task(n))).job.id for n in (1, 2)]
        await rig.schema.execute(
            f"UPDATE river_job SET metadata = {PAST}, state = 'cancelled', finalized_at = now()"
        )
        await client.job_retry(one)
        await client.job_retry_many(ids=[two])
    for result in await rig.work_due_jobs():
        result.require_completed()
    assert sorted(ran) == [1, 2]
