"""Findings: the results of the checks, each with a level, a text and a remedy."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from riverpy._tools.text import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable

PROBLEMS_PER_CHECK_MAX = 10
"""The maximum number of problems that are shown for one check."""


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    """Jobs are slow or at risk, or a check could not run."""
    FAIL = "fail"
    """Jobs are not inserted, not worked or not made available."""


LEVEL_NAMES = {Level.OK: "ok", Level.WARN: "warn", Level.FAIL: "FAIL"}
"""The names of the levels in the output for people."""
_LEVEL_ORDER = list(Level)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One result of a check. `--json` prints these fields."""

    level: Level
    name: str = ""
    """The name of the check. `add_check_name` sets it. The name does not change between
    versions."""
    text: str
    """The result, in one line."""
    fix: str | None = None
    """The remedy. None: nothing needs to be done."""
    data: dict[str, object] = {}
    """The values behind the text. Durations are in seconds, sizes in bytes."""


def ok_finding(text: str, /, **data: object) -> Finding:
    """Return a finding of level OK."""
    return Finding(level=Level.OK, text=text, data=data)


def warn_finding(text: str, fix: str, /, **data: object) -> Finding:
    """Return a finding of level WARN."""
    return Finding(level=Level.WARN, text=text, fix=fix, data=data)


def fail_finding(text: str, fix: str, /, **data: object) -> Finding:
    """Return a finding of level FAIL."""
    return Finding(level=Level.FAIL, text=text, fix=fix, data=data)


def add_check_name(check_name: str, findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with the name of their check."""
    return [msgspec.structs.replace(finding, name=check_name) for finding in findings]


def worst_level(findings: Iterable[Finding]) -> Level:
    """Return the worst level of the findings. Without findings, it is OK."""
    return max((finding.level for finding in findings), key=_LEVEL_ORDER.index, default=Level.OK)


def limit_problem_count(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that are ok, the worst `PROBLEMS_PER_CHECK_MAX` problems, and one more
    finding that counts the remaining problems."""
    ordered = sorted(findings, key=lambda finding: _LEVEL_ORDER.index(finding.level), reverse=True)
    problems = [finding for finding in ordered if finding.level is not Level.OK]
    shown = ordered[len(problems) :] + problems[:PROBLEMS_PER_CHECK_MAX]
    if more := problems[PROBLEMS_PER_CHECK_MAX:]:
        text = f"and {format_count(len(more), 'more like this', plural='more like these')}"
        level, fix = worst_level(more), more[0].fix
        shown.append(Finding(level=level, text=text, fix=fix, data={"more": len(more)}))
    return shown
