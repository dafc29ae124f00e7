"""Schedules: intervals, cron expressions in time zones, and what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from riverpy._maintenance.due_times import find_due_times
from riverpy.errors import ConfigError
from riverpy.schedules import (
    ClockChangePolicy,
    cron,
    every,
    find_next_due_time,
    format_schedule,
    parse_schedule,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from riverpy.schedules import PeriodicSchedule

NEW_YORK = "America/New_York"
BERLIN = "Europe/Berlin"
LORD_HOWE = "Australia/Lord_Howe"
MINUTE = timedelta(minutes=1)
CHANGES: tuple[ClockChangePolicy, ...] = get_args(ClockChangePolicy)
VECTORS = Path(__file__).parents[1] / "vectors" / "cron.jsonl"
"""The next times of expressions in robfig/cron, printed by the verb `cron` of `interop/go`."""


def times(schedule: PeriodicSchedule, after: datetime, count: int) -> list[datetime]:
    """The next so many."""
    found: list[datetime] = []
    while len(found) < count:
        due = find_next_due_time(schedule, found[-1] if found else after)
        assert due is not None
        found.append(due)
    return found


def shown(schedule: PeriodicSchedule, zone: str, start: str) -> str:
    """The next two times after a local one of 2026, on the clocks of the zone."""
    local = datetime.strptime(f"2026-{start}", "%Y-%m-%d %H:%M").replace(tzinfo=ZoneInfo(zone))
    found = times(schedule, local.astimezone(UTC), 2)
    return ", ".join(at.astimezone(ZoneInfo(zone)).strftime("%m-%d %H:%M%z") for at in found)


@pytest.mark.parametrize(
    ("zone", "expression", "start", "expected"),
    [
        # Skipped times: due once, at the first instant after the gap.
        (NEW_YORK, "0 2 * * *", "03-07 03:00", "03-08 03:00-0400, 03-09 02:00-0400"),
        (NEW_YORK, "30 2 * * *", "03-07 03:00", "03-08 03:00-0400, 03-09 02:30-0400"),
        (NEW_YORK, "0,30 2,3 * * *", "03-08 00:00", "03-08 03:00-0400, 03-08 03:30-0400"),
        (BERLIN, "30 2 * * *", "03-28 03:00", "03-29 03:00+0200, 03-30 02:30+0200"),
        (BERLIN, "0 3 * * *", "03-28 04:00", "03-29 03:00+0200, 03-30 03:00+0200"),
        (LORD_HOWE, "15 2 * * *", "10-03 03:00", "10-04 02:30+1100, 10-05 02:15+1100"),
        # Repeated times: due the first time only.
        (NEW_YORK, "0 1 * * *", "10-31 02:00", "11-01 01:00-0400, 11-02 01:00-0500"),
        (NEW_YORK, "30 1 * * *", "11-01 00:00", "11-01 01:30-0400, 11-02 01:30-0500"),
        (BERLIN, "30 2 * * *", "10-24 03:00", "10-25 02:30+0200, 10-26 02:30+0100"),
        (LORD_HOWE, "45 1 * * *", "04-04 02:00", "04-05 01:45+1100, 04-06 01:45+1030"),
        # Hourly: once per elapsed hour.
        (NEW_YORK, "0 * * * *", "03-08 00:30", "03-08 01:00-0500, 03-08 03:00-0400"),
        (NEW_YORK, "@hourly", "11-01 00:30", "11-01 01:00-0400, 11-01 01:00-0500"),
        (NEW_YORK, "0 0-23 * * *", "11-01 00:30", "11-01 01:00-0400, 11-01 01:00-0500"),
        (BERLIN, "0 * * * *", "10-25 01:30", "10-25 02:00+0200, 10-25 02:00+0100"),
        (LORD_HOWE, "0 * * * *", "10-04 00:30", "10-04 01:00+1030, 10-04 03:00+1100"),
        (LORD_HOWE, "0 * * * *", "04-05 00:30", "04-05 01:00+1100, 04-05 02:00+1030"),
        (LORD_HOWE, "*/15 2 * * *", "04-05 00:30", "04-05 02:00+1030, 04-05 02:15+1030"),
        (LORD_HOWE, "*/15 * * * *", "04-05 01:30", "04-05 01:45+1100, 04-05 01:30+1030"),
        # Expressions with a `*` in the minute or hour are not due in the gap.
        (NEW_YORK, "30 */2 * * *", "03-08 00:00", "03-08 00:30-0500, 03-08 04:30-0400"),
        (NEW_YORK, "? 2 * * *", "03-08 00:00", "03-09 02:00-0400, 03-09 02:01-0400"),
    ],
)
def test_clock_changes(zone: str, expression: str, start: str, expected: str) -> None:
    """When clocks change, a fixed time is due once that day, and recurring times continue."""
    assert shown(cron(expression, timezone=zone), zone, start) == expected


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    zone=st.sampled_from([NEW_YORK, BERLIN, LORD_HOWE, "Africa/Casablanca", "Asia/Kathmandu"]),
    minute=st.sampled_from(["*", "*/7", "*/30"]),
    hour=st.sampled_from(["*", "*/2", "1", "2", "1-3"]),
    start=st.datetimes(datetime(2026, 1, 1), datetime(2026, 12, 30)),
    near=st.sampled_from(["", "2026-03-08T05:00", "2026-11-01T04:00", "2026-04-04T13:00"]),
)
def test_recurring_is_each_matching_minute(
    zone: str, minute: str, hour: str, start: datetime, near: str
) -> None:
    """An expression with `*` in its minute or hour is due at each minute whose local time
    matches."""
    if near:
        start = datetime.fromisoformat(near)
    start = start.replace(tzinfo=UTC, second=0, microsecond=0)
    minutes = range(0, 60, int(minute[2:] or 1)) if minute != "*" else range(60)
    hours = {"*": range(24), "*/2": range(0, 24, 2), "1-3": range(1, 4)}.get(hour)
    if hours is None:
        hours = [int(hour)]
    local = ZoneInfo(zone)
    clocks = ((due, due.astimezone(local)) for due in (start + n * MINUTE for n in range(1, 1600)))
    matching = [due for due, at in clocks if at.minute in minutes and at.hour in hours]
    schedule = cron(f"{minute} {hour} * * *", timezone=zone)
    assert times(schedule, start, len(matching)) == matching


def vectors() -> Iterator[tuple[str, str | None, datetime, list[datetime]]]:
    """Each expression with the zone that it is used in, a time, and those that follow in Go; none
    where Go refuses the expression or finds no time."""
    for vector in map(json.loads, VECTORS.read_bytes().splitlines()):
        expression = vector["expression"]
        zone = None if expression.startswith(("TZ=", "CRON_TZ=")) else vector["zone"]
        following = [datetime.fromisoformat(at) for at in vector["next"] or ()]
        yield expression, zone, datetime.fromisoformat(vector["after"]), following


def test_expressions_equal_go() -> None:
    """Each expression has the same times as in robfig/cron for Go, and is refused if Go refuses it
    or no date matches (FR-15). `clock_changes` is an option (CF-070, cron_schedule_goldens;
    CF-109)."""
    wrong: list[str] = []
    accepted = 0
    for expression, zone, after, expected in vectors():
        for changes in CHANGES if zone in {None, "UTC"} else ("river",):
            if not expected:
                with pytest.raises(ConfigError):
                    cron(expression, timezone=zone, clock_changes=changes)
                continue
            accepted += 1
            schedule = cron(expression, timezone=zone, clock_changes=changes)
            found = times(schedule, after, len(expected))
            if found != expected:
                wrong.append(f"{expression!r} {zone} {changes}: {found}, in Go {expected}")
    assert not wrong
    assert accepted > 1500


@pytest.mark.parametrize(
    ("zone", "expression", "start", "expected"),
    [
        (NEW_YORK, "30 2 * * *", "03-07 03:00", "03-09 02:30-0400, 03-10 02:30-0400"),
        (NEW_YORK, "30 1 * * *", "10-31 12:00", "11-01 01:30-0400, 11-01 01:30-0500"),
        (BERLIN, "0 2,3 * * *", "03-29 00:00", "03-29 03:00+0200, 03-30 02:00+0200"),
        (LORD_HOWE, "45 1 * * *", "04-04 02:00", "04-05 01:45+1100, 04-05 01:45+1030"),
        (BERLIN, "0 * * * *", "10-25 01:30", "10-25 02:00+0200, 10-25 02:00+0100"),
    ],
)
def test_clock_changes_as_in_river(zone: str, expression: str, start: str, expected: str) -> None:
    """With `clock_changes="river"`, a skipped time is not due on that day, and a repeated time is
    due twice."""
    assert shown(cron(expression, timezone=zone, clock_changes="river"), zone, start) == expected


@pytest.mark.parametrize("days", [1, 365 * 9])
def test_slots_of_an_interval_text(days: int) -> None:
    """After a gap, `@every` has the same times as without the gap."""
    first = datetime(2026, 1, 1, 0, 0, 7, tzinfo=UTC)
    due = find_due_times(cron("@every 90s"), "one", first, first + timedelta(days=days, seconds=50))
    assert due.times_with_job == [first + timedelta(days=days)]
    assert due.next_time == first + timedelta(days=days, seconds=90)


@pytest.mark.parametrize(
    ("expression", "options", "message"),
    [
        ("CRON_TZ=Asia/Tokyo @daily", {"timezone": BERLIN}, "has the time zone 'Asia/Tokyo'"),
        ("TZ=UTC @every 5m", {"timezone": "UTC"}, "remove timezone="),
        ("TZ=Mars/Olympus @every 5m", {}, "there is no time zone 'Mars/Olympus'"),
        ("@every 5m", {"timezone": "Mars/Olympus"}, "there is no time zone"),
        ("@daily", {"clock_changes": "twice"}, "clock_changes must be one of 'once', 'river'"),
        ("0 0 * * 7", {}, "'7' is not a day of the week: use 0 to 6 or sun to sat"),
        ("0 0 L * *", {}, "'L' is not a day of the month: use 1 to 31"),
        ("0 0 * * MON#2", {}, "'MON#2' is not a day of the week"),
        ("@weekly 0 * * *", {}, "'@weekly' is not a minute"),
        ("@every 2d", {}, "use a duration with the units"),
        ("@Daily", {}, "or one of @annually"),
    ],
)
def test_refusals_name_the_remedy(expression: str, options: dict[str, Any], message: str) -> None:
    """The error says what is wrong and what to write instead."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        cron(expression, **options)


