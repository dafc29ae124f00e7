"""The types of command-line values: durations, points in time, queues with their slots."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from riverpy._duration import parse_duration
from riverpy._names import validate_queue
from riverpy.config import MAX_WORKERS_MAX
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


def parse_timestamp(text: str) -> datetime:
    """An ISO 8601 date and time with its zone, in UTC.

    Raises:
        ValueError: the text is no such time, or it has no zone.
    """
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(
            f"{text!r} is no time: give a date, a time and a zone, as in 2026-01-31T18:00:00Z"
        ) from None
    if time.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone: add Z for UTC, or an offset such as +02:00")
    try:
        return time.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{text!r} is outside the years 1 to 9999 in UTC") from None


def parse_queues(text: str) -> dict[str, int]:
    """`default:50,mail:5`: queues, each with the number of jobs it may run at once.

    Raises:
        ValueError: a part is not NAME:SLOTS, a name is wrong or given twice, or SLOTS is not
            allowed.
    """
    queues: dict[str, int] = {}
    for part in text.split(","):
        name, colon, slots = part.strip().partition(":")
        if not colon or not re.fullmatch("[0-9]{1,9}", slots):
            raise ValueError(f"{part!r} is not NAME:SLOTS, as in default:50,mail:5")
        if name in queues:
            raise ValueError(f"queue {name!r} is given twice")
        queues[name] = int(slots)
    check_queues(queues)
    return queues


def check_queues(queues: Mapping[str, int]) -> None:
    """Each name is allowed and has 1 to `MAX_WORKERS_MAX` slots; else ValueError."""
    for name, slots in queues.items():
        try:
            validate_queue(name)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if not 1 <= slots <= MAX_WORKERS_MAX:
            raise ValueError(f"queue {name!r} needs 1 to {MAX_WORKERS_MAX} slots, got {slots}")


def format_queues(queues: Mapping[str, int]) -> str:
    """The text that `parse_queues` reads back."""
    return ",".join(f"{name}:{slots}" for name, slots in queues.items())


class IntegerType(click.IntRange):
    """A whole number within limits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(_why_no_number(self, value), param, ctx)


class NumberType(click.FloatRange):
    """A number within limits, which may have a fraction."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            number = super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(_why_no_number(self, value), param, ctx)
        if math.isnan(number):
            self.fail(_why_no_number(self, value), param, ctx)
        return number


def _why_no_number(limits: click.IntRange | click.FloatRange, value: object) -> str:
    is_whole = isinstance(limits, click.IntRange)
    try:
        (int if is_whole else float)(str(value))
    except ValueError:
        what = f"{value!r} is not a {'whole ' if is_whole else ''}number"
    else:
        what = f"{value} is out of range"
    most = "or more" if limits.max is None else f"to {limits.max}"
    return f"{what}: {limits.min} {most}"


class DurationType(click.ParamType[timedelta]):
    """A duration, given as in `90s`, `1h30m` or `2d`."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        if isinstance(value, timedelta):
            return value
        try:
            return parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class TimestampType(click.ParamType[datetime]):
    """A point in time, given in ISO 8601 with its zone."""

    name = "time"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            return parse_timestamp(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class TextType(click.ParamType[str]):
    """A text that the database can hold: bytes that are not UTF-8 reach us as lone surrogates."""

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
            self.fail("expected a text that is not empty", param, ctx)
        return text


TEXT = TextType()
NAME = TextType(may_be_empty=False)
DURATION = DurationType()
TIMESTAMP = TimestampType()
