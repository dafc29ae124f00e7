"""The job scheduler: what becomes available and when, unique keys, rows that cannot be moved."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy import Job, JobSnooze
from riverpy._clock import Clock
from riverpy._leading.queue_scope import NO_QUEUES, only_queues
from riverpy._maintenance import batch_runner
from riverpy._maintenance.job_scheduler import RUN_INTERVAL, JobScheduler
from riverpy.errors import FencedOutError
from tests._notifications import due_payload
from tests.leading.term_context import held_term
from tests.maintenance.rows import accept_many, insert_jobs, refuse_many, states_of
from tests.work.rig import FAR, Rig, Task

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema
    from tests.leading.term_context import HeldTerm

DUE = "now() - interval '1 s'"
DEFAULT_STATES = "11110101"
"""A key is held while available, completed, pending, retryable, running or scheduled."""
BITS = (
    "scheduled",
    "running",
    "retryable",
    "pending",
    "discarded",
    "completed",
    "cancelled",
    "available",
)
"""From the left."""


def mask(*states: str) -> str:
    """The bits of these states."""
    return "".join("1" if bit in states else "0" for bit in BITS)


REQUIRED = mask("scheduled", "running", "pending", "available")
"""A key is released while a job waits for its retry."""


async def waiting(schema: Schema, state: str = "scheduled", at: str = DUE, **columns: str) -> int:
    """Insert a job that waits for its time."""
    (job_id,) = await insert_jobs(schema, state=f"'{state}'", scheduled_at=at, **columns)
    return job_id


async def keyed(
    schema: Schema, state: str = "retryable", states: str = REQUIRED, at: str = DUE, **columns: str
) -> int:
    """Insert a job with the one unique key of a test."""
    if state in {"completed", "cancelled", "discarded"}:
        columns["finalized_at"] = "now()"
    return await waiting(
        schema, state, at, unique_key=r"'\xaa'", unique_states=f"B'{states}'", **columns
    )


@asynccontextmanager
async def heard(schema: Schema, topic: str = "river_insert") -> AsyncGenerator[list[str]]:
    """The payloads of a topic's notifications, complete after the block."""
    payloads: list[str] = []
    ended = asyncio.Event()

    def hear(_connection: Any, _pid: int, _channel: str, payload: object) -> None:
        if payload == "end":
            ended.set()
        else:
            payloads.append(str(payload))

    async with schema.connected() as connection:
        await connection.add_listener(f"{schema.name}.{topic}", hear)
        yield payloads
        await schema.execute(f"NOTIFY \"{schema.name}.{topic}\", 'end'")
        await asyncio.wait_for(ended.wait(), 30)


async def test_due_jobs(held: HeldTerm, schema: Schema) -> None:
    """JS1: scheduled and retryable jobs that are due, or will be before the next pass, become
    available with nothing else changed; others stay."""
    due = {
        await waiting(schema, state, at)
        for state in ("scheduled", "retryable")
        for at in ("now() - interval '1 year'", DUE, "now() + interval '4 s'")
    }
    future = {
        await waiting(schema, state, "now() + interval '1 min'")
        for state in ("scheduled", "retryable")
    }
    pending = await waiting(schema, "pending", DUE)
    before = {row["id"]: dict(row) for row in await schema.jobs()}
    assert await held.run(JobScheduler(held.context)) == RUN_INTERVAL
    after = {row["id"]: dict(row) for row in await schema.jobs()}
    assert {job_id for job_id, row in after.items() if row["state"] == "available"} == due
    assert after == {
        job_id: row | {"state": "available"} if job_id in due else row
        for job_id, row in before.items()
    }
    assert future | {pending} == set(after) - due


