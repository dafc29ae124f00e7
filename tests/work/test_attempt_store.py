"""Jobs that complete themselves in a transaction of their code."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import AttemptLostError, EventKind, Job, JobRow, JobSnooze, TransactionError
from riverpy._log_events import CODE_FAILED_AFTER_ITS_JOB_COMPLETED, JOB_RESULT_REFUSED
from tests.work.rig import Rig, Task, errors_of, metadata_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class Rollback(Exception):
    """Ends a transaction that is rolled back."""


class Completing:
    """Jobs that write a row and complete themselves in one transaction, and then end in a way that
    depends on their `n`."""

    def __init__(self, rig: Rig) -> None:
        self.rows: list[JobRow] = []
        self.committed = asyncio.Event()
        self.may_end = asyncio.Event()

        @rig.job(next_retry=lambda job: timedelta(hours=1))
        async def work(job: Job[Task]) -> None:
            job.record_output({"n": job.args.n})
            with suppress(Rollback):
                async with rig.schema.connected() as connection, connection.transaction():
                    await connection.execute("INSERT INTO data VALUES ($1)", job.id)
                    self.rows.append(await job.complete_tx(connection))
                    if self.how.startswith("rolled back"):
                        raise Rollback
                    if self.how == "open":
                        self.committed.set()
                        await self.may_end.wait()
            self.committed.set()
            match self.how:
                case "raises" | "rolled back, raises":
                    raise ValueError("too late")
                case "waits":
                    await self.may_end.wait()
                case "records":
                    job.record_output("more")

        self.how = "returns"


@pytest.fixture
async def completing(rig: Rig) -> AsyncGenerator[Completing]:
    """Yield the controls of the test's jobs."""
    await rig.schema.execute("CREATE TABLE data (job_id bigint)")
    yield Completing(rig)
    await rig.schema.execute("DROP TABLE data")


@pytest.mark.parametrize(
    ("how", "output"), [("returns", {"n": 0}), ("raises", {"n": 0}), ("records", "more")]
)
async def test_commit(
    rig: Rig, completing: Completing, log: list[dict[str, Any]], how: str, output: Any
) -> None:
    """After the commit the job is completed, with the recorded output. Whatever the code does then,
    the event says so. An error is logged once, and not as a refused result."""
    completing.how = how
    row = await rig.run_one_on_pool()
    assert (row["state"], metadata_of(row), row["errors"]) == (
        "completed",
        {"output": output},
        None,
    )
    (returned,) = completing.rows
    assert (returned.state, returned.output) == ("completed", {"n": 0})
    assert returned.finalized_at == row["finalized_at"]
    event = rig.last.event
    assert (event.kind, event.job and event.job.state) == (EventKind.JOB_COMPLETED, "completed")
    assert await rig.schema.fetchval("SELECT job_id FROM data") == row["id"]
    logged = [entry for entry in log if entry["event"] == CODE_FAILED_AFTER_ITS_JOB_COMPLETED]
    assert [entry["error"] for entry in logged] == ["ValueError: too late"] * (how == "raises")
    assert JOB_RESULT_REFUSED not in [entry["event"] for entry in log]


@pytest.mark.parametrize(
    ("how", "state"), [("rolled back, returns", "completed"), ("rolled back, raises", "retryable")]
)
async def test_rollback(rig: Rig, completing: Completing, how: str, state: str) -> None:
    """After a rollback the attempt ends as if the job had not been completed."""
    completing.how = how
    row = await rig.run_one_on_pool()
    assert (row["state"], metadata_of(row)) == (state, {"output": {"n": 0}})
    raised = ["ValueError: too late"] if how.endswith("raises") else []
    assert [entry["error"] for entry in errors_of(row)] == raised
    assert await rig.schema.fetchval("SELECT count(*) FROM data") == 0


