"""Parses cron expressions in the same way as robfig/cron 3, which programs in Go use. Also finds
time zones by name."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, NamedTuple

from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from cronsim import CronSim

_TIME_ZONE_HINT = "use a name such as Europe/Berlin"
_EVERY_PREFIX = "@every "
_TIME_ZONE_PREFIXES = ("TZ=", "CRON_TZ=")
_CRON_MACROS = {
    "@annually": "0 0 1 1 *",
    "@yearly": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_FIELD_WILDCARDS = ("*", "?")
_TOO_LARGE_NUMBER_DIGITS = 19
"""Numbers with this many digits or more are rejected, because they can be too large for Go."""
_GO_DURATION_PART_REGEX = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)"
_GO_DURATION_PATTERN = re.compile(rf"[+-]?(?:(?:{_GO_DURATION_PART_REGEX})+|0)")
_NANOSECONDS_BY_UNIT = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "μs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}


class _CronField(NamedTuple):
    """One of the five fields of a cron expression."""

    name: str
    minimum: int
    maximum: int
    value_names: tuple[str, ...] = ()
    """The names of the field's values in lower case, such as `jan`. The first name means
    `minimum`."""


_MONTH_NAMES = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAY_NAMES = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_CRON_FIELDS = (
    _CronField("minute", 0, 59),
    _CronField("hour", 0, 23),
    _CronField("day of the month", 1, 31),
    _CronField("month", 1, 12, _MONTH_NAMES),
    _CronField("day of the week", 0, 6, _WEEKDAY_NAMES),
)


def find_time_zone(name: object) -> tzinfo:
    """Return the time zone with this name. UTC works without time zone files.

    Raises:
        ConfigError: there is no such time zone. The error text suggests similar names.
    """
    if not isinstance(name, str):
        raise ConfigError(f"timezone must be a name, got {type(name).__name__}")
    if name == "UTC":
        return UTC
    # Functions of this module import what only they need. This saves 0.5 MiB of memory in programs
    # without periodic jobs, i.e. in most programs.
    from zoneinfo import ZoneInfo, available_timezones

    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        from difflib import get_close_matches

        near = get_close_matches(name[:80], available_timezones(), n=3)
        hint = f"did you mean {', '.join(near)}?" if near else _TIME_ZONE_HINT
        raise ConfigError(f"there is no time zone {name[:80]!r}: {hint}") from None


def split_time_zone(expression: object) -> tuple[str | None, str]:
    """Split a cron expression into its time zone (`CRON_TZ=ZONE ` or `TZ=ZONE ` at the start) and
    the rest. The time zone is None if the expression has none. As in Go, an empty name means UTC.

    Raises:
        ConfigError: the expression is not a string.
    """
    if not isinstance(expression, str):
        raise ConfigError(f"a cron expression must be a string, got {type(expression).__name__}")
    if not expression.startswith(_TIME_ZONE_PREFIXES):
        return None, expression
    prefix, _, rest = expression.partition(" ")
    return prefix.partition("=")[2], rest.strip()


def parse_every_interval(expression: str) -> timedelta | None:
    """Return the interval of an expression `@every DURATION`. It is rounded down to whole seconds,
    but is at least one second. Return None if the expression does not have this form.

    Raises:
        ConfigError: the duration is not valid.
    """
    if not expression.startswith(_EVERY_PREFIX):
        return None
    nanoseconds = _parse_go_duration(expression.removeprefix(_EVERY_PREFIX))
    if nanoseconds is None:
        raise ConfigError(
            f"cron expression {expression[:80]!r} is not allowed: use a duration with the units "
            "h m s ms us ns, as in @every 1h30m"
        )
    return timedelta(seconds=max(nanoseconds // 10**9, 1))


def _parse_go_duration(text: str) -> int | None:
    """Parse a duration in Go's format. Return its nanoseconds, or None if the text is not a
    duration."""
    if not _GO_DURATION_PATTERN.fullmatch(text):
        return None
    from fractions import Fraction

    parts = re.findall(_GO_DURATION_PART_REGEX, text)
    try:
        total = sum(int(Fraction(number) * _NANOSECONDS_BY_UNIT[unit]) for number, unit in parts)
    except ValueError:  # Python rejects numbers with thousands of digits
        return None
    total *= -1 if text.startswith("-") else 1
    return total if -(2**63) <= total < 2**63 else None  # Go stores durations in 64 bits


def split_cron_fields(expression: str) -> list[str]:
    """Split a cron expression into its five fields. For a macro such as @daily, return the five
    fields that it stands for.

    Raises:
        ConfigError: the expression does not have five fields, and is not a macro.
    """
    fields = _CRON_MACROS.get(expression, expression).split()
    if len(fields) != len(_CRON_FIELDS):
        raise ConfigError(
            "a cron expression must have five fields (minute, hour, day of the month, month, day "
            f"of the week), or be @every DURATION or one of {', '.join(_CRON_MACROS)}, got "
            f"{expression[:80]!r}"
        )
    return fields


def make_cron_iterator(fields: list[str], expression: str) -> CronSim:
    """Return an iterator over the local times that the five fields match.

    Raises:
        ConfigError: a field is not valid, or no date matches. The error text contains `expression`.
    """
    try:
        texts = list(map(_expand_field, fields, _CRON_FIELDS))
    except ConfigError as error:
        raise ConfigError(f"cron expression {expression[:80]!r} is not allowed: {error}") from None
    from cronsim import CronSim, CronSimError

    try:
        return CronSim(" ".join(texts), datetime(2000, 1, 1))  # noqa: DTZ001 (a local time)
    except CronSimError:  # no date matches, for example the 30th of February
        raise ConfigError(
            f"cron expression {expression[:80]!r} is not allowed: no date matches"
        ) from None


def _expand_field(field_text: str, field: _CronField) -> str:
    """Return the values that a cron field allows, separated by commas. Return `*` if the field
    contains an item `*`, `?` or `*/1`.

    A field `*/2` allows only some values, but the library cronsim treats every field that begins
    with `*` as unrestricted. So this function lists the values of `*/2`.
    """
    values: set[int] = set()
    is_unrestricted = False
    for item in filter(None, field_text.split(",")):
        found = _parse_list_item(item, field)
        values.update(found)
        is_unrestricted = is_unrestricted or (item.startswith(_FIELD_WILDCARDS) and found.step == 1)
    return "*" if is_unrestricted else ",".join(map(str, sorted(values)))


def _parse_list_item(item_text: str, field: _CronField) -> range:
    """Return the values of one item in a cron field, such as `5`, `*/2` or `mon-fri`.

    Raises:
        ConfigError: the item is not allowed.
    """
    span, *steps = item_text.split("/")
    start, *ends = span.split("-")
    step = _parse_number(steps[0]) if steps else 1
    if start in _FIELD_WILDCARDS:  # robfig/cron ignores the end in `*-5`
        low, high = field.minimum, field.maximum
    else:
        low = _parse_field_value(start, field)
        high = _parse_field_value(ends[0], field) if ends else field.maximum if steps else low
    is_form = len(steps) <= 1 and len(ends) <= 1
    if not is_form or not step or low is None or high is None or not low <= high:
        names = field.value_names
        name_range = f" or {names[0]} to {names[-1]}" if names else ""
        raise ConfigError(
            f"{item_text[:40]!r} is not a {field.name}: use {field.minimum} to {field.maximum}"
            f"{name_range}, ranges such as 1-5, and steps such as */2"
        )
    return range(low, high + 1, step)


def _parse_field_value(text: str, field: _CronField) -> int | None:
    """Return the value of a number or name in a cron field. Return None if the field does not allow
    it."""
    name, names = text.lower(), field.value_names
    value = field.minimum + names.index(name) if name in names else _parse_number(text)
    return value if value is not None and field.minimum <= value <= field.maximum else None


def _parse_number(text: str) -> int | None:
    digits = text.removeprefix("+")
    if not digits.isascii() or not digits.isdigit():
        return None
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) < _TOO_LARGE_NUMBER_DIGITS else None
