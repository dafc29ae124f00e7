"""Converts timestamps of the database to Python's `datetime`, and back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

PG_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
"""The time from which PostgreSQL counts microseconds."""
_TIMESTAMP_MIN = datetime(1, 1, 1, tzinfo=UTC)
_TIMESTAMP_MAX = datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def decode_timestamp(raw: int | bytes | None) -> datetime | None:
    """Convert a timestamp from the database to a `datetime` in UTC. `raw` is the number of
    microseconds since 2000, as an integer or in PostgreSQL's wire format. None stays None.

    A time that `datetime` does not support (`infinity`, the year 10000) becomes the first or last
    supported time.
    """
    if raw is None:
        return None
    if isinstance(raw, bytes):
        raw = decode_wire_microseconds(raw)
    try:
        return PG_EPOCH + timedelta(microseconds=raw)
    except OverflowError:
        return _TIMESTAMP_MAX if raw > 0 else _TIMESTAMP_MIN


def decode_wire_microseconds(raw: bytes) -> int:
    """Return the microseconds since 2000 of a timestamp in PostgreSQL's wire format."""
    return int.from_bytes(raw, "big", signed=True)


def encode_timestamp(value: datetime) -> int:
    """Convert a time to microseconds since 2000. This is the inverse of `decode_timestamp`."""
    return (value - PG_EPOCH) // _MICROSECOND


def format_raw_timestamp(raw: int) -> str:
    """Return a time in microseconds since 2000 as text in UTC with six decimals, such as
    `2026-01-31T18:00:00.000000Z`. Such texts sort by time."""
    time = (PG_EPOCH + timedelta(microseconds=raw)).replace(tzinfo=None)
    return f"{time.isoformat(timespec='microseconds')}Z"
