"""Findings: what a check found, how bad it is, and what to do about it."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from riverpy._tools.text import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FINDINGS_MAX = 10
"""Findings of one name that are shown."""


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    """Something is slower or riskier than it should be, or could not be checked."""
    FAIL = "fail"
    """Jobs are not inserted, worked or made available as they should be."""


LEVEL_NAMES = {Level.OK: "ok", Level.WARN: "warn", Level.FAIL: "FAIL"}
"""The names of the levels as people see them."""
_ORDER = list(Level)


class Finding(msgspec.Struct, frozen=True):
    """One finding, as `--json` prints it."""

    level: Level
    name: str
    """The subject of the check. It is the same in every run."""
    text: str
    """What was found, in one line."""
    fix: str | None = None
    """What to do about it. None: nothing."""
    data: dict[str, object] = {}
    """The facts. Durations are in seconds, sizes in bytes."""


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
    """Return the worst findings, and one that counts the others."""
    ordered = sorted(findings, key=lambda finding: _ORDER.index(finding.level), reverse=True)
    more = ordered[FINDINGS_MAX:]
    if not more:
        return ordered
    text = f"and {count(len(more), 'more like this', plural='more like these')}"
    rest = Finding(worst_level(more), more[0].name, text, more[0].fix, {"more": len(more)})
    return [*ordered[:FINDINGS_MAX], rest]
