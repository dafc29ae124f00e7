"""Outcomes of attempts: completed, failed, snoozed, cancelled, and the rows after them."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest

import riverpy
from riverpy import (
    ArgsError,
    DefaultRetryPolicy,
    EventKind,
    InsertOpts,
    Job,
    JobCancel,
    JobSnooze,
    JobState,
    Worker,
)
from riverpy._log_events import RETRY_POLICY_FAILED
from riverpy._work import outcomes
from riverpy._work.outcomes import AVAILABLE_STATE_DELAY_MAX
from riverpy.job import JobColumn, JobRow
from riverpy.retry import RETRY_DELAY_MAX
from tests.work.rig import PATIENCE, Task, errors_of, metadata_of

if TYPE_CHECKING:
    from pathlib import Path

    import asyncpg

    from riverpy import JobRow as Row
    from tests.work.rig import Rig

SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)


def delay_of(row: asyncpg.Record) -> timedelta:
    """Return the time from the claim of an attempt to the next one."""
    return row["scheduled_at"] - row["attempted_at"]


async def first_failure(rig: Rig, **settings: Any) -> Row:
    """Return the stored row of a job whose first attempt failed. (It may have run again since.)
    Check the time of its retry against the formula."""
    began = time.monotonic()
    await rig.run_one(**settings)
    took = timedelta(seconds=time.monotonic() - began)
    job = rig.last.event.job
    assert job is not None
    assert job.attempted_at is not None
    delay = job.scheduled_at - job.attempted_at
    assert timedelta(seconds=0.9) <= delay <= timedelta(seconds=1.1) + took
    return job


async def test_completed(rig: Rig) -> None:
    """A job that returns is completed. Only the columns of the attempt change."""
    seen: list[Job[Task]] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        assert riverpy.current_job() is job
        seen.append(job)

    before = datetime.now(UTC)
    row = await rig.run_one(Task(n=7))
    assert row["state"] == "completed"
    assert row["attempt"] == 1
    assert row["errors"] is None
    assert row["metadata"] == "{}"
    assert row["attempted_at"] <= row["finalized_at"] <= datetime.now(UTC) + timedelta(seconds=1)
    assert row["attempted_at"] >= before - timedelta(seconds=1)
    (job,) = seen
    assert job.args == Task(n=7)
    assert (job.id, job.state, job.attempt) == (row["id"], JobState.RUNNING, 1)
    assert row["attempted_by"] == job.attempted_by
    assert rig.last.event.kind is EventKind.JOB_COMPLETED


async def test_current_job_outside_of_a_job() -> None:
    """`current_job` raises an error outside of a job."""
    with pytest.raises(riverpy.ClientStateError, match="inside a job"):
        riverpy.current_job()


async def test_failed_is_retryable(rig: Rig) -> None:
    """A failed attempt is recorded with its error, and the job is due again after n^4 seconds."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        raise ValueError("no luck")

    await rig.schema.execute(
        "INSERT INTO river_job (kind, max_attempts, args, attempt, errors)"
        " VALUES ('task', 25, '{}', 2,"
        """ array_fill('{"at":"2026-01-01T00:00:00Z"}'::jsonb, array[2]))"""
    )
    (result,) = await rig.work_due_jobs(retry_policy=DefaultRetryPolicy())
    (row,) = await rig.schema.jobs()
    assert row["state"] == "retryable"
    assert (row["attempt"], row["finalized_at"]) == (3, None)
    assert timedelta(seconds=72) < delay_of(row) < timedelta(seconds=90) + PATIENCE * SECOND
    *others, last = errors_of(row)
    assert others == [{"at": "2026-01-01T00:00:00Z"}] * 2
    assert last["error"] == "ValueError: no luck"
    event = result.event
    assert event.job is not None
    assert (event.kind, event.job.state) == (EventKind.JOB_FAILED, JobState.RETRYABLE)


async def test_short_delay_is_available_at_once(rig: Rig) -> None:
    """A first failure is retried within River's 5 seconds, so the job is available at once."""
    assert timedelta(seconds=5) == AVAILABLE_STATE_DELAY_MAX

    @rig.job
    async def work(job: Job[Task]) -> None:
        raise ValueError("no luck")

    job = await first_failure(rig, retry_policy=DefaultRetryPolicy())
    assert (job.state, job.attempt) == (JobState.AVAILABLE, 1)


