"""What the enqueuer inserts: each slot as its policy says, never twice, whatever fails."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy._log_events import (
    MISSED_PERIODIC_DUE_TIMES_DROPPED,
    PERIODIC_DUE_TIME_SKIPPED,
    PERIODIC_JOB_INSERTED_AGAIN,
)
from riverpy._maintenance import periodic_enqueuer
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._postgres.periodic import periodic_request_run
from riverpy.errors import FencedOutError
from riverpy.hooks import HookPeriodicJobsStartFunc
from riverpy.insert_opts import InsertOpts, UniqueOpts
from riverpy.job import JobState, RawArgs
from riverpy.periodic import PeriodicJob
from riverpy.schedules import cron, every
from tests._notifications import due_payload
from tests.kit.proxy import proxied
from tests.leading.term_context import StillTimer
from tests.periodic.enqueuing import MINUTELY, Grid, Tick, enqueuing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._maintenance.periodic_enqueuer import PeriodicJobPlan
    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.inserts import InsertRow
    from riverpy.periodic import ConstructorResult, MissedPolicy, PeriodicJobsStart, RunOnStart
    from riverpy.schedules import PeriodicSchedule
    from tests._database import Schema

SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)
UNIQUE = InsertOpts(unique_opts=UniqueOpts(by_args=True))
WAITING = ("available", "pending", "retryable", "running", "scheduled")


def ticks(job_id: str = "ticks", *, missed: MissedPolicy = "one") -> PeriodicJob:
    """A tick each minute."""
    return PeriodicJob(MINUTELY, Tick(), id=job_id, missed=missed)


# --- what is inserted


async def test_due_slot(schema: Schema) -> None:
    """A slot's job is available at the slot by the server's clock, with River's metadata, and
    workers are notified (SK-19)."""
    job = PeriodicJob(
        MINUTELY,
        lambda: (Tick(7), InsertOpts(metadata={"own": 1}, queue="other", priority=2)),
        id="ticks",
    )
    async with enqueuing(schema, job) as one, schema.connected() as listener:
        heard: list[object] = []
        await listener.add_listener(
            f"{schema.name}.river_insert", lambda *message: heard.append(message[3])
        )
        assert await one.run() == 5.0
        assert await schema.jobs() == []
        slot = await one.move("ticks", 10 * SECOND)
        assert await one.run() == 5.0
        (row,) = await schema.jobs()
        assert (row["state"], row["queue"], row["priority"]) == ("available", "other", 2)
        assert (row["scheduled_at"], row["kind"], row["args"]) == (slot, "tick", '{"number": 7}')
        metadata = json.loads(row["metadata"])
        run = metadata.pop("riverpy:periodic_run")
        assert metadata == {"own": 1, "periodic": True, "river:periodic_job_id": "ticks"}
        assert run["cause"] == "schedule"
        assert datetime.fromisoformat(run["due_at"]) == slot
        state = await one.row("ticks")
        assert (state["next_run_at"], state["last_run_at"]) == (slot + MINUTE, slot)
        await listener.execute("SELECT 1")
        assert heard == [due_payload("other")]


async def test_options_may_name_a_time(schema: Schema) -> None:
    """A constructor that gives a time, or pending, has its way (SK-15)."""
    at = datetime(2999, 1, 1, tzinfo=UTC)
    later = PeriodicJob(MINUTELY, lambda: (Tick(), InsertOpts(scheduled_at=at)), id="later")
    pending = PeriodicJob(MINUTELY, lambda: (Tick(), InsertOpts(pending=True)), id="pending")
    async with enqueuing(schema, later, pending) as one:
        for job_id in ("later", "pending"):
            await one.move(job_id, SECOND)
        await one.run()
        rows = {row["state"]: row for row in await schema.jobs()}
        assert rows["scheduled"]["scheduled_at"] == at
        assert rows["pending"]["metadata"].endswith('"river:periodic_job_id": "pending"}')


async def test_constructor_is_called_for_each_run(schema: Schema) -> None:
    """Args are made afresh for each run; None inserts nothing and the next run comes (SK-10)."""
    made = iter([Tick(1), None, Tick(2), Tick(3)])
    async with enqueuing(schema, PeriodicJob(MINUTELY, lambda: next(made), id="ticks")) as one:
        for _ in range(4):
            await one.move("ticks", SECOND)
            await one.run()
        assert [row["args"] for row in await schema.jobs()] == [
            f'{{"number": {n}}}' for n in (1, 2, 3)
        ]


async def test_unique_jobs_collapse(schema: Schema) -> None:
    """A unique job that exists is not inserted again; its period is the slot's, whatever the clock
    of the process says (SK-19)."""
    by_period = UniqueOpts(by_period=HOUR)
    unique = PeriodicJob(MINUTELY, lambda: (Tick(), UNIQUE), id="unique")
    hourly = PeriodicJob(
        every(HOUR),
        lambda: (RawArgs("hourly", "{}"), InsertOpts(unique_opts=by_period)),
        id="hourly",
        missed="all",
    )
    async with enqueuing(schema, unique, hourly) as one:
        await one.move("hourly", 2.5 * HOUR)
        for _ in range(2):
            await one.move("unique", SECOND)
            await one.run()
        assert len(await one.slots("unique")) == 1
        assert len(await one.slots("hourly")) == 3


async def finish(schema: Schema) -> int:
    """Let the only job be one of ten minutes ago, and completed. Returns its id."""
    return await schema.fetchval(
        "UPDATE river_job SET state = 'completed', finalized_at = now(),"
        " scheduled_at = scheduled_at - interval '10 minutes' RETURNING id"
    )


async def test_lost_slots_are_reported(schema: Schema, log: list[Any]) -> None:
    """A slot that a finished job keeps from being inserted is reported, once, with the remedy; the
    last slot of a periodic job is that of a job that exists (FR-11)."""
    unique = PeriodicJob(MINUTELY, lambda: (Tick(), UNIQUE), id="unique")
    async with enqueuing(schema, unique) as one:
        await one.move("unique", SECOND)
        await one.run()
        (inserted,) = await one.slots("unique")
        assert (await one.row("unique"))["last_run_at"] == inserted
        job_id = await finish(schema)
        for ago in (60, 30, 0):
            await one.move("unique", ago * SECOND)
            await one.run()
        assert len(await one.slots("unique")) == 1
        assert (await one.row("unique"))["last_run_at"] == inserted
        assert (await one.row("unique"))["next_run_at"] > inserted
    entries = [entry for entry in log if entry["event"] == PERIODIC_DUE_TIME_SKIPPED]
    warnings = [entry for entry in entries if entry["log_level"] == "warning"]
    assert len(entries) == 3
    (warning,) = warnings
    assert (warning["periodic_job_id"], warning["job_id"]) == ("unique", job_id)
    assert warning["state"] == "completed"
    assert "by_state" in warning["advice"]


async def test_slots_are_skipped_while_a_job_runs(schema: Schema, log: list[Any]) -> None:
    """With `completed` left out of the states a slot is skipped only while a job of an earlier one
    waits or runs, which is no warning (FR-11)."""
    states = [state for state in JobState if state.value in WAITING]
    opts = InsertOpts(unique_opts=UniqueOpts(by_args=True, by_state=states))
    unique = PeriodicJob(MINUTELY, lambda: (Tick(), opts), id="unique")
    async with enqueuing(schema, unique) as one:
        for inserted, ended in ((1, False), (1, True), (2, False)):
            await one.move("unique", SECOND)
            await one.run()
            assert len(await one.slots("unique")) == inserted
            if ended:
                await finish(schema)
    assert [entry["log_level"] for entry in log if entry["event"] == PERIODIC_DUE_TIME_SKIPPED] == [
        "debug"
    ]


# --- missed slots


@pytest.mark.parametrize(
    ("missed", "ago", "inserted"),
    [
        ("one", 0, [0]),
        ("one", 90, [60]),
        ("one", 3 * 86400, [3 * 86400]),
        ("skip", 20, [0]),
        ("skip", 50, []),
        ("skip", 80, [60]),
        ("all", 150, [0, 60, 120]),
    ],
)
async def test_missed(schema: Schema, missed: MissedPolicy, ago: int, inserted: list[int]) -> None:
    """After a gap one job, none, or one for each slot, at its own time, as the policy says; then
    the schedule goes on. A skipped slot may be 30 s late (SK-05)."""
    async with enqueuing(schema, ticks(missed=missed)) as one:
        slot = await one.move("ticks", timedelta(seconds=ago))
        await one.run()
        assert await one.slots("ticks") == [slot + timedelta(seconds=late) for late in inserted]
        following = (await one.row("ticks"))["next_run_at"]
        assert following == slot + (ago // 60 + 1) * MINUTE
        await one.run()
        assert len(await one.slots("ticks")) == len(inserted)


@pytest.mark.parametrize(
    ("schedule", "step"),
    [
        (every(SECOND), SECOND),
        (cron("* * * * *", timezone="Europe/Berlin"), MINUTE),
        (Grid(HOUR), HOUR),
        (Grid(MINUTE), MINUTE),
    ],
)
async def test_many_missed(
    schema: Schema,
    log: list[dict[str, object]],
    schedule: PeriodicSchedule,
    step: timedelta,
) -> None:
    """After a year `all` catches up with the newest 1,000, and says so."""
    job = PeriodicJob(schedule, Tick(), id="ticks", missed="all")
    async with enqueuing(schema, job) as one:
        await one.move("ticks", timedelta(days=365))
        began = await schema.fetchval("SELECT now()")
        await one.run()
        slots = await one.slots("ticks")
        passed = await schema.fetchval("SELECT now()") - began
        assert {later - earlier for earlier, later in pairwise(slots)} == {step}
        assert 1000 <= len(slots) <= 1001 + passed / step
        assert slots[-1] > began - step
        assert MISSED_PERIODIC_DUE_TIMES_DROPPED in str(log)


async def test_schedule_does_not_drift(schema: Schema) -> None:
    """The next slot is counted from the last, however late that was inserted (SK-08)."""
    async with enqueuing(schema, ticks()) as one:
        first = await one.move("ticks", HOUR)
        await one.run()
        state = await one.row("ticks")
        assert (state["next_run_at"] - first) % MINUTE == timedelta(0)


# --- terms


async def test_two_leaders(schema: Schema) -> None:
    """Two processes that both act as leader insert each slot once, and each run on start
    and each run that was asked for."""
    jobs = [
        PeriodicJob(Grid(SECOND), Tick(), id=f"ticks-{n}", missed="all", run_on_start=True)
        for n in range(5)
    ]
    async with (
        enqueuing(schema, *jobs) as one,
        enqueuing(schema, *jobs, term=one.held.term) as other,
    ):
        for _ in range(3):
            await schema.execute("DELETE FROM river_job")
            await schema.execute(
                "UPDATE riverpy_periodic SET run_requested_at = now(),"
                " next_run_at = date_trunc('seconds', now()) - interval '20 seconds'"
            )
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(one.held.run, one.enqueuer)
                    tasks.start_soon(other.held.run, other.enqueuer)
            await one.run()
            for job in jobs:
                slots = await one.slots(job.id)
                on_grid = [slot for slot in slots if slot.microsecond == 0]
                assert len(on_grid) == len(set(on_grid)) >= 21
                assert len(slots) == len(on_grid) + 1


async def test_deposed_inserts_nothing(schema: Schema) -> None:
    """A leader that another has followed is refused, and its slots are the other's."""
    async with enqueuing(schema, ticks()) as one:
        slot = await one.move("ticks", SECOND)
        await one.held.take_over()
        with pytest.raises(FencedOutError):
            await one.run()
        assert one.held.is_refused
        assert await schema.jobs() == []
        assert (await one.row("ticks"))["next_run_at"] == slot


