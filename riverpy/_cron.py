"""Cron expressions, read as robfig/cron 3 reads them, which Go programs use; and time zones."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo
from difflib import get_close_matches
from fractions import Fraction
from typing import NamedTuple
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from riverpy.errors import ConfigError

_ZONE_HINT = "give a name such as Europe/Berlin"
_EVERY = "@every "
_ZONE_PREFIXES = ("TZ=", "CRON_TZ=")
_MACROS = {
    "@annually": "0 0 1 1 *",
    "@yearly": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_STARS = ("*", "?")
_DIGITS_MAX = 19
"""Digits from which on a number is too large for Go."""
_PART = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)"
_DURATION_PART = re.compile(_PART)
_DURATION = re.compile(rf"[+-]?(?:(?:{_PART})+|0)")
_NANOSECONDS = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "μs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}
_DURATION_MAX = 2**63 - 1
"""Nanoseconds of the longest duration of Go. A negative one may have one more."""


class _Field(NamedTuple):
    """One of the five fields."""

    name: str
    first: int
    last: int
    names: tuple[str, ...] = ()
    """Of its values, in small letters."""


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_FIELDS = (
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day of the month", 1, 31),
    _Field("month", 1, 12, _MONTHS),
    _Field("day of the week", 0, 6, _WEEKDAYS),
)


class _ItemError(Exception):
    """An item of a field is not allowed; the text says why."""


def time_zone(name: object) -> tzinfo:
    """The time zone of this name. UTC needs no time zone files.

    Raises:
        ConfigError: there is none; the text names those that are alike.
    """
    if not isinstance(name, str):
        raise ConfigError(f"a time zone is given by its name, got {type(name).__name__}")
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        near = get_close_matches(name[:80], available_timezones(), n=3)
        hint = f"did you mean {', '.join(near)}?" if near else _ZONE_HINT
        raise ConfigError(f"there is no time zone {name[:80]!r}: {hint}") from None


def split_time_zone(expression: object) -> tuple[str | None, str]:
    """The zone that `CRON_TZ=ZONE ` or `TZ=ZONE ` names in front of an expression, and the rest. An
    empty name means UTC, as in Go.

    Raises:
        ConfigError: the expression is no text.
    """
    if not isinstance(expression, str):
        raise ConfigError(f"a cron expression is a text, got {type(expression).__name__}")
    if not expression.startswith(_ZONE_PREFIXES):
        return None, expression
    prefix, _, rest = expression.partition(" ")
    return prefix.partition("=")[2], rest.strip()


def every_interval(expression: str) -> timedelta | None:
    """The interval of `@every DURATION`, in whole seconds, at least one; None: it is no interval.

    Raises:
        ConfigError: the duration cannot be read.
    """
    if not expression.startswith(_EVERY):
        return None
    nanoseconds = _go_duration(expression.removeprefix(_EVERY))
    if nanoseconds is None:
        raise ConfigError(
            f"cron expression {expression[:80]!r} is not allowed: give a duration with the units "
            "h m s ms us ns, as in @every 1h30m"
        )
    return timedelta(seconds=max(nanoseconds // 10**9, 1))


def _go_duration(text: str) -> int | None:
    """The nanoseconds of a duration as Go reads it; None: it is none."""
    if not _DURATION.fullmatch(text):
        return None
    is_negative = text.startswith("-")
    parts = _DURATION_PART.findall(text)
    try:
        total = sum(int(Fraction(number) * _NANOSECONDS[unit]) for number, unit in parts)
    except ValueError:  # thousands of digits
        return None
    if total > _DURATION_MAX + is_negative:
        return None
    return -total if is_negative else total


def cron_fields(expression: str) -> list[str]:
    """The five fields of an expression.

    Raises:
        ConfigError: it has another number of fields, and is no macro such as @daily.
    """
    fields = _MACROS.get(expression, expression).split()
    if len(fields) != len(_FIELDS):
        raise ConfigError(
            "a cron expression has five fields (minute, hour, day of the month, month, day of the "
            f"week) or is @every DURATION or one of {', '.join(_MACROS)}, got {expression[:80]!r}"
        )
    return fields


def cron_pattern(fields: list[str], given: str) -> CronSim:
    """What `fields` match, in readings of a clock without a time zone.

    Raises:
        ConfigError: a field cannot be read, or no date ever matches; the text has the expression as
            it was given.
    """
    try:
        texts = [_values(text, field) for text, field in zip(fields, _FIELDS, strict=True)]
    except _ItemError as error:
        raise ConfigError(f"cron expression {given[:80]!r} is not allowed: {error}") from None
    try:
        return CronSim(" ".join(texts), datetime(2000, 1, 1))  # noqa: DTZ001 (a reading of a clock)
    except CronSimError:  # as for the 30th of February
        raise ConfigError(f"cron expression {given[:80]!r} never comes: no date matches") from None


def _values(text: str, field: _Field) -> str:
    """The values of a field as a list, or `*` if it does not restrict.

    Of the two day fields one does not restrict that has an item `*`, `?` or a star with the step 1;
    `*/2` does. Cronsim goes by the first character of the text, so `*/2` is written out.
    """
    values: set[int] = set()
    is_star = False
    for item in filter(None, text.split(",")):
        found = _item(item, field)
        values.update(found)
        is_star = is_star or (item.startswith(_STARS) and found.step == 1)
    return "*" if is_star else ",".join(map(str, sorted(values)))


def _item(item: str, field: _Field) -> range:
    """The values of one item, as `5`, `*/2` or `mon-fri`.

    Raises:
        _ItemError: it is not allowed.
    """
    span, *steps = item.split("/")
    start, *ends = span.split("-")
    step = _number(steps[0]) if steps else 1
    if start in _STARS:  # with robfig/cron what follows, as in `*-5`, does not count
        low, high = field.first, field.last
    else:
        low = _value(start, field)
        high = _value(ends[0], field) if ends else field.last if steps else low
    is_form = len(steps) <= 1 and len(ends) <= 1
    if not is_form or not step or low is None or high is None or not low <= high:
        raise _ItemError(_item_text(item, field))
    return range(low, high + 1, step)


def _value(text: str, field: _Field) -> int | None:
    """A value of a field by its number or name; None: it is none."""
    name = text.lower()
    value = field.first + field.names.index(name) if name in field.names else _number(text)
    return value if value is not None and field.first <= value <= field.last else None


def _number(text: str) -> int | None:
    digits = text.removeprefix("+")
    if not digits.isascii() or not digits.isdigit():
        return None
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) < _DIGITS_MAX else None


def _item_text(item: str, field: _Field) -> str:
    names = f" or {field.names[0]} to {field.names[-1]}" if field.names else ""
    return (
        f"{item[:40]!r} is no {field.name}: use {field.first} to {field.last}{names}, ranges as "
        "1-5, and steps as */2"
    )