@pytest.mark.parametrize("snoozes", [False, True])
async def test_limit_of_a_short_delay(rig: Rig, snoozes: bool) -> None:
    """A job that is due within the limit is available. A later one is not."""
    soon = outcomes.AVAILABLE_STATE_DELAY_MAX  # as the rig sets it

    @rig.job(next_retry=lambda job: soon + timedelta(milliseconds=job.args.n))
    async def work(job: Job[Task]) -> None:
        if snoozes:
            raise JobSnooze(soon + timedelta(milliseconds=job.args.n))
        raise ValueError("no luck")

    rows = await rig.work_in_order(Task(n=0), Task(n=1))
    later = "scheduled" if snoozes else "retryable"
    assert [row["state"] for row in rows] == ["available", later]


async def test_retried_until_it_succeeds(rig: Rig) -> None:
    """A job that is soon due again is worked without a notification or a poll."""
    attempts: list[int] = []

    @rig.job(next_retry=lambda job: timedelta(milliseconds=30 * (job.attempt - 1)))
    async def work(job: Job[Task]) -> None:
        attempts.append(job.attempt)
        if job.attempt < 3:
            raise ValueError(f"attempt {job.attempt}")

    async with rig.working() as client:
        await client.insert(Task())
        events = await rig.take(3)
    (row,) = await rig.schema.jobs()
    assert [event.kind for event in events] == [
        EventKind.JOB_FAILED,
        EventKind.JOB_FAILED,
        EventKind.JOB_COMPLETED,
    ]
    assert (row["state"], row["attempt"], attempts) == ("completed", 3, [1, 2, 3])
    assert [entry["attempt"] for entry in errors_of(row)] == [1, 2]


async def test_discarded_after_the_last_attempt(rig: Rig) -> None:
    """The last failure is final."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        raise ValueError("fatal")

    row = await rig.run_one(opts=InsertOpts(max_attempts=1))
    assert (row["state"], row["attempt"]) == ("discarded", 1)
    assert row["finalized_at"] is not None
    assert rig.last.event.kind is EventKind.JOB_FAILED


def job_row(*, errors: int, metadata: str = "{}") -> Row:
    """Return a row with so many errors."""
    values: list[Any] = [None] * 18
    values[JobColumn.METADATA] = metadata
    values[JobColumn.ERRORS] = ["{}"] * errors
    return JobRow(values)


@pytest.mark.parametrize("errors", [0, 1, 2, 10, 24, 308])
def test_retry_formula(monkeypatch: pytest.MonkeyPatch, errors: int) -> None:
    """The delay is the fourth power of the number of errors, 10 % less at the random value 0, and
    10 % more just below 1, but never longer than the maximum (CF-045)."""
    seconds = (errors + 1) ** 4
    for value, factor in ((0.0, 0.9), (0.5, 1.0), (math.nextafter(1.0, 0.0), 1.1)):
        monkeypatch.setattr("riverpy.retry.random.uniform", lambda a, b, v=value: a + (b - a) * v)
        delay = DefaultRetryPolicy().next_retry(job_row(errors=errors)).total_seconds()
        longest = RETRY_DELAY_MAX.total_seconds()
        assert delay == pytest.approx(min(seconds * factor, longest), rel=1e-9)
        assert delay <= longest


@pytest.mark.parametrize("errors", [309, 310, 5000])
def test_retry_formula_is_capped(errors: int) -> None:
    """From the 310th error on, the delay is River's maximum without jitter: 2^63 - 1 ns, to the
    microsecond."""
    assert DefaultRetryPolicy().next_retry(job_row(errors=errors)) == RETRY_DELAY_MAX
    assert timedelta(microseconds=(2**63 - 1) // 1000) == RETRY_DELAY_MAX


def test_errors_that_are_not_kept_count() -> None:
    """Errors that the row no longer keeps still count in the formula."""
    job = job_row(errors=100, metadata='{"riverpy:errors_dropped": 50}')
    assert job.error_count == 150
    delay = DefaultRetryPolicy().next_retry(job).total_seconds()
    assert 0.9 * 151**4 <= delay <= 1.1 * 151**4
    job = job_row(errors=100, metadata='{"riverpy:errors_dropped": 250}')
    assert DefaultRetryPolicy().next_retry(job) == RETRY_DELAY_MAX


async def test_longest_delay_is_stored(rig: Rig) -> None:
    """The maximum delay of about 292 years is a time that the database stores and that can be
    read."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        raise ValueError("again")

    errors = ", ".join(["'{}'::jsonb"] * 310)
    await rig.schema.execute(
        "INSERT INTO river_job (kind, max_attempts, args, attempt, errors)"
        f" VALUES ('task', 1000, '{{}}', 310, array[{errors}])"
    )
    (result,) = await rig.work_due_jobs(retry_policy=DefaultRetryPolicy())
    (row,) = await rig.schema.jobs()
    assert (row["state"], row["attempt"]) == ("retryable", 311)
    assert result.job.scheduled_at == row["scheduled_at"]
    assert row["scheduled_at"].year in {2318, 2319, 2320}