async def test_terms_share_slots(schema: Schema) -> None:
    """A periodic job with an interval longer than any term runs: the next slot is stored, and each
    leader reads it (SK-06). A job that was added at run time keeps its next slot when it is added
    again (SK-12)."""
    job, added = ticks(), ticks("added")
    for ago, inserted in ((None, 0), (-20, 0), (-10, 0), (0, 1), (None, 1)):
        async with enqueuing(schema, job) as one:
            one.jobs.add(added)
            if ago is not None:
                for job_id in ("ticks", "added"):
                    await one.move(job_id, timedelta(seconds=ago))
            await one.run()
            assert len(await one.slots("ticks")) == inserted
            assert len(await one.slots("added")) == inserted
        await schema.execute("DELETE FROM river_leader")


@pytest.mark.parametrize(
    ("run_on_start", "runs"),
    [("never", [0, 0]), ("first_registration", [1, 1]), ("each_term", [1, 2])],
)
async def test_run_on_start(schema: Schema, run_on_start: RunOnStart, runs: list[int]) -> None:
    """A run on start is inserted when its client leads, once for each term or for ever (LM-15)."""
    job = PeriodicJob(every(HOUR), Tick(), id="ticks", run_on_start=run_on_start)
    for expected in runs:
        async with enqueuing(schema, job) as one:
            await one.enqueuer.prepare()
            await one.run()
            assert len(await one.slots("ticks")) == expected
        await schema.execute("DELETE FROM river_leader")


