"""Periodic jobs: what is inserted by the clock, and when.

A schedule says when, a periodic job what. Every client of a schema should register the same ones:
whichever leads inserts them.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Literal, Protocol, TypeAlias, cast, get_args

import msgspec

from riverpy._cron import cron_fields, cron_pattern, every_interval, split_time_zone, time_zone
from riverpy._duration import format_duration, parse_duration
from riverpy._lifecycle import only_exceptions
from riverpy._names import validate_kind
from riverpy.errors import ConfigError
from riverpy.insert_opts import InsertOpts
from riverpy.job import JobArgs, RawArgs

Missed: TypeAlias = Literal["skip", "one", "all"]
RunOnStart: TypeAlias = Literal["never", "first_registration", "each_term"]
ClockChanges: TypeAlias = Literal["once", "river"]
PeriodicRun: TypeAlias = JobArgs | RawArgs | tuple[JobArgs | RawArgs, InsertOpts]
"""What is inserted for one run: args, or args with options."""

INTERVAL_MIN = timedelta(milliseconds=1)
INTERVAL_MAX = timedelta(days=365_000)

_SECOND = timedelta(seconds=1)
_DAY = timedelta(days=1)
_EVERY, _CRON = "every ", "cron "
_STARS = ("*", "?")
_AS_RIVER = " clock_changes=river"


# Schedules


class PeriodicSchedule(Protocol):
    """When something is due. What `next` returns depends on `after` alone, so that every process
    comes to the same times."""

    def next(self, after: datetime, /) -> datetime | None:
        """The first time after `after` (aware, UTC) that it is due; None: never again."""
        ...


class IntervalSchedule:
    """Due again and again after the same time. Its text is `every 1h30m`."""

    def __init__(self, interval: timedelta) -> None:
        """Make it; see `every`."""
        if not isinstance(interval, timedelta):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"an interval is a timedelta, got {type(interval).__name__}")
        if not INTERVAL_MIN <= interval <= INTERVAL_MAX or interval % INTERVAL_MIN:
            raise ConfigError(
                "an interval is one millisecond or more, in whole milliseconds, and at most "
                f"{INTERVAL_MAX.days:,} days, got {interval}"
            )
        self.interval = interval

    def next(self, after: datetime, /) -> datetime | None:
        """`after` and the interval."""
        try:
            return after + self.interval
        except OverflowError:
            return None

    def __str__(self) -> str:
        return _EVERY + format_duration(self.interval)


class WholeSecondSchedule(IntervalSchedule):
    """The interval of a cron expression `@every DURATION`. Its times are whole seconds, and its
    text is `cron @every 1h30m UTC`."""

    def __init__(self, expression: str, interval: timedelta) -> None:
        """Make it; see `cron`."""
        super().__init__(interval)
        self.expression = expression

    def next(self, after: datetime, /) -> datetime | None:
        """`after` and the interval, without a fraction of a second."""
        return super().next(after.replace(microsecond=0))

    def __str__(self) -> str:
        return f"{_CRON}{self.expression} UTC"


class CronSchedule:
    """Due when a cron expression says so, on the clocks of a time zone. Its text is
    `cron 0 9 * * MON Europe/Berlin`.

    The clocks change. An entry at fixed times (neither its minute nor its hour begins with `*` or
    `?`) keeps them: one that the clocks leap over comes at the first instant after the gap, one
    that they show twice comes the first time only. Any other entry is due at each instant whose
    local time matches: an hourly one once in each hour that passes. With `clock_changes="river"`
    that holds for entries at fixed times too.
    """

    def __init__(self, expression: str, timezone: str, clock_changes: ClockChanges) -> None:
        """Make it; see `cron`. The expression names no zone."""
        self.timezone, self.zone = timezone, time_zone(timezone)
        fields = cron_fields(expression)
        self.expression = " ".join(fields).upper()
        self.clock_changes: ClockChanges = clock_changes
        self._pattern = cron_pattern(fields, expression)
        minute, hour = fields[:2]
        recurs = minute.startswith(_STARS) or hour.startswith(_STARS)
        is_hourly = len(self._pattern.hours) == 24
        self._keeps_times = clock_changes == "once" and not recurs and not is_hourly

    def next(self, after: datetime, /) -> datetime | None:
        """The first time after `after` that the expression matches."""
        try:
            return self._next_fixed(after) if self._keeps_times else self._next_elapsed(after)
        except OverflowError:  # the end of the calendar
            return None

    def __str__(self) -> str:
        suffix = _AS_RIVER if self.clock_changes == "river" else ""
        return f"{_CRON}{self.expression} {self.timezone}{suffix}"

    def _next_fixed(self, after: datetime) -> datetime | None:
        wall: datetime | None = self._wall(after)
        while (wall := self._next_wall(wall)) is not None:
            due = self._instant(wall)
            if due > after:
                return due
        return None

    def _next_elapsed(self, after: datetime) -> datetime | None:
        start = after.astimezone(UTC).replace(microsecond=0)
        wall = self._wall(start)
        while (wall := self._next_wall(wall)) is not None:
            due = (wall - self._offset(start)).replace(tzinfo=UTC)
            change = self._first_change(start, due)
            if change is None:
                return due
            start, wall = change, self._wall(change) - _SECOND
        return None

    def _next_wall(self, wall: datetime) -> datetime | None:
        """The next reading of a clock, without a zone, that matches."""
        pattern = copy.copy(self._pattern)
        pattern.dt = wall.replace(microsecond=0)
        return next(pattern, None)

    def _wall(self, instant: datetime) -> datetime:
        return instant.astimezone(self.zone).replace(tzinfo=None, fold=0)

    def _offset(self, instant: datetime) -> timedelta:
        return instant.astimezone(self.zone).utcoffset() or timedelta(0)

    def _instant(self, wall: datetime) -> datetime:
        """When the clocks show this for the first time or, if never, when they leap over it."""
        instant = wall.replace(tzinfo=self.zone).astimezone(UTC)
        if self._wall(instant) == wall:
            return instant
        before = wall.replace(tzinfo=self.zone, fold=1).astimezone(UTC)
        return self._first_change(before, instant) or instant

    def _first_change(self, start: datetime, end: datetime) -> datetime | None:
        """The first second after `start`, up to `end`, that has another offset."""
        offset = self._offset(start)
        low = start
        while low < end:
            high = min(low + _DAY, end)
            if self._offset(high) != offset:
                while high - low > _SECOND:
                    middle = low + (high - low) // 2 // _SECOND * _SECOND
                    low, high = (low, middle) if self._offset(middle) != offset else (middle, high)
                return high
            low = high
        return None


def every(interval: timedelta) -> IntervalSchedule:
    """Due again and again after `interval`, for the first time that long after it was registered.

    Args:
        interval: one millisecond or more, in whole milliseconds.

    Raises:
        ConfigError: it is not.
    """
    return IntervalSchedule(interval)


def cron(
    expression: str, *, timezone: str | None = None, clock_changes: ClockChanges = "once"
) -> CronSchedule | IntervalSchedule:
    """Due by the clocks of a time zone. An expression means what it means to River in Go.

    Args:
        expression: minute, hour, day of the month, month and day of the week, as in
            `30 9 * * MON-FRI`; or @hourly, @daily, @midnight, @weekly, @monthly, @yearly,
            @annually; or `@every 1h30m`, an interval of whole seconds. If both day fields restrict,
            a day that matches either one counts; `*` and `?` do not restrict, `*/2` does.
            `CRON_TZ=Europe/Berlin ` may stand in front, in place of `timezone`.
        timezone: as in `Europe/Berlin`. Default UTC.
        clock_changes: what happens to an entry at fixed times when the clocks change. `once` (the
            default): a time that they leap over comes at the first instant after the gap, one that
            they show twice comes the first time only. `river`: it does not come on that day, and it
            comes twice.

    Raises:
        ConfigError: the expression is none, no date ever matches it, there is no such zone, or a
            zone is given twice.
    """
    named, expression = split_time_zone(expression)
    if named is not None and timezone is not None:
        raise ConfigError(f"the cron expression names the time zone {named!r}: leave timezone= out")
    timezone = named or ("UTC" if timezone is None else timezone)
    time_zone(timezone)
    _expect_one_of("clock_changes", clock_changes, ClockChanges)
    interval = every_interval(expression)
    if interval is not None:
        return WholeSecondSchedule(expression, interval)
    return CronSchedule(expression, timezone, clock_changes)


def parse_schedule(text: str) -> PeriodicSchedule | None:
    """The schedule of which `schedule_text` is the text; None if it is one of the user's own.

    Raises:
        ConfigError: this version of riverpy or this machine does not know it.
    """
    if text.startswith(_EVERY):
        try:
            return every(parse_duration(text.removeprefix(_EVERY)))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if text.startswith(_CRON):
        changes: ClockChanges = "river" if text.endswith(_AS_RIVER) else "once"
        text = text.removeprefix(_CRON).removesuffix(_AS_RIVER)
        expression, _, timezone = text.rpartition(" ")
        return cron(expression, timezone=timezone, clock_changes=changes)
    return None


def schedule_text(schedule: PeriodicSchedule) -> str:
    """The schedule in words that are the same in each process."""
    cls = type(schedule)
    has_words = cls.__str__ is not object.__str__ or cls.__repr__ is not object.__repr__
    return str(schedule) if has_words else cls.__qualname__


def next_time(schedule: PeriodicSchedule, after: datetime) -> datetime | None:
    """What the schedule says, checked, in UTC.

    Raises:
        ConfigError: it returns no aware time, or one that is not after `after`.
        Exception: the schedule failed.
    """
    with only_exceptions(schedule_text(schedule)):
        due = cast("object", schedule.next(after))
    if due is None:
        return None
    if not isinstance(due, datetime) or due.utcoffset() is None:
        raise ConfigError(f"{schedule_text(schedule)} must return an aware datetime, got {due!r}")
    if due <= after:
        raise ConfigError(
            f"{schedule_text(schedule)} must return a time after the one it is given: "
            f"{due.isoformat()} after {after.isoformat()}"
        )
    return due.astimezone(UTC)


# Jobs


class PeriodicJob:
    """Jobs that are inserted by a schedule."""

    def __init__(
        self,
        schedule: PeriodicSchedule,
        constructor: Callable[[], PeriodicRun | None] | JobArgs | RawArgs,
        *,
        id: str | None = None,  # noqa: A002 (River's name)
        run_on_start: RunOnStart | bool = "never",
        missed: Missed = "one",
    ) -> None:
        """Describe them; `PeriodicJobs.add` or `Client(periodic_jobs=…)` registers them.

        Args:
            schedule: `every(…)`, `cron(…)`, or an object of your own with a method `next`.
            constructor: the args of every job; or a plain function that is called for each run,
                without arguments, and returns its args, its args and InsertOpts, or None for no job
                this time.
            id: names it in the database, where its state outlives processes and leaders; 2 to 127
                letters, digits and `-[]<>/.·:+_`. Default: the kind or the function's name, and
                eight digits made of the schedule's text. Give one to what may change its schedule.
            run_on_start: one run more `each_term`, whenever a client begins to lead (also True);
                on the `first_registration` of its id; or `never` (also False), the default.
            missed: what becomes of slots that passed while no client led: `one` job for all of them
                together (the default), none for a slot that is more than 30 s late (`skip`), or one
                for each of the newest 1,000 (`all`).

        Raises:
            ConfigError: a value is not allowed, or the schedule never comes.
        """
        if not callable(getattr(schedule, "next", None)):
            raise ConfigError(
                "a schedule is every(timedelta(…)), cron('…') or an object with a method `next`, "
                f"got {type(schedule).__name__}"
            )
        if isinstance(run_on_start, bool):
            run_on_start = "each_term" if run_on_start else "never"
        _expect_one_of("run_on_start", run_on_start, RunOnStart)
        _expect_one_of("missed", missed, Missed)
        self.schedule = schedule
        self.schedule_text = _storable(schedule_text(schedule))
        self.run_on_start: RunOnStart = run_on_start
        self.missed: Missed = missed
        if not callable(constructor) and not hasattr(constructor, "kind"):
            raise ConfigError(
                "a periodic job needs its args, or a function that makes them, got "
                f"{type(constructor).__name__}"
            )
        self._constructor = constructor
        self.id = id if id is not None else _default_id(constructor, self.schedule_text)
        _check_id(self.id)
        if callable(constructor):
            _check_constructor(self.id, constructor)
        if next_time(schedule, datetime.now(UTC)) is None:
            raise ConfigError(f"the schedule of periodic job {self.id!r} never comes")

    def construct(self) -> tuple[JobArgs | RawArgs, InsertOpts] | None:
        """The args and options of one run, made afresh; None: no job this time.

        Raises:
            ConfigError: the constructor returned an awaitable, or a tuple that is no pair of args
                and options.
            Exception: whatever the constructor raised.
        """
        constructor = self._constructor
        with only_exceptions(f"the constructor of periodic job {self.id!r}"):
            run = constructor() if callable(constructor) else constructor
        if run is None:
            return None
        if isinstance(run, Awaitable):
            close = getattr(cast("object", run), "close", None)
            if close is not None:
                close()
            raise ConfigError(_not_plain(self.id))
        if not isinstance(run, tuple):
            return run, InsertOpts()
        parts = cast("tuple[object, ...]", run)
        if len(parts) != 2 or not isinstance(parts[1], InsertOpts):
            types = ", ".join(type(part).__name__ for part in parts)
            raise ConfigError(
                f"the constructor of periodic job {self.id!r} must return args, a pair of args and "
                f"InsertOpts, or None; got a tuple of ({types})"
            )
        return run

    def __repr__(self) -> str:
        return f"PeriodicJob({self.id!r}, {self.schedule_text!r})"


def _expect_one_of(name: str, value: object, choices: object) -> None:
    if value not in get_args(choices):
        allowed = ", ".join(map(repr, get_args(choices)))
        raise ConfigError(f"{name} must be one of {allowed}, got {value!r}")


_NOT_PLAIN = (
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
)


def _check_constructor(job_id: str, constructor: Callable[..., object]) -> None:
    """What would fail at each slot is refused at once."""
    codes = (constructor, type(constructor).__call__)
    if any(test(code) for test in _NOT_PLAIN for code in codes):
        raise ConfigError(_not_plain(job_id))
    try:
        signature = inspect.signature(constructor)
    except (TypeError, ValueError):  # it does not tell
        return
    try:
        signature.bind()
    except TypeError as error:
        raise ConfigError(
            f"the constructor of periodic job {job_id!r} is called without arguments: {error}"
        ) from None


def _not_plain(job_id: str) -> str:
    return (
        f"the constructor of periodic job {job_id!r} must be a plain function that returns the "
        "args, neither an `async def` nor a generator"
    )


def _storable(text: str) -> str:
    return text.replace("\0", "").encode(errors="replace").decode()


def _check_id(job_id: str) -> None:
    validate_kind(job_id, noun="the id of a periodic job")


def _default_id(constructor: object, schedule: str) -> str:
    name = getattr(constructor, "kind", None) or getattr(constructor, "__qualname__", None)
    if not isinstance(name, str) or "<lambda>" in name:
        raise ConfigError("the constructor of this periodic job has no name: give it an id=")
    digits = hashlib.sha256(f"{name}\0{schedule}".encode()).hexdigest()[:8]
    return f"{name}:{digits}"


class PeriodicJobs:
    """The periodic jobs of a client. They may be added and removed at any time, in the event loop
    of the client; what a leader has is inserted."""

    def __init__(self, jobs: Iterable[PeriodicJob] = ()) -> None:
        self._jobs: dict[str, PeriodicJob] = {}
        self.stir: Callable[[], None] = _nothing
        """Lets the enqueuer of these jobs, if there is one, look at once what there is to do."""
        self.add_many(jobs)

    def add(self, job: PeriodicJob) -> str:
        """Register one. Returns its id.

        Raises:
            ConfigError: its id is taken.
        """
        (job_id,) = self.add_many([job])
        return job_id

    def add_many(self, jobs: Iterable[PeriodicJob]) -> list[str]:
        """Register all or none. Returns their ids.

        Raises:
            ConfigError: an id is taken, or given twice.
        """
        added: dict[str, PeriodicJob] = {}
        if not isinstance(jobs, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                "periodic jobs are given as a list, as in periodic_jobs=[PeriodicJob(…)], got "
                f"{type(jobs).__name__}"
            )
        for job in jobs:
            if not isinstance(job, PeriodicJob):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(f"a periodic job is a PeriodicJob, got {type(job).__name__}")
            if job.id in self._jobs or job.id in added:
                raise ConfigError(
                    f"two periodic jobs have the id {job.id!r}: give one of them another id="
                )
            added[job.id] = job
        self._jobs.update(added)
        if added:
            self.stir()
        return list(added)

    def get(self, job_id: str) -> PeriodicJob | None:
        """The one with this id."""
        return self._jobs.get(job_id)

    def remove(self, job_id: str) -> bool:
        """Insert no more jobs of this id, which is free again. Returns whether there was one.

        What the database knows of it is kept for 30 days: one that is added again goes on where it
        stood.
        """
        return self._jobs.pop(job_id, None) is not None

    def clear(self) -> None:
        """Remove all."""
        self._jobs.clear()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[PeriodicJob]:
        return iter(list(self._jobs.values()))

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs


def _nothing() -> None: ...


# Starting


class PeriodicJobState(msgspec.Struct, frozen=True, kw_only=True):
    """What the database knows of a periodic job."""

    id: str
    schedule: str
    """The text of its schedule."""
    next_run_at: datetime | None
    """Its next slot; None: there is none."""
    last_run_at: datetime | None
    """The slot of the last job that was inserted; None: none was."""
    paused_at: datetime | None
    """Since when no job is inserted; None: it is not paused."""
    run_requested_at: datetime | None
    """Since when a run is asked for that no leader has inserted yet."""


class PeriodicJobsStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a hook `periodic_jobs_start` is called with."""

    jobs: PeriodicJobs
    """The client's; the hook may add and remove. They are kept from one term to the next."""
    states: Mapping[str, PeriodicJobState]
    """What the database knows, by id, also of jobs that this client does not have; of its leader
    domain alone."""