async def test_next_retry_of_function_and_class(rig: Rig) -> None:
    """A worker's own `next_retry` overrides the client's policy. None means the policy."""

    class Policy:
        def next_retry(self, job: Row, /) -> timedelta:
            return 3 * HOUR

    class Other(msgspec.Struct):
        kind: ClassVar[str] = "other"

    class Third(msgspec.Struct):
        kind: ClassVar[str] = "third"

    class OtherWorker(Worker[Other]):
        async def work(self, job: Job[Other]) -> None:
            raise ValueError("no luck")

        def next_retry(self, job: Job[Other]) -> timedelta | None:
            return 2 * HOUR

    @rig.job(next_retry=lambda job: HOUR)
    async def work(job: Job[Task]) -> None:
        raise ValueError("no luck")

    @rig.job(args=Third, next_retry=lambda job: None)
    async def third(job: Job[Third]) -> None:
        raise ValueError("no luck")

    rig.workers.add(OtherWorker())
    rows = await rig.work_in_order(Task(), Other(), Third(), retry_policy=Policy())
    delays = [round(delay_of(row).total_seconds() / 3600, 2) for row in rows]
    assert delays == [1, 2, 3]


@pytest.mark.parametrize("value", [timedelta(seconds=-1), "soon", OSError("raised"), SystemExit(3)])
async def test_bad_next_retry(rig: Rig, log: list[dict[str, Any]], value: Any) -> None:
    """A `next_retry` that returns a negative or invalid value, or raises, is logged. River's
    formula is used."""

    def next_retry(job: Job[Task]) -> timedelta:
        if isinstance(value, BaseException):
            raise value
        return value

    @rig.job(next_retry=next_retry)
    async def work(job: Job[Task]) -> None:
        raise ValueError("no luck")

    job = await first_failure(rig)
    assert job.state is JobState.AVAILABLE
    assert job.errors[0].error == "ValueError: no luck"
    assert RETRY_POLICY_FAILED in [entry["event"] for entry in log]


async def test_bad_next_retry_of_many(rig: Rig, log: list[dict[str, Any]]) -> None:
    """Of many jobs whose `next_retry` fails, ten are logged as warnings and the rest at debug."""

    @rig.job(next_retry=lambda _: timedelta(seconds=-1))
    async def work(job: Job[Task]) -> None:
        raise ValueError("no luck")

    await rig.insert_rows(12)
    async with rig.working(slots=12):
        await rig.take(12)
    told = [one for one in log if one["event"] == RETRY_POLICY_FAILED]
    levels = [one["log_level"] for one in told]
    assert levels == ["warning"] * 10 + ["debug"] * (len(told) - 10)


