"""Jobs whose client is gone run again; no other is touched."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import asyncpg
import msgspec
import pytest
from msgspec import UNSET

from riverpy import Job, JobRow, Worker, Workers
from riverpy._fleet.filters import ALL_EVENTS_FILTER
from riverpy._fleet.outbox import FleetOutbox
from riverpy._leading.queue_scope import only_queues
from riverpy._leading.term_fence import FenceTimeoutError
from riverpy._log_events import JOBS_OF_UNKNOWN_KIND_SKIPPED, JOBS_RESCUED, ROW_SET_ASIDE
from riverpy._maintenance import batch_runner, job_rescuer
from riverpy._maintenance.job_rescuer import JobRescuer
from riverpy._postgres import clients, job_maintenance
from riverpy._postgres.driver import use_raw_timestamps
from riverpy._postgres.jobs import AttemptResult, ClaimKey, job_complete, job_store_results
from riverpy._work.subscriptions import SubscriptionManager
from riverpy.errors import FencedOutError
from tests.leading.term_context import QuickTimer, held_term
from tests.maintenance.dead_clients import BEAT, in_contact, observed, register

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from tests._database import Schema
    from tests.leading.term_context import HeldTerm

SECOND = timedelta(seconds=1)
OLD = "3 hours"


class Sleep(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "sleep"
    n: int = 0


def registry(timeout: Any = UNSET, next_retry: Any = None) -> Workers:
    """One worker, of kind `sleep`."""
    workers = Workers()

    @workers.job(timeout=timeout, next_retry=next_retry)
    async def sleep(job: Job[Sleep]) -> None:
        pass

    return workers


async def observing(
    held: HeldTerm, contact: Callable[[], float] = in_contact, *, seconds: float = 5.0
) -> JobRescuer:
    """A rescuer that has read the heartbeats, and so many seconds ago by its own clock."""
    return await observed(held, JobRescuer(held.context, contact), seconds)


async def insert(
    schema: Schema, *, by: str | None = "dead", age: str = "1 second", **columns: object
) -> int:
    """A running job that a client claimed `age` ago."""
    values = {"kind": "sleep", "args": "{}", "max_attempts": 25, "attempt": 1} | columns
    if by is not None:
        values["attempted_by"] = ["another", by]
    names = ", ".join(values)
    marks = ", ".join(f"${index}" for index in range(2, len(values) + 2))
    return await schema.fetchval(
        f"INSERT INTO river_job (state, attempted_at, scheduled_at, {names})"
        f" VALUES ('running', now() - $1::text::interval, now() - interval '1 day', {marks})"
        " RETURNING id",
        age,
        *values.values(),
    )


async def states(schema: Schema) -> list[str]:
    rows = await schema.fetch("SELECT state::text FROM river_job ORDER BY id")
    return [row[0] for row in rows]


@pytest.fixture
async def quick(schema: Schema) -> AsyncGenerator[HeldTerm]:
    """A context to which a client is dead after a second."""
    async with held_term(schema, workers=registry(), dead_after=SECOND) as held:
        yield held


# --- by liveness


async def test_outcomes(quick: HeldTerm, log: list[dict[str, Any]]) -> None:
    """The running jobs of a client that writes no heartbeats run again, whatever kinds the leader
    knows; without an attempt left they are discarded, with a cancel mark cancelled. The attempt
    counts: it stays, and has an error (LD-07). Each attempt is an event for clients that follow."""
    schema = quick.schema
    subscriptions, outbox = SubscriptionManager(), FleetOutbox(lambda: None)
    subscriptions.fleet_outbox, outbox.filters = outbox, [ALL_EVENTS_FILTER]
    quick.context = replace(quick.context, ended_job_publisher=subscriptions)
    await register(schema, "dead")
    mark = '{"cancel_attempted_at": "2026-01-01T00:00:00Z", "river:rescue_count": 2}'
    await insert(schema, attempt=3)
    await insert(schema, kind="unknown", queue="other", metadata='{"mine": 1}')
    await insert(schema, attempt=25)
    await insert(schema, metadata=mark)
    heard: asyncio.Queue[str] = asyncio.Queue()
    async with schema.connected() as listener:
        await listener.add_listener(
            f"{schema.name}.river_insert", lambda *message: heard.put_nowait(message[3])
        )
        assert await quick.run(await observing(quick)) == pytest.approx(1 / 5)
        queues = {json.loads(await asyncio.wait_for(heard.get(), 30))["queue"] for _ in range(2)}
    assert queues == {"default", "other"}
    rows = await schema.jobs()
    assert [row["state"] for row in rows] == ["available", "available", "discarded", "cancelled"]
    assert [row["attempt"] for row in rows] == [3, 1, 25, 1]
    assert [json.loads(row["metadata"]) for row in rows] == [
        {"river:rescue_count": 1},
        {"mine": 1, "river:rescue_count": 1},
        {"river:rescue_count": 1},
        {**json.loads(mark), "river:rescue_count": 3},
    ]
    for row in rows:
        final = row["state"] in {"discarded", "cancelled"}
        assert (row["finalized_at"] is not None) is final
        assert (row["scheduled_at"] > row["attempted_at"]) is not final
        (error,) = JobRow([None] * 6 + [row["errors"]]).errors
        assert (error.attempt, error.error, error.trace) == (
            row["attempt"],
            "Stuck job rescued by JobRescuer",
            "",
        )
        assert error.at > row["attempted_at"]
    (entry,) = [entry for entry in log if entry["event"] == JOBS_RESCUED]
    assert entry["client_ids"] == ["dead"]
    assert entry["states"] == {"available": 2, "discarded": 1, "cancelled": 1}
    assert entry["reason"] == job_rescuer.RESCUE_REASON_CLIENT_DEAD
    events = [json.loads(line) for line in outbox.take_encoded_events(10, 8_000)]
    assert {event["error"] for event in events} == {"Stuck job rescued by JobRescuer"}
    assert sorted(
        (one["job_id"], one["event"], one["state"], one["attempt"]) for one in events
    ) == [
        (1, "job_failed", "available", 3),
        (2, "job_failed", "available", 1),
        (3, "job_failed", "discarded", 25),
        (4, "job_cancelled", "cancelled", 1),
    ]


@pytest.mark.parametrize(
    ("seconds", "dead_after", "contact", "rescued"),
    [
        (5.0, "1s", 5.0, True),
        (5.0, "1s", 0.9, False),  # the leader itself was out of contact
        (5.0, "1s", 0.0, False),
        (0.5, "100ms", 5.0, False),  # the leader's setting is longer
        (5.0, "1h", 5.0, False),  # the client's is
        (5.0, "3s", 2.0, False),  # and the leader was not in contact for as long
    ],
)
async def test_who_is_dead(
    quick: HeldTerm, seconds: float, dead_after: str, contact: float, rescued: bool
) -> None:
    """A client is dead when its heartbeat has not changed for the longer of its own limit and the
    leader's, by the leader's own clock, and only to a leader that has been in contact for as long
    (LD-15)."""
    await register(quick.schema, "dead", dead_after=dead_after)
    await insert(quick.schema, age=OLD)
    await quick.run(await observing(quick, lambda: contact, seconds=seconds))
    assert await states(quick.schema) == ["available" if rescued else "running"]


@pytest.mark.parametrize("step", ["11 minutes", "-11 minutes"])
async def test_clock_of_the_server(quick: HeldTerm, step: str) -> None:
    """However old or new a heartbeat is by the server's clock, only the time for which it has not
    changed counts."""
    await register(quick.schema, "living")
    await insert(quick.schema, by="living")
    shift = f"UPDATE riverpy_client SET heartbeat_at = heartbeat_at - interval '{step}'"
    rescuer = await observing(quick)
    await quick.schema.execute(shift)
    await quick.run(rescuer)
    assert await states(quick.schema) == ["running"]
    assert isinstance(quick.timer, QuickTimer)
    quick.timer.skipped += 5
    await quick.run(rescuer)
    assert await states(quick.schema) == ["available"]


async def test_server_restarted(quick: HeldTerm) -> None:
    """A client could write no heartbeat while the server was down: after a restart it is observed
    for `dead_after` again."""
    await register(quick.schema, "silent")
    await insert(quick.schema, by="silent", age=OLD)
    rescuer = await observing(quick)
    assert rescuer._heartbeat_observer is not None
    rescuer._heartbeat_observer.server_start = b"before"
    await quick.run(rescuer)
    assert await states(quick.schema) == ["running"]


@pytest.mark.parametrize("others", [("dead", "beating"), ()])
async def test_sign_of_life_in_between(
    quick: HeldTerm, monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...]
) -> None:
    """A heartbeat that arrives while the jobs of a client are being rescued saves them, whether
    it is stored already or still on its way, and whether there are other dead clients or not."""
    schema = quick.schema
    for client_id in ("late", *others):
        await register(schema, client_id)
        await insert(schema, by=client_id)
    lock_dead = clients.client_lock_dead

    async def after_a_beat(*args: Any, **values: Any) -> set[str]:
        await schema.execute(BEAT, "late")
        return await lock_dead(*args, **values)

    monkeypatch.setattr(job_rescuer, "client_lock_dead", after_a_beat)
    async with schema.connected() as connection, connection.transaction():
        await connection.execute(BEAT, "beating")
        await quick.run(await observing(quick))
    ends = {"late": "running", "dead": "available", "beating": "running"}
    assert await states(schema) == [ends[client_id] for client_id in ("late", *others)]


async def test_other_attempts_are_left(quick: HeldTerm) -> None:
    """Jobs that a living or unknown client claimed last, and those that do not run, stay as they
    are, however often a dead one had them."""
    schema = quick.schema
    await register(schema, "dead")
    await register(schema, "alive")
    await insert(schema, attempted_by=["dead", "alive"], by=None)
    await insert(schema, attempted_by=["dead", "unknown"], by=None)
    await insert(schema, attempted_by=None, by=None)
    await insert(schema)
    await schema.execute("UPDATE river_job SET state = 'retryable' WHERE id = 4")
    rescuer = await observing(quick)
    await schema.execute(BEAT, "alive")
    await quick.run(rescuer)
    assert await states(schema) == ["running"] * 3 + ["retryable"]


@pytest.mark.parametrize("alive", [False, True])
async def test_ended_between_read_and_write(
    quick: HeldTerm, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    """A job that ends, or is claimed again, between the read and the write stays so (JR6,
    CF-058)."""
    schema = quick.schema
    client_id = "unknown" if alive else "dead"
    await register(schema, "dead")
    for _ in range(3):
        await insert(schema, by=client_id, age=OLD)
    end = job_maintenance.job_rescue

    async def after_they_ended(*args: Any, **values: Any) -> dict[int, str]:
        await schema.execute(
            "UPDATE river_job SET state = 'completed', finalized_at = now() WHERE id = 1"
        )
        await schema.execute("UPDATE river_job SET attempted_at = now() WHERE id = 2")
        return await end(*args, **values)

    monkeypatch.setattr(job_rescuer, "job_rescue", after_they_ended)
    await quick.run(await observing(quick))
    assert await states(schema) == ["completed", "running", "available"]


async def test_only_its_queues(quick: HeldTerm) -> None:
    """A rescuer of some queues leaves the jobs of others alone, the dead clients' and the stuck
    ones."""
    schema = quick.schema
    await register(schema, "dead")
    for queue in ("mine", "others"):
        await insert(schema, queue=queue)
        await insert(schema, queue=queue, by="unknown", age=OLD)
    quick.scope = only_queues({"mine", "also mine"})
    await quick.run(await observing(quick))
    assert await states(schema) == ["available"] * 2 + ["running"] * 2


async def test_deposed(quick: HeldTerm) -> None:
    """A leader that was deposed and does not know it yet rescues nothing."""
    schema = quick.schema
    await register(schema, "dead")
    await insert(schema)
    await quick.take_over()
    with pytest.raises(FencedOutError):
        await quick.run(await observing(quick))
    assert await states(schema) == ["running"]


# --- rows that cannot be changed


async def test_locked_row(quick: HeldTerm) -> None:
    """A job that another session has locked is skipped, and rescued by a later pass."""
    schema = quick.schema
    await register(schema, "dead")
    for _ in range(3):
        await insert(schema)
    rescuer = await observing(quick)
    async with schema.connected() as connection, connection.transaction():
        await connection.execute("SELECT FROM river_job WHERE id = 2 FOR UPDATE")
        await quick.run(rescuer)
        assert await states(schema) == ["available", "running", "available"]
    await quick.run(rescuer)
    assert await states(schema) == ["available"] * 3


@pytest.mark.parametrize("metadata", ["[]", "7", '"text"', "null", '{"river:rescue_count": "no"}'])
async def test_malformed_metadata(quick: HeldTerm, metadata: str) -> None:
    """Metadata that is no object, or whose count is no number, keeps no job from being rescued
    (JR7)."""
    schema = quick.schema
    await register(schema, "dead")
    await insert(schema, metadata=metadata)
    await insert(schema)
    await insert(schema, metadata=metadata, by="unknown", age=OLD)
    await quick.run(await observing(quick))
    rows = await schema.jobs()
    assert [row["state"] for row in rows] == ["available"] * 3
    assert json.loads(rows[0]["metadata"]) in (json.loads(metadata), {"river:rescue_count": 1})


async def test_odd_rows(quick: HeldTerm) -> None:
    """A row that says nothing of its claim, or whose metadata is nested too deeply to be read,
    keeps no other from being rescued."""
    schema = quick.schema
    await register(schema, "dead")
    odd = await insert(schema)
    await schema.execute("UPDATE river_job SET attempted_at = NULL WHERE id = $1", odd)
    await insert(schema)
    nested = '{"a": ' + "[" * 3000 + "]" * 3000 + "}"
    await insert(schema, metadata=nested, by="unknown", age=OLD)
    await insert(schema, by="unknown", age=OLD)
    await quick.run(await observing(quick))
    assert [row["state"] for row in await schema.jobs()] == ["running"] + ["available"] * 3


async def test_busy_fence_is_no_fault_of_a_job(schema: Schema, log: list[dict[str, Any]]) -> None:
    """Jobs are not blamed for a leader's row that another session has locked."""
    await register(schema, "dead")
    for _ in range(8):
        await insert(schema)
    async with held_term(schema, dead_after=SECOND) as held, schema.connected() as other:
        rescuer, fence = await observing(held), held.context.fence
        limit, fence.transaction_timeout = fence.transaction_timeout, SECOND / 4
        async with other.transaction():
            await other.execute("SELECT FROM river_leader FOR UPDATE")
            with pytest.raises(FenceTimeoutError):
                await held.run(rescuer)
        fence.transaction_timeout = limit
        await held.run(rescuer)
    assert {row["state"] for row in await schema.jobs()} == {"available"}
    assert ROW_SET_ASIDE not in [entry["event"] for entry in log]


