"""AttemptError: one entry of a job's column `errors`. River, riverpy or another program may have
written it."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

GO_ZERO_TIME = datetime(1, 1, 1, tzinfo=UTC)
"""The zero time of Go. AttemptError uses it as `at` if the time of the entry cannot be read."""
_RFC3339_TIME_PATTERN = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:[.,](\d+))?(?:Z|([+-])(\d\d):(\d\d))", re.ASCII
)
_INTEGER_PATTERN = re.compile(r"[+-]?\d{1,30}", re.ASCII)
_NUMBER_PATTERN = re.compile(r"[+-]?\d{1,30}(?:\.\d{0,400})?(?:[eE][+-]?\d{1,3})?", re.ASCII)
_INT64_RANGE = range(-(2**63), 2**63)


class AttemptError(msgspec.Struct, frozen=True):
    """One entry of a job's column `errors`: a failed attempt at the job.

    Other programs may have written the entry in any form. If its time cannot be read, `at` is the
    first moment of the year 1. If its attempt number cannot be read, `attempt` is 0. If its error
    or trace is not a string, `error` or `trace` is the JSON text of the value.
    """

    at: datetime
    attempt: int
    error: str
    trace: str = ""


def iterate_error_entries(errors_column: Iterable[Any] | None) -> Iterator[str]:
    """Yield the JSON text of each entry of a job's column `errors`. The column is an array, and
    another program may have stored an array of arrays in it. For an SQL NULL in the array, yield
    `null`."""
    for entry in errors_column or ():
        if isinstance(entry, list):
            yield from iterate_error_entries(cast("list[Any]", entry))
        else:
            yield "null" if entry is None else entry


def parse_error_entry(entry_text: str) -> AttemptError:
    """Parse the JSON text of one entry of a job's column `errors`. If the text is not a JSON
    object, the whole text becomes `AttemptError.error`."""
    try:
        members = msgspec.json.decode(entry_text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return AttemptError(GO_ZERO_TIME, 0, _json_value_to_text(entry_text))
    texts = {key.lower(): bytes(raw).decode() for key, raw in members.items()}
    return AttemptError(
        _parse_time(_json_value_to_text(texts.get("at", ""))),
        _parse_integer(_json_value_to_text(texts.get("attempt", ""))),
        _json_value_to_text(texts.get("error", "")),
        _json_value_to_text(texts.get("trace", "")),
    )


def format_json_time(moment: datetime) -> str:
    """Return a timezone-aware time in the format of River's JSON: RFC 3339 in UTC, without trailing
    zeros in the fraction of a second."""
    text = moment.astimezone(UTC).replace(tzinfo=None).isoformat()
    return (text.rstrip("0") if "." in text else text) + "Z"


def _json_value_to_text(json_text: str) -> str:
    """Return a JSON value as text: the content of a string, an empty text for null, and the JSON
    text of any other value."""
    if json_text == "null":
        return ""
    if not json_text.startswith(("{", "[", '"')):
        return json_text
    try:
        if json_text.startswith('"'):
            return msgspec.json.decode(json_text, type=str)
        return msgspec.json.format(json_text, indent=-1)
    except (msgspec.DecodeError, RecursionError):
        return json_text


def _parse_time(text: str) -> datetime:
    """Parse an RFC 3339 time. Return `GO_ZERO_TIME` if the text is not a valid time."""
    match = _RFC3339_TIME_PATTERN.fullmatch(text)
    if match is None:
        return GO_ZERO_TIME
    seconds, fraction, sign, hours, minutes = match.groups()
    try:
        at = datetime.fromisoformat(seconds).replace(tzinfo=UTC)
        # Timedelta rounds to microseconds in the same way as PostgreSQL.
        at += timedelta(seconds=float(f"0.{(fraction or '0')[:9]}"))
        if sign is None:
            return at
        offset = timedelta(hours=int(hours), minutes=int(minutes))
        return at - offset if sign == "+" else at + offset
    except (ValueError, OverflowError):
        return GO_ZERO_TIME


def _parse_integer(text: str) -> int:
    """Parse an integer of 64 bits, for example `3`, `3.0` or `3e0`. Return 0 for any other text."""
    text = text.strip()
    if _INTEGER_PATTERN.fullmatch(text):
        number = int(text)
    elif _NUMBER_PATTERN.fullmatch(text) and (value := float(text)).is_integer():
        number = int(value)
    else:
        return 0
    return number if number in _INT64_RANGE else 0