async def test_job_cancel(rig: Rig) -> None:
    """JobCancel ends the job for good with River's text, also from inside exception groups."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        match job.args.n:
            case 0:
                raise JobCancel("not today")
            case 1:
                raise JobCancel
            case _:
                inner = ExceptionGroup("inner", [ValueError("x"), JobCancel("deep")])
                raise ExceptionGroup("outer", [OSError("y"), inner])

    rows = await rig.work_in_order(Task(n=0), Task(n=1), Task(n=2))
    assert [row["state"] for row in rows] == ["cancelled"] * 3
    assert all(row["finalized_at"] and row["attempt"] == 1 for row in rows)
    texts = [errors_of(row)[0]["error"] for row in rows]
    assert texts == [
        "JobCancelError: not today",
        "JobCancelError: JobCancel",
        "JobCancelError: deep",
    ]
    assert all(errors_of(row)[0]["trace"] == "" for row in rows)


async def test_job_snooze(rig: Rig) -> None:
    """A snooze does not count as an attempt and is counted in the metadata. After a long snooze the
    job is scheduled."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        job.set_metadata("seen", job.args.n)
        match job.args.n:
            case 0:
                raise JobSnooze(HOUR)
            case 1:
                raise JobSnooze(outcomes.AVAILABLE_STATE_DELAY_MAX)
            case _:
                raise ExceptionGroup("both", [JobCancel("no"), JobSnooze(HOUR)])

    rows = await rig.work_in_order(Task(n=0), Task(n=1), Task(n=2))
    assert [row["state"] for row in rows] == ["scheduled", "available", "scheduled"]
    assert [(row["attempt"], row["errors"], row["finalized_at"]) for row in rows] == [
        (0, None, None)
    ] * 3
    assert [metadata_of(row) for row in rows] == [{"seen": n, "snoozes": 1} for n in range(3)]
    assert abs(delay_of(rows[0]) - HOUR) < PATIENCE * SECOND


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("{}", '{"snoozes": 1}'),
        ('{"snoozes": 2.9}', '{"snoozes": 3}'),
        ('{"snoozes": -2.5}', '{"snoozes": -1}'),
        ('{"snoozes": 1e3}', '{"snoozes": 1001}'),
        ('{"snoozes": "4"}', '{"snoozes": 5}'),
        ('{"snoozes": "-7"}', '{"snoozes": -6}'),
        ('{"snoozes": "4.5"}', '{"snoozes": 5}'),
        ('{"snoozes": "+4"}', '{"snoozes": 5}'),
        ('{"snoozes": true}', '{"snoozes": 2}'),
        ('{"snoozes": false}', '{"snoozes": 1}'),
        ('{"snoozes": "4x"}', '{"snoozes": 1}'),
        ('{"snoozes": []}', '{"snoozes": 1}'),
        ('{"snoozes": null, "a": 1e400}', '{"snoozes": 1, "a": 1e400}'),
        ('{"snoozes": 9007199254740993}', '{"snoozes": 9007199254740994}'),
        ('{"snoozes": 9223372036854775806}', '{"snoozes": 9223372036854775807}'),
        ('{"snoozes": 1e30}', '{"snoozes": 9223372036854775807}'),
        ('{"snoozes": -1e400}', '{"snoozes": -9223372036854775807}'),
        ("[1]", '[1, {"snoozes": 1}]'),
    ],
)
async def test_snooze_counter(rig: Rig, text: str, after: str) -> None:
    """The snooze counter is read as River reads it, and stays within 64 bits."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        raise JobSnooze(HOUR)

    await rig.schema.execute(
        "INSERT INTO river_job (kind, args, max_attempts, metadata)"
        " SELECT 'task', '{}', 1, $1::text::jsonb",
        text,
    )
    await rig.work_due_jobs()
    found = await rig.schema.fetchval("SELECT metadata = $1::text::jsonb FROM river_job", after)
    assert found, (await rig.row(1))["metadata"]


async def test_zero_snooze(rig: Rig) -> None:
    """Three snoozes of zero, then success: 3 snoozed, 1 completed, one attempt, no error
    (LD-19)."""
    runs = 0

    @rig.job
    async def work(job: Job[Task]) -> None:
        nonlocal runs
        runs += 1
        if runs <= 3:
            raise JobSnooze(timedelta(0))

    await rig.insert_rows(1)
    results = await rig.work_due_jobs()
    (row,) = await rig.schema.jobs()
    assert [result.event.kind for result in results] == [EventKind.JOB_SNOOZED] * 3 + [
        EventKind.JOB_COMPLETED
    ]
    assert (row["state"], row["attempt"], row["errors"]) == ("completed", 1, None)
    assert metadata_of(row) == {"snoozes": 3}


async def test_many_snoozes(rig: Rig) -> None:
    """A job that snoozes 120 times uses up no attempt, and its row does not grow (LD-20)."""
    runs = 0

    @rig.job
    async def work(job: Job[Task]) -> None:
        nonlocal runs
        runs += 1
        if runs <= 120:
            raise JobSnooze(timedelta(0))

    await rig.insert_rows(1)
    assert len(await rig.work_due_jobs()) == 121
    (row,) = await rig.schema.jobs()
    assert (row["state"], row["attempt"], row["errors"]) == ("completed", 1, None)
    assert metadata_of(row) == {"snoozes": 120}
    assert len(row["attempted_by"]) == 100
    size = await rig.schema.fetchval("SELECT pg_column_size(j.*) FROM river_job AS j")
    assert size < 16_000


def test_snooze_refuses_nonsense() -> None:
    """A snooze refuses anything but a timedelta of zero or more."""
    with pytest.raises(ValueError, match="zero or more"):
        JobSnooze(timedelta(seconds=-1))
    with pytest.raises(TypeError, match="timedelta"):
        JobSnooze(5)  # type: ignore[arg-type]


async def test_longest_snooze(rig: Rig) -> None:
    """A snooze of a thousand years is cut to the longest delay that can be stored."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        raise JobSnooze(timedelta.max)

    row = await rig.run_one()
    assert row["state"] == "scheduled"
    assert row["scheduled_at"].year < 2330