@pytest.mark.parametrize(
    ("how", "count", "bad"),
    [("RAISE EXCEPTION 'no'", 20, {5, 6, 18}), ("PERFORM pg_sleep(60)", 4, {3})],
)
async def test_refused_row(
    schema: Schema, log: list[dict[str, Any]], how: str, count: int, bad: set[int]
) -> None:
    """A job that a trigger keeps from being changed, or holds up, stops no other, and is named
    once."""
    await register(schema, "dead")
    for job_id in range(1, count + 1):
        await insert(schema, queue="bad" if job_id in bad else "default")
    await schema.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN {how}; RETURN new; END $$"
    )
    await schema.execute(
        "CREATE TRIGGER refuse BEFORE UPDATE ON river_job FOR EACH ROW"
        " WHEN (old.queue = 'bad') EXECUTE FUNCTION refuse()"
    )
    try:
        async with held_term(schema, dead_after=SECOND) as held:
            held.context.fence.transaction_timeout = (
                1.5 * SECOND
            )  # a busy machine takes less for any other
            rescuer = await observing(held)
            for _ in range(2):
                await held.run(rescuer)
                rescuer.batch_runner.skipped_rows.make_all_rows_due()
    finally:
        await schema.execute("DROP FUNCTION refuse CASCADE")
    rows = await schema.jobs()
    assert {row["id"] for row in rows if row["state"] == "running"} == bad
    named = [entry["row"] for entry in log if entry["event"] == ROW_SET_ASIDE]
    assert sorted(named) == sorted(bad)


