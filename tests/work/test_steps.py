"""Steps of a job: which run again, what is kept, and what is stored at once."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from riverpy import AttemptLostError, ClientStateError, EventKind, InsertOpts, Job
from riverpy._work import attempt_store, steps
from riverpy._work.attempt_store import AttemptStore
from tests.work.rig import Rig, Task, errors_of, metadata_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

STEP, CURSOR, KEPT = "river:resumable_step", "river:resumable_cursor", "riverpy:steps"
KEPT_SUMMARY = {"text": "short", "parts": [1, 2]}


class Summary(msgspec.Struct):
    """A result that is no plain JSON."""

    text: str
    parts: tuple[int, ...]


class Ran(list[str]):
    """The names of the steps that ran."""

    def step(self, name: str, result: Any = None) -> Callable[[], Any]:
        """Return a function for a step."""

        def run() -> Any:
            self.append(name)
            return result

        return run


@pytest.fixture
def ran() -> Ran:
    """Return the list of the steps that ran."""
    return Ran()


async def nothing() -> None:
    """Do nothing, as a step."""


async def test_kept_results(rig: Rig, ran: Ran) -> None:
    """A kept result is in the row before its step returns. A later attempt gets it and does not run
    the step. A result_type decodes it. Both attempts get the same value. A plain step before the
    stored step does not run again either."""
    got: list[Any] = []
    stored: list[Any] = []

    async def summarise(text: str) -> Summary:
        ran.append("summarise")
        return Summary(text, (1, 2))

    @rig.job(next_retry=lambda job: timedelta(0))
    async def work(job: Job[Task]) -> None:
        await job.step("plain", ran.step("plain"))
        summary = await job.step("sum", summarise, "short", keep=True, result_type=Summary)
        stored.append(metadata_of(await rig.row(job.id)))
        got.append((summary, await job.step("count", ran.step("count", [2**70]), keep=True)))
        if job.attempt == 1:
            raise ValueError

    await rig.insert_rows(1)
    results = await rig.work_due_jobs()
    assert [result.event.kind for result in results] == [
        EventKind.JOB_FAILED,
        EventKind.JOB_COMPLETED,
    ]
    assert ran == ["plain", "summarise", "count"]
    assert got == [(Summary("short", (1, 2)), [2**70])] * 2
    assert stored[0] == {STEP: "sum", KEPT: {"sum": KEPT_SUMMARY}}
    last = {STEP: "count", KEPT: {"sum": KEPT_SUMMARY, "count": [2**70]}}
    assert stored[1] == last == metadata_of((await rig.schema.jobs())[0])


async def test_result_that_was_not_kept(rig: Rig, ran: Ran) -> None:
    """A step whose result should be kept runs again if an earlier attempt, for instance in Go, has
    completed it and kept no result. The stored step does not go back."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        await job.step("first", ran.step("first"), keep=True)
        await job.step("second", ran.step("second"))
        await job.step("third", ran.step("third"))
        raise ValueError

    row = await rig.run_one(opts=InsertOpts(metadata={STEP: "second", KEPT: "odd"}, max_attempts=1))
    assert ran == ["first", "third"]
    assert metadata_of(row) == {STEP: "third", KEPT: {"first": None}}


async def _catch(awaitable: Awaitable[object]) -> None:
    try:
        await awaitable
    except Exception:  # the attempt must fail all the same
        return
    raise AssertionError("there was no error")


async def _caught(job: Job[Task]) -> None:
    async def fail() -> None:
        raise LookupError("lost")

    await _catch(job.step("a", fail))
    await _catch(job.step("b", nothing))


async def _nested(job: Job[Task]) -> None:
    async def outer() -> None:
        await _catch(job.step("inner", nothing))

    await _catch(job.step("outer", outer))


async def _together(job: Job[Task]) -> None:
    started, end = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        started.set()
        await end.wait()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(job.step("a", wait))
        await started.wait()
        await _catch(job.step("b", nothing))
        end.set()


async def _not_awaited(job: Job[Task]) -> None:
    NOT_AWAITED.add(asyncio.ensure_future(job.step("a", asyncio.sleep, 3600)))
    await asyncio.sleep(0)


