"""Schedules: intervals, cron on the clocks of a zone, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from riverpy._maintenance.slots import due_slots
from riverpy.errors import ConfigError
from riverpy.periodic import cron, every, next_time, parse_schedule, schedule_text

if TYPE_CHECKING:
    from riverpy.periodic import PeriodicSchedule

NEW_YORK = "America/New_York"
BERLIN = "Europe/Berlin"
LORD_HOWE = "Australia/Lord_Howe"
MINUTE = timedelta(minutes=1)
VECTORS = Path(__file__).parents[1] / "vectors" / "cron.jsonl"
"""What robfig/cron makes of expressions; no next times for one that it refuses."""
VECTORS_AFTER = datetime(2026, 11, 28, tzinfo=UTC)


def times(schedule: PeriodicSchedule, after: datetime, count: int) -> list[datetime]:
    """The next so many."""
    found: list[datetime] = []
    while len(found) < count:
        due = next_time(schedule, found[-1] if found else after)
        assert due is not None
        found.append(due)
    return found


@pytest.mark.parametrize(
    ("zone", "expression", "start", "expected"),
    [
        # In the gap: the first instant after it, once however many times are in it.
        (NEW_YORK, "0 2 * * *", "03-07 03:00", "03-08 03:00-0400, 03-09 02:00-0400"),
        (NEW_YORK, "30 2 * * *", "03-07 03:00", "03-08 03:00-0400, 03-09 02:30-0400"),
        (NEW_YORK, "0,30 2,3 * * *", "03-08 00:00", "03-08 03:00-0400, 03-08 03:30-0400"),
        (BERLIN, "30 2 * * *", "03-28 03:00", "03-29 03:00+0200, 03-30 02:30+0200"),
        (BERLIN, "0 3 * * *", "03-28 04:00", "03-29 03:00+0200, 03-30 03:00+0200"),
        (LORD_HOWE, "15 2 * * *", "10-03 03:00", "10-04 02:30+1100, 10-05 02:15+1100"),
        # In the overlap: the first time only.
        (NEW_YORK, "0 1 * * *", "10-31 02:00", "11-01 01:00-0400, 11-02 01:00-0500"),
        (NEW_YORK, "30 1 * * *", "11-01 00:00", "11-01 01:30-0400, 11-02 01:30-0500"),
        (BERLIN, "30 2 * * *", "10-24 03:00", "10-25 02:30+0200, 10-26 02:30+0100"),
        (LORD_HOWE, "45 1 * * *", "04-04 02:00", "04-05 01:45+1100, 04-06 01:45+1030"),
        # Hourly: once in each hour that passes.
        (NEW_YORK, "0 * * * *", "03-08 00:30", "03-08 01:00-0500, 03-08 03:00-0400"),
        (NEW_YORK, "@hourly", "11-01 00:30", "11-01 01:00-0400, 11-01 01:00-0500"),
        (NEW_YORK, "0 0-23 * * *", "11-01 00:30", "11-01 01:00-0400, 11-01 01:00-0500"),
        (BERLIN, "0 * * * *", "10-25 01:30", "10-25 02:00+0200, 10-25 02:00+0100"),
        (LORD_HOWE, "0 * * * *", "10-04 00:30", "10-04 01:00+1030, 10-04 03:00+1100"),
        (LORD_HOWE, "0 * * * *", "04-05 00:30", "04-05 01:00+1100, 04-05 02:00+1030"),
        (LORD_HOWE, "*/15 2 * * *", "04-05 00:30", "04-05 02:00+1030, 04-05 02:15+1030"),
        (LORD_HOWE, "*/15 * * * *", "04-05 01:30", "04-05 01:45+1100, 04-05 01:30+1030"),
    ],
)
def test_clock_changes(zone: str, expression: str, start: str, expected: str) -> None:
    """When the clocks are changed, a fixed time comes once that day, and what recurs goes on."""
    local = datetime.strptime(f"2026-{start}", "%Y-%m-%d %H:%M").replace(tzinfo=ZoneInfo(zone))
    found = times(cron(expression, timezone=zone), local.astimezone(UTC), 2)
    shown = [due.astimezone(ZoneInfo(zone)).strftime("%m-%d %H:%M%z") for due in found]
    assert ", ".join(shown) == expected


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
    """An entry with a `*` in its minute or hour is due at each minute whose local time matches."""
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


def test_expressions_mean_what_they_mean_to_go() -> None:
    """FR-15: an expression is due when robfig/cron, which Go programs use, says so, and refused
    where it refuses."""
    vectors = [json.loads(line) for line in VECTORS.read_text().splitlines()]
    assert len(vectors) > 300
    wrong: list[str] = []
    for vector in vectors:
        expression, expected = vector["expression"], vector["next"]
        if expected is None:
            with pytest.raises(ConfigError):
                cron(expression)
            continue
        due = times(cron(expression), VECTORS_AFTER, len(expected))
        if due != [datetime.fromisoformat(at) for at in expected]:
            wrong.append(f"{expression}: {due[:3]}, in Go {expected[:3]}")
    assert not wrong


@pytest.mark.parametrize(
    ("expression", "remedy"),
    [
        ("@every 5m", r"every\(timedelta"),
        ("@every 1h30m", r"every\(timedelta"),
        ("CRON_TZ=Asia/Tokyo 0 9 * * *", "timezone="),
        ("TZ=UTC @daily", "timezone="),
    ],
)
def test_refused_expression_names_the_remedy(expression: str, remedy: str) -> None:
    """FR-15: what Go's library takes and riverpy does not is refused with the way to say it."""
    with pytest.raises(ConfigError, match=remedy):
        cron(expression)


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
    """FR-02: schedules work where the system has no time zone files."""
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
    """FR-02: UTC works without time zone files and without the package tzdata."""
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
    """SK-02: `0 12 1 * *` in Kolkata is 06:30 UTC on the first of each of 24 months."""
    found = times(
        cron("0 12 1 * *", timezone="Asia/Kolkata"),
        datetime(2026, 1, 31, 23, 59, tzinfo=ZoneInfo("Asia/Kolkata")),
        24,
    )
    assert [(due.day, due.hour, due.minute, due.tzinfo) for due in found] == [(1, 6, 30, UTC)] * 24
    assert [(due.month - 2) % 12 for due in found] == [*range(12), *range(12)]


