"""Findings: the results of the checks, each with a level, a text and a remedy."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from riverpy._tools.text import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FINDINGS_MAX = 10
"""The maximum number of findings of one check that are shown."""


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    """Jobs are slow or at risk, or a check could not run."""
    FAIL = "fail"
    """Jobs are not inserted, not worked or not made available."""


LEVEL_NAMES = {Level.OK: "ok", Level.WARN: "warn", Level.FAIL: "FAIL"}
"""The names of the levels in the output for people."""
_ORDER = list(Level)


class Finding(msgspec.Struct, frozen=True):
    """One result of a check. `--json` prints these fields."""

    level: Level
    name: str
    """The name of the check. This name does not change between versions."""
    text: str
    """The result, in one line."""
    fix: str | None = None
    """The remedy; None: nothing needs to be done."""
    data: dict[str, object] = {}
    """The values behind the text. Durations are in seconds, sizes in bytes."""


def ok(name: str, text: str, data: dict[str, object] | None = None) -> Finding:
    """Return a finding of level OK."""
    return Finding(Level.OK, name, text, None, data or {})


def warn(name: str, text: str, fix: str, data: dict[str, object] | None = None) -> Finding:
    """Return a finding of level WARN."""
    return Finding(Level.WARN, name, text, fix, data or {})


def fail(name: str, text: str, fix: str, data: dict[str, object] | None = None) -> Finding:
    """Return a finding of level FAIL."""
    return Finding(Level.FAIL, name, text, fix, data or {})


def worst_level(findings: Iterable[Finding]) -> Level:
    """Return the worst level of the findings."""
    return max((finding.level for finding in findings), key=_ORDER.index, default=Level.OK)


def limited(findings: Sequence[Finding]) -> list[Finding]:
    """Return the worst `FINDINGS_MAX` findings, and one more finding that counts the rest."""
    ordered = sorted(findings, key=lambda finding: _ORDER.index(finding.level), reverse=True)
    more = ordered[FINDINGS_MAX:]
    if not more:
        return ordered
    text = f"and {count(len(more), 'more like this', plural='more like these')}"
    rest = Finding(worst_level(more), more[0].name, text, more[0].fix, {"more": len(more)})
    return [*ordered[:FINDINGS_MAX], rest]
