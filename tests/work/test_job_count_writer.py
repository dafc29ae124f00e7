"""Counts of jobs by queue and minute: what a worker adds, and when it does not."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import Job, JobCancel, JobSnooze, QueueConfig
from riverpy._log_events import JOB_COUNTS_NOT_STORED, JOB_COUNTS_STORED_AGAIN
from riverpy._postgres import job_counts
from riverpy._postgres.connection import ConnectionOutageTracker, DedicatedConnection
from riverpy._postgres.driver import connect
from riverpy._postgres.job_counts import (
    QUEUES_PER_PERIOD_MAX,
    JobCounts,
    PeriodCleanup,
    job_count_clean_periods,
    job_count_write,
)
from riverpy._work import job_count_writer
from riverpy._work.counters import RunCounters
from riverpy._work.job_count_writer import JobCountCollector, JobCountWriter, make_job_count_rows
from tests._statements import record_statements
from tests.work.test_summary import ended

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema
    from tests.work.rig import Rig, Task

STORED = (
    "SELECT queue, sum(attempts)::int, sum(completed)::int, sum(failed)::int, sum(discarded)::int"
    " FROM riverpy_job_count WHERE seconds = 60 GROUP BY queue ORDER BY queue"
)


async def stored(schema: Schema) -> dict[str, tuple[int, ...]]:
    """Return attempts, completed, failed and discarded by queue."""
    return {row[0]: tuple(row)[1:] for row in await schema.fetch(STORED)}


async def test_counts_of_a_worker(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker adds the outcomes and waits of its jobs, by queue and for all queues, to minutes of
    the server, with one statement for all of them, also when it stops. Without jobs it adds
    nothing."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.args.n == 1:
            raise JobSnooze(timedelta(hours=1))
        if job.args.n == 2:
            raise JobCancel("no")
        if job.args.n >= 3:
            raise ValueError

    sent = record_statements(monkeypatch, "")
    queues = {"aa": QueueConfig(max_workers=5), "bb": QueueConfig(max_workers=5)}
    async with rig.working(queues=queues, candidate=False):
        pass
    assert await stored(rig.schema) == {}
    await rig.insert_rows(4, queue="aa")
    await rig.schema.execute(
        "UPDATE river_job SET args = '{\"n\": 0}', scheduled_at = now() - interval '90 s',"
        " created_at = now() - interval '90 s' WHERE id < 4;"
        "UPDATE river_job SET args = '{\"n\": 3}', max_attempts = 1 WHERE id = 4"
    )
    await rig.insert_rows(4, queue="bb")
    async with rig.working(queues=queues, candidate=False):
        await rig.take(8)
    assert await stored(rig.schema) == {
        "": (8, 3, 3, 1),
        "aa": (4, 3, 1, 1),
        "bb": (4, 0, 2, 0),
    }
    row = await rig.schema.fetchrow(
        "SELECT sum(wait_seconds) / 3 AS mean, max(wait_max) AS longest,"
        " sum(waits_over_1m)::int AS over, max(waits_over_5m) AS far, bool_and("
        "  started_at = date_trunc('minute', started_at) AND started_at <= now()"
        "  AND started_at > now() - interval '2 minutes') AS is_minute"
        " FROM riverpy_job_count WHERE queue = 'aa'"
    )
    assert row is not None
    assert 90 < row["mean"] < 180
    assert 90 < row["longest"] < 180
    assert (row["over"], row["far"], row["is_minute"]) == (3, 0, True)
    assert len([one for one in sent if "insert into" in one.text and "job_count" in one.text]) == 1


def collector(*queues: str) -> tuple[RunCounters, JobCountCollector]:
    """Counters of queues, and their collector."""
    counters = RunCounters(["k"], queues)
    return counters, JobCountCollector(counters)


def attempt_in(queue: str, error: str | None = None) -> Any:
    """Return an attempt in a queue that ended a moment ago."""
    attempt = ended("k", error)
    attempt.claimed_row[attempt.claimed_row.index("default")] = queue
    return attempt


def test_collected_counts() -> None:
    """Each attempt is collected once, also if its queue was removed, or removed and added again.
    Of many queues, the busiest have rows of their own, and the sums are right."""
    counters, taken = collector("aa", "bb")
    assert taken.take_counts() == []
    counters.count_ended_attempts([attempt_in("aa"), attempt_in("aa", "x"), attempt_in("bb")])
    counters.remove_queue("bb")
    assert [one[:5] for one in taken.take_counts()] == [("aa", 2, 1, 1, 1)]
    counters.count_ended_attempts([attempt_in("aa")])
    counters.remove_queue("aa")
    counters.add_queue("aa")
    counters.count_ended_attempts([attempt_in("aa", "x")])
    assert sorted(one[:5] for one in taken.take_counts()) == [
        ("aa", 1, 0, 1, 1),
        ("aa", 1, 1, 0, 0),
    ]
    assert taken.take_counts() == []
    names = [f"q{number:03}" for number in range(QUEUES_PER_PERIOD_MAX + 50)]
    counters, taken = collector(*names)
    counters.count_ended_attempts([attempt_in(queue) for queue in [*names, *names[50:]]])
    rows = {row.queue: row.attempts for row in make_job_count_rows(taken.take_counts())}
    assert len(rows) == QUEUES_PER_PERIOD_MAX + 2
    assert (rows[""], rows["*"], rows["q249"]) == (2 * len(names) - 50, 50, 2)


@pytest.fixture
async def writer(
    schema: Schema,
) -> AsyncGenerator[tuple[JobCountWriter, RunCounters, DedicatedConnection]]:
    """A writer, what it counts, and its connection."""
    counters = RunCounters(["k"], ["aa"])
    connection = DedicatedConnection(
        "reserved", lambda: connect(schema.url), ConnectionOutageTracker()
    )
    await connection.open()
    connections = SimpleNamespace(reserved=connection)
    context: Any = SimpleNamespace(connections=connections, schema=schema.name, counters=counters)
    yield JobCountWriter(context), counters, connection
    await connection.close()


async def test_failed_writes(
    schema: Schema,
    writer: tuple[JobCountWriter, RunCounters, DedicatedConnection],
    log: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refused write is repeated once, with the next one, so that many minutes are never added to
    one. The failure is logged once. A write that may have been committed is not repeated. A locked
    table costs a moment, not the connection."""
    monkeypatch.setattr(job_count_writer, "LOCK_TIMEOUT", timedelta(milliseconds=20))
    writing, counters, connection = writer

    async def write(jobs: int) -> None:
        counters.count_ended_attempts([attempt_in("aa") for _ in range(jobs)])
        await writing.write_counts(job_count_writer.WRITE_TIMEOUT)

    await schema.execute("ALTER TABLE riverpy_job_count RENAME TO moved")
    for jobs in (100, 10, 1):
        await write(jobs)
    await schema.execute("ALTER TABLE moved RENAME TO riverpy_job_count")
    await write(1000)
    await write(0)
    assert (await stored(schema))["aa"][0] == 1001
    events = [one["event"] for one in log if one["log_level"] != "debug"]
    assert events == [JOB_COUNTS_NOT_STORED, JOB_COUNTS_STORED_AGAIN]
    async with schema.connected() as locking:
        async with locking.transaction():
            await locking.execute("LOCK TABLE riverpy_job_count")
            await write(10_000)
            assert connection.is_connected
        # The answer to the commit is lost.
        name = "riverpy_job_count"
        await schema.execute(
            "CREATE FUNCTION kill() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NEW; END $$;"
            f" CREATE CONSTRAINT TRIGGER kill AFTER INSERT OR UPDATE ON {name}"
            " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION kill()"
        )
        await write(100_000)
        await schema.execute("DROP FUNCTION kill CASCADE")
    await write(5)
    assert (await stored(schema))["aa"][0] == 1006


