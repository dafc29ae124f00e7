"""Parses and formats durations such as `1h30m` or `250ms`."""

from __future__ import annotations

import re
from datetime import timedelta

_UNIT_NAMES = {
    "w": "weeks",
    "d": "days",
    "h": "hours",
    "m": "minutes",
    "s": "seconds",
    "ms": "milliseconds",
}
_DURATION_PATTERN = re.compile(
    "".join(rf"(?:(?P<{unit}>[0-9]+(?:\.[0-9]+)?){unit})?" for unit in _UNIT_NAMES)
)


def parse_duration(text: str) -> timedelta:
    """Parse a duration such as `90s`, `1h30m`, `2d`, `250ms` or `1.5h`. The units are w, d, h, m, s
    and ms, the largest first.

    Raises:
        ValueError: the text is not a duration, or it is longer than 999,999,999 days.
    """
    match = _DURATION_PATTERN.fullmatch(text.strip())
    if not match or not match.group():
        raise ValueError(
            f"{text!r} is not a duration: use numbers with units (w d h m s ms), largest first, "
            "as in 90s, 1h30m or 2d"
        )
    parts = {
        _UNIT_NAMES[unit]: float(number) for unit, number in match.groupdict().items() if number
    }
    try:
        return timedelta(**parts)
    except OverflowError:
        raise ValueError(f"the duration {text!r} is too long") from None


def format_duration(duration: timedelta | None) -> str:
    """Format a duration so that `parse_duration` can parse it. None becomes `none`. Parts below a
    millisecond are cut off."""
    if duration is None:
        return "none"
    left = duration // timedelta(milliseconds=1)
    parts: list[str] = []
    for unit, length in (
        ("d", 86_400_000),
        ("h", 3_600_000),
        ("m", 60_000),
        ("s", 1_000),
        ("ms", 1),
    ):
        number, left = divmod(left, length)
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts) or "0s"
