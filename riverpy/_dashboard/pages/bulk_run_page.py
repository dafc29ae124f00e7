"""The page of a bulk run, i.e. a change of all jobs that match a search. It shows the progress and
the result."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from riverpy._dashboard.errors import PageError
from riverpy._dashboard.job_actions import describe_change_counts
from riverpy._dashboard.page import Page

if TYPE_CHECKING:
    from collections.abc import Mapping

    from riverpy._dashboard.bulk_runs import BulkChangeRun
    from riverpy._dashboard.page import PageRequest


async def load_bulk_run_page(view: PageRequest) -> Mapping[str, object]:
    """Return the progress and the result of a bulk run.

    Raises:
        PageError: the run is not stored in the memory of this process.
    """
    run = view.site.bulk_runs.find(view.path_params["run_id"])
    if run is None:
        raise PageError(
            404,
            "This change is not known here.",
            "If the web server has several processes, another one may know it: load the page "
            "again. The log has the start and the end of each change.",
        )
    return {
        "run": run,
        "plan": run.plan,
        "now": datetime.now(UTC),
        "headline": _describe_outcome(run),
        "state": _get_run_health(run),
        "numbers": describe_change_counts(run.plan.action, run.changes),
        "reasons": run.changes.reasons,
    }


def _describe_outcome(run: BulkChangeRun) -> str:
    match run.outcome:
        case "running":
            return "The change runs."
        case "done":
            return "The change is done."
        case "stopped":
            return f"The change was stopped before its end. {run.problem}".strip()
        case "failed":
            return f"The change failed before its end: {run.problem}"


def _get_run_health(run: BulkChangeRun) -> str:
    if run.outcome == "failed":
        return "act"
    return "look" if run.outcome == "stopped" or run.changes.refused else "ok"


PAGE = Page("bulk_run", "/bulk-change/{run_id}", "bulk_run.html", load_bulk_run_page)
