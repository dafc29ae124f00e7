"""Stored error entries, and errors that are hard to handle."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

import riverpy._work.executor
from riverpy import EventKind, InsertOpts, Job, JobCancel, JobSnooze, RawArgs
from riverpy._postgres.driver import use_raw_timestamps
from riverpy._postgres.job_maintenance import JobRescue, job_rescue
from riverpy._postgres.jobs import AttemptResult, ClaimKey, job_store_results
from tests.work.rig import Task, errors_of, metadata_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy import JobRow
    from tests._database import Schema
    from tests.work.rig import Rig


class RaisingStr(Exception):
    """Raises when it is converted to a string."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class DeadlyStr(Exception):
    """Raises SystemExit when it is converted to a string."""

    def __str__(self) -> str:
        raise SystemExit(4)


class NoText(Exception):
    """Its string conversion returns something else."""

    def __str__(self) -> str:
        return None  # type: ignore[return-value]


async def test_entry(rig: Rig) -> None:
    """An entry has River's keys. Its time is the start of the attempt in UTC, in a form that Go
    reads."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        raise ValueError("<boom> é😀")

    before = datetime.now(UTC)
    row = await rig.run_one()
    after = datetime.now(UTC)
    (entry,) = errors_of(row)
    assert list(entry) == ["at", "error", "trace", "attempt"]  # jsonb's order; Go has the same
    assert entry["error"] == "ValueError: <boom> é😀"
    assert entry["attempt"] == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?Z", entry["at"])
    assert before <= datetime.fromisoformat(entry["at"]) <= after
    assert rig.last.event.job is not None
    (read,) = rig.last.event.job.errors
    assert (read.error, read.attempt, read.trace) == ("ValueError: <boom> é😀", 1, entry["trace"])
    assert read.at == datetime.fromisoformat(entry["at"])


async def test_trace(rig: Rig) -> None:
    """A trace starts at the job's own code, and shows no local variables and no code of riverpy."""

    def inner(secret: str) -> None:
        raise KeyError("missing")

    @rig.job
    async def work(job: Job[Task]) -> None:
        try:
            inner("hunter2-" + "secret")
        except KeyError as error:
            raise ValueError("outer") from error

    row = await rig.run_one()
    trace = errors_of(row)[0]["trace"]
    assert "in work" in trace
    assert "in inner" in trace
    assert trace.endswith("ValueError: outer\n")
    assert "direct cause" in trace
    assert "hunter2-secret" not in trace
    assert "executor.py" not in trace


def caused(error: BaseException, cause: BaseException) -> BaseException:
    """Return the error as `raise error from cause` makes it."""
    error.__cause__ = cause
    return error


