"""The schedules of periodic jobs. They compute the times at which periodic jobs are due."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Literal, Protocol, TypeAlias, cast

from riverpy._cron import (
    find_time_zone,
    make_cron_iterator,
    parse_every_interval,
    split_cron_fields,
    split_time_zone,
)
from riverpy._duration import format_duration, parse_duration
from riverpy._lifecycle import convert_base_exceptions
from riverpy._names import validate_literal_value
from riverpy.errors import ConfigError

ClockChangePolicy: TypeAlias = Literal["once", "river"]

SCHEDULE_INTERVAL_MIN = timedelta(milliseconds=1)
SCHEDULE_INTERVAL_MAX = timedelta(days=365_000)

_ONE_SECOND = timedelta(seconds=1)
_ONE_DAY = timedelta(days=1)
_EVERY_PREFIX, _CRON_PREFIX = "every ", "cron "
_NEVER_TEXT = "never"
_CRON_WILDCARDS = ("*", "?")
_RIVER_CLOCK_CHANGES_SUFFIX = " clock_changes=river"


class PeriodicSchedule(Protocol):
    """Computes the times at which a periodic job is due.

    The result of `next` must depend only on `after`, so that all processes compute the same times.
    """

    def next(self, after: datetime, /) -> datetime | None:
        """Return the first due time after `after` (aware, UTC); None: there is no such time."""
        ...


class IntervalSchedule:
    """A schedule with a fixed interval. Its text is, for example, `every 1h30m`.

    `cron("@every 1h30m")` returns such a schedule too. The due times of this schedule are whole
    seconds, and its text is `cron @every 1h30m UTC`.
    """

    def __init__(self, interval: timedelta, expression: str | None = None) -> None:
        """Create the schedule. `interval` is the time from one due time to the next. `expression`
        is the cron expression `@every …` that contains the interval; None: `every` creates the
        schedule."""
        if not isinstance(interval, timedelta):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"interval must be a timedelta, got {type(interval).__name__}")
        is_in_range = SCHEDULE_INTERVAL_MIN <= interval <= SCHEDULE_INTERVAL_MAX
        if not is_in_range or interval % SCHEDULE_INTERVAL_MIN:
            raise ConfigError(
                "interval must be a whole number of milliseconds, at least 1 and at most "
                f"{SCHEDULE_INTERVAL_MAX.days:,} days, got {interval}"
            )
        self.interval, self.expression = interval, expression

    def next(self, after: datetime, /) -> datetime | None:
        """Return `after` plus the interval. If a cron expression contains the interval, the
        fraction of a second of `after` is dropped first. None: the result would be after the year
        9999."""
        if self.expression is not None:
            after = after.replace(microsecond=0)
        try:
            return after + self.interval
        except OverflowError:
            return None

    def __str__(self) -> str:
        if self.expression is not None:
            return f"{_CRON_PREFIX}{self.expression} UTC"
        return _EVERY_PREFIX + format_duration(self.interval)


class NeverSchedule:
    """A schedule that is never due. Its text is `never`."""

    def next(self, after: datetime, /) -> datetime | None:
        """Return None: there is no due time."""
        return None

    def __str__(self) -> str:
        return _NEVER_TEXT


class CronSchedule:
    """A schedule that is due when the local time of a time zone matches a cron expression. Its text
    is, for example, `cron 0 9 * * MON Europe/Berlin`.

    An expression has fixed times if neither its minute nor its hour begins with `*` or `?`, and its
    hour does not match all 24 hours. If clocks go forward and skip a fixed time, the schedule is
    due at the first instant after the gap. If clocks go back and a fixed time occurs twice, the
    schedule is due only the first time.

    Any other expression is due at each instant whose local time matches. For example, an hourly
    expression is due once in each elapsed hour. With `clock_changes="river"`, this is also true for
    expressions with fixed times: a skipped time is not due on that day, and a repeated time is due
    twice.
    """

    def __init__(self, expression: str, timezone: str, clock_changes: ClockChangePolicy) -> None:
        """Create the schedule. Its parameters are those of `cron`, but `expression` must not
        contain a time zone."""
        self.timezone, self.zone = timezone, find_time_zone(timezone)
        fields = split_cron_fields(expression)
        self.expression = " ".join(fields).upper()
        self.clock_changes: ClockChangePolicy = clock_changes
        self._cron_iterator = make_cron_iterator(fields, expression)
        minute, hour = fields[:2]
        recurs = minute.startswith(_CRON_WILDCARDS) or hour.startswith(_CRON_WILDCARDS)
        is_hourly = len(self._cron_iterator.hours) == 24
        self._has_fixed_times = clock_changes == "once" and not recurs and not is_hourly

    def next(self, after: datetime, /) -> datetime | None:
        """Return the first matching time after `after`."""
        try:
            if self._has_fixed_times:
                return self._find_next_fixed_time(after)
            return self._find_next_matching_time(after)
        except OverflowError:  # datetime has no times after the year 9999
            return None

    def __str__(self) -> str:
        suffix = _RIVER_CLOCK_CHANGES_SUFFIX if self.clock_changes == "river" else ""
        return f"{_CRON_PREFIX}{self.expression} {self.timezone}{suffix}"

    def _find_next_fixed_time(self, after: datetime) -> datetime | None:
        """Return the next time of an expression with fixed times, such as `0 9 * * *`."""
        local_time: datetime | None = self._to_local_time(after)
        while (local_time := self._find_next_local_time(local_time)) is not None:
            due = self._to_utc_time(local_time)
            if due > after:
                return due
        return None

    def _find_next_matching_time(self, after: datetime) -> datetime | None:
        """Return the first instant after `after` whose local time matches the expression."""
        start = after.astimezone(UTC).replace(microsecond=0)
        local_time = self._to_local_time(start)
        while (local_time := self._find_next_local_time(local_time)) is not None:
            due = (local_time - self._get_utc_offset(start)).replace(tzinfo=UTC)
            change = self._find_offset_change(start, due)
            if change is None:
                return due
            start, local_time = change, self._to_local_time(change) - _ONE_SECOND
        return None

    def _find_next_local_time(self, local_time: datetime) -> datetime | None:
        """Return the next local time that matches the expression. The times have no time zone."""
        pattern = copy.copy(self._cron_iterator)
        pattern.dt = local_time.replace(microsecond=0)
        return next(pattern, None)

    def _to_local_time(self, instant: datetime) -> datetime:
        return instant.astimezone(self.zone).replace(tzinfo=None, fold=0)

    def _get_utc_offset(self, instant: datetime) -> timedelta:
        return instant.astimezone(self.zone).utcoffset() or timedelta(0)

    def _to_utc_time(self, local_time: datetime) -> datetime:
        """Return the first instant with this local time. If clocks skip this local time, return the
        end of the gap."""
        instant = local_time.replace(tzinfo=self.zone).astimezone(UTC)
        if self._to_local_time(instant) == local_time:
            return instant
        before = local_time.replace(tzinfo=self.zone, fold=1).astimezone(UTC)
        return self._find_offset_change(before, instant) or instant

    def _find_offset_change(self, start: datetime, end: datetime) -> datetime | None:
        """Return the first second up to `end` that has another UTC offset than `start`."""
        offset = self._get_utc_offset(start)
        low = start
        while low < end:
            high = min(low + _ONE_DAY, end)
            if self._get_utc_offset(high) != offset:
                while high - low > _ONE_SECOND:
                    middle = low + (high - low) // 2 // _ONE_SECOND * _ONE_SECOND
                    is_changed = self._get_utc_offset(middle) != offset
                    low, high = (low, middle) if is_changed else (middle, high)
                return high
            low = high
        return None


def every(interval: timedelta) -> IntervalSchedule:
    """Return a schedule with a fixed interval. The periodic job is first due one interval after its
    registration.

    Args:
        interval: at least 1 millisecond, in whole milliseconds.

    Raises:
        ConfigError: the interval is not allowed.
    """
    return IntervalSchedule(interval)


def never() -> NeverSchedule:
    """Return a schedule that is never due. Its periodic job runs only with `run_on_start`, or when
    `Client.periodic_run` or `riverpy periodic run` requests it."""
    return NeverSchedule()


def cron(
    expression: str, *, timezone: str | None = None, clock_changes: ClockChangePolicy = "once"
) -> CronSchedule | IntervalSchedule:
    """Return the schedule of a cron expression. River in Go computes the same times, except when
    clocks change: see `clock_changes`.

    Args:
        expression: minute, hour, day of the month, month and day of the week, as in
            `30 9 * * MON-FRI`; or @hourly, @daily, @midnight, @weekly, @monthly, @yearly,
            @annually; or `@every 1h30m`, an interval in whole seconds. If both day fields are
            restricted, a day matches if one of them matches. A field is restricted if it is neither
            `*` nor `?` (`*/2` is restricted). The prefix `CRON_TZ=Europe/Berlin ` sets the time
            zone, as `timezone` does.
        timezone: the name of a time zone, such as `Europe/Berlin`. Default UTC.
        clock_changes: what happens to fixed times (see `CronSchedule`) when clocks change. "once"
            (the default): a skipped time is due at the first instant after the gap, a repeated time
            is due the first time only. "river": a skipped time is not due on that day, a repeated
            time is due twice.

    Raises:
        ConfigError: the expression or the time zone is not valid, no date matches, or both
            `timezone` and the prefix `CRON_TZ=` are set.
    """
    named, expression = split_time_zone(expression)
    if named is not None and timezone is not None:
        raise ConfigError(f"the cron expression has the time zone {named!r}: remove timezone=")
    timezone = named or ("UTC" if timezone is None else timezone)
    find_time_zone(timezone)
    validate_literal_value("clock_changes", clock_changes, ClockChangePolicy)
    interval = parse_every_interval(expression)
    if interval is not None:
        return IntervalSchedule(interval, expression)
    return CronSchedule(expression, timezone, clock_changes)


def parse_schedule(text: str) -> PeriodicSchedule | None:
    """Return the schedule that has this text. Return None if it is the text of a schedule that a
    user's class implements.

    Raises:
        ConfigError: this version of riverpy cannot read the text, or this machine does not have the
            time zone.
    """
    if text == _NEVER_TEXT:
        return never()
    if text.startswith(_EVERY_PREFIX):
        try:
            return every(parse_duration(text.removeprefix(_EVERY_PREFIX)))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if text.startswith(_CRON_PREFIX):
        changes: ClockChangePolicy = (
            "river" if text.endswith(_RIVER_CLOCK_CHANGES_SUFFIX) else "once"
        )
        text = text.removeprefix(_CRON_PREFIX).removesuffix(_RIVER_CLOCK_CHANGES_SUFFIX)
        expression, _, timezone = text.rpartition(" ")
        return cron(expression, timezone=timezone, clock_changes=changes)
    return None


def format_schedule(schedule: PeriodicSchedule) -> str:
    """Return the text of a schedule. The database stores this text with the periodic job. Equal
    schedules have the same text in every process."""
    cls = type(schedule)
    has_text = cls.__str__ is not object.__str__ or cls.__repr__ is not object.__repr__
    return str(schedule) if has_text else cls.__qualname__


def find_next_due_time(schedule: PeriodicSchedule, after: datetime) -> datetime | None:
    """Return the first due time of a schedule after `after`, in UTC; None: there is none.

    Raises:
        ConfigError: the schedule returned a naive time, or a time that is not after `after`.
        Exception: the error that the schedule raised.
    """
    with convert_base_exceptions(format_schedule(schedule)):
        due = cast("object", schedule.next(after))
    if due is None:
        return None
    if not isinstance(due, datetime) or due.utcoffset() is None:
        raise ConfigError(f"{format_schedule(schedule)} must return an aware datetime, got {due!r}")
    if due <= after:
        raise ConfigError(
            f"{format_schedule(schedule)} must return a time after the one it is given: "
            f"{due.isoformat()} after {after.isoformat()}"
        )
    return due.astimezone(UTC)