# --- by age


class Timed(Worker[Sleep]):
    """A worker that says for each job how long it may run."""

    def __init__(self, timeout: Any) -> None:
        self._timeout = timeout

    async def work(self, job: Job[Sleep]) -> None:
        pass

    def timeout(self, job: Job[Sleep]) -> Any:
        assert job.args == Sleep()
        return self._timeout


@pytest.mark.parametrize("by_method", [False, True])
@pytest.mark.parametrize(
    ("worker", "client", "rescued"),
    [
        (UNSET, timedelta(seconds=60), True),
        (timedelta(seconds=5), timedelta(seconds=60), True),
        (None, timedelta(seconds=60), False),
        (UNSET, None, False),
        (timedelta(seconds=5), None, True),
        (None, None, False),
        (timedelta(hours=4), timedelta(seconds=60), False),
        (UNSET, timedelta(hours=4), False),
        (timedelta(hours=4), None, False),
    ],
)
async def test_timeouts(
    schema: Schema, worker: Any, client: timedelta | None, rescued: bool, by_method: bool
) -> None:
    """A job of a client that writes no heartbeats is rescued only when it runs for longer than
    its timeout, the worker's or else the client's; one without a timeout never is (JR2) (LD-05,
    LD-06)."""
    workers = Workers().add(Timed(worker)) if by_method else registry(timeout=worker)
    rescue_after = max(client or SECOND, timedelta(minutes=18))
    async with held_term(
        schema, workers=workers, job_timeout=client, rescue_after=rescue_after
    ) as held:
        await insert(schema, by="unknown", age="3 hours")
        await insert(schema, by="unknown", age="17 minutes")
        await held.run(await observing(held))
    # Within 5 seconds of its due time a job is available, else it is retryable.
    assert await states(schema) == ["available" if rescued else "running", "running"]