async def test_workers_and_leaders_at_once(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that add to the same minute, and leaders that move it into its hour or limit its
    queues, never wait for each other in a circle, and lose or repeat nothing."""
    monkeypatch.setattr(job_counts, "QUEUES_PER_PERIOD_MAX", 9)
    minute = (await schema.fetchval("SELECT date_trunc('minute', now())")).isoformat()

    async def add(number: int) -> None:
        async with schema.connected() as connection:
            for turn in range(20):
                counts = [
                    JobCounts(queue, 1, 1, 0, 0, 0.5, 0.5, 1, 0, 0, 0, 0)
                    for queue in ("", "*", *(f"q{(number + turn) % 7 * 31 + n}" for n in range(60)))
                ]
                async with connection.transaction():
                    await job_count_write(
                        connection,
                        schema.name,
                        counts=counts[:: -1 if number % 2 else 1],
                        age_seconds=0,
                        lock_timeout=timedelta(seconds=20),
                    )

    async def change(action: Any) -> None:
        async with schema.connected() as connection:
            for _ in range(20):
                async with connection.transaction():
                    await job_count_clean_periods(
                        connection, schema.name, changes=[PeriodCleanup(60, minute, action)]
                    )

    workers = [add(number) for number in range(4)]
    leaders = [change("limit queues"), change("add to hour"), change("add to hour")]
    await asyncio.gather(*workers, *leaders)
    rows = await schema.fetch(
        "SELECT queue = '', sum(attempts)::int, sum(wait_seconds), max(wait_max),"
        " sum(waits_over_100ms)::int FROM riverpy_job_count GROUP BY 1 ORDER BY 1"
    )
    assert [tuple(row) for row in rows] == [
        (False, 4880, 2440.0, 0.5, 4880),
        (True, 80, 40.0, 0.5, 80),
    ]