def test_leap_day() -> None:
    """SK-14: the 29th of February comes in 2028."""
    due = next_time(cron("0 0 29 2 *"), datetime(2026, 1, 1, tzinfo=UTC))
    assert due == datetime(2028, 2, 29, tzinfo=UTC)


@pytest.mark.parametrize(
    "expression",
    [
        "0 0 30 2 *",
        "60 * * * *",
        "* * * *",
        "*/0 * * * *",
        "5-1 * * * *",
        "",
        "0 0 31 2,4,6,9,11 *",
        "* * * * * *",
        "@every 1h",
        "٣ * * * *",
        f"{'9' * 5000} * * * *",
    ],
)
def test_impossible_cron(expression: str) -> None:
    """SK-14: what is no expression, or never comes, is refused, and soon."""
    begin = time.thread_time()
    with pytest.raises(ConfigError, match="cron expression"):
        cron(expression)
    assert time.thread_time() - begin < 1


@pytest.mark.parametrize("zone", ["Mars/Olympus", "Europe", "../etc/passwd", "/etc/localtime", ""])
def test_unknown_zone(zone: str) -> None:
    """A zone that does not exist is refused by its name."""
    with pytest.raises(ConfigError, match="there is no time zone"):
        cron("@daily", timezone=zone)


@pytest.mark.parametrize("zone", ["europe/berlin", "Europe/Berln", "Europe_Berlin"])
def test_zones_that_are_alike(zone: str) -> None:
    """The error of an unknown zone names those that are alike."""
    with pytest.raises(ConfigError, match=r"did you mean .*Europe/Berlin\b"):
        cron("@daily", timezone=zone)


def test_error_has_the_text_that_was_given() -> None:
    """The error of a wrong expression shows it as it was written."""
    with pytest.raises(ConfigError, match=r"'0 9  \* \* mon-fry' is not allowed"):
        cron("0 9  * * mon-fry")


@pytest.mark.parametrize(
    "interval",
    [timedelta(0), timedelta(seconds=-1), timedelta(microseconds=1500), timedelta.max],
)
def test_impossible_interval(interval: timedelta) -> None:
    """An interval is above zero, and can be told in milliseconds."""
    with pytest.raises(ConfigError, match="an interval is one millisecond or more"):
        every(interval)


def test_interval_counts_from_the_last() -> None:
    """An interval is added to what it is given, across changes of clocks and into the last year."""
    schedule = every(timedelta(hours=36))
    found = times(schedule, datetime(2026, 3, 28, tzinfo=UTC), 10)
    assert {later - earlier for earlier, later in pairwise(found)} == {timedelta(hours=36)}
    assert next_time(schedule, datetime(9999, 12, 31, tzinfo=UTC)) is None


@pytest.mark.parametrize("zone", ["UTC", NEW_YORK])
def test_slot_of_the_first_year(zone: str) -> None:
    """A slot of the year 1, and the rare ones since, are caught up with."""
    first, now = datetime(1, 1, 2, tzinfo=UTC), datetime(2026, 11, 29, tzinfo=UTC)
    due = due_slots(cron("0 0 29 2 *", timezone=zone), "all", first, now)
    assert 480 < len(due.slots) < 500
    assert due.following is not None
    assert due.following.year == 2028


def test_end_of_calendar() -> None:
    """After the last date of the calendar nothing is due."""
    for zone in ("UTC", "Asia/Tokyo", NEW_YORK):
        for expression in ("@yearly", "* * * * *"):
            schedule = cron(expression, timezone=zone)
            assert next_time(schedule, datetime(9999, 12, 31, 23, 59, 30, tzinfo=UTC)) is None


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (every(timedelta(minutes=90)), "every 1h30m"),
        (every(timedelta(milliseconds=1)), "every 1ms"),
        (every(timedelta(days=400)), "every 400d"),
        (cron("@daily"), "cron 0 0 * * * UTC"),
        (cron(" 30  9 * * mon-fri ", timezone=BERLIN), f"cron 30 9 * * MON-FRI {BERLIN}"),
    ],
)
def test_text_is_read_back(schedule: PeriodicSchedule, text: str) -> None:
    """The text of a schedule tells all of it."""
    assert schedule_text(schedule) == text
    read = parse_schedule(text)
    assert read is not None
    assert schedule_text(read) == text
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
    """SK-18: a schedule that returns a naive time, none at all, or one that is past, is refused."""
    with pytest.raises(ConfigError, match=message):
        next_time(Own(answer), datetime(2026, 1, 1, tzinfo=UTC))
    assert parse_schedule(schedule_text(Own(answer))) is None