async def test_paused_is_not_run_on_start(schema: Schema) -> None:
    """A job that is paused has no run on start."""
    job = PeriodicJob(every(HOUR), Tick(), id="ticks", run_on_start=True)
    await schema.execute(
        "INSERT INTO riverpy_periodic (id, schedule, paused_at) VALUES ('ticks', 'every 1h', now())"
    )
    async with enqueuing(schema, job) as one:
        await one.run()
        assert await schema.jobs() == []


async def test_changed_schedule(schema: Schema) -> None:
    """A job whose schedule has changed begins again; one with the same schedule continues."""
    async with enqueuing(schema, ticks()) as one:
        slot = await one.move("ticks", -30 * SECOND)
    await schema.execute("DELETE FROM river_leader")
    async with enqueuing(schema, ticks()) as one:
        assert (await one.row("ticks"))["next_run_at"] == slot
    await schema.execute("DELETE FROM river_leader")
    job = PeriodicJob(every(HOUR), Tick(), id="ticks")
    async with enqueuing(schema, job) as one:
        row = await one.row("ticks")
        assert row["schedule"] == "every 1h"
        assert row["next_run_at"] - row["updated_at"] > 59 * MINUTE


# --- failures


@pytest.mark.parametrize(
    "error", [ValueError("not today"), SystemExit(1), asyncio.CancelledError(), StopIteration()]
)
async def test_failed_constructor_keeps_its_slot(
    schema: Schema,
    log: list[dict[str, object]],
    error: BaseException,
) -> None:
    """A slot whose job cannot be made is tried again, and is inserted once (SK-07)."""
    fails = [True]

    def construct() -> Tick:
        if fails:
            raise error
        return Tick()

    job = PeriodicJob(MINUTELY, construct, id="ticks")
    async with enqueuing(schema, job, timer=StillTimer()) as one:
        slot = await one.move("ticks", SECOND)
        assert 0.5 < await one.run() < 1.5
        assert (await one.row("ticks"))["next_run_at"] == slot
        fails.clear()
        await one.run()
        assert await schema.jobs() == []
        one.wait_out_holds()
        await one.run()
        assert await one.slots("ticks") == [slot]
        failed, works = log
        assert type(error).__name__ in str(failed["error"])
        assert failed["exc_info"] is not None
        assert works["event"] == PERIODIC_JOB_INSERTED_AGAIN


