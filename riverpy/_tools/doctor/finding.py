"""Finding: what one look found, how bad it is, and what to do about it."""

from __future__ import annotations

import re
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from riverpy._dsn import mask_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

QUERY_LENGTH = 80
"""Characters of a statement that are shown."""
ERROR_LENGTH = 160
"""The same of an error."""
NAMES_SHOWN = 5
FINDINGS_SHOWN = 10
"""Of one sort."""
_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))

_TOKEN = re.compile(
    r"""
    (?P<comment> --[^\n]* | /\*(?:(?!/\*|\*/).)*(?:\*/|/\*.*|\Z) )
    | (?P<name> "[^"]*(?:"|\Z) )
    | \$(?P<tag>\w*)\$ .*? (?:\$(?P=tag)\$|\Z)
    | (?P<escape> (?<!\w)[eE] )' (?:\\.|''|[^'\\])* (?:'|\\?\Z)
    | '(?:''|\\(?!')|[^'\\])*(?:'|\\'.*|\Z)
    """,
    re.DOTALL | re.VERBOSE,
)
"""What may hold a quote, and the literals. Where a comment is nested, or it is for a setting of the
session to say whether a backslash hides the end of a literal, all that follows is part of it."""


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """Something is slower, riskier or less than it could be, or was not seen."""
    FAIL = "fail"
    """Jobs are not inserted, worked or moved on as they should be."""


WORDS = {Level.OK: "ok", Level.WARN: "warn", Level.FAIL: "FAIL"}
"""How a level is told to people."""
_ORDER = list(Level)


class Finding(msgspec.Struct, frozen=True):
    """What one look found, as `--json` prints it."""

    level: Level
    name: str
    """What was looked at: one word, the same in every run."""
    text: str
    """What was found, in one line."""
    fix: str | None = None
    """What to do about it. None: nothing."""
    data: dict[str, object] = {}
    """The facts; durations in seconds, sizes in bytes."""


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level of all."""
    return max((finding.level for finding in findings), key=_ORDER.index, default=Level.OK)


def shown(findings: Sequence[Finding]) -> list[Finding]:
    """The worst of findings of one sort, and how many more there are."""
    ordered = sorted(findings, key=lambda finding: _ORDER.index(finding.level), reverse=True)
    more = ordered[FINDINGS_SHOWN:]
    if not more:
        return ordered
    text = f"and {count(len(more), 'more like this', plural='more like these')}"
    rest = Finding(worst(more), more[0].name, text, more[0].fix, {"more": len(more)})
    return [*ordered[:FINDINGS_SHOWN], rest]


def span(seconds: float) -> str:
    """A duration for people: its largest unit and the one below."""
    if seconds < 10:
        return f"{max(seconds, 0):.1f}".removesuffix(".0") + "s"
    whole = round(seconds)
    for (unit, length), (lower, part) in pairwise(_UNITS):
        if whole >= length:
            rest = whole % length // part
            return f"{whole // length}{unit}" + (f"{rest}{lower}" if rest else "")
    return f"{whole}s"


def size(number: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 10_000:
            return f"{number:,.0f} {unit}"
        number /= 1024
    return f"{number:,.0f} TB"


def count(number: int, noun: str, *, plural: str | None = None, limit: int | None = None) -> str:
    """`1 job`, `2 jobs`; `at least 1,000 jobs` at the limit where counting ended."""
    least = "at least " if limit is not None and number >= limit else ""
    return f"{least}{number:,} {noun if number == 1 else plural or noun + 's'}"


def names(values: Iterable[str]) -> str:
    """The first of them in quotes, and how many more there are."""
    quoted = [f'"{value}"' for value in values]
    more = len(quoted) - NAMES_SHOWN
    return ", ".join(quoted[:NAMES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def one_error(text: str) -> str:
    """The head of an error of a job in one line, without passwords."""
    return shortened(mask_url(" ".join(text.split())), ERROR_LENGTH)


def shortened(line: str, length: int) -> str:
    """Its head, if it is longer."""
    return line if len(line) <= length else line[: length - 1] + "…"


def jobs(values: Iterable[int]) -> str:
    """`job 1`, `jobs 1, 2`: the first of them, and how many more there are."""
    found = [str(value) for value in values]
    more = len(found) - NAMES_SHOWN
    text = f"job{'s' * (len(found) != 1)} {', '.join(found[:NAMES_SHOWN])}"
    return text + (f" and {more:,} more" if more > 0 else "")


def masked_query(text: str) -> str:
    """The head of a statement in one line, without the strings and comments in it: they are
    somebody's data, or a password."""
    line = mask_url(" ".join(_TOKEN.sub(_masked_token, text).split()))
    return shortened(line, QUERY_LENGTH)


def _masked_token(token: re.Match[str]) -> str:
    if token["comment"] is not None:
        return " "
    return token["name"] or f"{token['escape'] or ''}'…'"