async def test_stuck_outcomes(schema: Schema) -> None:
    """A stuck job waits as its worker or the retry policy says; one with a cancel mark is
    cancelled, whatever its kind and timeout; one without attempts left is discarded (JR1). Args
    that cannot be decoded make no difference (JR4)."""
    mark = '{"cancel_attempted_at": "2026-01-01T00:00:00Z"}'

    def next_retry(job: Job[Any]) -> timedelta | None:
        if job.attempt == 3:
            raise ValueError("no idea")
        return timedelta(hours=1) if job.attempt == 2 else None

    async with held_term(schema, workers=registry(next_retry=next_retry)) as held:
        old = partial(insert, schema, by="unknown", age=OLD)
        await old()
        await old(attempt=2)
        await old(attempt=3)
        await old(attempt=25)
        await old(metadata=mark)
        await old(metadata=mark, kind="unknown")
        await old(args='{"n": "text"}', attempt=2)
        await old(args='{"n": "text"}', attempt=25)
        await old(by=None)
        await insert(schema, by="unknown", age="59 minutes")
        await held.run(await observing(held))
    rows = await schema.jobs()
    assert [row["state"] for row in rows] == [
        "available",  # River's formula: a second
        "retryable",
        "available",
        "discarded",
        "cancelled",
        "cancelled",
        "available",
        "discarded",
        "available",
        "running",
    ]
    wait = rows[1]["scheduled_at"] - rows[0]["scheduled_at"]
    assert timedelta(minutes=59) < wait < timedelta(hours=1)
    assert [len(row["errors"] or ()) for row in rows] == [1] * 9 + [0]
    assert json.loads(rows[0]["errors"][0])["error"] == "Stuck job rescued by JobRescuer"
    assert [row["attempt"] for row in rows[:3]] == [1, 2, 3]


