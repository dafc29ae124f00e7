"""Maintenance of several leaders at once, beside workers: there are no deadlocks."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import msgspec

from riverpy import Job, JobRetention, Workers
from riverpy._leading.queue_scope import ALL_QUEUES, all_queues_except, only_queues
from riverpy._maintenance import batch_runner
from riverpy._maintenance.job_cleaner import JobCleaner
from riverpy._maintenance.job_rescuer import JobRescuer
from riverpy._maintenance.job_scheduler import JobScheduler
from riverpy._postgres.driver import use_raw_timestamps
from riverpy._postgres.jobs import AttemptResult, job_claim, job_complete, job_store_results
from riverpy._work.claim_cursor import WHOLE_QUEUE_RANGE
from tests.leading.term_context import held_term

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import asyncpg
    import pytest

    from tests._database import Schema
    from tests.leading.term_context import HeldTerm

LEADERS = 4
ROUNDS = 12
SCOPES = [
    ALL_QUEUES,
    only_queues({"default"}),
    only_queues({"default", "other"}),
    all_queues_except({"other"}),
]
"""These overlap."""
SOON = timedelta(milliseconds=1)


class Task(msgspec.Struct, frozen=True):
    """The args of all jobs here."""

    kind: ClassVar[str] = "task"


def registry() -> Workers:
    """A worker whose jobs are stuck almost at once, and run again at once."""
    workers = Workers()

    @workers.job(timeout=SOON, next_retry=lambda job: timedelta(0))
    async def task(job: Job[Task]) -> None: ...

    return workers


async def insert(connection: asyncpg.Connection[Any], count: int) -> None:
    """Jobs that ended, can be worked, or wait for a retry, some of these with one key."""
    await connection.execute(
        "INSERT INTO river_job (kind, max_attempts, args, state, scheduled_at, unique_key,"
        " unique_states, finalized_at, queue) SELECT 'task', 25, '{}',"
        " (CASE i % 4 WHEN 0 THEN 'completed' WHEN 2 THEN 'available' ELSE 'retryable' END)"
        "   ::river_job_state,"
        " now() - make_interval(secs => i % 7),"
        " CASE WHEN i % 4 = 1 THEN decode(md5((i % 16)::text), 'hex') END,"
        " CASE WHEN i % 4 = 1 THEN B'11010001' END,"
        " CASE WHEN i % 4 = 0 THEN now() - make_interval(secs => i % 7) END,"
        " CASE WHEN i % 5 = 0 THEN 'other' ELSE 'default' END"
        " FROM generate_series(1, $1::int) AS i",
        count,
    )


async def work(connection: asyncpg.Connection[Any], schema: str, chance: random.Random) -> None:
    """Claim jobs and store results, as workers do; some jobs are left running."""
    rows = await job_claim(
        connection,
        schema,
        queue="default",
        kinds=None,
        skipped_ids=[],
        after_position=WHOLE_QUEUE_RANGE.start_after,
        priority_max=WHOLE_QUEUE_RANGE.last_priority,
        limit=50,
        client_id="worker",
    )
    ended = sorted((row for row in rows if chance.random() < 0.8), key=lambda row: row["id"])
    done, failed = ended[::2], ended[1::2]
    await job_complete(
        connection,
        schema,
        ids=[row["id"] for row in done],
        attempts=[row["attempt"] for row in done],
        attempted_ats=[row["attempted_at"] for row in done],
        seconds_since_end=[1.0] * len(done),
    )
    results = [
        AttemptResult(
            id=row["id"],
            attempt=row["attempt"],
            attempted_at=row["attempted_at"],
            state="retryable",
            is_final=None,
            seconds_since_end=0.0,
            new_attempt=row["attempt"],
            delay=0.0,
            error="{}",
            metadata_updates=None,
        )
        for row in failed
    ]
    if results:
        await job_store_results(connection, schema, results)


async def lead(held: HeldTerm, chance: random.Random) -> None:
    """Lead and work at once, each round in another order."""
    services = [
        JobCleaner(held.context),
        JobScheduler(held.context),
        JobRescuer(held.context, None),
    ]
    async with held.schema.connected() as connection:
        await use_raw_timestamps(connection)
        for _ in range(ROUNDS):
            await insert(connection, 100)
            held.scope = chance.choice(SCOPES)
            steps: list[Callable[[], Awaitable[object]]] = [
                partial(held.run, service) for service in services
            ]
            steps += [partial(work, connection, held.schema.name, chance)] * 3
            chance.shuffle(steps)
            for step in steps:
                await step()


async def test_leaders_at_once(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cleaner, scheduler and rescuer of four processes that all act as leader, the same queues or
    some that overlap, beside workers that store results: no deadlock reaches any of them
    (LM-13)."""
    monkeypatch.setattr(batch_runner, "BATCH_ROWS_MAX", 40)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    settings: dict[str, Any] = {
        "workers": registry(),
        "retention": JobRetention(completed=timedelta(0), discarded=timedelta(0)),
        "job_timeout": SOON,
        "rescue_after": SOON,
    }
    async with schema.connected() as connection:
        await insert(connection, 6_000)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(held_term(schema, **settings))
        contexts = [first] + [
            await stack.enter_async_context(held_term(schema, term=first.term, **settings))
            for _ in range(LEADERS - 1)
        ]
        async with anyio.create_task_group() as tasks:
            for number, held in enumerate(contexts):
                tasks.start_soon(lead, held, random.Random(seed + number))
    deleted = await schema.fetchval(
        "SELECT last_value - (SELECT count(*) FROM river_job) FROM river_job_id_seq"
    )
    rescued = await schema.fetchval(
        "SELECT count(*) FROM river_job WHERE metadata ? 'river:rescue_count'"
    )
    assert deleted > 0
    assert rescued > 0
