"""Cursors: texts that contain the position of a job in a list. They have the format of River's
cursors.

The text is base64 (URL-safe, with padding) of a JSON object with the keys `id`, `kind`, `queue`,
`sort_field` and `time`, in this order. `time` is the job's value in the time column by which the
list is ordered, such as `finalized_at`. It is the zero time of Go if the list is ordered by id, or
if the job has no value in this column.
"""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, get_args

import msgspec

from riverpy._attempt_errors import format_json_time
from riverpy._json import encode_unchecked_string
from riverpy._timestamps import decode_timestamp, encode_timestamp
from riverpy.errors import ConfigError
from riverpy.job_list import JobOrder

CURSOR_LENGTH_MAX = 8_192
"""The maximum number of characters of a cursor."""
GO_ZERO_TIME_TEXT = "0001-01-01T00:00:00Z"
"""The zero time of Go. It is the `time` of a cursor if the list is ordered by id, or if the job has
no value in the time column by which the list is ordered."""
_INT64_RANGE = range(-(2**63), 2**63)
_INFINITY_NAMES = {2**63 - 1: "infinity", -(2**63): "-infinity"}
"""PostgreSQL's names for its largest and smallest timestamp. The keys are these timestamps in
microseconds since 2000."""
_JULIAN_DAY_2000 = 2_451_545
_MICROSECONDS_PER_DAY = 86_400_000_000
_RFC3339_TIME_PATTERN = re.compile(
    r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.(\d{1,30}))?(?:Z|([+-])(\d\d):(\d\d))", re.ASCII
)
_POSTGRES_TIME_PATTERN = re.compile(r"-?infinity|J\d{1,9} (\d\d:\d\d:\d\d\.\d{6})\+00", re.ASCII)


class JobPosition(NamedTuple):
    """The position of a job in a list. A cursor contains it as text."""

    order: JobOrder
    id: int
    kind: str
    queue: str
    sort_time: int | None
    """The job's value in the time column by which the list is ordered, in microseconds since 2000.
    None: the list is ordered by id, or the job has no value in this column."""


class CursorSqlParameters(NamedTuple):
    """The position that a cursor contains, as parameters for SQL statements."""

    id: int
    sort_time: str | None
    """The job's value in the time column by which the list is ordered, as text for PostgreSQL.
    None: the list is ordered by id, or the job has no value in this column."""


def encode_cursor(position: JobPosition) -> str:
    """Return the cursor text of a position."""
    time = (
        GO_ZERO_TIME_TEXT if position.sort_time is None else _format_cursor_time(position.sort_time)
    )
    text = (
        f'{{"id":{position.id},"kind":{encode_unchecked_string(position.kind)},'
        f'"queue":{encode_unchecked_string(position.queue)},"sort_field":"{position.order}","time":"{time}"}}'
    )
    return base64.urlsafe_b64encode(text.encode()).decode()


def decode_cursor(text: str, order: JobOrder) -> CursorSqlParameters:
    """Return the position that a cursor contains. `order` is the order of the list to read. Both
    alphabets of base64 are accepted, with or without padding. Unknown JSON keys are ignored.

    Raises:
        ConfigError: the text is not a cursor, or is a cursor of a list with another order.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"a cursor must be a string, got {type(text).__name__}")
    if len(text) > CURSOR_LENGTH_MAX:
        raise _make_cursor_error(text, f"it has more than {CURSOR_LENGTH_MAX} characters")
    try:
        plain = text.rstrip("=").replace("-", "+").replace("_", "/")
        padded = plain + "=" * (-len(plain) % 4)
        members = msgspec.json.decode(
            base64.b64decode(padded, validate=True), type=dict[str, msgspec.Raw]
        )
    except (ValueError, msgspec.DecodeError, RecursionError):
        raise _make_cursor_error(text, "it is not base64 of a JSON object") from None
    job_id = _decode_cursor_member(members, "id")
    if not isinstance(job_id, int) or isinstance(job_id, bool) or job_id not in _INT64_RANGE:
        raise _make_cursor_error(text, "`id` is not an integer of 64 bits")
    sort_field = _decode_cursor_member(members, "sort_field")
    if sort_field not in get_args(JobOrder):
        raise _make_cursor_error(
            text, f"`sort_field` is not one of {', '.join(get_args(JobOrder))}"
        )
    if sort_field != order:
        raise _make_cursor_error(text, f"it is of a list ordered by {sort_field}, not by {order}")
    time = _decode_cursor_member(members, "time")
    if "time" not in members or time == GO_ZERO_TIME_TEXT:
        return CursorSqlParameters(job_id, None)
    raw = _parse_cursor_time(time) if isinstance(time, str) else None
    if raw is None:
        raise _make_cursor_error(text, "`time` is not a time of RFC 3339")
    return CursorSqlParameters(job_id, raw)


def _decode_cursor_member(members: dict[str, msgspec.Raw], key: str) -> object:
    try:
        return msgspec.json.decode(members.get(key, b"null"))
    except (msgspec.DecodeError, RecursionError):
        return None


def _make_cursor_error(text: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{text[:80]!r} is not a cursor of this list: {reason}; use `page.cursor` of a list with "
        "the same order"
    )


def _format_cursor_time(microseconds: int) -> str:
    """Return a time as text for a cursor. If RFC 3339 cannot express the time, the text has
    PostgreSQL's format. River in Go cannot read jobs with such times."""
    time = decode_timestamp(microseconds)
    if time is None or encode_timestamp(time) != microseconds:
        return format_postgres_time(microseconds)
    text = format_json_time(time)
    return format_postgres_time(microseconds) if text == GO_ZERO_TIME_TEXT else text


def format_postgres_time(microseconds: int) -> str:
    """Return a time as text for PostgreSQL. The day is written as a Julian day, because PostgreSQL
    allows years that Python's `datetime` does not."""
    if microseconds in _INFINITY_NAMES:
        return _INFINITY_NAMES[microseconds]
    days, microseconds = divmod(microseconds, _MICROSECONDS_PER_DAY)
    clock = (datetime(2000, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)).time()
    return f"J{_JULIAN_DAY_2000 + days} {clock.isoformat('microseconds')}+00"


def _parse_cursor_time(text: str) -> str | None:
    """Return the time of a cursor as text for PostgreSQL, or None if the text is not a time. Digits
    below a microsecond are cut off, as in PostgreSQL's drivers for Go."""
    if _POSTGRES_TIME_PATTERN.fullmatch(text):
        return text
    match = _RFC3339_TIME_PATTERN.fullmatch(text)
    if match is None:
        return None
    day, clock, fraction, sign, hours, minutes = match.groups()
    try:
        time = datetime.fromisoformat(f"{day}T{clock}").replace(tzinfo=UTC)
        offset = timedelta(hours=int(hours or 0), minutes=int(minutes or 0))
        if offset >= timedelta(days=1):
            return None
        raw = encode_timestamp(time) + int((fraction or "0")[:6].ljust(6, "0"))
    except ValueError:
        return None
    shift = offset // timedelta(microseconds=1)
    return format_postgres_time(raw + shift if sign == "-" else raw - shift)