async def test_unknown_kind(schema: Schema, log: list[dict[str, Any]]) -> None:
    """A stuck job of a kind that the leader has no worker for is left, counted, and told once
    (JR8)."""
    async with held_term(schema, workers=registry()) as held:
        for kind in ("go_job", "sleep", "go_job"):
            await insert(schema, by="unknown", age=OLD, kind=kind)
        rescuer = await observing(held)
        assert isinstance(held.timer, QuickTimer)
        for _ in range(2):
            await held.run(rescuer)
            held.timer.skipped += job_rescuer.STUCK_JOB_SEARCH_INTERVAL_MAX
        await schema.execute("UPDATE river_job SET state = 'available' WHERE state = 'running'")
        await held.run(rescuer)
    assert await states(schema) == ["available"] * 3
    told = [entry for entry in log if entry["event"] == JOBS_OF_UNKNOWN_KIND_SKIPPED]
    assert [(entry["kind"], entry["count"]) for entry in told] == [("go_job", 2)]


async def test_old_jobs_of_registered_clients(quick: HeldTerm) -> None:
    """A client that writes heartbeats decides how long its jobs may run: they are never
    rescued by their age."""
    await register(quick.schema, "alive")
    await insert(quick.schema, by="alive", age="30 days")
    await insert(quick.schema, by="unknown", age="30 days")
    await quick.run(await observing(quick, seconds=0))
    assert await states(quick.schema) == ["running", "available"]