WITHOUT_ZONE_FILES = """
from datetime import UTC, datetime
import riverpy
at = datetime(2026, 1, 1, tzinfo=UTC)
for schedule in (
    riverpy.cron("0 0 * * *"),
    riverpy.cron("@daily"),
    riverpy.cron("0 9 * * *", timezone="Europe/Berlin"),
    riverpy.cron("0 9 * * *", timezone="US/Pacific"),
):
    print(schedule, schedule.next(at).isoformat())
"""


def test_no_time_zone_files() -> None:
    """Schedules work on a system without time zone files (FR-02)."""
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_ZONE_FILES],
        env={**os.environ, "PYTHONTZPATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "cron 0 0 * * * UTC 2026-01-02T00:00:00+00:00",
        "cron 0 0 * * * UTC 2026-01-02T00:00:00+00:00",
        "cron 0 9 * * * Europe/Berlin 2026-01-01T08:00:00+00:00",
        "cron 0 9 * * * US/Pacific 2026-01-01T17:00:00+00:00",
    ]


WITHOUT_TZDATA = """
import sys
sys.modules["tzdata"] = None
import riverpy
print(riverpy.cron("@daily"), riverpy.cron("0 9 * * *", timezone="UTC"))
"""


def test_utc_needs_no_package() -> None:
    """UTC works without time zone files and without the package tzdata (FR-02)."""
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TZDATA],
        env={**os.environ, "PYTHONTZPATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_zone_is_kept_over_months() -> None:
    """`0 12 1 * *` in Kolkata is 06:30 UTC on the first of each of 24 months (SK-02)."""
    found = times(
        cron("0 12 1 * *", timezone="Asia/Kolkata"),
        datetime(2026, 1, 31, 23, 59, tzinfo=ZoneInfo("Asia/Kolkata")),
        24,
    )
    assert [(due.day, due.hour, due.minute, due.tzinfo) for due in found] == [(1, 6, 30, UTC)] * 24
    assert [(due.month - 2) % 12 for due in found] == [*range(12), *range(12)]


def test_leap_day() -> None:
    """The 29th of February is due in 2028 (SK-14)."""
    due = find_next_due_time(cron("0 0 29 2 *"), datetime(2026, 1, 1, tzinfo=UTC))
    assert due == datetime(2028, 2, 29, tzinfo=UTC)


@pytest.mark.parametrize(
    "expression",
    [
        "0 0 30 2 *",
        "60 * * * *",
        "* * * *",
        "*/0 * * * *",
        "5-1 * * * *",
        "5,30-10 * * * *",
        "",
        "0 0 31 2,4,6,9,11 *",
        "* * * * * *",
        "@every 5x",
        ", * * * *",
        f"@every {'9' * 5000}s",
        "٣ * * * *",
        f"{'9' * 5000} * * * *",
    ],
)
def test_impossible_cron(expression: str) -> None:
    """An invalid expression, or one without a matching date, is refused quickly (SK-14)."""
    begin = time.thread_time()
    with pytest.raises(ConfigError, match="cron expression"):
        cron(expression)
    assert time.thread_time() - begin < 1


@pytest.mark.parametrize("zone", ["Mars/Olympus", "Europe", "../etc/passwd", "/etc/localtime", ""])
def test_unknown_zone(zone: str) -> None:
    """An unknown time zone is refused. The error has its name."""
    with pytest.raises(ConfigError, match="there is no time zone"):
        cron("@daily", timezone=zone)


@pytest.mark.parametrize("zone", ["europe/berlin", "Europe/Berln", "Europe_Berlin"])
def test_similar_zones_are_suggested(zone: str) -> None:
    """The error for an unknown time zone suggests similar names."""
    with pytest.raises(ConfigError, match=r"did you mean .*Europe/Berlin\b"):
        cron("@daily", timezone=zone)


def test_error_has_the_text_that_was_given() -> None:
    """The error for a wrong expression shows the expression as the user wrote it."""
    with pytest.raises(ConfigError, match=r"'0 9  \* \* mon-fry' is not allowed"):
        cron("0 9  * * mon-fry")


@pytest.mark.parametrize(
    "interval",
    [timedelta(0), timedelta(seconds=-1), timedelta(microseconds=1500), timedelta.max],
)
def test_impossible_interval(interval: timedelta) -> None:
    """An interval must be above zero, in whole milliseconds."""
    with pytest.raises(ConfigError, match="interval must be a whole number of milliseconds"):
        every(interval)


def test_interval_is_added_to_the_given_time() -> None:
    """An interval is added to the given time, across clock changes and up to the last year."""
    schedule = every(timedelta(hours=36))
    found = times(schedule, datetime(2026, 3, 28, tzinfo=UTC), 10)
    assert {later - earlier for earlier, later in pairwise(found)} == {timedelta(hours=36)}
    assert find_next_due_time(schedule, datetime(9999, 12, 31, tzinfo=UTC)) is None


@pytest.mark.parametrize("zone", ["UTC", NEW_YORK])
def test_slot_of_the_first_year(zone: str) -> None:
    """A time in the year 1, and the rare times since, are computed."""
    first, now = datetime(1, 1, 2, tzinfo=UTC), datetime(2026, 11, 29, tzinfo=UTC)
    due = find_due_times(cron("0 0 29 2 *", timezone=zone), "all", first, now)
    assert 480 < len(due.times_with_job) < 500
    assert due.next_time is not None
    assert due.next_time.year == 2028


def test_end_of_calendar() -> None:
    """After the last date of the calendar nothing is due."""
    for zone in ("UTC", "Asia/Tokyo", NEW_YORK):
        for expression in ("@yearly", "* * * * *"):
            schedule = cron(expression, timezone=zone)
            assert (
                find_next_due_time(schedule, datetime(9999, 12, 31, 23, 59, 30, tzinfo=UTC)) is None
            )


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (every(timedelta(minutes=90)), "every 1h30m"),
        (every(timedelta(milliseconds=1)), "every 1ms"),
        (every(timedelta(days=400)), "every 400d"),
        (cron("@daily"), "cron 0 0 * * * UTC"),
        (cron("@every 1h30m", timezone=BERLIN), "cron @every 1h30m UTC"),
        (cron("TZ=Asia/Tokyo 0 9 * * *"), "cron 0 9 * * * Asia/Tokyo"),
        (cron("@daily", clock_changes="river"), "cron 0 0 * * * UTC clock_changes=river"),
        (cron(" 30  9 * * mon-fri ", timezone=BERLIN), f"cron 30 9 * * MON-FRI {BERLIN}"),
    ],
)
def test_text_is_read_back(schedule: PeriodicSchedule, text: str) -> None:
    """`parse_schedule` restores a schedule from its text."""
    assert format_schedule(schedule) == text
    read = parse_schedule(text)
    assert read is not None
    assert format_schedule(read) == text
    now = datetime(2026, 5, 1, 12, 34, 56, 789, tzinfo=UTC)
    assert read.next(now) == schedule.next(now)


class Own:
    """A schedule of a user's own, that returns what it is told."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def next(self, after: datetime, /) -> datetime | None:
        """The answer."""
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("tomorrow", "must return an aware datetime, got 'tomorrow'"),
        (datetime(2027, 1, 1), "must return an aware datetime"),
        (datetime(2026, 1, 1, tzinfo=UTC), "a time after the one it is given"),
    ],
)
def test_own_schedule_is_checked(answer: object, message: str) -> None:
    """A user's schedule that returns a naive time, a past time or no datetime is refused
    (SK-18)."""
    with pytest.raises(ConfigError, match=message):
        find_next_due_time(Own(answer), datetime(2026, 1, 1, tzinfo=UTC))
    assert parse_schedule(format_schedule(Own(answer))) is None
