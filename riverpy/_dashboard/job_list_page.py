"""The page with a list of jobs, by state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._dashboard.database import open_read
from riverpy._dashboard.job_actions import list_actions
from riverpy._dashboard.job_search import find_jobs, read_search
from riverpy._dashboard.page import Page
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._postgres.transactions import read_server_time
from riverpy.errors import RiverError
from riverpy.job import JobState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from riverpy._dashboard.page import PageView
    from riverpy._tools.top.status import FleetStatus

JOBS_PER_PAGE = 50
BULK_RUNS_SHOWN_MAX = 3


async def load_jobs(view: PageView) -> Mapping[str, object]:
    """Read one page of jobs."""
    search = read_search(view.query)
    async with open_read(view.site.client) as tx:
        now = await read_server_time(tx)
        schema = view.site.client.config.schema
        found = await find_jobs(tx, schema, search, limit=JOBS_PER_PAGE)
    return {
        "now": now,
        "search": search,
        "found": found,
        "is_ticked": view.query.get("tick") == "all",
        "status": await _read_status(view),
        "actions_for_all": list_actions(JobState(search.state)) if search.state else [],
        "bulk_runs": view.site.bulk_runs.list_newest_first()[:BULK_RUNS_SHOWN_MAX],
    }


async def _read_status(view: PageView) -> FleetStatus | None:
    """Return the status, for the numbers beside the states. None: the list has to do without."""
    try:
        return await view.site.statuses.read()
    except (RiverError, *DATABASE_ERRORS):
        return None


PAGE = Page("jobs", "/jobs", "jobs.html", load_jobs, "Jobs")