async def test_notifies_each_queue(held: HeldTerm, schema: Schema) -> None:
    """JS3: each queue with jobs that can be worked at once is notified once, as inserts do; none is
    for jobs that are due later or discarded."""
    async with heard(schema) as payloads:
        for queue in ("aa", "bb", "aa", "bb"):
            await waiting(schema, queue=f"'{queue}'")
        await waiting(schema, at="now() + interval '4 s'", queue="'later'")
        await waiting(schema, at="now() + interval '1 min'", queue="'future'")
        await keyed(schema, "running", at="now()")
        await keyed(schema, "retryable", queue="'beaten'")
        await held.run(JobScheduler(held.context))
        await held.run(JobScheduler(held.context))
    assert sorted(payloads) == [due_payload("aa"), due_payload("bb")]


async def test_foretells_jobs_that_it_moves_early(held: HeldTerm, schema: Schema) -> None:
    """Riverpy's clients are told, once a queue, when jobs become due that are available before, in
    steps of half a second (NR-16)."""
    async with heard(schema, "riverpy_event") as payloads:
        for at in (DUE, *(f"now() + interval '{seconds} s'" for seconds in (4.0, 4.1, 4.9, 60))):
            await waiting(schema, at=at, queue="'early'")
        await waiting(schema, queue="'due'")
        await held.run(JobScheduler(held.context))
        await held.run(JobScheduler(held.context))
    (message,) = map(json.loads, payloads)
    seconds = message.pop("seconds")
    assert message == {"action": "due", "queue": "early"}
    assert len(seconds) in {2, 3}  # the first two may be on two sides of a step
    assert seconds == sorted(set(seconds))
    assert all(0 < one <= 5 and one % 0.5 == 0 for one in seconds)


async def test_wakes_workers(held: HeldTerm, schema: Schema) -> None:
    """A worker that polls hardly ever begins a due job as soon as the scheduler has moved it."""
    rig = Rig(schema)

    rig.register_task()
    async with rig.working(fetch_poll_interval=FAR):
        job_id = await waiting(schema)
        await held.run(JobScheduler(held.context))
        await rig.event()
    assert (await states_of(schema))[job_id] == "completed"


@pytest.mark.parametrize("state", ["available", "running", "scheduled", "pending", "completed"])
async def test_key_held_by_another(held: HeldTerm, schema: Schema, state: str) -> None:
    """JS2: a due job whose key another job holds is discarded, with River's mark in its metadata
    and no error."""
    states = mask("scheduled", "running", "pending", "available", state)
    holder = await keyed(schema, state, states, at="now() + interval '1 hour'")
    beaten = await keyed(schema, metadata="""'{"a": 1}'""")
    await held.run(JobScheduler(held.context))
    row = await schema.fetchrow(
        "SELECT *, metadata::text AS m FROM river_job WHERE id = $1", beaten
    )
    assert row is not None
    assert (row["state"], row["errors"]) == ("discarded", None)
    assert row["m"] == '{"a": 1, "unique_key_conflict": "scheduler_discarded"}'
    assert await schema.fetchval(
        "SELECT finalized_at <= now() FROM river_job WHERE id = $1", beaten
    )
    assert (await states_of(schema))[holder] == state


@pytest.mark.parametrize("state", ["cancelled", "discarded", "completed"])
async def test_key_released_by_another(held: HeldTerm, schema: Schema, state: str) -> None:
    """A job in a state outside of its unique ones holds no key."""
    await keyed(schema, state)
    job_id = await keyed(schema)
    await held.run(JobScheduler(held.context))
    assert (await states_of(schema))[job_id] == "available"


async def test_first_of_a_batch(held: HeldTerm, schema: Schema) -> None:
    """JS2: of due jobs with one key the first by priority, due time and id is kept."""
    orders = [
        {"priority": "1", "at": "now() - interval '1 min'"},
        {"priority": "1", "at": "now() - interval '1 min'"},
        {"priority": "2", "at": "now() - interval '1 hour'"},
        {"priority": "1", "at": "now() - interval '2 min'"},
        {"priority": "1", "at": "now() - interval '2 min'"},
    ]
    ids = [await keyed(schema, **order) for order in orders]
    await held.run(JobScheduler(held.context))
    states = await states_of(schema)
    assert [states[job_id] for job_id in ids] == [
        "available" if index == 3 else "discarded" for index in range(5)
    ]


