"""Functions that format numbers, names and statements for the output of the tools."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from riverpy._dsn import mask_passwords

if TYPE_CHECKING:
    from collections.abc import Iterable

QUERY_LENGTH_MAX = 80
"""The maximum length of a shown statement, in characters."""
ERROR_LENGTH_MAX = 160
"""The maximum length of a shown error, in characters."""
SHOWN_NAMES_MAX = 5
"""The maximum number of shown names in a list."""
_DURATION_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))

_SQL_TOKEN_PATTERN = re.compile(
    r"""
    (?P<comment> --[^\n]* | /\*(?:(?!/\*|\*/).)*(?:\*/|/\*.*|\Z) )
    | (?P<name> "[^"]*(?:"|\Z) )
    | \$(?P<tag>\w*)\$ .*? (?:\$(?P=tag)\$|\Z)
    | (?P<escape> (?<!\w)[eE] )' (?:\\.|''|[^'\\])* (?:'|\\?\Z)
    | '(?:''|\\(?!')|[^'\\])*(?:'|\\'.*|\Z)
    """,
    re.DOTALL | re.VERBOSE,
)
"""Matches a comment, a quoted name or a string literal in a statement.

The pattern cannot find the end of a nested comment, or of a string with a backslash before a quote.
The match then extends to the end of the text.
"""


def format_seconds(seconds: float) -> str:
    """Return a duration with its two largest units, such as `1h5m`."""
    if seconds < 10:
        return f"{max(seconds, 0):.1f}".removesuffix(".0") + "s"
    whole = round(seconds)
    for (unit, length), (lower, part) in pairwise(_DURATION_UNITS):
        if whole >= length:
            rest = whole % length // part
            return f"{whole // length}{unit}" + (f"{rest}{lower}" if rest else "")
    return f"{whole}s"


def format_size(byte_count: float) -> str:
    """Return a number of bytes with a unit, such as `12 MB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if byte_count < 10_000:
            return f"{byte_count:,.0f} {unit}"
        byte_count /= 1024
    return f"{byte_count:,.0f} TB"


def format_count(
    number: int, noun: str, *, plural: str | None = None, limit: int | None = None
) -> str:
    """Return a text such as `1 job`, `2 jobs` or `at least 1,000 jobs`. `limit` is the number at
    which the caller stopped counting; None: no limit."""
    prefix = "at least " if limit is not None and number >= limit else ""
    return f"{prefix}{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_waiting_count(
    number: int, noun: str, *, suffix: str = "", is_partial: bool = False
) -> str:
    """Return a text such as `1 job waits` or `2 jobs wait`, with `suffix` before the verb. With
    `is_partial`, the text begins with `at least`, because the caller stopped counting at a
    limit."""
    limit = number if is_partial else None
    return f"{format_count(number, noun, limit=limit)}{suffix} wait{'s' if number == 1 else ''}"


def format_names(names: Iterable[str]) -> str:
    """Return the first `SHOWN_NAMES_MAX` names in quotes, as one text. If there are more names, the
    text ends with their number."""
    return _format_list([f'"{value}"' for value in names])


def format_job_ids(job_ids: Iterable[int]) -> str:
    """Return a text such as `job 1` or `jobs 1, 2`. A long list ends with the number of the
    remaining jobs."""
    found = [str(value) for value in job_ids]
    return f"job{'s' * (len(found) != 1)} {_format_list(found)}"


def _format_list(items: list[str]) -> str:
    more = len(items) - SHOWN_NAMES_MAX
    return ", ".join(items[:SHOWN_NAMES_MAX]) + (f" and {more:,} more" if more > 0 else "")


def format_error(error: str) -> str:
    """Return the start of a job's error in one line, without passwords."""
    return shorten_line(mask_passwords(" ".join(error.split())), ERROR_LENGTH_MAX)


def shorten_line(line: str, length: int) -> str:
    """Return the line, shortened to at most `length` characters."""
    return line if len(line) <= length else line[: length - 1] + "…"


def mask_and_shorten_query(statement: str) -> str:
    """Return the start of a statement in one line, without the contents of strings and without
    comments, because they may contain private data or a password."""
    line = mask_passwords(" ".join(_SQL_TOKEN_PATTERN.sub(_mask_token, statement).split()))
    return shorten_line(line, QUERY_LENGTH_MAX)


def _mask_token(token: re.Match[str]) -> str:
    if token["comment"] is not None:
        return " "
    return token["name"] or f"{token['escape'] or ''}'…'"
