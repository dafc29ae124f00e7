"""`replace` and `expires_in`: what an insert changes in a waiting job, and what it stores."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from riverpy.errors import InsertError
from riverpy.insert_opts import InsertManyParams, InsertOpts, ReplaceOpts, UniqueOpts
from riverpy.job import JobState
from tests._notifications import due_payload
from tests.insert.jobs import Data, Welcome, many

if TYPE_CHECKING:
    from riverpy._insert.inserter import Inserter
    from tests._database import Schema

UNIQUE = UniqueOpts(by_args=True)
HOUR = timedelta(hours=1)
_BLOCKED = "SELECT count(*) FROM pg_stat_activity WHERE $1::int = ANY (pg_blocking_pids(pid))"
ALL = ReplaceOpts(priority=True, metadata=True)


def replacing(replace: ReplaceOpts | None = None, **opts: Any) -> InsertOpts:
    """Options that replace args and time, or these values."""
    return InsertOpts(unique_opts=UNIQUE, replace=replace or ReplaceOpts(), **opts)


def later(hours: float) -> datetime:
    """A time in this many hours."""
    return datetime.now(UTC) + timedelta(hours=hours)


async def test_replaces_a_waiting_job(inserter: Inserter, schema: Schema) -> None:
    """The existing row gets the new args, time, priority and metadata. It keeps its id, its queue
    and the metadata of River and riverpy. `is_replaced` says so."""
    first = await inserter.insert(
        Welcome(1, "old"), replacing(scheduled_at=later(1), queue="q1"), tx=None
    )
    assert (first.unique_skipped_as_duplicate, first.is_replaced) == (False, False)
    await schema.execute(
        """UPDATE river_job SET attempt = 3, state = 'retryable', metadata =
          '{"river:log": [1], "riverpy:x": 2, "snoozes": 3, "mine": 4, "rivers": 5}'"""
    )
    at = later(2)
    second = await inserter.insert(
        Welcome(1, "new"),
        replacing(ALL, scheduled_at=at, priority=3, metadata={"new": "é"}, queue="q2"),
        tx=None,
    )
    assert (second.unique_skipped_as_duplicate, second.is_replaced) == (True, True)
    job = second.job
    (row,) = await schema.jobs()
    assert row["id"] == first.job.id == job.id
    assert json.loads(row["args"]) == {"user_id": 1, "note": "new"}
    assert (row["scheduled_at"], row["priority"], row["queue"]) == (at, 3, "q1")
    assert (row["state"], row["attempt"]) == ("scheduled", 3)
    expected = {"river:log": [1], "riverpy:x": 2, "snoozes": 3, "new": "é"}
    assert json.loads(row["metadata"]) == expected == job.metadata
    assert (job.scheduled_at, job.state) == (at, JobState.SCHEDULED)
    assert (job.unique_key, job.unique_states) == (first.job.unique_key, first.job.unique_states)


@pytest.mark.parametrize("field", ["args", "scheduled_at", "priority", "metadata"])
async def test_replaces_only_the_selected_values(
    inserter: Inserter, schema: Schema, field: str
) -> None:
    """Each field of ReplaceOpts changes its own column only."""
    columns = ("args", "scheduled_at", "priority", "metadata")
    names = dict.fromkeys(columns, False) | {field: True}
    opts = replacing(ReplaceOpts(**names), scheduled_at=later(2), priority=2, metadata={"b": 1})
    await inserter.insert(
        Welcome(1, "old"), replacing(scheduled_at=later(1), metadata={"a": 1}), tx=None
    )
    (before,) = await schema.jobs()
    assert (await inserter.insert(Welcome(1, "new"), opts, tx=None)).is_replaced
    (after,) = await schema.jobs()
    assert [column for column in dict(after) if after[column] != before[column]] == [field]


@pytest.mark.parametrize("state", list(JobState))
async def test_only_waiting_jobs_change(
    inserter: Inserter, schema: Schema, state: JobState
) -> None:
    """A job that runs or has ended stays as it is. A pending job stays pending."""
    every = InsertOpts(
        unique_opts=UniqueOpts(by_args=True, by_state=list(JobState)), replace=ALL, priority=2
    )
    await inserter.insert(Welcome(1, "old"), every, tx=None)
    final = state in (JobState.CANCELLED, JobState.COMPLETED, JobState.DISCARDED)
    await schema.execute(
        "UPDATE river_job SET state = $1::text::river_job_state, finalized_at = $2",
        state.value,
        later(0) if final else None,
    )
    (before,) = await schema.jobs()
    result = await inserter.insert(Welcome(1, "new"), every, tx=None)
    (after,) = await schema.jobs()
    assert result.unique_skipped_as_duplicate
    assert result.is_replaced is (not final and state is not JobState.RUNNING)
    if result.is_replaced:
        assert json.loads(after["args"])["note"] == "new"
        assert after["state"] == ("pending" if state is JobState.PENDING else "available")
    else:
        assert after == before


async def test_max_wait_limits_the_delay(inserter: Inserter, schema: Schema) -> None:
    """The job is due at its created_at plus `max_wait` at the latest. If this time has passed, the
    job is available."""
    wait = ReplaceOpts(max_wait=HOUR)
    await inserter.insert(Welcome(1), replacing(scheduled_at=later(0.5)), tx=None)
    opts = replacing(wait, scheduled_at=later(2))
    job = (await inserter.insert(Welcome(1), opts, tx=None)).job
    assert (job.state, job.scheduled_at) == (JobState.SCHEDULED, job.created_at + HOUR)
    await schema.execute("UPDATE river_job SET created_at = created_at - interval '2 hours'")
    job = (await inserter.insert(Welcome(1), opts, tx=None)).job
    assert (job.state, job.scheduled_at) == (JobState.AVAILABLE, job.created_at + HOUR)
    early = replacing(wait, scheduled_at=later(-5))
    job = (await inserter.insert(Welcome(1), early, tx=None)).job
    assert (job.state, job.scheduled_at) == (JobState.AVAILABLE, early.scheduled_at)


async def test_batches(inserter: Inserter, schema: Schema) -> None:
    """In a batch each job has its own options. Of several jobs with one key, later ones replace the
    first. Jobs without `replace` change nothing."""
    old = [Welcome(n, "old") for n in range(4)]
    await inserter.insert_many(many(*old, opts=InsertOpts(unique_opts=UNIQUE)), tx=None)
    results = await inserter.insert_many(
        [
            InsertManyParams(Welcome(0, "new"), replacing(priority=2)),
            InsertManyParams(Welcome(1, "new"), InsertOpts(unique_opts=UNIQUE)),
            InsertManyParams(
                Welcome(2, "new"), replacing(ReplaceOpts(args=False, priority=True), priority=3)
            ),
            InsertManyParams(Welcome(3, "new"), InsertOpts(unique_opts=UNIQUE)),
            InsertManyParams(Welcome(3, "last"), replacing()),
            InsertManyParams(Welcome(4, "new"), replacing(metadata={"n": 4})),
            InsertManyParams(
                Welcome(4, "last"),
                replacing(ALL, metadata={"n": 5}, priority=4, scheduled_at=later(1)),
            ),
            InsertManyParams(Welcome(4, "never"), InsertOpts(unique_opts=UNIQUE)),
            InsertManyParams(Data(n=1)),
        ],
        tx=None,
    )
    assert [r.unique_skipped_as_duplicate for r in results] == [True] * 5 + [
        False,
        True,
        True,
        False,
    ]
    assert [r.is_replaced for r in results] == [
        True,
        False,
        True,
        True,
        True,
        False,
        True,
        False,
        False,
    ]
    rows = await schema.fetch(
        "SELECT args ->> 'note' AS note, priority, state::text, metadata FROM river_job"
        " WHERE kind = 'welcome' ORDER BY args -> 'user_id'"
    )
    assert [tuple(row) for row in rows] == [
        ("new", 1, "available", "{}"),
        ("old", 1, "available", "{}"),
        ("old", 3, "available", "{}"),
        ("last", 1, "available", "{}"),
        ("last", 4, "scheduled", '{"n": 5}'),
    ]


async def test_refusals(inserter: Inserter, schema: Schema) -> None:
    """What is not allowed is refused before anything is stored."""
    soon = datetime.now(UTC) + HOUR
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"replace": ReplaceOpts()}, "replace requires unique_opts"),
        ({"replace": ReplaceOpts(args=False, scheduled_at=False)}, "at least one of args"),
        ({"replace": True}, "must be ReplaceOpts, got bool"),
        ({"replace": ReplaceOpts(args=1)}, "replace.args must be bool"),
        ({"replace": ReplaceOpts(max_wait=timedelta(0))}, "max_wait must be more than 0"),
        ({"replace": ReplaceOpts(max_wait=HOUR, scheduled_at=False)}, "max_wait requires"),
        ({"replace": ReplaceOpts(), "pending": True, "unique_opts": UNIQUE}, "with pending cannot"),
        ({"expires_in": timedelta(0)}, "expires_in must be more than 0"),
        ({"expires_in": timedelta(days=36_501)}, "at most 36,500 days"),
        ({"expires_in": 5}, "expires_in must be timedelta, got int"),
        ({"expires_in": HOUR / 2, "scheduled_at": soon}, "it counts from the insert, so the job"),
    ]
    for values, text in wrong:
        with pytest.raises(InsertError, match=text):
            await inserter.insert(Welcome(1), InsertOpts(**values), tx=None)
    with pytest.raises(InsertError, match="use insert_many"):
        await inserter.insert_many_fast(many(Welcome(1), opts=replacing()), tx=None)
    assert await schema.jobs() == []


async def test_replaced_jobs_notify_their_own_queue(inserter: Inserter, schema: Schema) -> None:
    """If a replaced job becomes due, its own queue is notified. Otherwise no queue is."""
    heard: list[str] = []
    async with schema.connected() as listener:
        channel = f"{schema.name}.river_insert"
        await listener.add_listener(channel, lambda *found: heard.append(found[-1]))
        await inserter.insert(Welcome(1), replacing(scheduled_at=later(1), queue="own"), tx=None)
        for queue, at in (("other", later(2)), ("other", None)):
            await inserter.insert(Welcome(1), replacing(queue=queue, scheduled_at=at), tx=None)
        await inserter.insert(Data(n=1), InsertOpts(queue="last"), tx=None)
        with anyio.fail_after(30):
            while due_payload("last") not in heard:
                await listener.fetchval("SELECT 1")
    assert heard == [due_payload("own"), due_payload("last")]


async def test_concurrent_replaces_and_claims(inserter: Inserter, schema: Schema) -> None:
    """A replace waits for an open replace, and sees a claim that commits first. A rolled back
    replace changes nothing. There is one row throughout."""
    await inserter.insert(Welcome(1, "first"), replacing(), tx=None)
    claim = "UPDATE river_job SET state = 'running', attempt = 1 WHERE state = 'available'"

    async def notes() -> list[str]:
        return [json.loads(row["args"])["note"] for row in await schema.jobs()]

    async with schema.connected() as one:
        results: list[Any] = []

        async def replace(note: str) -> None:
            results.append(await inserter.insert(Welcome(1, note), replacing(), tx=None))

        for ending, statement, expected in (
            ("rollback", None, "second"),
            ("commit", None, "third"),
            ("commit", claim, "third"),
        ):
            transaction = one.transaction()
            await transaction.start()
            if statement is None:
                assert (await inserter.insert(Welcome(1, "open"), replacing(), tx=one)).is_replaced
                picked = await schema.fetch("SELECT FROM river_job FOR UPDATE SKIP LOCKED")
                assert picked == []
            else:
                await one.execute(statement)
            async with anyio.create_task_group() as group:
                group.start_soon(replace, expected if statement is None else "late")
                with anyio.fail_after(30):
                    while not await schema.fetchval(_BLOCKED, one.get_server_pid()):
                        await anyio.lowlevel.checkpoint()
                await getattr(transaction, ending)()
            assert await notes() == [expected]
            assert results[-1].is_replaced is (statement is None)
    assert results[-1].job.state is JobState.RUNNING


async def test_expires_in(inserter: Inserter, schema: Schema) -> None:
    """The time is stored as the server's time plus `expires_in`, beside the other metadata, by each
    kind of insert. A replaced time replaces it too."""
    opts = InsertOpts(expires_in=HOUR, metadata={"a": 1})
    plain = InsertOpts(metadata={"a": 1})
    await inserter.insert(Data(n=1), opts, tx=None)
    await inserter.insert_many(
        [InsertManyParams(Data(n=2), opts), InsertManyParams(Data(n=3), plain)], tx=None
    )
    await inserter.insert_many_fast(
        [
            InsertManyParams(Data(n=4), opts),
            InsertManyParams(Data(n=5), InsertOpts(expires_in=HOUR)),
            InsertManyParams(Data(n=6), plain),
        ],
        tx=None,
    )
    rows = await schema.fetch(
        "SELECT metadata, created_at, scheduled_at, state::text FROM river_job ORDER BY id"
    )
    for number, row in enumerate(rows, 1):
        stored = json.loads(row["metadata"])
        expires_at = stored.pop("riverpy:expires_at", None)
        assert stored == ({} if number == 5 else {"a": 1})
        assert (row["state"], row["scheduled_at"]) == ("available", row["created_at"])
        if number in (3, 6):
            assert expires_at is None
        else:
            assert datetime.fromisoformat(expires_at) == row["created_at"] + HOUR
            assert len(expires_at) == len("2026-01-31T18:00:00.000000Z")


async def test_replacing_the_time_replaces_the_expiry(inserter: Inserter, schema: Schema) -> None:
    """The expiry belongs to the time of the job: it is replaced with it, and only with it."""

    async def expiry(replace: ReplaceOpts, **opts: Any) -> str | None:
        result = await inserter.insert(Welcome(1), replacing(replace, **opts), tx=None)
        return result.job.metadata.get("riverpy:expires_at")

    first = await expiry(ReplaceOpts(), expires_in=HOUR)
    assert first is not None
    no_time = ReplaceOpts(scheduled_at=False, metadata=True)
    assert await expiry(no_time, expires_in=2 * HOUR) == first
    assert await expiry(no_time) == first
    second = await expiry(ReplaceOpts(), expires_in=2 * HOUR)
    assert second is not None
    assert second > first
    assert await expiry(ALL, expires_in=HOUR) < second
    assert await expiry(ReplaceOpts()) is None
