"""AttemptError: one entry of a job's column `errors`, written by River, riverpy or another
program."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

GO_ZERO_TIME = datetime(1, 1, 1, tzinfo=UTC)
"""Go's zero time: the `at` of an entry whose time cannot be read."""
_RFC3339_TIME_PATTERN = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:[.,](\d+))?(?:Z|([+-])(\d\d):(\d\d))", re.ASCII
)
_INTEGER_PATTERN = re.compile(r"[+-]?\d{1,30}", re.ASCII)
_NUMBER_PATTERN = re.compile(r"[+-]?\d{1,30}(?:\.\d{0,400})?(?:[eE][+-]?\d{1,3})?", re.ASCII)
_INT64_RANGE = range(-(2**63), 2**63)


class AttemptError(msgspec.Struct, frozen=True):
    """One entry of a job's `errors`: a failed attempt at the job.

    Entries of other programs may have any form. If `at` cannot be read, it is the first moment of
    the year 1. If `attempt` cannot be read, it is 0. If the entry's `error` or `trace` is not a
    string, its JSON text is used.
    """

    at: datetime
    attempt: int
    error: str
    trace: str = ""


def iterate_error_entries(errors_column: Iterable[Any] | None) -> Iterator[str]:
    """Yield the JSON text of each entry of a column `errors`, an array with any number of
    dimensions. For an SQL NULL, yield `null`."""
    for entry in errors_column or ():
        if isinstance(entry, list):
            yield from iterate_error_entries(cast("list[Any]", entry))
        else:
            yield "null" if entry is None else entry


def parse_error_entry(entry_text: str) -> AttemptError:
    """Parse the JSON text of an entry. If the text is not a JSON object, it becomes the entry's
    `error`."""
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
    """Return a timezone-aware time as River writes it into JSON: RFC 3339 in UTC, without zeros at
    the end of the fraction."""
    text = moment.astimezone(UTC).replace(tzinfo=None).isoformat()
    return (text.rstrip("0") if "." in text else text) + "Z"


def _json_value_to_text(json_text: str) -> str:
    """Return the text of a JSON value: the content of a string, an empty text for null, otherwise
    the JSON text."""
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
    """Return the 64-bit integer that a text contains, for example `3`, `3.0` or `3e0`. Return 0 for
    any other text."""
    text = text.strip()
    if _INTEGER_PATTERN.fullmatch(text):
        number = int(text)
    elif _NUMBER_PATTERN.fullmatch(text) and (value := float(text)).is_integer():
        number = int(value)
    else:
        return 0
    return number if number in _INT64_RANGE else 0