async def test_kind_that_names_code(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of a kind without a worker fails with River's text. The name of a Python function or
    module is an unknown kind too (SE-01). Another job is not affected."""
    rig.register_task()
    (tmp_path / "canary.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    kinds = ["os:system", "os.system", "canary", "canary:work", "__import__"]
    for kind in [*kinds, "task"]:
        await rig.insert_rows(1, kind=kind)
    await rig.work_due_jobs(known_kinds_only=False)
    *unknown, known = await rig.schema.jobs()
    entries = [errors_of(row)[0] for row in unknown]
    prefix = "job kind is not registered in the client's Workers bundle: "
    assert [entry["error"] for entry in entries] == [prefix + kind for kind in kinds]
    assert {entry["trace"] for entry in entries} == {""}
    assert {(row["state"], row["attempt"]) for row in unknown} == {("available", 1)}
    assert known["state"] == "completed"
    assert "canary" not in sys.modules


async def test_kind_aliases(rig: Rig) -> None:
    """A worker also works rows with the older names of its kind."""

    class Renamed(msgspec.Struct):
        kind: ClassVar[str] = "new_name"
        kind_aliases: ClassVar[tuple[str, ...]] = ("old_name", "older_name")

    kinds: list[str] = []

    @rig.job(args=Renamed)
    async def work(job: Job[Renamed]) -> None:
        kinds.append(job.kind)

    for kind in ("new_name", "old_name", "older_name"):
        await rig.insert_rows(1, kind=kind)
    await rig.work_due_jobs()
    assert sorted(kinds) == ["new_name", "old_name", "older_name"]
    assert await rig.states() == {"completed": 3}


@dataclasses.dataclass
class Address:
    """Nested args."""

    street: str
    tags: list[str]


@dataclasses.dataclass
class Parcel:
    """Args of a dataclass."""

    kind: ClassVar[str] = "parcel"
    to: Address
    weight: float = 1.0


class Loose(dict[str, Any]):
    """Args of a dict."""

    kind: ClassVar[str] = "loose"


async def test_args_of_each_type(rig: Rig) -> None:
    """A Struct, a dataclass and a dict arrive as they were inserted."""
    got: list[object] = []

    @rig.job
    async def task(job: Job[Task]) -> None:
        got.append(job.args)

    @rig.job(args=Parcel)
    async def parcel(job: Job[Parcel]) -> None:
        got.append(job.args)

    @rig.job(args=Loose)
    async def loose(job: Job[Loose]) -> None:
        got.append(job.args)

    sent = [
        Task(n=3),
        Parcel(Address("a & b <c>", ["é", "😀"]), 2.5),
        Loose(x=[1, None], y={"z": 1.5}),
    ]
    await rig.work_in_order(*sent)
    assert got == sent
    assert [type(args) for args in got] == [Task, Parcel, Loose]


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ('{"to": {"street": "s", "tags": ["a", 5]}}', "$.to.tags[1]"),
        ('{"to": {"street": 1, "tags": []}}', "$.to.street"),
        ('{"weight": 1}', "to"),
        ("[1]", "object"),
    ],
)
async def test_undecodable_args(rig: Rig, args: str, path: str) -> None:
    """Args of the wrong type are a job error with the path. The worker is not called."""
    called: list[object] = []

    @rig.job(args=Parcel)
    async def work(job: Job[Parcel]) -> None:
        called.append(job)

    await rig.schema.execute(
        "INSERT INTO river_job (kind, max_attempts, args) VALUES ('parcel', 25, $1::text::jsonb)",
        args,
    )
    await rig.work_due_jobs()
    (row,) = await rig.schema.jobs()
    (entry,) = errors_of(row)
    assert path in entry["error"]
    assert (row["state"], called) == ("available", [])


async def test_unknown_fields_are_ignored(rig: Rig) -> None:
    """Fields that a newer sender added are ignored."""
    got: list[Task] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        got.append(job.args)

    await rig.schema.execute(
        """INSERT INTO river_job (kind, max_attempts, args) VALUES ('task', 25, '{"n":1,"m":2}')"""
    )
    await rig.work_due_jobs()
    assert got == [Task(n=1)]


@pytest.mark.parametrize("fails", [False, True])
async def test_metadata_is_merged(rig: Rig, fails: bool) -> None:
    """What an attempt records is merged into the metadata for each outcome."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        job.record_output({"first": 1})
        job.record_output({"n": job.args.n, "text": "<é>"})
        job.set_metadata("k", None)
        job.set_metadata("new", [1.5])
        if fails:
            raise ValueError("after recording")

    row = await rig.run_one(opts=InsertOpts(metadata={"k": "v", "other": True}))
    assert metadata_of(row) == {
        "k": None,
        "other": True,
        "new": [1.5],
        "output": {"n": 0, "text": "<é>"},
    }
    assert rig.last.event.job is not None
    assert rig.last.event.job.metadata == metadata_of(row)
    assert rig.last.event.job.output == {"n": 0, "text": "<é>"}


async def test_metadata_is_another_sessions_too(rig: Rig) -> None:
    """Keys that another session wrote while the job ran are kept."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        await rig.schema.execute("""UPDATE river_job SET metadata = '{"theirs": 1}'""")
        job.set_metadata("ours", 2)

    row = await rig.run_one_on_pool()
    assert metadata_of(row) == {"theirs": 1, "ours": 2}


async def test_metadata_that_is_no_object(rig: Rig) -> None:
    """A row whose metadata is not an object can be worked. What is recorded is joined to it."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        assert job.metadata == {}
        job.set_metadata("ours", 2)

    await rig.schema.execute(
        "INSERT INTO river_job (kind, max_attempts, args, metadata)"
        " VALUES ('task', 25, '{}', '[1]')"
    )
    await rig.work_due_jobs()
    (row,) = await rig.schema.jobs()
    assert (row["state"], metadata_of(row)) == ("completed", [1, {"ours": 2}])


async def test_recording_refuses_what_cannot_be_stored(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN, NUL, surrogates, `river:` keys and huge outputs are refused at the call. The job
    continues (BI-03, BI-04)."""
    refused: list[str] = []
    assert riverpy.job.OUTPUT_SIZE_MAX == 32 * 1024 * 1024
    limit = 64 * 1024
    monkeypatch.setattr(riverpy.job, "OUTPUT_SIZE_MAX", limit)

    @rig.job
    async def work(job: Job[Task]) -> None:
        too_large = "x" * (limit - 1)
        for value in (math.nan, math.inf, "\0", "\ud800", {"a": ["\udfff"]}, object(), too_large):
            try:
                job.record_output(value)
            except ArgsError as error:
                refused.append(str(error))
        for key in ("river:mine", "Cancel_Attempted_At", "a\0b", "\ud800"):
            try:
                job.set_metadata(key, 1)
            except ArgsError as error:
                refused.append(str(error))
        job.record_output("x" * (limit - 2))

    row = await rig.run_one()
    assert row["state"] == "completed"
    assert len(refused) == 11
    assert any("river:" in text for text in refused)
    assert len(metadata_of(row)["output"]) == limit - 2