async def _cancelled(job: Job[Task]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await job.step("a", asyncio.sleep, 3600)


async def _cursor_outside(job: Job[Task]) -> None:
    job.set_cursor(1)


async def _cursor_of_a_plain_step(job: Job[Task]) -> None:
    await job.step("a", lambda: job.set_cursor(1))


async def _cursor_of_another_type(job: Job[Task]) -> None:
    async def move(cursor: int | None) -> None:
        job.set_cursor(None)
        job.set_cursor("x")

    await job.step("a", move, cursor=int)


async def _no_json(job: Job[Task]) -> None:
    await _catch(job.step("a", lambda: {1, 2}, keep=True))  # type: ignore[arg-type, type-var]


async def _other_type(job: Job[Task]) -> None:
    await job.step("a", lambda: "x", keep=True, result_type=int)  # type: ignore[misc]


async def _too_large(job: Job[Task]) -> None:
    await job.step("a", lambda: "x" * 1024**2, keep=True)


async def _too_many(job: Job[Task]) -> None:
    for number in range(3):
        await job.step(f"a{number}", lambda: "x" * 498, keep=True)


async def _keep_with_cursor(job: Job[Task]) -> None:
    await job.step("a", nothing, cursor=int, keep=True)  # type: ignore[call-overload]


async def _no_name(job: Job[Task]) -> None:
    await job.step("", nothing)


async def _bad_name(job: Job[Task]) -> None:
    await job.step("a\0", nothing)


async def _checkpoint_outside(job: Job[Task]) -> None:
    async with RIGS[0].schema.connected() as connection, connection.transaction():
        await job.checkpoint(connection)


async def _checkpoint_without_cursor(job: Job[Task]) -> None:
    async def copy(cursor: int | None) -> None:
        async with RIGS[0].schema.connected() as connection, connection.transaction():
            await job.checkpoint(connection)

    await job.step("a", copy, cursor=int)


NOT_AWAITED: set[asyncio.Future[Any]] = set()
RIGS: list[Rig] = []
MISTAKES: dict[Callable[[Job[Task]], Awaitable[None]], str] = {
    _caught: "LookupError: lost",
    _nested: "StepError: river: resumable steps cannot be nested",
    _together: 'cannot be nested, and not run at the same time: step "a" runs',
    _not_awaited: 'StepError: the code ended while step "a" was running',
    _cancelled: "StepError: a step was cancelled, and the code continued",
    _cursor_outside: "StepError: job.set_cursor works only in a step with a cursor",
    _cursor_of_a_plain_step: "StepError: job.set_cursor works only in a step with a cursor",
    _cursor_of_another_type: 'StepError: the cursor of step "a" is not of the type',
    _no_json: "ArgsError: the result of step 'a': a set has no order",
    _other_type: "ValidationError: Expected `int`, got `str`",
    _too_large: "ArgsError: the result of step 'a' has at most 1048576 bytes as JSON, got 1048578",
    _too_many: "ArgsError: the kept results of a job have at most 1000 bytes as JSON, with step "
    "'a2' they have 1500",
    _keep_with_cursor: "StepError: step 'a' has a cursor, so its result cannot be kept",
    _no_name: "StepError: the name of a step is a text that is not empty, got ''",
    _bad_name: "ArgsError: ",
    _checkpoint_outside: "StepError: job.checkpoint(tx) stores the running step",
    _checkpoint_without_cursor: "StepError: job.checkpoint(tx) stores the cursor of the step",
}
"""Wrong uses of steps, and the error of the attempt."""


async def test_mistakes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that uses steps in a wrong way fails with a text that says what is wrong, even if
    its code catches the error."""
    monkeypatch.setattr(steps, "KEPT_RESULTS_SIZE_MAX", 1000)
    RIGS[:] = [rig]
    mistakes = list(MISTAKES)

    @rig.job
    async def work(job: Job[Task]) -> None:
        await mistakes[job.args.n](job)

    for n, mistake in enumerate(mistakes):
        row = await rig.run_one(Task(n), InsertOpts(max_attempts=1))
        assert row["state"] == "discarded", mistake
        assert MISTAKES[mistake] in errors_of(row)[0]["error"]
    while NOT_AWAITED:
        NOT_AWAITED.pop().cancel()


async def test_checkpoints(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint stores the completed steps and the cursors at once, at most once a second and
    only after a change. In a transaction it stores the running step."""
    monkeypatch.setattr(steps, "CHECKPOINT_INTERVAL_MIN", 3600.0)
    stored: list[Any] = []

    async def copy(cursor: int | None, job: Job[Task]) -> None:
        job.set_cursor(7)
        assert not await job.checkpoint()  # less than CHECKPOINT_INTERVAL_MIN after the last one
        assert await job.checkpoint(now=True)
        stored.append(metadata_of(await rig.row(job.id)))
        job.set_cursor(8)
        async with rig.schema.connected() as connection, connection.transaction():
            assert await job.checkpoint(connection)
            stored.append(metadata_of(await rig.row(job.id)))
        stored.append(metadata_of(await rig.row(job.id)))

    @rig.job
    async def work(job: Job[Task]) -> None:
        assert not await job.checkpoint()  # there is nothing to store
        await job.step("first", nothing)
        assert await job.checkpoint()
        assert not await job.checkpoint(now=True)
        stored.append(metadata_of(await rig.row(job.id)))
        await job.step("rows", copy, job, cursor=int)

    row = await rig.run_one_on_pool()
    assert stored == [
        {STEP: "first"},
        {STEP: "first", CURSOR: {"rows": 7}},
        {STEP: "first", CURSOR: {"rows": 7}},
        {STEP: "rows", CURSOR: {"rows": 8}},
    ]
    assert (row["state"], metadata_of(row)) == ("completed", stored[-1])


async def test_lost_attempt(rig: Rig) -> None:
    """If the job was rescued and claimed again, a kept result and a checkpoint raise
    AttemptLostError and change nothing. A transaction given as `tx` stays usable."""
    raised: list[str] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        await rig.schema.execute("UPDATE river_job SET attempted_at = now()")

        async def store() -> None:
            async with rig.schema.connected() as connection, connection.transaction():
                with pytest.raises(AttemptLostError) as error:
                    await job.checkpoint(connection)
                raised.append(str(error.value))
                assert await connection.fetchval("SELECT 'usable'") == "usable"

        await job.step("store", store)
        with pytest.raises(AttemptLostError):
            await job.checkpoint(now=True)
        with pytest.raises(AttemptLostError):
            await job.step("keep", nothing, keep=True)
        rig.release.set()

    async with rig.working() as client:
        job_id = (await client.insert(Task())).job.id
        await rig.release.wait()
    row = await rig.row(job_id)
    assert (row["state"], metadata_of(row)) == ("running", {})
    assert raised[0].startswith(f"attempt 1 of job {job_id} has ended in the database")


async def test_result_that_cannot_be_stored_at_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the database does not answer, a kept result is sent again. If the attempt is cancelled
    meanwhile, its end stores the result."""
    merge, failures = AttemptStore.merge_metadata, 2
    is_failing = asyncio.Event()

    async def failing_merge(self: AttemptStore, *args: Any, **options: Any) -> None:
        nonlocal failures
        failures -= 1
        is_failing.set()
        if failures >= 0:
            raise ConnectionRefusedError
        await merge(self, *args, **options)

    monkeypatch.setattr(AttemptStore, "merge_metadata", failing_merge)

    @rig.job
    async def work(job: Job[Task]) -> None:
        await job.step("a", nothing, keep=True)
        raise AssertionError("the step was not stored")

    async with rig.working() as client:
        row = (await rig.work(client, Task()))[0]
        assert (metadata_of(row)[KEPT], errors_of(row)[0]["error"]) == (
            {"a": None},
            "AssertionError: the step was not stored",
        )
        failures = 10**6
        is_failing.clear()
        job_id = (await client.insert(Task())).job.id
        await is_failing.wait()
        await client.job_cancel(job_id)
        assert (await rig.event()).kind is EventKind.JOB_CANCELLED
    assert metadata_of(await rig.row(job_id))[KEPT] == {"a": None}


async def test_code_without_steps(rig: Rig, ran: Ran) -> None:
    """A job with a stored step fails if its code has no steps, for instance after a deploy. Stored
    cursors that are a list fail it before its code runs."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        ran.append(str(job.args.n))

    errors: list[str] = []
    for n, stored in enumerate([{STEP: "gone"}, {CURSOR: [1]}, {CURSOR: {}}]):
        await rig.run_one(Task(n), InsertOpts(metadata=stored, max_attempts=1))
        errors += [error.error for error in rig.last.job.errors]
    assert errors == [
        'StepError: river: resumable step "gone" not found in Worker',
        "StepError: river: unmarshal resumable cursors: expected an object, got an array",
    ]
    assert ran == ["0", "2"]


async def test_code_that_catches_its_cancellation(rig: Rig) -> None:
    """If a stop cancels a step, and the code catches the cancellation and returns, the job is
    interrupted and not completed."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        await job.step("first", nothing)
        rig.release.set()
        with suppress(asyncio.CancelledError):
            await job.step("second", asyncio.sleep, 3600)

    async with rig.working() as client:
        job_id = (await client.insert(Task())).job.id
        await rig.release.wait()
        client.stop_and_cancel()
        assert (await rig.event()).kind is EventKind.JOB_INTERRUPTED
    row = await rig.row(job_id)
    assert (row["state"], row["attempt"], metadata_of(row)) == ("available", 0, {STEP: "first"})


async def test_row_that_the_code_has_locked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the code keeps a result while its own transaction has locked the row, it gets an error
    that says so, and no endless wait. The transaction stays usable."""
    monkeypatch.setattr(steps, "STEP_PROGRESS_STORE_TIMEOUT", 0.001)
    monkeypatch.setattr(attempt_store, "ROW_LOCK_TIMEOUT", "20ms")

    @rig.job
    async def work(job: Job[Task]) -> None:
        async with rig.schema.connected() as connection, connection.transaction():
            await job.step("first", lambda: job.checkpoint(connection))
            job.set_metadata("was_skipped", await job.checkpoint())
            try:
                await job.step("kept", nothing, keep=True)
            finally:
                assert await connection.fetchval("SELECT 1") == 1

    row = await rig.run_one_on_pool(opts=InsertOpts(max_attempts=1))
    assert "TransactionError: the row of job 1 is locked by another" in errors_of(row)[0]["error"]
    assert metadata_of(row) == {KEPT: {"kept": None}, STEP: "kept", "was_skipped": False}


@pytest.mark.parametrize(
    "cursor", [date(2026, 1, 31), timedelta(hours=1), Summary("x", (1,)), {"a": [1.5]}]
)
async def test_cursor_keeps_its_type(rig: Rig, cursor: Any) -> None:
    """A later attempt gets a cursor of the type that an earlier one has set."""
    got: list[Any] = []

    async def move(found: Any, job: Job[Task]) -> None:
        got.append(found)
        if found is None:
            job.set_cursor(cursor)
            raise ValueError

    @rig.job(next_retry=lambda job: timedelta(0))
    async def work(job: Job[Task]) -> None:
        await job.step("move", move, job, cursor=type(cursor))

    await rig.insert_rows(1)
    assert len(await rig.work_due_jobs()) == 2
    assert got == [None, cursor]


@pytest.mark.parametrize("executor", ["thread", "process"])
async def test_blocking_jobs(rig: Rig, executor: Any) -> None:
    """In a blocking job each of the methods raises at once, and says what to do."""
    rig.workers.blocking_job(executor=executor)(use_steps)
    row = await rig.run_one()
    assert row["state"] == "completed", errors_of(row)
    text = " works only in an async job: register the function with @workers.job, and call"
    assert [error.partition(text)[0] for error in metadata_of(row)["output"]] == [
        f"job.{name}" for name in ("step", "set_cursor", "checkpoint", "complete_tx")
    ]


def use_steps(job: Job[Task]) -> None:
    """Call each method, and record the errors."""
    calls: list[Callable[[], object]] = [
        lambda: job.step("a", nothing),
        lambda: job.set_cursor(1),
        job.checkpoint,
        lambda: job.complete_tx(None),  # type: ignore[arg-type]
    ]
    errors: list[str] = []
    for call in calls:
        try:
            call()
        except ClientStateError as error:
            errors.append(str(error))
    job.record_output(errors)