ERRORS: list[tuple[Callable[[], BaseException], str]] = [
    (lambda: asyncio.CancelledError(), "CancelledError"),
    (lambda: asyncio.CancelledError("by a library"), "CancelledError: by a library"),
    (lambda: SystemExit(3), "SystemExit: 3"),
    (lambda: {}["user_id"], "KeyError: 'user_id'"),
    (
        lambda: caused(RuntimeError(), OSError(28, "disk")),
        "RuntimeError from OSError: [Errno 28] disk",
    ),
    (lambda: KeyboardInterrupt(), "KeyboardInterrupt"),
    (lambda: GeneratorExit(), "GeneratorExit"),
    (lambda: BaseException("base"), "BaseException: base"),
    (lambda: StopIteration("stop"), "RuntimeError: coroutine raised StopIteration"),
    (lambda: TimeoutError("mine"), "TimeoutError: mine"),
    (
        lambda: ExceptionGroup(
            "two", [ExceptionGroup("in", [ValueError("no such order")]), TimeoutError()]
        ),
        "ValueError: no such order; TimeoutError",
    ),
    (
        lambda: ExceptionGroup("many", [ValueError(n // 2) for n in range(30)]),
        "; ".join(f"ValueError: {n}" for n in range(10)) + "; …",
    ),
    (
        lambda: BaseExceptionGroup("one", [asyncio.CancelledError("inner")]),
        "CancelledError: inner",
    ),
    (lambda: RaisingStr(), "<unprintable RaisingStr object>"),
    (lambda: DeadlyStr(), "<unprintable DeadlyStr object>"),
    (lambda: NoText(), "<unprintable NoText object>"),
    (lambda: ValueError("nul \0 and \ud800 half"), "ValueError: nul \ufffd and \ufffd half"),
    (lambda: ValueError(os.fsdecode(b"caf\xe9.txt")), "ValueError: caf\ufffd.txt"),
    (lambda: ValueError(), "ValueError"),
    (lambda: ValueError("\0"), "ValueError: \ufffd"),
]
"""What a job raises, and the text of its error entry."""


async def test_errors_are_failed_attempts(rig: Rig) -> None:
    """Everything a job raises is a failed attempt with a storable entry. The slot is free again and
    the worker keeps running. The text has the type, or the leaves of a group (FR-07, SC-17,
    BI-04)."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.args.n < len(ERRORS):
            raise ERRORS[job.args.n][0]()

    async with rig.working(slots=1) as client:
        *failed, completed = await rig.work(client, *map(Task, range(len(ERRORS) + 1)))
    entries = [errors_of(row)[0] for row in failed]
    assert [entry["error"] for entry in entries] == [text for _, text in ERRORS]
    assert {row["state"] for row in failed} == {"available"}
    assert not any("\0" in entry["trace"] for entry in entries)
    assert completed["state"] == "completed"


async def test_cancelled_future_of_other_code(rig: Rig) -> None:
    """Awaiting a cancelled future is a failed attempt, not a cancelled job (SC-17)."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    row = await rig.run_one()
    assert row["state"] == "available"
    assert errors_of(row)[0]["error"] == "CancelledError"
    assert rig.last.event.kind is EventKind.JOB_FAILED


async def test_job_that_cancels_its_own_task(rig: Rig) -> None:
    """A job that cancels itself and waits has failed. One that returns at once has completed."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if job.args.n == 0:
            await asyncio.sleep(0)

    rows = await rig.work_in_order(Task(n=0), Task(n=1))
    assert [row["state"] for row in rows] == ["available", "completed"]


async def test_recursion(rig: Rig) -> None:
    """A recursion of 5,000 frames is a failed attempt with a bounded trace (PF-08)."""

    def deeper(depth: int) -> int:
        return deeper(depth + 1) + 1

    @rig.job
    async def work(job: Job[Task]) -> None:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(5000)
        try:
            deeper(0)
        finally:
            sys.setrecursionlimit(limit)

    row = await rig.run_one()
    (entry,) = errors_of(row)
    assert "recursion" in entry["error"]
    assert 0 < len(entry["trace"]) <= 32 * 1024


@pytest.mark.timeout(120)
async def test_megabytes_of_text(rig: Rig) -> None:
    """Of a message of 20 MB, 16 Ki characters are stored with a mark, and the trace keeps its
    frames. A row with 25 attempts has less than 2 MB (PF-08)."""

    @rig.job(next_retry=lambda job: timedelta(0))
    async def work(job: Job[Task]) -> None:
        raise ValueError("é" * 10_000_000)

    await rig.insert_rows(1)
    assert len(await rig.work_due_jobs()) == 25
    (row,) = await rig.schema.jobs()
    assert row["state"] == "discarded"
    entries = errors_of(row)
    assert len(entries) == 25
    for entry in entries:
        assert len(entry["error"]) == 16 * 1024
        assert entry["error"].endswith("… [truncated]")
        assert "in work" in entry["trace"]
        assert "[truncated]" in entry["trace"]
    size = await rig.schema.fetchval(
        "SELECT sum(octet_length(e::text)) FROM river_job, unnest(errors) e"
    )
    assert size < 2_000_000


class Handler:
    """Remembers its calls and returns what the test set."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.told: list[tuple[int, BaseException]] = []

    async def handle_error(self, job: JobRow, error: BaseException, /) -> bool | None:
        self.told.append((job.id, error))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


async def test_error_handler_is_called(rig: Rig) -> None:
    """The error handler is called for failures and unknown kinds, not for snoozes and cancels."""
    handler = Handler()

    @rig.job
    async def work(job: Job[Task]) -> None:
        match job.args.n:
            case 0:
                raise ValueError("told")
            case 1:
                raise JobCancel("not told")
            case 2:
                raise JobSnooze(timedelta(hours=1))

    settings = {"error_handler": handler, "known_kinds_only": False}
    _, *rows = await rig.work_in_order(
        RawArgs("unknown_kind", "{}"), *map(Task, range(4)), **settings
    )
    assert [str(error) for _, error in handler.told] == [
        "job kind is not registered in the client's Workers bundle: unknown_kind",
        "told",
    ]
    assert [row["state"] for row in rows] == ["available", "cancelled", "scheduled", "completed"]


async def test_error_handler_cancels(rig: Rig) -> None:
    """A handler that returns True cancels the job. The recorded error stays."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        raise ValueError("hopeless")

    row = await rig.run_one(error_handler=Handler(True))
    assert row["state"] == "cancelled"
    assert row["finalized_at"] is not None
    assert errors_of(row)[0]["error"] == "ValueError: hopeless"
    assert rig.last.event.kind is EventKind.JOB_CANCELLED


@pytest.mark.parametrize("error", [ValueError("x"), asyncio.CancelledError(), SystemExit(2)])
async def test_error_handler_raises(rig: Rig, error: BaseException) -> None:
    """A handler that raises counts as one that returned None."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        raise ValueError("original")

    row = await rig.run_one(error_handler=Handler(error))
    assert row["state"] == "available"
    assert errors_of(row)[0]["error"] == "ValueError: original"


async def test_error_handler_hangs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that hangs is cancelled after its timeout, and the failure stays."""
    monkeypatch.setattr(riverpy._work.executor, "ERROR_HANDLER_TIMEOUT", 0.05)
    cut = asyncio.Event()

    class Hanging:
        async def handle_error(self, job: JobRow, error: BaseException, /) -> bool | None:
            try:
                await asyncio.Event().wait()
            finally:
                cut.set()

    @rig.job
    async def work(job: Job[Task]) -> None:
        raise ValueError("original")

    row = await rig.run_one(error_handler=Hanging())
    assert cut.is_set()
    assert row["state"] == "available"


async def test_one_bad_result_harms_no_other(rig: Rig) -> None:
    """Jobs with all kinds of difficult texts end in one batch with normal ones, and all are
    stored."""
    texts = ["\0", "\ud800", "x" * 100_000, "ok"]

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.args.n % 5:
            raise ValueError(texts[job.args.n % 5 - 1])

    await rig.insert_rows(50)
    async with rig.working(slots=50):
        await rig.take(50)
    assert await rig.states() == {"completed": 10, "available": 40}


async def test_the_last_attempt_of_a_base_exception(rig: Rig) -> None:
    """A job that raises SystemExit in its last attempt is discarded like any other (SC-17)."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        sys.exit(3)

    row = await rig.run_one(opts=InsertOpts(max_attempts=1))
    assert row["state"] == "discarded"


async def test_error_that_cannot_be_classified(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the classification of an error fails, the job still counts as failed, never as
    completed."""

    def broken(*args: Any) -> None:
        raise ZeroDivisionError("a fault of ours")

    @rig.job
    async def work(job: Job[Task]) -> None:
        raise ValueError("no luck")

    monkeypatch.setattr(riverpy._work.executor.JobExecutor, "_make_outcome_from_error", broken)
    row = await rig.run_one()
    assert row["state"] == "retryable"
    assert errors_of(row)[0]["error"] == "riverpy could not classify the error"


async def test_errors_are_bounded(rig: Rig) -> None:
    """A row keeps the first and the newest 99 errors, whoever adds one. The metadata has the number
    of dropped errors (FR-20)."""

    @rig.job(next_retry=lambda job: timedelta(0))
    async def work(job: Job[Task]) -> None:
        if job.attempt <= 103:
            raise ValueError(str(job.attempt))

    await rig.insert_rows(1)
    await rig.schema.execute(
        "UPDATE river_job SET max_attempts = 200, attempt = 97, metadata = '{\"own\": 1}', errors ="
        " array(SELECT jsonb_build_object('at', now(), 'attempt', i, 'error', i::text, 'trace', '')"
        " FROM generate_series(1, 97) AS i)"
    )
    assert len(await rig.work_due_jobs()) == 7
    (row,) = await rig.schema.jobs()
    assert row["state"] == "completed"
    attempts = [entry["attempt"] for entry in errors_of(row)]
    assert attempts == [1, *range(5, 104)]
    assert metadata_of(row) == {"own": 1, "riverpy:errors_dropped": 3}


async def _settle(connection: Any, schema: str, keys: list[ClaimKey], error: str) -> None:
    results = [
        AttemptResult(*key, "retryable", None, 0.0, key.attempt, 60.0, error, None) for key in keys
    ]
    await job_store_results(connection, schema, results)


async def _rescue(connection: Any, schema: str, keys: list[ClaimKey], _error: str) -> None:
    await job_rescue(connection, schema, [JobRescue(key, "me") for key in keys])


@pytest.mark.parametrize("end", [_settle, _rescue], ids=["settle", "rescue"])
async def test_errors_are_bounded_whoever_adds_one(
    schema: Schema, end: Callable[[Any, str, list[ClaimKey], str], Awaitable[None]]
) -> None:
    """Results and rescues both limit the errors, also if another version stored more. The number is
    added to the count of dropped errors, and left out if the metadata is not an object (FR-20)."""
    given = {
        (99, '{"own": 1}'): {"own": 1},
        (100, '{"own": 1}'): {"own": 1, "riverpy:errors_dropped": 1},
        (103, '{"riverpy:errors_dropped": 2.5}'): {"riverpy:errors_dropped": 6},
        (100, '{"riverpy:errors_dropped": "x"}'): {"riverpy:errors_dropped": 1},
        (100, "[1]"): [1],
    }
    await schema.execute(
        "INSERT INTO river_job (kind, max_attempts, args, state, attempt, attempted_at, metadata,"
        " errors) SELECT 'task', 200, '{}', 'running', 104, now(), metadata::jsonb, array("
        " SELECT jsonb_build_object('attempt', i) FROM generate_series(1, count) AS i)"
        " FROM unnest($1::int[], $2::text[]) AS given (count, metadata)",
        [count for count, _ in given],
        [metadata for _, metadata in given],
    )
    async with schema.connected() as connection:
        await use_raw_timestamps(connection)
        keys = await connection.fetch("SELECT id, attempt, attempted_at FROM river_job ORDER BY id")
        await end(connection, schema.name, [ClaimKey(*key) for key in keys], '{"attempt": 104}')
    for row, ((count, _), expected) in zip(await schema.jobs(), given.items(), strict=True):
        attempts = [entry["attempt"] for entry in errors_of(row)]
        assert attempts == [1, *range(count - 97, count + 1), 104]
        metadata = json.loads(row["metadata"])
        if isinstance(metadata, dict):
            metadata.pop("river:rescue_count", None)
        assert metadata == expected
