"""How the tools write numbers, names and statements."""

from __future__ import annotations

import pytest

from riverpy._tools.doctor.finding import Level, fail_finding, warn_finding, worst_level
from riverpy._tools.text import (
    format_count,
    format_names,
    format_seconds,
    format_size,
    mask_and_shorten_query,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("SELECT  1\n FROM t", "SELECT 1 FROM t"),
        ("SELECT 'it''s' || E'a\\'b' || 'open", "SELECT '…' || E'…' || '…'"),
        ("DO $x$ 'secret' $x$", "DO '…'"),
        ("DO $$ secret", "DO '…'"),
        ("ALTER ROLE ada PASSWORD 'secret'", "ALTER ROLE ada PASSWORD '…'"),
        ("SELECT 1 -- don't\nFROM t WHERE p = 'secret'", "SELECT 1 FROM t WHERE p = '…'"),
        ("/* it's */ SELECT 'secret'", "SELECT '…'"),
        ("/* /* */ it's */ SELECT 'secret'", ""),
        ("SELECT \"it's\" FROM t WHERE p = 'secret'", "SELECT \"it's\" FROM t WHERE p = '…'"),
        (r"SELECT 'C:\x', 'C:\', 'secret'", "SELECT '…', '…'"),
        (r"SELECT 'a\' || ', secret", "SELECT '…'"),
        ("CONNECT postgresql://ada:secret@host/db", "CONNECT postgresql://ada:***@host/db"),
        ("x" * 100, "x" * 79 + "…"),
        ("", ""),
    ],
)
def test_masked_query(text: str, shown: str) -> None:
    """The start of a statement contains no string (SE-02)."""
    assert mask_and_shorten_query(text) == shown


def test_numbers_and_names() -> None:
    """Durations, sizes, counts and names are written for people."""
    assert [format_seconds(n) for n in (-1, 0.04, 2, 9.96, 61, 3725, 3630, 200_000)] == [
        *("0s", "0s", "2s", "10s", "1m1s", "1h2m", "1h", "2d7h"),
    ]
    assert [format_size(n) for n in (0, 9_999, 20_480, 5e7, 2e10, 2e16)] == [
        *("0 bytes", "9,999 bytes", "20 kB", "48 MB", "19 GB", "18,190 TB"),
    ]
    assert format_count(1, "job") == "1 job"
    assert format_count(2_000, "index", plural="indexes") == "2,000 indexes"
    assert format_count(10, "job", limit=10) == "at least 10 jobs"
    assert format_names("abcdefg") == '"a", "b", "c", "d", "e" and 2 more'
    assert worst_level([]) is Level.OK
    assert worst_level([fail_finding("", ""), warn_finding("", "")]) is Level.FAIL
