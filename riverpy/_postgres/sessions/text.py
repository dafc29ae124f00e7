"""Converts statements and values to text, for drivers that do not know the types of parameters.

asyncpg asks the server for the type of each parameter, and encodes the value for this type. Other
drivers choose a type from the value's type in Python: an `int` of 5 becomes a smallint. So riverpy
sends values as text of unknown type. The server then chooses the type from the statement, exactly
as with asyncpg.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Iterable

CACHED_STATEMENTS_MAX = 1_000
"""The maximum number of cached results of `to_pyformat`. The least recently used one is dropped."""
_PYFORMAT_PATTERN = re.compile(r"\$(\d+)|%")


@lru_cache(maxsize=CACHED_STATEMENTS_MAX)
def to_pyformat(statement: str) -> str:
    """Return a statement in Python's format `pyformat` (PEP 249): with the parameters `%(p1)s`,
    `%(p2)s`, … instead of `$1`, `$2`, …"""

    def replace(match: re.Match[str]) -> str:
        return f"%(p{match[1]})s" if match[1] else "%%"

    return _PYFORMAT_PATTERN.sub(replace, statement)


def encode_value(value: object) -> str | None:
    """Return a value as text in the form that the server accepts for its type.

    Raises:
        TypeError: no statement of riverpy has values of this type.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return str.__str__(value)  # for a member of an enumeration: its value
    if isinstance(value, (list, tuple, set, frozenset)):
        return _encode_array(cast("Iterable[object]", value))
    return _encode_scalar(value)


def _encode_scalar(value: object) -> str:
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (bytes, bytearray)):
        return rf"\x{value.hex()}"
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return f"{value.days} days {value.seconds} seconds {value.microseconds} microseconds"
    raise TypeError(f"a statement has no parameters of type {type(value).__name__}")


def _encode_array(values: Iterable[object]) -> str:
    return f"{{{','.join(map(_encode_element, values))}}}"


def _encode_element(value: object) -> str:
    text = encode_value(value)
    if text is None:
        return "NULL"
    escaped = text.replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'
