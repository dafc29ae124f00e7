"""The registry of periodic jobs: their ids, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest

from riverpy.errors import ConfigError, UnknownJobKindError
from riverpy.insert_opts import InsertOpts
from riverpy.job import RawArgs
from riverpy.periodic import PeriodicJob, PeriodicJobs
from riverpy.schedules import cron, every, format_schedule, never, parse_schedule

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

HOURLY = every(timedelta(hours=1))


class Report(msgspec.Struct):
    """Args without a field that must be given."""

    kind: ClassVar[str] = "report"

    number: int = 0


def make_report() -> Report:
    """A constructor."""
    return Report()


class Never:
    """A schedule that never comes."""

    def next(self, after: datetime, /) -> datetime | None:
        """Never."""
        del after


class Failing:
    """A schedule that fails."""

    def next(self, after: datetime, /) -> datetime | None:
        """Fail."""
        raise ZeroDivisionError(after)


def job(job_id: str) -> PeriodicJob:
    """A job of this id."""
    return PeriodicJob(HOURLY, Report(), id=job_id)


_PRINT_IDS = """
from datetime import timedelta
from riverpy import PeriodicJob, RawArgs, cron, every
def make(): ...
print(PeriodicJob(cron("@daily", timezone="Asia/Tokyo"), RawArgs("report", "{}")).id)
print(PeriodicJob(every(timedelta(hours=1)), make).id)
"""


def test_default_id_is_stable() -> None:
    """The default id is the same in each process, whatever PYTHONHASHSEED is (SK-13)."""
    printed = {
        subprocess.run(
            [sys.executable, "-c", _PRINT_IDS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert printed == {"report:a217e3d0\nmake:560e4f00\n"}


def test_default_ids_differ() -> None:
    """The default id depends on the kind or function and on the schedule."""
    ids = [
        PeriodicJob(HOURLY, Report()).id,
        PeriodicJob(HOURLY, Report).id,
        PeriodicJob(every(timedelta(hours=2)), Report()).id,
        PeriodicJob(cron("@hourly"), Report()).id,
        PeriodicJob(cron("@hourly", timezone="Asia/Tokyo"), Report()).id,
        PeriodicJob(HOURLY, make_report).id,
    ]
    assert ids[0] == ids[1]
    assert len(set(ids)) == len(ids) - 1
    with pytest.raises(ConfigError, match="has no name: set id="):
        PeriodicJob(HOURLY, lambda: Report())


@pytest.mark.parametrize(
    ("job_id", "message"),
    [
        ("", "must not be empty"),
        ("a", "followed by one or more"),
        ("with space", "followed by one or more"),
        ("a" * 128, "at most 127 characters, got 128"),
        ("semi;colon", "followed by one or more"),
        (7, "must be a string, got int"),
    ],
)
def test_bad_id(job_id: Any, message: str) -> None:
    """An id must follow River's rule for kinds. The error calls it an id."""
    with pytest.raises(ConfigError, match=f"^the id of a periodic job .*{message}"):
        job(job_id)
    job("a" * 127)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PeriodicJob(Never(), Report()), "has no time in the future"),
        (lambda: PeriodicJob(cast_any("1h"), Report()), "schedule must be every"),
        (lambda: PeriodicJob(HOURLY, cast_any("report")), "must be job args, or a function"),
        (lambda: PeriodicJob(HOURLY, cast_any(None), id="none"), "must be job args"),
        (lambda: PeriodicJob(HOURLY, Report(), missed=cast_any("some")), "missed must be one of"),
        (lambda: PeriodicJob(HOURLY, Report(), run_on_start=cast_any("x")), "run_on_start must be"),
        (lambda: PeriodicJobs([cast_any(Report())]), "must be a PeriodicJob"),
    ],
)
def test_bad_input(make: Callable[[], object], message: str) -> None:
    """Wrong values are refused when they are given."""
    with pytest.raises(ConfigError, match=message):
        make()


def cast_any(value: object) -> Any:
    """A value that no type checker would let pass."""
    return value


def test_failing_schedule_is_refused() -> None:
    """A schedule that raises does so when it is registered."""
    with pytest.raises(ZeroDivisionError):
        PeriodicJob(Failing(), Report())


def test_add_many_adds_all_or_none() -> None:
    """A list with a duplicate id registers nothing and calls no callback."""
    jobs = PeriodicJobs([job("one")])
    told: list[int] = []
    jobs.wake = lambda: told.append(len(jobs))
    for added in ([job("two"), job("one")], [job("two"), job("two")]):
        with pytest.raises(ConfigError, match=r"two periodic jobs have the id '(one|two)'"):
            jobs.add_many(added)
        assert [one.id for one in jobs] == ["one"]
    with pytest.raises(ConfigError, match="two periodic jobs have the id 'one'"):
        PeriodicJobs([job("one"), job("one")])
    assert told == []


