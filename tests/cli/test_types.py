"""Durations, times and queues as they are typed on a command line."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from riverpy._duration import format_duration, parse_duration
from riverpy.cli._types import format_queues, format_size, parse_queues, parse_size, parse_timestamp


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("90s", timedelta(seconds=90)),
        ("1h30m", timedelta(hours=1, minutes=30)),
        ("2d", timedelta(days=2)),
        ("1w1d", timedelta(days=8)),
        ("250ms", timedelta(milliseconds=250)),
        ("1m5ms", timedelta(minutes=1, milliseconds=5)),
        ("1.5h", timedelta(minutes=90)),
        ("0s", timedelta(0)),
        (" 3s ", timedelta(seconds=3)),
    ],
)
def test_duration(text: str, duration: timedelta) -> None:
    """Numbers with units, the largest first."""
    assert parse_duration(text) == duration


@pytest.mark.parametrize(
    "text", ["", "5", "-5s", "5 s", "30m1h", "1h1h", "1y", "s", "٣s", "1e3s", "99999999999999d"]
)
def test_no_duration(text: str) -> None:
    """Anything else is refused: above all a number without its unit."""
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


@given(st.integers(min_value=0, max_value=10**13))
def test_format_duration(milliseconds: int) -> None:
    """What is shown can be typed again."""
    duration = timedelta(milliseconds=milliseconds)
    assert parse_duration(format_duration(duration)) == duration


@pytest.mark.parametrize(
    ("text", "size", "shown"),
    [
        ("512MiB", 512 * 1024**2, "512MiB"),
        ("2G", 2 * 1024**3, "2GiB"),
        ("2gb", 2 * 1024**3, "2GiB"),
        ("1.5Gi", 1536 * 1024**2, "1536MiB"),
        (" 1T ", 1024**4, "1TiB"),
        ("3k", 3072, "3KiB"),
        ("0.999G", 1047527 * 1024, "1047527KiB"),
    ],
)
def test_size(text: str, size: int, shown: str) -> None:
    """A number with a unit, in powers of 1,024. What is shown can be typed again."""
    assert parse_size(text) == size
    assert format_size(size) == shown
    assert parse_size(shown) == size


@pytest.mark.parametrize(
    "text", ["", "512", "-1G", "1 G", "1.G", "G", "1B", "1P", "0M", "0.0001K", "٣M", "9999999999M"]
)
def test_no_size(text: str) -> None:
    """Anything else is refused, above all a number without its unit."""
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_timestamp() -> None:
    """A time with its zone comes out in UTC."""
    text = "2026-01-31T18:00:00+02:00"
    assert parse_timestamp(text) == datetime(2026, 1, 31, 16, tzinfo=UTC)
    assert parse_timestamp("2026-01-31T18:00:00Z").tzinfo is UTC
    assert parse_timestamp(text).utcoffset() == timedelta(0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tomorrow", "is not a time"),
        ("2026-01-31T18:00:00", "has no time zone"),
        ("2026-01-31", "has no time zone"),
        ("10001-01-01T00:00:00Z", "is not a time"),
        ("9999-12-31T23:59:59-01:00", "outside the years"),
    ],
)
def test_no_timestamp(text: str, message: str) -> None:
    """A time without a zone, or beyond the calendar, is refused with the way to mend it."""
    with pytest.raises(ValueError, match=message):
        parse_timestamp(text)


def test_queues() -> None:
    """NAME:SLOTS, separated by commas, in their order."""
    queues = parse_queues("mail:5, default:50")
    assert queues == {"mail": 5, "default": 50}
    assert list(queues) == ["mail", "default"]
    assert parse_queues(format_queues(queues)) == queues


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mail", "'mail' is not NAME:SLOTS"),
        ("mail:", "is not NAME:SLOTS"),
        ("mail:x", "is not NAME:SLOTS"),
        ("mail:-1", "is not NAME:SLOTS"),
        ("mail:1,", "'' is not NAME:SLOTS"),
        ("mail:0", "needs 1 to 10000 slots"),
        ("mail:99999999", "needs 1 to 10000 slots"),
        ("mail:1,mail:2", "given twice"),
        ("Mail:1", "a queue name must have lower-case letters"),
    ],
)
def test_no_queues(text: str, message: str) -> None:
    """The error names what is wrong."""
    with pytest.raises(ValueError, match=message):
        parse_queues(text)
