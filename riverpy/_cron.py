"""Cron expressions, read as robfig/cron reads them, which Go programs use; and time zones."""

from __future__ import annotations

import re
from datetime import UTC, datetime, tzinfo
from difflib import get_close_matches
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from riverpy.errors import ConfigError

_ZONE_HINT = "give a name such as Europe/Berlin"
_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_FIELDS: tuple[tuple[int, int, tuple[str, ...]], ...] = (
    (0, 59, ()),
    (0, 23, ()),
    (1, 31, ()),
    (1, 12, _MONTHS),
    (0, 6, _WEEKDAYS),
)
"""The first value of each field, its last, and the names of its values."""
_STAR = re.compile(r"\*(?:/0*1)?")
_ZONE_PREFIX = re.compile(r"(?:CRON_)?TZ=(\S*)")
_DESCRIPTORS = {
    "@ANNUALLY": "0 0 1 1 *",
    "@YEARLY": "0 0 1 1 *",
    "@MONTHLY": "0 0 1 * *",
    "@WEEKLY": "0 0 * * 0",
    "@DAILY": "0 0 * * *",
    "@MIDNIGHT": "0 0 * * *",
    "@HOURLY": "0 * * * *",
}


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


def cron_fields(expression: object) -> list[str]:
    """The five fields of an expression, in capitals.

    Raises:
        ConfigError: it has another number of fields, and is no name such as @daily.
    """
    if not isinstance(expression, str):
        raise ConfigError(f"a cron expression is a text, got {type(expression).__name__}")
    upper = expression.upper().strip()
    _check_form(upper, expression)
    fields = _DESCRIPTORS.get(upper, upper).split()
    if len(fields) != len(_FIELDS):
        raise ConfigError(
            "a cron expression has five fields (minute, hour, day of the month, month, day of the "
            f"week) or is one of {', '.join(_DESCRIPTORS).lower()}, got {expression[:80]!r}"
        )
    return fields


def _check_form(upper: str, given: str) -> None:
    """Refuse what robfig/cron takes and riverpy says in another way."""
    if upper.startswith("@EVERY"):
        raise ConfigError(
            f"cron expression {given[:80]!r} is an interval: use "
            "riverpy.every(timedelta(minutes=5)) or the like"
        )
    if _ZONE_PREFIX.match(upper):
        raise ConfigError(
            f"cron expression {given[:80]!r} names a time zone: use "
            "cron(expression, timezone='Europe/Berlin') or the like"
        )


def cron_pattern(fields: list[str], given: str) -> CronSim:
    """What `fields` match, in readings of a clock without a time zone.

    Raises:
        ConfigError: a field cannot be read; the text has the expression as it was given.
    """
    try:
        texts = map(_spelled_out, fields, *zip(*_FIELDS, strict=True))
        return CronSim(" ".join(texts), datetime(2000, 1, 1))  # noqa: DTZ001 (a reading of a clock)
    except (CronSimError, ValueError, AssertionError) as error:
        reason = str(error) or "cannot be read"
        raise ConfigError(f"cron expression {given[:80]!r} is not allowed: {reason[:80]}") from None


def _spelled_out(field: str, first: int, last: int, names: tuple[str, ...]) -> str:
    """A field in a form that cronsim reads as robfig/cron reads the original.

    To cronsim a day field that begins with a star does not restrict. To robfig/cron one does not
    that has an item `*`, `?` or `*/1`, but `*/2` does. It also passes over empty items, and ends a
    week with day 6.
    """
    items = [item for item in field.replace("?", "*").split(",") if item]
    if any(_STAR.fullmatch(item) for item in items):
        return "*"
    return ",".join(_item(item, first, last, names) for item in items)


def _item(item: str, first: int, last: int, names: tuple[str, ...]) -> str:
    span, slash, step = item.partition("/")
    if not slash or not step.isdecimal() or not int(step):
        return item
    start, dash, end = span.partition("-")
    if start == "*":
        start, end = str(first), str(last)
    elif not dash:
        end = str(last)
    start, end = (str(names.index(one) + first) if one in names else one for one in (start, end))
    is_single = start.isdecimal() and end.isdecimal() and int(start) == int(end)
    return start if is_single else f"{start}-{end}/{step}"