async def test_refused_insert_keeps_its_slot(schema: Schema) -> None:
    """Recording a slot and inserting its job is one step: neither is there without the other. One
    that is refused delays no other (SK-07)."""
    await schema.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN RAISE EXCEPTION 'refused'; END$$;"
        " CREATE TRIGGER refuse BEFORE INSERT ON river_job FOR EACH ROW WHEN (NEW.kind = 'bad')"
        " EXECUTE FUNCTION refuse()"
    )
    try:
        bad = PeriodicJob(MINUTELY, RawArgs("bad", "{}"), id="bad")
        async with enqueuing(schema, *(ticks(f"good-{n}") for n in range(6)), bad) as one:
            slots = {job.id: await one.move(job.id, SECOND) for job in one.jobs}
            await one.run()
            assert (await one.row("bad"))["next_run_at"] == slots["bad"]
            assert len(await schema.jobs()) == 6
            await schema.execute("DROP TRIGGER refuse ON river_job")
            one.wait_out_holds()
            await one.run()
            assert await one.slots("bad") == [slots["bad"]]
            assert len(await schema.jobs()) == 7
    finally:
        await schema.execute("DROP FUNCTION refuse CASCADE")


async def test_many_with_failing_ones(schema: Schema) -> None:
    """Of 300 jobs due at once one fails and one exists: 298 are inserted, and so they are when they
    are due again (SK-11)."""

    def fail() -> Tick:
        raise ValueError("number 7")

    def constructor(number: int) -> ConstructorResult:
        return RawArgs("numbered", f'{{"number": {number}}}'), UNIQUE

    jobs = [
        PeriodicJob(MINUTELY, fail if n == 7 else lambda n=n: constructor(n), id=f"job-{n}")
        for n in range(300)
    ]
    async with enqueuing(schema, *jobs) as one:
        await schema.execute("UPDATE riverpy_periodic SET next_run_at = now()")
        await one.run()
        assert await schema.fetchval("SELECT count(*) FROM river_job") == 299
        await schema.execute("DELETE FROM river_job WHERE args->>'number' <> '9'")
        await schema.execute("UPDATE riverpy_periodic SET next_run_at = now()")
        await one.run()
        assert await schema.fetchval("SELECT count(*) FROM river_job") == 299