async def test_ignored_jobs_hide_nothing(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pages of jobs that must not be rescued do not hide later ones that must (JR3), nor do
    those of registered clients and of unknown kinds (LD-04)."""
    monkeypatch.setattr(job_rescuer, "STUCK_JOBS_PER_READ_MAX", 10)
    monkeypatch.setattr(batch_runner, "PAGE_ROWS_MIN", 10)
    workers = registry()

    class Endless(msgspec.Struct, frozen=True):
        kind: ClassVar[str] = "endless"

    async def endless(job: Any) -> None:
        pass

    endless.__annotations__ = {"job": Job[Endless], "return": None}
    workers.job(timeout=None)(endless)
    await register(schema, "alive")
    for _ in range(10):
        await insert(schema, by="go", age=OLD, kind="endless")
        await insert(schema, by="go", age=OLD, kind="unknown")
        await insert(schema, by="alive", age=OLD)
    for _ in range(15):
        await insert(schema, by="go", age=OLD)
    async with held_term(schema, workers=workers) as held:
        await held.run(await observing(held))
    assert await states(schema) == ["running"] * 30 + ["available"] * 15


async def test_pages_of_the_dead(quick: HeldTerm, monkeypatch: pytest.MonkeyPatch) -> None:
    """All jobs of a dead client are rescued in one pass, however many pages they fill."""
    monkeypatch.setattr(batch_runner, "BATCH_ROWS_MAX", 10)
    monkeypatch.setattr(batch_runner, "PAGE_ROWS_MIN", 10)
    await register(quick.schema, "dead")
    for _ in range(20):
        await insert(quick.schema)
    await quick.run(await observing(quick))
    assert await states(quick.schema) == ["available"] * 20


async def test_without_our_tables(schema: Schema) -> None:
    """In a database without the line `riverpy` jobs are rescued by their age, whichever client
    claimed them."""
    await schema.execute("ALTER TABLE riverpy_client RENAME TO hidden")
    try:
        async with held_term(schema, workers=registry()) as held:
            await insert(schema, age=OLD)
            await insert(schema)
            await held.run(JobRescuer(held.context, None))
    finally:
        await schema.execute("ALTER TABLE hidden RENAME TO riverpy_client")
    assert await states(schema) == ["available", "running"]


async def test_maintenance_and_completer_do_not_deadlock(schema: Schema) -> None:
    """Rescuing, scheduling, cleaning and storing results go on side by side, on the same rows from
    many connections, and no statement dies of a deadlock (LM-13)."""
    ids = [await insert(schema, by="go", age=OLD) for _ in range(60)]
    errors: list[Exception] = []

    async def claim_keys(connection: asyncpg.Connection[Any]) -> list[ClaimKey]:
        rows = await connection.fetch(
            "SELECT id, attempt, attempted_at FROM river_job WHERE id = any($1) ORDER BY random()",
            ids,
        )
        return [ClaimKey(*row) for row in rows]

    async def rescue_all(connection: asyncpg.Connection[Any]) -> None:
        rescues = [
            job_maintenance.JobRescue(claim_key, "go", 6.0)
            for claim_key in await claim_keys(connection)
        ]
        await job_maintenance.job_rescue(connection, schema.name, rescues)

    async def store(connection: asyncpg.Connection[Any]) -> None:
        """As a completer does: the plain results, then the others, each in order of their ids."""
        found = await claim_keys(connection)
        plain, others = sorted(found[:30]), sorted(found[30:])
        await job_complete(
            connection,
            schema.name,
            ids=[claim_key.id for claim_key in plain],
            attempts=[claim_key.attempt for claim_key in plain],
            attempted_ats=[claim_key.attempted_at for claim_key in plain],
            seconds_since_end=[0.0] * len(plain),
        )
        await job_store_results(
            connection,
            schema.name,
            [
                AttemptResult(*claim_key, "retryable", None, 0.0, 1, 0.0, None, None)
                for claim_key in others
            ],
        )

    async def schedule(connection: asyncpg.Connection[Any]) -> None:
        await job_maintenance.job_schedule(
            connection, schema.name, ids=ids, lookahead=timedelta(hours=1)
        )

    async def clean(connection: asyncpg.Connection[Any]) -> None:
        await job_maintenance.job_delete_ended(
            connection, schema.name, ids=ids, state="discarded", retention=timedelta(0)
        )

    async def run_again(connection: asyncpg.Connection[Any]) -> None:
        await connection.execute(
            "UPDATE river_job SET state = 'running', attempted_at = clock_timestamp(),"
            " finalized_at = NULL, errors = NULL WHERE id = any(array("
            "SELECT id FROM river_job ORDER BY id FOR UPDATE SKIP LOCKED))"
        )

    async def repeat(step: Any) -> None:
        async with schema.connected() as connection:
            await use_raw_timestamps(connection)
            for _ in range(60):
                try:
                    await step(connection)
                except asyncpg.PostgresError as error:
                    errors.append(error)

    steps = (rescue_all, rescue_all, store, schedule, schedule, clean, run_again)
    async with asyncio.TaskGroup() as tasks:
        for step in steps:
            tasks.create_task(repeat(step))
    assert not errors