async def test_open_transaction(rig: Rig) -> None:
    """If the code has left its transaction open, the result waits for the end of the transaction.
    Results of other jobs are stored meanwhile."""
    async with rig.schema.connected() as connection:
        transaction = connection.transaction()
        await transaction.start()

        @rig.job
        async def work(job: Job[Task]) -> None:
            if job.args.n:
                await job.complete_tx(connection)
                rig.release.set()

        async with rig.working() as client:
            left = (await client.insert(Task(1))).job.id
            await rig.release.wait()
            await rig.work(client, Task(0), Task(0))
            assert (await rig.row(left))["state"] == "running"
            await transaction.commit()
            event = await rig.event()
    assert (event.kind, event.job and event.job.id) == (EventKind.JOB_COMPLETED, left)
    assert (await rig.row(left))["state"] == "completed"


@pytest.mark.parametrize("cause", ["stop", "timeout", "cancel"])
async def test_cancellation_after_the_commit(
    rig: Rig, completing: Completing, log: list[dict[str, Any]], cause: str
) -> None:
    """A stop, the timeout or a job_cancel after the commit does not change the result, and the
    event is that of a completed job."""
    completing.how = "waits"
    settings = {"job_timeout": timedelta(seconds=1)} if cause == "timeout" else {}
    async with rig.working(**settings) as client:
        job_id = (await client.insert(Task())).job.id
        await completing.committed.wait()
        if cause == "stop":
            client.stop_and_cancel()
        elif cause == "cancel":
            await client.job_cancel(job_id)
            completing.may_end.set()
        event = await rig.event()
    assert (event.kind, event.job and event.job.id) == (EventKind.JOB_COMPLETED, job_id)
    row = await rig.row(job_id)
    assert (row["state"], row["attempt"], row["errors"]) == ("completed", 1, None)
    events = [entry["event"] for entry in log]
    assert JOB_RESULT_REFUSED not in events
    assert (CODE_FAILED_AFTER_ITS_JOB_COMPLETED in events) == (cause == "timeout")


async def test_snooze_after_the_commit(rig: Rig, log: list[dict[str, Any]]) -> None:
    """A snooze after the commit writes nothing but the metadata that the code has recorded, and is
    logged with its reason. None is refused as a transaction."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        with pytest.raises(TypeError, match="tx must be"):
            await job.complete_tx(None)  # type: ignore[arg-type]
        assert (await rig.row(job.id))["state"] == "running"
        await job.step("first", asyncio.sleep, 0)
        async with rig.schema.connected() as connection, connection.transaction():
            await job.complete_tx(connection)
        job.set_metadata("mine", 1)
        raise JobSnooze(timedelta(hours=1))

    row = await rig.run_one_on_pool()
    assert rig.last.event.kind is EventKind.JOB_COMPLETED
    assert (row["state"], metadata_of(row)) == ("completed", {"mine": 1})
    (entry,) = [one for one in log if one["event"] == CODE_FAILED_AFTER_ITS_JOB_COMPLETED]
    assert entry["error"].startswith("JobSnooze was raised")


async def test_lost_attempt(rig: Rig) -> None:
    """A job that was rescued, or that is completed already, is not completed again. The transaction
    stays usable. A connection may have codecs of its own. One in no transaction is refused."""
    errors: list[str] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        async with rig.schema.connected() as connection:
            for name in ("json", "jsonb", "timestamptz", "int2", "int8"):
                await connection.set_type_codec(
                    name, schema="pg_catalog", encoder=repr, decoder=repr, format="text"
                )
            with pytest.raises(TransactionError):
                await job.complete_tx(connection)
            async with connection.transaction():
                await job.complete_tx(connection)
                with pytest.raises(AttemptLostError) as error:
                    await job.complete_tx(connection)
                errors.append(str(error.value))
            await rig.schema.execute("UPDATE river_job SET state = 'running', finalized_at = NULL")
            await rig.schema.execute("UPDATE river_job SET attempted_at = now()")
            async with connection.transaction():
                with pytest.raises(AttemptLostError):
                    await job.complete_tx(connection)
                assert await connection.fetchval("SELECT 'usable'") == "usable"
        rig.release.set()

    async with rig.working() as client:
        await client.insert(Task())
        await rig.release.wait()
    assert "was completed already, rescued, changed or deleted" in errors[0]