async def test_failing_schedule_keeps_nobody(schema: Schema) -> None:
    """A schedule of the user's own that fails later is held, and the others go on."""

    class Broken(Grid):
        def next(self, after: datetime, /) -> datetime | None:
            if broken:
                raise ValueError("broken")
            return super().next(after)

    broken: list[bool] = []
    job = PeriodicJob(Broken(MINUTE), Tick(), id="broken")
    async with enqueuing(schema, job, ticks()) as one:
        broken.append(True)
        for job_id in ("broken", "ticks"):
            await one.move(job_id, SECOND)
        await one.run()
        assert len(await one.slots("ticks")) == 1
        assert await one.slots("broken") == []


async def test_failure_between_slots(schema: Schema) -> None:
    """`all` inserts what could be made before a failure, and goes on from there."""
    made = iter([Tick(1), Tick(2)])
    job = PeriodicJob(MINUTELY, lambda: next(made), id="ticks", missed="all")
    async with enqueuing(schema, job) as one:
        slot = await one.move("ticks", 5 * MINUTE + SECOND)
        await one.run()
        assert await one.slots("ticks") == [slot, slot + MINUTE]
        assert (await one.row("ticks"))["next_run_at"] == slot + 2 * MINUTE
        made = iter(Tick(n) for n in range(10))
        one.wait_out_holds()
        await one.run()
        assert await one.slots("ticks") == [slot + n * MINUTE for n in range(6)]


async def test_lost_answer(schema: Schema) -> None:
    """A commit whose answer was lost has inserted its slot; it is not inserted again."""
    async with enqueuing(schema, ticks()) as one:
        slot = await one.move("ticks", SECOND)
        transact = one.enqueuer._update_rows_and_insert_jobs

        async def lose_answer(firings: Sequence[PeriodicJobPlan]) -> set[str]:
            await transact(firings)
            raise ConnectionError("the answer was lost")

        one.enqueuer._update_rows_and_insert_jobs = lose_answer
        with pytest.raises(ConnectionError):
            await one.run()
        one.enqueuer._update_rows_and_insert_jobs = transact
        one.wait_out_holds()
        await one.run()
        assert await one.slots("ticks") == [slot]