@pytest.mark.parametrize("first", ["retryable", "scheduled"])
async def test_holder_among_the_due(held: HeldTerm, schema: Schema, first: str) -> None:
    """Two due jobs with one key, of which one holds it: the first is kept, whichever that is, and
    never are both discarded."""
    earlier, later = "now() - interval '2 min'", "now() - interval '1 min'"
    ids = {
        state: await keyed(schema, state, at=earlier if state == first else later)
        for state in ("retryable", "scheduled")
    }
    await held.run(JobScheduler(held.context))
    states = await states_of(schema)
    assert {state: states[job_id] for state, job_id in ids.items()} == {
        state: "available" if state == first else "discarded" for state in ids
    }


async def test_keys_across_batches(
    held: HeldTerm, schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is it where they are in different batches."""
    monkeypatch.setattr(batch_runner, "BATCH_ROWS_MAX", 2)
    ids = [await keyed(schema, at=f"now() - interval '{9 - n} min'") for n in range(5)]
    await held.run(JobScheduler(held.context))
    states = await states_of(schema)
    assert [states[job_id] for job_id in ids] == ["available"] + ["discarded"] * 4


async def test_key_kept_when_discarded(
    held: HeldTerm, schema: Schema, log: list[dict[str, Any]]
) -> None:
    """A job that would hold its key as a discarded one too waits until the key is free, and holds
    up no other."""
    states = mask("scheduled", "running", "pending", "available", "discarded")
    holder = await keyed(schema, "running", states, at="now()")
    waits = await keyed(schema, "retryable", states)
    other = await waiting(schema)
    scheduler = JobScheduler(held.context)
    await held.run(scheduler)
    assert await states_of(schema) == {holder: "running", waits: "retryable", other: "available"}
    assert log == []
    await schema.execute(
        "UPDATE river_job SET state = 'completed', finalized_at = now() WHERE id = $1", holder
    )
    await held.run(scheduler)
    assert (await states_of(schema))[waits] == "available"


async def test_odd_metadata(held: HeldTerm, schema: Schema) -> None:
    """Metadata that is no object is kept, and gets the mark as the last element of an array."""
    await keyed(schema, "running", at="now()")
    beaten = await keyed(schema, metadata="'[1]'")
    await held.run(JobScheduler(held.context))
    text = await schema.fetchval("SELECT metadata::text FROM river_job WHERE id = $1", beaten)
    assert json.loads(text) == [1, {"unique_key_conflict": "scheduler_discarded"}]


@pytest.mark.parametrize("commits", [True, False])
async def test_uncommitted_rival(
    held: HeldTerm, schema: Schema, commits: bool, log: list[dict[str, Any]]
) -> None:
    """A due job whose key an open transaction inserts is left, all others are moved; it is decided
    when the transaction has ended."""
    scheduler = JobScheduler(held.context)
    others = {await waiting(schema) for _ in range(20)}
    contended = await keyed(schema)
    others |= {await waiting(schema) for _ in range(20)}
    async with schema.connected() as rival:
        transaction = rival.transaction()
        await transaction.start()
        await rival.execute(
            "INSERT INTO river_job (kind, max_attempts, args, unique_key, unique_states)"
            rf" VALUES ('task', 25, '{{}}', '\xaa', B'{REQUIRED}')"
        )
        for _ in range(2):
            scheduler.batch_runner.skipped_rows.make_all_rows_due()
            await held.run(scheduler)
            states = await states_of(schema)
            assert states.pop(contended) == "retryable"
            assert states == dict.fromkeys(others, "available")
        await (transaction.commit() if commits else transaction.rollback())
    with anyio.fail_after(30):
        while (await states_of(schema))[contended] == "retryable":
            scheduler.batch_runner.skipped_rows.make_all_rows_due()
            await held.run(scheduler)
    assert (await states_of(schema))[contended] == ("discarded" if commits else "available")
    warnings = [entry for entry in log if entry["log_level"] == "warning"]
    assert [entry["row"] for entry in warnings] == [contended]


async def test_locked_row(held: HeldTerm, schema: Schema, log: list[dict[str, Any]]) -> None:
    """A due job that another transaction has locked is skipped, and moved in a later
    pass."""
    locked, other = await waiting(schema), await waiting(schema)
    scheduler = JobScheduler(held.context)
    async with schema.connected() as user, user.transaction():
        await user.execute("SELECT FROM river_job WHERE id = $1 FOR UPDATE", locked)
        await held.run(scheduler)
        assert await states_of(schema) == {locked: "scheduled", other: "available"}
    assert log == []
    await held.run(scheduler)
    assert (await states_of(schema))[locked] == "available"


async def test_locked_batch(
    held: HeldTerm, schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole batch of locked rows does not hide those behind it."""
    monkeypatch.setattr(batch_runner, "BATCH_ROWS_MAX", 3)
    locked = [await waiting(schema, at="now() - interval '1 hour'") for _ in range(7)]
    other = await waiting(schema)
    async with schema.connected() as user, user.transaction():
        await user.execute("SELECT FROM river_job WHERE id = any($1) FOR UPDATE", locked)
        await held.run(JobScheduler(held.context))
    states = await states_of(schema)
    assert states == dict.fromkeys(locked, "scheduled") | {other: "available"}


async def test_slow_moves(held: HeldTerm, schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a batch does not fit into the statement's limit, the pass goes on in smaller ones."""
    monkeypatch.setattr(batch_runner, "BATCH_ROWS_MAX", 100)
    await insert_jobs(schema, 35, state="'scheduled'", scheduled_at=DUE)
    await refuse_many(schema, 10)
    try:
        await held.run(JobScheduler(held.context))
    finally:
        await accept_many(schema)
    assert set((await states_of(schema)).values()) == {"available"}


async def test_idle_queue(held: HeldTerm, schema: Schema) -> None:
    """Tens of thousands of due jobs of a queue without workers do not keep 10 of another from
    becoming available in the same pass, and are not touched again in the next (LM-17)."""
    await insert_jobs(schema, 25_000, state="'scheduled'", scheduled_at=DUE, queue="'idle'")
    ids = await insert_jobs(schema, 10, state="'retryable'", scheduled_at="now()", priority="4")
    scheduler = JobScheduler(held.context)
    await held.run(scheduler)
    assert await schema.fetchval(
        "SELECT count(*) FROM river_job WHERE state = 'available' AND id = any($1)", ids
    ) == len(ids)
    assert await schema.fetchval("SELECT count(*) FROM river_job WHERE state <> 'available'") == 0
    moved = "SELECT max(xmin::text::bigint) FROM river_job"
    before = await schema.fetchval(moved)
    await held.run(scheduler)
    assert await schema.fetchval(moved) == before


async def test_some_queues(held: HeldTerm, schema: Schema) -> None:
    """A scheduler of some queues moves only their jobs; one of none asks nothing."""
    ids = {queue: await waiting(schema, queue=f"'{queue}'") for queue in ("aa", "bb", "cc")}
    held.scope = only_queues({"aa", "cc", "dd"})
    await held.run(JobScheduler(held.context))
    states = await states_of(schema)
    assert {queue: states[job_id] for queue, job_id in ids.items()} == {
        "aa": "available",
        "bb": "scheduled",
        "cc": "available",
    }
    await held.take_over()
    held.scope = NO_QUEUES
    await held.run(JobScheduler(held.context))


async def test_batches_in_order(
    held: HeldTerm, schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MC7: more jobs than a batch has all become available, the first ones first: in the order of
    priority, due time and id, over states and queues."""
    monkeypatch.setattr(batch_runner, "BATCH_ROWS_MAX", 5)
    await insert_jobs(
        schema,
        60,
        state="case when i % 2 = 0 then 'scheduled' else 'retryable' end",
        queue="'q' || i % 3",
        priority="1 + i % 4",
        scheduled_at="now() - make_interval(secs => (i * 7) % 11)",
    )
    await held.run(JobScheduler(held.context))
    rows = await schema.fetch(
        "SELECT state::text, xmin::text::bigint AS moved_by FROM river_job"
        " ORDER BY priority, scheduled_at, id"
    )
    assert {row["state"] for row in rows} == {"available"}
    moves = [row["moved_by"] for row in rows]
    assert moves == sorted(moves)
    assert len(set(moves)) == 12


async def test_two_leaders(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """MC11: two schedulers at once do no harm: each job becomes available, of those with one key
    one."""
    monkeypatch.setattr(batch_runner, "BATCH_ROWS_MAX", 10)
    await insert_jobs(
        schema,
        200,
        state="'retryable'",
        scheduled_at=DUE,
        unique_key=r"case when i % 2 = 0 then decode(md5((i % 20)::text), 'hex') end",
        unique_states=f"B'{REQUIRED}'",
    )
    async with (
        held_term(schema) as held,
        held_term(schema, term=held.term) as second,
        anyio.create_task_group() as tasks,
    ):
        for context in (held, second):
            tasks.start_soon(context.run, JobScheduler(context.context))
    async with held_term(schema, term=held.term) as third:  # what lost a race is moved then
        await third.run(JobScheduler(third.context))
    rows = await schema.fetch(
        "SELECT state::text, unique_key IS NULL AS free, count(*) FROM river_job GROUP BY 1, 2"
    )
    assert {(row[0], row[1]): row[2] for row in rows} == {
        ("available", True): 100,
        ("available", False): 10,
        ("discarded", False): 90,
    }


@pytest.mark.parametrize("skew", [timedelta(minutes=10), timedelta(minutes=-10)])
async def test_skewed_clock(
    held: HeldTerm, schema: Schema, skew: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's clock decides what is due, not the one of the leader (MC10) (SK-19)."""
    now = Clock.now
    monkeypatch.setattr(Clock, "now", lambda self: now(self) + skew)
    due, future = await waiting(schema), await waiting(schema, at="now() + interval '1 min'")
    await held.run(JobScheduler(held.context))
    assert await states_of(schema) == {due: "available", future: "scheduled"}


async def test_deposed(held: HeldTerm, schema: Schema) -> None:
    """A deposed leader moves nothing."""
    job_id = await waiting(schema)
    await held.take_over()
    with pytest.raises(FencedOutError):
        await held.run(JobScheduler(held.context))
    assert await states_of(schema) == {job_id: "scheduled"}


class Soon:
    """A retry policy: half a second."""

    def next_retry(self, job: Any, /) -> timedelta:
        return timedelta(seconds=0.5)


async def test_short_delays(schema: Schema) -> None:
    """A retry after half a second and a snooze of one second wait in state available and begin by
    themselves: no scheduler runs, and the next poll is far off (SK-16)."""
    rig = Rig(schema)
    seen: list[str] = []

    @rig.job
    async def task(job: Job[Task]) -> None:
        name = "snooze" if job.args.n else "retry"
        seen.append(name)
        if seen.count(name) == 1:
            if job.args.n:
                raise JobSnooze(timedelta(seconds=1))
            raise ValueError

    async with rig.working(retry_policy=Soon(), fetch_poll_interval=FAR, candidate=False) as client:
        ids = [(await client.insert(Task(n))).job.id for n in (0, 1)]
        states: dict[int, list[str]] = {job_id: [] for job_id in ids}
        for event in await rig.take(4):  # the first may have ended before the other is inserted
            states[event.job.id].append(event.job.state)
    assert list(states.values()) == [["available", "completed"]] * 2
    assert await rig.states() == {"completed": 2}
    assert sorted(seen) == ["retry", "retry", "snooze", "snooze"]
    early = "SELECT count(*) FROM river_job WHERE attempted_at < scheduled_at"
    assert await schema.fetchval(early) == 0
