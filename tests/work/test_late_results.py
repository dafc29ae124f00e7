"""Results of attempts that another session ended while they ran."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import EventKind, Job, JobCancel, JobSnooze
from riverpy._log_events import JOB_RESULT_REFUSED
from riverpy._postgres.driver import use_raw_timestamps
from riverpy._postgres.jobs import ClaimKey, job_merge_ended_metadata
from riverpy.job import JobColumn
from tests.work.rig import Rig, Task, metadata_of

if TYPE_CHECKING:
    from tests._database import Schema

OTHER = "cancelled", "completed", "discarded"
"""The final states that another session can set."""
EVENTS = {
    "cancelled": EventKind.JOB_CANCELLED,
    "completed": EventKind.JOB_COMPLETED,
    "discarded": EventKind.JOB_FAILED,
}
END = (
    "UPDATE river_job SET state = $1::text::river_job_state, finalized_at = now(),"
    " priority = 3, metadata = metadata || '{\"theirs\": 1}'"
)


class Endings:
    """Jobs that record something and end in one way when the test allows it."""

    def __init__(self, rig: Rig) -> None:
        self.started: asyncio.Queue[int] = asyncio.Queue()
        self.may_end = asyncio.Event()
        self.how = ""

        @rig.job(next_retry=lambda job: timedelta(hours=1))
        async def work(job: Job[Task]) -> None:
            self.started.put_nowait(job.id)
            await self.may_end.wait()
            if self.how != "plain":
                job.record_output({"ours": job.id})
            match self.how:
                case "fails":
                    raise ValueError("no luck")
                case "snoozes":
                    raise JobSnooze(timedelta(hours=1))
                case "cancels":
                    raise JobCancel("enough")
                case _:
                    pass


@pytest.fixture
def endings(rig: Rig) -> Endings:
    """Return the controls of the test's jobs."""
    return Endings(rig)


@pytest.mark.parametrize("how", ["plain", "completes", "fails", "snoozes", "cancels"])
async def test_job_that_another_session_made_final(
    rig: Rig, endings: Endings, log: list[dict[str, Any]], how: str
) -> None:
    """A job that another session made final keeps its state, time and errors. What the attempt
    recorded is merged into its metadata. Its event has the stored state."""
    endings.how = how
    await rig.insert_rows(4)
    async with rig.working() as client:
        for _ in range(4):
            await endings.started.get()
        for job_id, state in enumerate(OTHER, start=2):
            await rig.schema.execute(f"{END} WHERE id = $2", state, job_id)
        before = [await rig.row(job_id) for job_id in (2, 3, 4)]
        await client.queue_pause("default")
        await rig.event()
        endings.may_end.set()
        events = {event.job.id: event for event in await rig.take(4) if event.job}
    ours = {"output": {"ours": 0}} if how != "plain" else {}
    if how == "snoozes":
        ours["snoozes"] = 1  # type: ignore[assignment]
    for row in before:
        after, event = await rig.row(row["id"]), events[row["id"]]
        if "output" in ours:
            ours["output"] = {"ours": row["id"]}
        assert metadata_of(after) == {"theirs": 1, **ours}
        assert {**after, "metadata": ""} == {**row, "metadata": ""}
        if how == "plain" and row["state"] == "completed":
            continue  # the row is as the attempt's own result would have left it
        assert event.kind == EVENTS[row["state"]]
        assert event.job is not None
        assert (event.job.state, event.job.priority) == (row["state"], 3)
        assert (event.job.finalized_at, event.job.metadata) == (
            row["finalized_at"],
            metadata_of(after),
        )
    own = {"cancels": "cancelled", "completes": "completed", "plain": "completed"}.get(how)
    refused = [entry["job_id"] for entry in log if entry["event"] == JOB_RESULT_REFUSED]
    assert refused == [row["id"] for row in before if row["state"] != own]
    assert events[1].kind.value == {
        "plain": "job_completed",
        "completes": "job_completed",
        "fails": "job_failed",
        "snoozes": "job_snoozed",
        "cancels": "job_cancelled",
    }.get(how)


async def test_row_that_is_locked(rig: Rig, endings: Endings) -> None:
    """A late result for a locked row waits for the lock. Other results are stored."""
    endings.how = "completes"
    await rig.insert_rows(2)
    async with rig.working() as client, rig.schema.connected() as connection:
        for _ in range(2):
            await endings.started.get()
        await rig.schema.execute(f"{END} WHERE id = 1", "discarded")
        async with connection.transaction():
            await connection.execute("SELECT FROM river_job WHERE id = 1 FOR UPDATE")
            endings.may_end.set()
            event = await rig.event()
            assert (event.job and event.job.id) == 2
            assert client.stats().backlog == 1
        event = await rig.event()
    assert (event.kind, event.job and event.job.id) == (EventKind.JOB_FAILED, 1)
    assert metadata_of(await rig.row(1)) == {"theirs": 1, "output": {"ours": 1}}


async def test_merge_waits_for_no_lock(schema: Schema) -> None:
    """The merge skips rows that are locked by others."""
    await schema.execute(
        "INSERT INTO river_job (kind, max_attempts, args, state, attempt, attempted_at,"
        " finalized_at) SELECT 'task', 25, '{}', 'completed', 1, now(), now()"
        " FROM generate_series(1, 2)"
    )
    async with (
        schema.connected(statement_timeout="5s") as connection,
        schema.connected() as other,
        other.transaction(),
    ):
        await use_raw_timestamps(connection)
        claim_keys = await connection.fetch("SELECT id, attempt, attempted_at FROM river_job")
        await other.execute("SELECT FROM river_job WHERE id = 1 FOR NO KEY UPDATE")
        rows = await job_merge_ended_metadata(
            connection,
            schema.name,
            claim_keys=[ClaimKey(*one) for one in claim_keys],
            metadata_updates=["{}", None],
        )
    assert [row[JobColumn.ID] for row in rows] == [2]