async def test_lost_connection(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is lost during an insert is an outage, and the slot is inserted on another
    one."""
    async with enqueuing(schema, ticks()) as one:
        insert_rows = one.enqueuer._inserter.insert_prepared_jobs

        async def cut(rows: list[InsertRow], *, tx: Transaction) -> object:
            monkeypatch.undo()
            pid = await tx.fetchval("SELECT pg_backend_pid()")
            await schema.execute("SELECT pg_terminate_backend($1, 5000)", pid)
            return await insert_rows(rows, tx=tx)

        monkeypatch.setattr(one.enqueuer._inserter, "insert_prepared_jobs", cut)
        slot = await one.move("ticks", SECOND)
        with pytest.raises(DATABASE_ERRORS, match=r"closed|ended"):
            await one.run()
        one.wait_out_holds()
        await one.run()
        assert await one.slots("ticks") == [slot]


@pytest.mark.parametrize("stage", ["begin", "insert"])
async def test_frozen_backend(schema: Schema, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """A statement that is not answered is given up at its limit, its transaction is undone, and the
    slot is inserted once on a new connection (LM-05)."""
    url = schema.url
    async with proxied(url) as proxy:
        schema.url = proxy.url

        def construct() -> Tick:
            if stage == "begin":
                proxy.hold("context leader")
            return Tick()

        async with enqueuing(schema, PeriodicJob(MINUTELY, construct, id="ticks")) as one:
            fence = one.held.context.fence
            limit, fence.transaction_timeout = fence.transaction_timeout, SECOND
            insert_rows = one.enqueuer._inserter.insert_prepared_jobs

            async def insert(rows: list[InsertRow], *, tx: Transaction | None) -> object:
                if stage == "insert":
                    proxy.hold("context leader")
                return await insert_rows(rows, tx=tx)

            monkeypatch.setattr(one.enqueuer._inserter, "insert_prepared_jobs", insert)
            slot = await one.move("ticks", SECOND)
            with suppress(TimeoutError):  # it may be the fault of the periodic job, which is held
                await one.run()
            assert proxy.held.is_set()
            stage, fence.transaction_timeout = "over", limit
            await proxy.release()
            with anyio.fail_after(20):
                while not await one.slots("ticks"):
                    one.wait_out_holds()
                    await one.run()
            await one.run()
            assert await one.slots("ticks") == [slot]
        schema.url = url


async def test_locked_row_keeps_nobody(schema: Schema) -> None:
    """A row that another transaction has locked waits; the others do not."""
    async with enqueuing(schema, ticks("locked"), ticks("free")) as one:
        for job_id in ("locked", "free"):
            await one.move(job_id, SECOND)
        async with schema.connected() as other, other.transaction():
            await other.execute("UPDATE riverpy_periodic SET paused_at = now() WHERE id = 'locked'")
            assert await one.run() <= 1.0
            assert len(await one.slots("free")) == 1
        await one.run()
        assert await one.slots("locked") == []


# --- while it runs


async def test_paused(schema: Schema) -> None:
    """What is paused passes its slots over, and does not catch up with them; a pause is kept from
    one leader to the next."""
    async with enqueuing(schema, ticks(missed="all")) as one:
        await schema.execute("UPDATE riverpy_periodic SET paused_at = now()")
        slot = await one.move("ticks", 150 * SECOND)
        await one.run()
    await schema.execute("DELETE FROM river_leader")
    async with enqueuing(schema, ticks(missed="all")) as one:
        assert (await one.row("ticks"))["next_run_at"] == slot + 3 * MINUTE
        await schema.execute("UPDATE riverpy_periodic SET paused_at = NULL")
        await one.run()
        assert await schema.jobs() == []
        slot = await one.move("ticks", SECOND)
        await one.run()
        assert await one.slots("ticks") == [slot]


async def test_requested_run(schema: Schema) -> None:
    """A run that was asked for is inserted once, paused or not, beside the slots."""
    async with enqueuing(schema, ticks()) as one:
        slot = await one.move("ticks", SECOND)
        await schema.execute("UPDATE riverpy_periodic SET run_requested_at = now()")
        await one.run()
        assert len(await one.slots("ticks")) == 2
        assert slot in await one.slots("ticks")
        await schema.execute(
            "UPDATE riverpy_periodic SET run_requested_at = now(), paused_at = now()"
        )
        await one.run()
        await one.run()
        assert len(await one.slots("ticks")) == 3


CAUSES = (
    "SELECT metadata -> 'riverpy:periodic_run' ->> 'cause' AS cause,"
    " metadata -> 'riverpy:periodic_run' ->> 'user' AS user FROM river_job ORDER BY id"
)


async def find_causes(schema: Schema) -> list[tuple[str | None, str | None]]:
    """Return why the jobs were inserted, and by which users, and delete the jobs."""
    causes = [(row["cause"], row["user"]) for row in await schema.fetch(CAUSES)]
    await schema.execute("DELETE FROM river_job")
    return causes


async def request_run(schema: Schema, user: str | None) -> None:
    """Request a run of `ticks`."""
    async with schema.connected() as connection, connection.transaction():
        await periodic_request_run(connection, None, "ticks", user=user)


async def test_cause_of_a_run(schema: Schema) -> None:
    """The metadata of a job say why it was inserted: by its schedule, by `run_on_start`, or because
    a user requested the run. The first of two requests counts. A note that belongs to an earlier
    request, or cannot be read, says nothing. Without the column, all but the schedule are not
    known."""
    job = PeriodicJob(MINUTELY, Tick(), id="ticks", run_on_start=True)
    other = PeriodicJob(MINUTELY, Tick(), id="other", run_on_start="first_registration")
    async with enqueuing(schema, job, other) as one:
        await one.run()
        assert await find_causes(schema) == [("start", None)] * 2
        await one.move("ticks", SECOND)
        await one.run()
        assert await find_causes(schema) == [("schedule", None)]
        await request_run(schema, None)
        await one.run()
        assert await find_causes(schema) == [("request", None)]
        await request_run(schema, "ann")
        await request_run(schema, "bob")
        await one.run()
        assert await find_causes(schema) == [("request", "ann")]
        for note in ("run_request", "'5'", """'{"cause": "start", "at": "2999-01-01T00:00:00"}'"""):
            await schema.execute(
                f"UPDATE riverpy_periodic SET run_requested_at = now(), run_request = {note}"
                " WHERE id = 'ticks'"
            )
            await one.run()
            assert await find_causes(schema) == [(None, None)]
        await schema.execute("ALTER TABLE riverpy_periodic RENAME COLUMN run_request TO moved")
        try:
            await request_run(schema, "ann")
            await one.run()
            assert await find_causes(schema) == [(None, None)]
            await one.move("ticks", SECOND)
            await one.run()
            assert await find_causes(schema) == [("schedule", None)]
        finally:
            await schema.execute("ALTER TABLE riverpy_periodic RENAME COLUMN moved TO run_request")


async def test_changes_while_running(schema: Schema) -> None:
    """Jobs are added and removed at run time; a removed one inserts nothing more."""
    async with enqueuing(schema) as one:
        assert await one.run() == 5.0
        one.jobs.add(ticks("first"))
        assert one.enqueuer._wake_event.is_set()
        one.jobs.add_many(
            [ticks("second"), PeriodicJob(MINUTELY, Tick(), id="third", run_on_start=True)]
        )
        await one.run()
        assert len(await one.slots("third")) == 1
        one.jobs.remove("first")
        for job_id in ("first", "second", "third"):
            await one.move(job_id, SECOND)
        await one.run()
        assert [len(await one.slots(job_id)) for job_id in ("first", "second", "third")] == [
            0,
            1,
            2,
        ]
        one.jobs.clear()
        await one.move("second", SECOND)
        assert await one.run() == 5.0
        one.jobs.add(ticks("second"))
        await one.run()
        assert len(await one.slots("second")) == 2


async def test_unused_rows_are_forgotten(schema: Schema) -> None:
    """The row of a job that no client has goes after 30 days, but for a paused one."""
    async with enqueuing(schema, ticks("used")) as one:
        await schema.execute(
            "INSERT INTO riverpy_periodic (id, schedule, paused_at, updated_at) VALUES"
            " ('old', 'every 1h', NULL, now() - interval '31 days'),"
            " ('paused', 'every 1h', now(), now() - interval '31 days'),"
            " ('unused', 'every 1h', NULL, now() - interval '29 days')"
        )
        await schema.execute(
            "UPDATE riverpy_periodic SET updated_at = now() - interval '31 days' WHERE id = 'used'"
        )
        await one.run()
        ids = await schema.fetch("SELECT id FROM riverpy_periodic ORDER BY id")
        assert [row[0] for row in ids] == ["paused", "unused", "used"]
        assert (
            await schema.fetchval(
                "SELECT updated_at = now() FROM riverpy_periodic WHERE id = 'used'"
            )
            is False
        )


async def test_without_table(
    schema: Schema,
    log: list[dict[str, object]],
) -> None:
    """Without version 2 of line `riverpy` periodic jobs are off, which is said once, with the
    command; when the table comes, they begin."""
    hooked: list[PeriodicJobsStart] = []

    async def hook(start: PeriodicJobsStart) -> None:
        hooked.append(start)

    await schema.execute("ALTER TABLE riverpy_periodic RENAME TO elsewhere")
    try:
        async with enqueuing(schema, ticks(), hooks=[HookPeriodicJobsStartFunc(hook)]) as one:
            assert await one.run() == 60.0
            assert await one.run() == 60.0
            (said,) = log
            assert said["log_level"] == "error"
            assert "riverpy migrate up --line riverpy" in str(said["reason"])
            assert [start.states for start in hooked] == [{}]
            await schema.execute("ALTER TABLE elsewhere RENAME TO riverpy_periodic")
            await one.run()
            await one.move("ticks", SECOND)
            await one.run()
            assert len(await one.slots("ticks")) == 1
    finally:
        await schema.execute("ALTER TABLE IF EXISTS elsewhere RENAME TO riverpy_periodic")


# --- the hook


async def test_start_hook(schema: Schema) -> None:
    """The hook gets the registry and what the database knows; what it adds and removes counts."""
    seen: list[dict[str, str]] = []

    async def hook(start: PeriodicJobsStart) -> None:
        seen.append({job_id: state.schedule for job_id, state in start.states.items()})
        start.jobs.remove("removed")
        if "added" not in start.jobs:
            start.jobs.add(ticks("added"))

    for _ in range(2):
        async with enqueuing(
            schema, ticks("stays"), ticks("removed"), hooks=[HookPeriodicJobsStartFunc(hook)]
        ) as one:
            assert [job.id for job in one.jobs] == ["stays", "added"]
            assert await one.row("added") is not None
            assert await one.row("removed") is None
        await schema.execute("DELETE FROM river_leader")
    assert seen == [{}, {"added": "every 1m", "stays": "every 1m"}]


async def test_failing_start_hook(schema: Schema) -> None:
    """A hook that raises, or hangs, makes the start fail before anything is registered."""

    async def fail(start: PeriodicJobsStart) -> None:
        raise ZeroDivisionError(start)

    with pytest.raises(ZeroDivisionError):
        async with enqueuing(schema, ticks(), hooks=[HookPeriodicJobsStartFunc(fail)]):
            pytest.fail("it started")
    assert await schema.fetchval("SELECT count(*) FROM riverpy_periodic") == 0


@pytest.mark.parametrize("raised", [SystemExit(1), asyncio.CancelledError()])
async def test_start_hook_that_seems_to_end_all(schema: Schema, raised: BaseException) -> None:
    """What ends a process or a task is a failure of the hook, and ends neither."""

    async def fail(start: PeriodicJobsStart) -> None:
        raise raised

    with pytest.raises(RuntimeError, match="the hook periodic_jobs_start raised"):
        async with enqueuing(schema, ticks(), hooks=[HookPeriodicJobsStartFunc(fail)]):
            pytest.fail("it started")


async def test_hanging_start_hook(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that does not end makes the start fail at its limit, by its name."""
    monkeypatch.setattr(periodic_enqueuer, "START_HOOKS_TIMEOUT", 0.01)

    async def hang(start: PeriodicJobsStart) -> None:
        del start
        await anyio.sleep_forever()

    with pytest.raises(TimeoutError, match="the hook periodic_jobs_start"):
        async with enqueuing(schema, ticks(), hooks=[HookPeriodicJobsStartFunc(hang)]):
            pytest.fail("it started")


@pytest.mark.parametrize("sqlstate", ["40001", "53100", "58030", "P0001", "XX001"])
async def test_row_that_the_server_refuses(schema: Schema, sqlstate: str) -> None:
    """A periodic job whose row the server refuses, with whatever class of error, keeps neither the
    others nor the start of a term."""
    await schema.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF NEW.id = 'bad' THEN RAISE EXCEPTION 'no' USING ERRCODE = '{sqlstate}'; END IF;"
        " RETURN NEW; END $$;"
        " CREATE TRIGGER refuse BEFORE INSERT ON riverpy_periodic"
        " FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    try:
        async with enqueuing(schema, ticks("bad"), ticks("good")) as one:
            with suppress(*DATABASE_ERRORS):  # the first error of its kind fails a pass
                await one.run()
            await one.run()
            slot = await one.move("good", SECOND)
            await one.run()
            assert await one.slots("good") == [slot]
    finally:
        await schema.execute("DROP FUNCTION refuse CASCADE")
