"""Types of command-line values: durations, times, numbers, names and queues."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from riverpy._dsn import mask_url
from riverpy._duration import parse_duration
from riverpy._names import validate_domain, validate_queue
from riverpy.config import MAX_WORKERS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")


def parse_timestamp(text: str) -> datetime:
    """Parse a date and time with its zone, in the format of ISO 8601. Return it in UTC.

    Raises:
        ValueError: the text is not such a time.
    """
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


def parse_queue(text: str) -> str:
    """Return the name of a queue. Raises ConfigError if it is not allowed."""
    validate_queue(text)
    return text


def parse_domain(text: str) -> str:
    """Return the name of a leader domain. Raises ConfigError if it is not allowed."""
    validate_domain(text)
    return text


def parse_queues(text: str) -> dict[str, int]:
    """Parse queues and their numbers of slots from a text like `default:50,mail:5`.

    Raises:
        ValueError: the format, a name or a number is wrong, or a name is repeated.
    """
    queues: dict[str, int] = {}
    for part in text.split(","):
        name, colon, slots = part.strip().partition(":")
        if not colon or not re.fullmatch("[0-9]{1,9}", slots):
            raise ValueError(f"{part!r} is not NAME:SLOTS, such as default:50,mail:5")
        if name in queues:
            raise ValueError(f"queue {name!r} is given twice")
        queues[name] = int(slots)
    check_queues(queues)
    return queues


def check_queues(queues: Mapping[str, int]) -> None:
    """Raise ValueError for a queue with a wrong name or number of slots."""
    for name, slots in queues.items():
        validate_queue(name)
        if not 1 <= slots <= MAX_WORKERS_MAX:
            raise ValueError(f"queue {name!r} needs 1 to {MAX_WORKERS_MAX} slots, got {slots}")


def format_queues(queues: Mapping[str, int]) -> str:
    """Return a text that `parse_queues` accepts."""
    return ",".join(f"{name}:{slots}" for name, slots in queues.items())


class IntegerType(click.IntRange):
    """A whole number within limits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(_number_error(self, value), param, ctx)


class NumberType(click.FloatRange):
    """A number within limits, with or without a fraction."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            number = super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(_number_error(self, value), param, ctx)
        if math.isnan(number):
            self.fail(_number_error(self, value), param, ctx)
        return number


def _number_error(limits: click.IntRange | click.FloatRange, value: object) -> str:
    is_whole = isinstance(limits, click.IntRange)
    try:
        (int if is_whole else float)(str(value))
    except ValueError:
        what = f"{value!r} is not a {'whole ' if is_whole else ''}number"
    else:
        what = f"{value} is out of range"
    most = "or more" if limits.max is None else f"to {limits.max}"
    return f"{what}: {limits.min} {most}"


class ParsedType(click.ParamType[T]):
    """A value that a function parses from a text. The function raises ValueError for a wrong
    text."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        if not isinstance(value, str):  # the value is converted already
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(mask_url(str(error)), param, ctx)


class TextType(click.ParamType[str]):
    """A text that the database can store. Python passes invalid UTF-8 as lone surrogates, which are
    refused."""

    name = "text"

    def __init__(self, *, may_be_empty: bool = True) -> None:
        self._may_be_empty = may_be_empty

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        text = str(value)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            self.fail(f"{text!a} is not UTF-8 (at index {error.start})", param, ctx)
        if not text and not self._may_be_empty:
            self.fail("the text must not be empty", param, ctx)
        return text


TEXT = TextType()
NAME = TextType(may_be_empty=False)
DURATION = ParsedType("duration", parse_duration)
TIMESTAMP = ParsedType("time", parse_timestamp)
QUEUE = ParsedType("queue", parse_queue)
DOMAIN = ParsedType("domain", parse_domain)
