"""Storing results: group commit, locked rows, refused rows, lost claims, and a failing database."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

import riverpy._postgres.connection
import riverpy._work.completer
import riverpy._work.producer
from riverpy import Event, EventKind, Job, JobCancel, JobSnooze
from riverpy._log_events import (
    CONNECTION_LOST,
    CONNECTION_RESTORED,
    JOB_RESULT_REFUSED,
    JOB_RESULT_REPLACED,
    JOB_RESULTS_LEFT_UNSTORED,
    JOB_RESULTS_REJECTED,
    REJECTED_JOB_RESULTS_STORED,
)
from riverpy._postgres import jobs
from tests.kit.proxy import proxied
from tests.work.rig import PATIENCE, Task, errors_of, metadata_of

if TYPE_CHECKING:
    from tests.work.rig import Rig

RESULTS = "riverpy results"


def refusals(log: list[dict[str, Any]]) -> list[Any]:
    """Return the job ids of refused results from the log."""
    return [entry["job_id"] for entry in log if entry["event"] == JOB_RESULT_REFUSED]


def id_of(event: Event) -> int:
    """Return the id of the event's job."""
    assert event.job is not None
    return event.job.id


@pytest.mark.parametrize("n", [0, 1])
async def test_time_of_the_end(rig: Rig, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """The end of a job is computed from the moment at which its result is sent, although the
    transaction started earlier to check for locks. No job ends before it started (SK-19)."""
    look = jobs.job_lock_running

    async def slow(*args: Any) -> set[int]:
        free = await look(*args)
        await asyncio.sleep(0.3)
        return free

    monkeypatch.setattr(jobs, "job_lock_running", slow)

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.args.n:
            raise JobCancel("no")

    row = await rig.run_one_on_pool(Task(n), pooler=True, listen_url=rig.url)
    assert row["attempted_at"] <= row["finalized_at"]


class Gate:
    """Jobs wait at the gate, so that the test decides when they end."""

    def __init__(self) -> None:
        self.started: asyncio.Queue[Job[Task]] = asyncio.Queue()
        self.open = asyncio.Event()

    async def work(self, job: Job[Task]) -> None:
        self.started.put_nowait(job)
        await self.open.wait()


@pytest.fixture
def gate(rig: Rig) -> Gate:
    """Return a gate for jobs of kind `task`. Those with n = -1 fail after it."""
    gate = Gate()

    @rig.job(next_retry=lambda job: timedelta(0))
    async def work(job: Job[Task]) -> None:
        await gate.work(job)
        if job.args.n == -1:
            raise ValueError("no luck")

    return gate


async def test_group_commit(rig: Rig, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that end together are stored by one statement, separately for plain completions and
    others. Rows go in the order of their ids."""
    batches: list[list[int]] = []
    complete, settle = jobs.job_complete, jobs.job_store_results

    async def spy_complete(*args: Any, **values: Any) -> set[int]:
        batches.append(values["ids"])
        return await complete(*args, **values)

    async def spy_settle(connection: Any, schema: Any, results: Any) -> dict[int, str]:
        batches.append([one.id for one in results])
        return await settle(connection, schema, results)

    monkeypatch.setattr(jobs, "job_complete", spy_complete)
    monkeypatch.setattr(jobs, "job_store_results", spy_settle)
    await rig.insert_rows(30)
    await rig.schema.execute("""UPDATE river_job SET args = '{"n": -1}' WHERE id % 3 = 0""")
    async with rig.working(slots=30) as client:
        for _ in range(30):
            await gate.started.get()
        await client.queue_pause("default")
        await rig.event()
        gate.open.set()
        await rig.take(30)
    assert batches == [
        [n for n in range(1, 31) if n % 3],
        [n for n in range(1, 31) if n % 3 == 0],
    ]


@pytest.mark.parametrize("fails", [False, True])
async def test_result_of_a_locked_row_waits(rig: Rig, gate: Gate, fails: bool) -> None:
    """The result for a row that another transaction has locked waits. The other results do not."""
    await rig.insert_rows(20)
    if fails:
        await rig.schema.execute("""UPDATE river_job SET args = '{"n": -1}'""")
    async with rig.working(slots=20) as client:
        for _ in range(20):
            await gate.started.get()
        await client.queue_pause("default")
        await rig.event()
        async with rig.schema.connected() as other:
            transaction = other.transaction()
            await transaction.start()
            await other.execute("SELECT id FROM river_job WHERE id = 7 FOR UPDATE")
            gate.open.set()
            events = await rig.take(19)
            assert 7 not in {id_of(event) for event in events}
            await transaction.commit()
        assert id_of(await rig.event()) == 7
    assert await rig.states() == {"available" if fails else "completed": 20}


async def test_locked_row_is_told_of(
    rig: Rig, gate: Gate, log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that stays locked is logged once, and so is the moment at which no result waits any
    more."""
    monkeypatch.setattr(riverpy._work.completer, "LOCKED_ROW_LOG_DELAY", 0.0)
    await rig.insert_rows(3)
    async with rig.working(slots=3) as client:
        for _ in range(3):
            await gate.started.get()
        await client.queue_pause("default")
        await rig.event()
        async with rig.schema.connected() as other:
            transaction = other.transaction()
            await transaction.start()
            await other.execute("SELECT id FROM river_job WHERE id IN (1, 3) FOR UPDATE")
            gate.open.set()
            assert id_of(await rig.event()) == 2
            completer = client._run._completer  # type: ignore[union-attr]
            completer.flushed.init()
            for _ in range(3):
                await completer.flushed.wait()
            await transaction.commit()
        await rig.take(2)
    told = [entry for entry in log if entry["event"].startswith(("job result", "rejected"))]
    assert [entry["event"] for entry in told] == [JOB_RESULTS_REJECTED, REJECTED_JOB_RESULTS_STORED]
    assert told[0]["job_ids"] == [1, 3]
    assert "locks" in told[0]["error"]


async def test_waiting_result_is_stored_under_load(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiting result is stored although other results keep arriving: here one that is already
    stored is sent again with each statement."""
    held = asyncio.Event()
    seen: list[Any] = []
    outcomes = jobs.job_get_stored_outcomes

    @rig.job
    async def work(job: Job[Task]) -> None:
        seen.append(job)
        if job.id == 1:
            await held.wait()

    await rig.insert_rows(2)
    async with rig.working() as client:
        assert id_of(await rig.event()) == 2
        (decoy,) = (job for job in seen if job.id == 2)
        completer = client._run._completer  # type: ignore[union-attr]
        under_load = True

        async def never_ceasing(*args: Any) -> Any:
            if under_load:
                completer.add_ended_attempt(decoy)
            return await outcomes(*args)

        monkeypatch.setattr(jobs, "job_get_stored_outcomes", never_ceasing)
        async with rig.schema.connected() as other:
            transaction = other.transaction()
            await transaction.start()
            await other.execute("SELECT id FROM river_job WHERE id = 1 FOR UPDATE")
            held.set()
            completer.add_ended_attempt(decoy)
            while not completer._attempts_with_locked_rows:
                await rig.event()
            await transaction.commit()
        for _ in range(2_000):
            if id_of(await rig.event()) == 1:
                break
        else:
            raise AssertionError("the locked result was never stored")
        under_load = False
    assert (await rig.row(1))["state"] == "completed"


async def test_refused_result_fails_alone(rig: Rig, gate: Gate, log: list[dict[str, Any]]) -> None:
    """A result whose value the database refuses fails alone, and the rest of its batch is stored.
    It counts as a failed attempt, which may be the last one."""
    await rig.schema.execute(
        "ALTER TABLE river_job ADD CONSTRAINT poison"
        " CHECK (id NOT IN (13, 14) OR NOT metadata ? 'bad')"
    )
    rig.workers = type(rig.workers)()

    @rig.job
    async def work(job: Job[Task]) -> None:
        await gate.work(job)
        job.set_metadata("bad", 1)

    await rig.insert_rows(20)
    await rig.schema.execute("UPDATE river_job SET max_attempts = 1 WHERE id = 14")
    async with rig.working(slots=20):
        for _ in range(20):
            await gate.started.get()
        gate.open.set()
        events = await rig.take(20)
    await rig.schema.execute("ALTER TABLE river_job DROP CONSTRAINT poison")
    assert await rig.states() == {"completed": 18, "retryable": 1, "discarded": 1}
    assert (await rig.row(14))["state"] == "discarded"
    row = await rig.row(13)
    assert errors_of(row)[0]["error"] == "the result of this attempt could not be stored"
    assert metadata_of(row) == {}
    assert [event.kind for event in events if id_of(event) == 13] == [EventKind.JOB_FAILED]
    refused = [one["job_id"] for one in log if one["event"] == JOB_RESULT_REPLACED]
    assert sorted(refused) == [13, 14]


@pytest.mark.timeout(180)
async def test_result_that_can_never_be_stored(
    rig: Rig, gate: Gate, log: list[dict[str, Any]]
) -> None:
    """A row that accepts no result at all stays running. The worker continues and stops cleanly.
    The failure that replaces the result is made once."""
    await rig.schema.execute(
        "ALTER TABLE river_job ADD CONSTRAINT poison CHECK (id <> 2 OR state = 'running'"
        " OR state = 'available')"
    )
    await rig.insert_rows(3)
    gate.open.set()
    short = timedelta(milliseconds=500)
    async with rig.working(soft_stop_timeout=short, hard_stop_timeout=short):
        assert {id_of(event) for event in await rig.take(2)} == {1, 3}
        await rig.insert_rows(1)
    await rig.schema.execute("ALTER TABLE river_job DROP CONSTRAINT poison")
    assert (await rig.row(2))["state"] == "running"
    replaced = [one["job_id"] for one in log if one["event"] == JOB_RESULT_REPLACED]
    assert replaced == [2]


async def test_results_are_sent_in_the_order_of_ids(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two statements that lock rows in the same order cannot deadlock, for each outcome of jobs."""
    ends: dict[int, asyncio.Event] = {}
    sent: list[list[int]] = []
    complete = jobs.job_complete

    async def spy(*args: Any, ids: list[int], **values: Any) -> set[int]:
        sent.append(list(ids))
        return await complete(*args, ids=ids, **values)

    monkeypatch.setattr(jobs, "job_complete", spy)

    @rig.job
    async def work(job: Job[Task]) -> None:
        ends[job.id] = asyncio.Event()
        await ends[job.id].wait()

    await rig.insert_rows(20)
    async with rig.working():
        async with asyncio.timeout(PATIENCE):
            while len(ends) < 20:
                await asyncio.sleep(0.01)
        for job_id in sorted(ends, reverse=True):
            ends[job_id].set()
        await rig.take(20)
    assert max(map(len, sent)) > 1
    assert all(ids == sorted(ids) for ids in sent)


TAKEN = [
    "attempted_at = now()",
    "state = 'available', attempt = 0",
    "state = 'available'",
    "attempt = 2, attempted_at = now()",
    "state = 'cancelled', attempt = 2, finalized_at = now()",
]
"""What other sessions do to rows: a second claim, a return, a retry, a later attempt, a cancel."""


@pytest.mark.parametrize("fails", [False, True])
async def test_late_result_is_refused(
    rig: Rig, gate: Gate, log: list[dict[str, Any]], fails: bool
) -> None:
    """A result for a row that no longer belongs to the attempt is logged once and not stored. It
    causes no event, and the rest of its batch is stored (LD-13)."""
    taken = dict(enumerate(TAKEN, start=2))
    await rig.insert_rows(20)
    if fails:
        await rig.schema.execute("""UPDATE river_job SET args = '{"n": -1}'""")
    async with rig.working(slots=20) as client:
        for _ in range(20):
            await gate.started.get()
        await client.queue_pause("default")
        await rig.event()
        for job_id, change in taken.items():
            await rig.schema.execute(f"UPDATE river_job SET {change} WHERE id = $1", job_id)
        await rig.schema.execute("DELETE FROM river_job WHERE id = 1")
        rows = "SELECT * FROM river_job WHERE id = any($1) ORDER BY id"
        before = await rig.schema.fetch(rows, list(taken))
        gate.open.set()
        events = await rig.take(19 - len(taken))
    assert rig.report is not None
    assert rig.report.is_clean
    assert not {1, *taken} & {id_of(event) for event in events}
    assert sorted(refusals(log)) == [1, *taken]
    assert await rig.schema.fetch(rows, list(taken)) == before


@pytest.mark.parametrize("fails", [False, True])
async def test_two_attempts_of_one_job_end_together(
    rig: Rig, gate: Gate, log: list[dict[str, Any]], fails: bool
) -> None:
    """After a crash of the server undid a claim, a client can have two attempts at a job whose
    results arrive together. The result of the attempt that owns the row is stored and published.
    The other one is refused (LD-18)."""
    await rig.insert_rows(1)
    if fails:
        await rig.schema.execute("""UPDATE river_job SET args = '{"n": -1}'""")
    async with rig.working(slots=2, fetch_poll_interval=timedelta(milliseconds=50)):
        await gate.started.get()
        await rig.schema.execute(
            "UPDATE river_job SET state = 'available', attempt = 0, max_attempts = 1"
        )
        await gate.started.get()
        gate.open.set()
        first = await rig.event()
        await rig.insert_rows(1)
        second = await rig.event()
    assert rig.report is not None
    assert rig.report.is_clean
    assert [id_of(first), id_of(second)] == [1, 2]
    assert refusals(log) == [1]
    assert await rig.states() == ({"discarded": 1, "completed": 1} if fails else {"completed": 2})


async def test_lost_answer_is_success(rig: Rig, log: list[dict[str, Any]]) -> None:
    """A result whose statement succeeded but lost its answer is sent again, which counts as
    success: it is stored once and published once."""

    @rig.job(next_retry=lambda job: timedelta(hours=1))
    async def work(job: Job[Task]) -> None:
        match job.args.n:
            case 1:
                raise ValueError("no luck")
            case 2:
                raise JobSnooze(timedelta(hours=1))
            case 3:
                raise JobCancel("no")

    states: list[str] = []
    async with proxied(rig.url) as proxy, rig.working(url=proxy.url) as client:
        for n in range(4):
            proxy.lost_next_answer = RESULTS
            await client.insert(Task(n))
            event = await rig.event()
            assert proxy.lost_next_answer is None
            assert event.job is not None
            states.append(event.job.state)
    rows = await rig.schema.jobs()
    assert states == ["completed", "retryable", "scheduled", "cancelled"]
    assert [row["state"] for row in rows] == states
    assert [len(errors_of(row)) for row in rows] == [0, 1, 0, 1]
    assert not refusals(log)


async def test_terminated_backends(rig: Rig, gate: Gate) -> None:
    """While all connections are terminated repeatedly, each result is stored once, by its own
    attempt (LD-18)."""
    await rig.insert_rows(30)
    async with rig.working(slots=30):
        for _ in range(30):
            await gate.started.get()
        for _ in range(3):
            await rig.schema.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name ~ '^riverpy' AND datname = current_database()"
            )
            gate.open.set()
        await rig.take(30)
    rows = await rig.schema.jobs()
    assert {(row["state"], row["attempt"]) for row in rows} == {("completed", 1)}


async def test_database_outage(rig: Rig, gate: Gate, log: list[dict[str, Any]]) -> None:
    """Results wait while no connection is possible, and are stored afterwards. The log has one
    event for the loss and one for the recovery (LD-18)."""
    async with proxied(rig.url) as proxy, rig.working(url=proxy.url) as client:
        await client.insert(Task())
        await gate.started.get()
        proxy.refusing = True
        proxy.cut()
        gate.open.set()
        while CONNECTION_LOST not in [entry["event"] for entry in log]:
            await asyncio.sleep(0)
        assert client._run is not None
        while not client._run._completer.unstored_attempts:
            await asyncio.sleep(0)
        proxy.refusing = False
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED
        while CONNECTION_RESTORED not in [entry["event"] for entry in log]:
            await asyncio.sleep(0.01)
    lost = [entry for entry in log if entry["event"] == CONNECTION_LOST]
    assert len(lost) == 1


async def test_errors_of_a_driver(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of a connection that is just being lost, in a claim or while storing, are retried and
    end nothing."""
    rig.register_task()
    failing: dict[Any, Exception] = {}

    def failing_once(function: Any) -> Any:
        async def fail_once(*args: Any, **values: Any) -> Any:
            if function in failing:
                raise failing.pop(function)
            return await function(*args, **values)

        return fail_once

    functions = [(jobs, "job_complete"), (riverpy._work.producer, "job_claim")]
    originals = [getattr(module, name) for module, name in functions]
    for (module, name), function in zip(functions, originals, strict=True):
        monkeypatch.setattr(module, name, failing_once(function))
    async with rig.working() as client:
        for error in (
            asyncpg.InternalClientError("cannot switch to state 11"),
            asyncpg.InterfaceError("the underlying connection is closed"),
            asyncpg.AdminShutdownError("terminating connection"),
            asyncpg.DeadlockDetectedError("deadlock detected"),
            asyncpg.SerializationError("could not serialize access"),
            ConnectionResetError("reset"),
        ):
            failing.update(dict.fromkeys(originals, error))
            (row,) = await rig.work(client, Task())
            assert (row["state"], row["attempt"]) == ("completed", 1)
            assert failing == {}


async def test_half_open_connection(rig: Rig, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A results connection that does not answer is given up after its timeout. The result is stored
    over a new one."""
    monkeypatch.setattr(riverpy._work.completer, "RESULT_STATEMENT_TIMEOUT", 0.3)
    async with proxied(rig.url) as proxy, rig.working(url=proxy.url) as client:
        await client.insert(Task())
        await gate.started.get()
        proxy.hold(RESULTS)
        gate.open.set()
        async with asyncio.timeout(PATIENCE):
            await proxy.held.wait()
            while client._run._completer._connection._connection is not None:  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
        await proxy.release()
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED


async def test_read_only_server(rig: Rig, gate: Gate) -> None:
    """While the server refuses writes, as in a failover, results wait. Then they are stored."""
    name = await rig.schema.fetchval("SELECT quote_ident(current_database())")
    await rig.insert_rows(3)
    async with rig.working(slots=3) as client:
        for _ in range(3):
            await gate.started.get()
        await rig.schema.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        try:
            await rig.schema.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name ~ '^riverpy' AND datname = current_database()"
            )
            results = client._run._connections.results  # type: ignore[union-attr]
            connect, tries = results._connect, asyncio.Semaphore(0)

            async def counted() -> Any:
                connection = await connect()
                tries.release()
                return connection

            results._connect = counted
            gate.open.set()
            async with asyncio.timeout(PATIENCE):
                for _ in range(2):
                    await tries.acquire()
            assert await rig.states() == {"running": 3}
        finally:
            await rig.schema.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        await rig.take(3)
    assert await rig.states() == {"completed": 3}


async def test_statement_timeout(rig: Rig, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that exceeds the server's statement timeout is split until its parts are stored."""
    await rig.schema.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_sleep(0.02); RETURN NEW; END $$"
    )
    await rig.schema.execute(
        "CREATE TRIGGER slow BEFORE UPDATE ON river_job FOR EACH ROW"
        " WHEN (NEW.state = 'completed') EXECUTE FUNCTION slow()"
    )
    connect = riverpy._postgres.connection.connect

    async def with_timeout(*args: Any, session_settings: Any = None, **options: Any) -> Any:
        settings = {**(session_settings or {}), "statement_timeout": "250ms"}
        return await connect(*args, session_settings=settings, **options)

    monkeypatch.setattr(riverpy._postgres.connection, "connect", with_timeout)
    try:
        await rig.insert_rows(40)
        async with rig.working(slots=40):
            for _ in range(40):
                await gate.started.get()
            gate.open.set()
            await rig.take(40)
    finally:
        await rig.schema.execute("DROP FUNCTION slow() CASCADE")
    assert await rig.states() == {"completed": 40}


@pytest.mark.parametrize("hard", [False, True])
async def test_stop_while_a_result_is_stored(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, hard: bool
) -> None:
    """A result is not lost to a stop that arrives while it is being stored: 9 tries each way,
    with a slow completion."""
    sending = asyncio.Event()
    go_on = asyncio.Event()
    complete = jobs.job_complete

    async def slow(*args: Any, **values: Any) -> set[int]:
        sending.set()
        await go_on.wait()
        return await complete(*args, **values)

    monkeypatch.setattr(jobs, "job_complete", slow)

    rig.register_task()
    turns = range(0, 25, 3)
    for turn in turns:
        sending.clear()
        go_on.clear()
        async with rig.working() as client:
            await client.insert(Task(n=turn))
            await sending.wait()
            client.stop_and_cancel() if hard else client.stop()
            for _ in range(turn):
                await asyncio.sleep(0)
            asyncio.get_running_loop().call_later(0.001 * (turn % 5), go_on.set)
        assert rig.report is not None
        assert rig.report.is_clean
    rows = await rig.schema.jobs()
    assert [(row["state"], row["attempt"]) for row in rows] == [("completed", 1)] * len(turns)


async def test_results_that_cannot_be_stored_in_time(
    rig: Rig, gate: Gate, log: list[dict[str, Any]]
) -> None:
    """A stop while the database is away ends within its timeout and reports what is left."""
    async with proxied(rig.url) as proxy:
        bound = timedelta(milliseconds=500)
        client = rig.client(url=proxy.url, soft_stop_timeout=bound, hard_stop_timeout=bound)
        async with rig.running(client):
            for n in range(3):
                await client.insert(Task(n=n))
                await gate.started.get()
            proxy.refusing = True
            proxy.cut()
            gate.open.set()
    assert rig.report is not None
    assert rig.report.unstored == 3
    assert not rig.report.abandoned
    assert JOB_RESULTS_LEFT_UNSTORED in [entry["event"] for entry in log]
    assert await rig.states() == {"running": 3}


async def test_serializable_default(rig: Rig) -> None:
    """With a serializable default isolation no job is lost, run twice, or failed (TX-06)."""
    name = await rig.schema.fetchval("SELECT quote_ident(current_database())")
    ran: list[int] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        ran.append(job.id)

    await rig.insert_rows(500)
    await rig.schema.execute(
        f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'"
    )
    try:
        first, second = rig.client(slots=50), rig.client(slots=50)
        async with rig.running(first), rig.running(second):
            await rig.until_state("completed", 500)
    finally:
        await rig.schema.execute(f"ALTER DATABASE {name} RESET default_transaction_isolation")
    assert sorted(ran) == list(range(1, 501))


async def test_claims_wait_for_the_backlog(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """When results cannot be stored, claiming waits, which limits what a crash can lose."""
    monkeypatch.setattr(riverpy._work.completer, "RESULT_BACKLOG_MAX", 10)
    go_on = asyncio.Event()
    complete = jobs.job_complete

    async def slow(*args: Any, **values: Any) -> set[int]:
        await go_on.wait()
        return await complete(*args, **values)

    monkeypatch.setattr(jobs, "job_complete", slow)

    rig.register_task()
    await rig.insert_rows(100)
    async with rig.working(slots=5) as client:
        completer = client._run._completer  # type: ignore[union-attr]
        async with asyncio.timeout(PATIENCE):
            while completer.waiting_result_count <= 10:
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert len(completer.unstored_attempts) <= 5 + 10 + 5 + 5
        go_on.set()
        await rig.take(100)
