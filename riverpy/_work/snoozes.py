"""The number of a job's snoozes, stored in its metadata as River stores it."""

from __future__ import annotations

import re

import msgspec

SNOOZES_KEY = "snoozes"
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_NUMBER = re.compile(r"[+-]?(?:\d++\.?\d*+|\.\d++)(?:[eE][+-]?\d++)?", re.ASCII)
_DIGITS_MAX = 25
"""The maximum number of characters of an integer that is read exactly. A 64-bit integer has at most
19 digits."""


def next_snoozes(metadata: str) -> int:
    """Return the number of snoozes after one more snooze, from a job's metadata as JSON text.

    Values that are not integers are read as in River. A number, also in a string, becomes its
    integer part. `true` becomes 1. Every other value becomes 0. River's count overflows after 64
    bits. riverpy's count stays at the maximum.
    """
    try:
        members = msgspec.json.decode(metadata, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return 1
    raw = members.get(SNOOZES_KEY)
    count = 0 if raw is None else _integer(bytes(raw).decode())
    return min(count, _INT64_MAX - 1) + 1


def _integer(text: str) -> int:
    if text == "true":
        return 1
    text = text.strip('"')
    if not _NUMBER.fullmatch(text):
        return 0
    if len(text) <= _DIGITS_MAX and text.lstrip("+-").isdigit():
        number = int(text)
    else:
        number = min(max(float(text), _INT64_MIN), _INT64_MAX)
    return min(max(int(number), _INT64_MIN), _INT64_MAX)