def test_registry() -> None:
    """Periodic jobs are added, found and removed. A removed id can be used again."""
    jobs = PeriodicJobs()
    told: list[int] = []
    jobs.wake = lambda: told.append(len(jobs))
    assert jobs.add(job("one")) == "one"
    assert jobs.add_many([job("two"), job("three")]) == ["two", "three"]
    assert told == [1, 3]
    assert "two" in jobs
    assert jobs.get("two") is not None
    assert jobs.remove("two")
    assert not jobs.remove("two")
    assert jobs.get("two") is None
    jobs.add(job("two"))
    assert [one.id for one in jobs] == ["one", "three", "two"]
    for one in jobs:
        jobs.remove(one.id)
    assert len(jobs) == 0
    jobs.add(job("one"))
    jobs.clear()
    assert len(jobs) == 0


def test_constructor() -> None:
    """The constructor may be args, a class or a function, with or without options. None inserts
    nothing."""
    opts = InsertOpts(queue="other")
    made: list[tuple[Any, Any]] = [
        (Report(3), (Report(3), InsertOpts())),
        (Report, (Report(), InsertOpts())),
        (RawArgs("raw", "{}"), (RawArgs("raw", "{}"), InsertOpts())),
        (lambda: (Report(4), opts), (Report(4), opts)),
        (lambda: None, None),
    ]
    for constructor, run in made:
        assert PeriodicJob(HOURLY, constructor, id="an-id").construct() == run

    async def coroutine() -> Report:
        return Report()

    with pytest.raises(ConfigError, match="must be a plain function"):
        PeriodicJob(HOURLY, cast_any(lambda: coroutine()), id="an-id").construct()
    for wrong in ((Report(), None), (Report(), InsertOpts(), 1), ()):
        with pytest.raises(ConfigError, match="'an-id' must return args, a pair of args and"):
            PeriodicJob(HOURLY, cast_any(lambda wrong=wrong: wrong), id="an-id").construct()


async def _coroutine() -> Report:
    return Report()


def _generator() -> Iterator[Report]:
    yield Report()


async def _async_generator() -> AsyncIterator[Report]:
    yield Report()


class _Callable:
    async def __call__(self) -> Report:
        return Report()


def _numbered(number: int) -> Report:
    return Report(number)


class Needy(msgspec.Struct):
    """Args with a field that must be given."""

    kind: ClassVar[str] = "needy"

    number: int


_WRONG_CONSTRUCTORS: list[tuple[Any, str]] = [
    (_coroutine, "must be a plain function"),
    (_generator, "must be a plain function"),
    (_async_generator, "must be a plain function"),
    (_Callable(), "must be a plain function"),
    (partial(_coroutine), "must be a plain function"),
    (_numbered, "called without arguments: .*'number'"),
    (Needy, "called without arguments: .*'number'"),
]


@pytest.mark.parametrize(("constructor", "message"), _WRONG_CONSTRUCTORS)
def test_constructor_that_cannot_work(constructor: Any, message: str) -> None:
    """A constructor that would fail at each run is refused when it is registered."""
    with pytest.raises(ConfigError, match=f"constructor of periodic job 'an-id' .*{message}"):
        PeriodicJob(HOURLY, constructor, id="an-id")


def test_constructor_without_signature() -> None:
    """A constructor without a readable signature, or with only default arguments, is accepted."""
    for constructor in (cast_any(dict), partial(_numbered, 3), Report):
        PeriodicJob(HOURLY, constructor, id="an-id").construct()


def test_schedule_with_one_time() -> None:
    """A schedule with one time in the future is accepted."""

    class Once:
        def next(self, after: datetime, /) -> datetime | None:
            due = datetime(2999, 1, 1, tzinfo=UTC)
            return due if after < due else None

    assert PeriodicJob(Once(), Report()).schedule_text.endswith("Once")


def test_remove_many() -> None:
    """Several periodic jobs are removed at once. Ids that are not there are ignored."""
    jobs = PeriodicJobs([job("one"), job("two"), job("three")])
    assert jobs.remove_many(["three", "four", "one", "one"]) == ["three", "one"]
    assert [one.id for one in jobs] == ["two"]
    with pytest.raises(ConfigError, match="list of ids"):
        jobs.remove_many("two")


def test_never() -> None:
    """The schedule `never` is accepted, although it has no time, and is read back from its text."""
    assert PeriodicJob(never(), Report()).schedule_text == "never"
    schedule = parse_schedule("never")
    assert schedule is not None
    assert format_schedule(schedule) == "never"
    assert schedule.next(datetime.now(UTC)) is None


def test_kinds_that_the_client_cannot_insert() -> None:
    """A periodic job is refused when it is added, if its args or the annotation of its constructor
    name a kind without a worker. Those that the client was created with are checked later, because
    workers may be registered until the client runs."""
    known = {"other"}
    jobs = PeriodicJobs([job("early")], lambda: known)
    for refused in (job("args"), PeriodicJob(HOURLY, make_report)):
        with pytest.raises(UnknownJobKindError, match="report"):
            jobs.add(refused)
        assert [one.id for one in jobs] == ["early"]
    with pytest.raises(UnknownJobKindError, match="report"):
        jobs.check_kinds()
    jobs.add(PeriodicJob(HOURLY, lambda: None, id="any"))
    jobs.add(PeriodicJob(HOURLY, RawArgs("other", "{}"), id="raw"))
    known.add("report")
    jobs.check_kinds()
    jobs.add(job("args"))
