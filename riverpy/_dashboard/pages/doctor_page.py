"""The page that shows the findings of `riverpy doctor`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from riverpy._dashboard.health_summary import HEALTH_BY_LEVEL, make_health_summary
from riverpy._dashboard.page import Page
from riverpy._dashboard.sentence import HealthSentence
from riverpy._tools.doctor.finding import Level
from riverpy._tools.text import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from riverpy._dashboard.page import PageRequest
    from riverpy._tools.doctor.finding import Finding

FINDINGS_AGE_MAX = 60.0
"""The maximum age of the findings of `riverpy doctor` in seconds. While the page is open, the
checks of `riverpy doctor` run again after this time."""


async def load_doctor_page(view: PageRequest) -> Mapping[str, object]:
    """Return the last findings of `riverpy doctor`. If they are too old, its checks run after this
    page is sent."""
    doctor = view.site.doctor
    report = doctor.last
    findings: Sequence[Finding] = () if report is None else report.findings
    return {
        "now": datetime.now(UTC),
        "can_run": doctor.can_run,
        "report": report,
        "is_running": doctor.is_running,
        "pause": None if report is None else report.get_pause_until_next_run(FINDINGS_AGE_MAX),
        "summary": make_health_summary(_describe_findings(findings), "The checks found no problem"),
        "problems": [one for one in findings if one.level is not Level.OK],
        "passed": [one for one in findings if one.level is Level.OK],
        "health_by_level": HEALTH_BY_LEVEL,
    }


PAGE = Page(
    "doctor",
    "/doctor",
    "doctor.html",
    load_doctor_page,
    "Doctor",
    findings_age_max=FINDINGS_AGE_MAX,
)


def _describe_findings(findings: Sequence[Finding]) -> Iterator[HealthSentence]:
    failures = sum(one.level is Level.FAIL for one in findings)
    warnings = sum(one.level is Level.WARN for one in findings)
    if failures:
        number = format_count(failures, "failure")
        text = "Jobs are not inserted, not worked or not made available."
        yield HealthSentence("act", f"{number}: {text} Begin with the first one.")
    if warnings:
        number = format_count(warnings, "warning")
        yield HealthSentence(
            "look", f"{number}: jobs are slow or at risk, or a check could not run."
        )
    if not failures and not warnings:
        yield HealthSentence("ok", f"{format_count(len(findings), 'check')} found no problem.")
