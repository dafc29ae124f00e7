"""Types of command-line values, such as durations, times, numbers, names and queues."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from riverpy._dsn import mask_passwords, validate_url
from riverpy._duration import parse_duration
from riverpy._names import validate_domain_name, validate_lease_name, validate_queue_name
from riverpy.config import MAX_WORKERS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")


def parse_timestamp(text: str) -> datetime:
    """Parse a date and time with a time zone in ISO 8601 format, and return it in UTC."""
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time: give a date, a time and a zone, such as 2026-01-31T18:00:00Z"
        ) from None
    if time.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone: add Z for UTC, or an offset such as +02:00")
    try:
        return time.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{text!r} is outside the years 1 to 9999 in UTC") from None


def parse_queues(text: str) -> dict[str, int]:
    """Parse names of queues and their numbers of slots from a text such as `default:50,mail:5`."""
    queues: dict[str, int] = {}
    for part in text.split(","):
        name, colon, slots = part.strip().partition(":")
        if not colon or not re.fullmatch("[0-9]{1,9}", slots):
            raise ValueError(f"{part!r} is not NAME:SLOTS, such as default:50,mail:5")
        if name in queues:
            raise ValueError(f"queue {name!r} is given twice")
        validate_queue_name(name)
        if not 1 <= int(slots) <= MAX_WORKERS_MAX:
            raise ValueError(f"queue {name!r} needs 1 to {MAX_WORKERS_MAX} slots, got {slots}")
        queues[name] = int(slots)
    return queues


def format_queues(queues: Mapping[str, object]) -> str:
    """Return the names and slots of queues as text, such as `default:50,mail:5`. This is the
    inverse of `parse_queues`."""
    return ",".join(f"{name}:{slots}" for name, slots in queues.items())


def parse_queue_names(text: str) -> tuple[str, ...]:
    """Parse names of queues from a text such as `mail,reports`."""
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        validate_queue_name(name)
        if names.count(name) > 1:
            raise ValueError(f"queue {name!r} is given twice")
    return names


_SIZE_PATTERN = re.compile(
    r"(?P<number>[0-9]{1,9}(\.[0-9]{1,3})?)(?P<unit>[KMGT])(i?B|i)?", re.IGNORECASE
)
_BYTES_BY_UNIT = {"K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def parse_size(text: str) -> int:
    """Parse a memory size from a text such as `512MiB`, `2G` or `1.5GB`. Return the size in bytes,
    rounded to a multiple of 1,024. All units are powers of 1,024, with or without the `i`, as in
    systemd and PostgreSQL."""
    match = _SIZE_PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not a size: use a number with a unit (K, M, G or T, powers of 1024), as "
            "in 512MiB or 2G"
        )
    unit = _BYTES_BY_UNIT[match["unit"].upper()]
    size = round(float(match["number"]) * unit / 1024) * 1024
    if not size:
        raise ValueError(f"expected a size above zero, got {text!r}")
    return size


def format_size(size: int) -> str:
    """Return a size in bytes as text, such as `512MiB`. The size must be a multiple of 1,024. This
    is the inverse of `parse_size`."""
    for unit in ("T", "G", "M"):
        if size and size % _BYTES_BY_UNIT[unit] == 0:
            return f"{size // _BYTES_BY_UNIT[unit]}{unit}iB"
    return f"{size // 1024}KiB"


class NumberType(click.FloatRange):
    """A number between a minimum and a maximum. NaN is an error."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):  # comparisons with NaN are false, so the limits accept it
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


class IntegerType(click.IntRange):
    """A whole number with a minimum and, if it is set, a maximum."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            limits = "" if self.max is None else f" to {self.max}"
            self.fail(f"{value!r} is not a whole number from {self.min}{limits}", param, ctx)


class ParsedType(click.ParamType[T]):
    """A value that the function `parse` makes from a text. `parse` raises ValueError if the text is
    wrong."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        if not isinstance(value, str):  # click may pass a value that is converted already
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(mask_passwords(str(error)), param, ctx)


def make_validated_type(name: str, validate: Callable[[str], object]) -> ParsedType[str]:
    """Return a type for texts. A text is accepted if `validate(text)` does not raise ValueError."""

    def parse(text: str) -> str:
        validate(text)
        return text

    return ParsedType(name, parse)


def _validate_utf8_text(text: str) -> None:
    """Raise ValueError for a text that the database cannot store. Python represents invalid UTF-8
    of the command line as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{text!a} is not UTF-8 (at index {error.start})") from None


def _validate_nonempty_text(text: str) -> None:
    _validate_utf8_text(text)
    if not text:
        raise ValueError("the text must not be empty")


TEXT_TYPE = make_validated_type("text", _validate_utf8_text)
NONEMPTY_TEXT_TYPE = make_validated_type("text", _validate_nonempty_text)
QUEUE_NAME_TYPE = make_validated_type("queue", validate_queue_name)
DOMAIN_NAME_TYPE = make_validated_type("domain", validate_domain_name)
LEASE_NAME_TYPE = make_validated_type("lease", validate_lease_name)
URL_TYPE = make_validated_type("url", validate_url)
DURATION_TYPE = ParsedType("duration", parse_duration)
SIZE_TYPE = ParsedType("size", parse_size)
TIMESTAMP_TYPE = ParsedType("time", parse_timestamp)
