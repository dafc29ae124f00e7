"""The page with a list of jobs, by state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._dashboard.database import open_read
from riverpy._dashboard.errors import PageError
from riverpy._dashboard.page import Page
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._postgres.transactions import read_server_time
from riverpy.errors import ConfigError, RiverError
from riverpy.job import JobState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from riverpy._dashboard.page import PageView
    from riverpy._tools.top.status import FleetStatus
    from riverpy.job_list import JobFilters

JOBS_PER_PAGE = 50
SHOWN_STATES = (
    JobState.AVAILABLE,
    JobState.RUNNING,
    JobState.SCHEDULED,
    JobState.RETRYABLE,
    JobState.PENDING,
    JobState.COMPLETED,
    JobState.CANCELLED,
    JobState.DISCARDED,
)
"""The states, in the order of the tabs."""


async def load_jobs(view: PageView) -> Mapping[str, object]:
    """Read one page of jobs."""
    filters: JobFilters = {}
    state = view.query.get("state", "")
    if state:
        filters["states"] = [state]
    after = view.query.get("after")
    descending = state in {"", "completed", "cancelled", "discarded"}
    try:
        async with open_read(view.site.client) as tx:
            now = await read_server_time(tx)
            page = await view.site.client.job_list(
                order_by="time" if state else "id",
                descending=descending,
                limit=JOBS_PER_PAGE,
                after=after,
                tx=tx,
                **filters,
            )
    except ConfigError as error:
        raise PageError(
            400, f"This list cannot be shown: {error}", "Go back to all jobs."
        ) from None
    is_full = len(page.jobs) + len(page.damaged) == JOBS_PER_PAGE
    return {
        "now": now,
        "state": state,
        "states": SHOWN_STATES,
        "jobs": page.jobs,
        "damaged": page.damaged,
        "next_cursor": page.cursor if is_full else None,
        "is_first": after is None,
        "status": await _read_status(view),
    }


async def _read_status(view: PageView) -> FleetStatus | None:
    """Return the status, for the numbers beside the states. None: the list has to do without."""
    try:
        return await view.site.statuses.read()
    except (RiverError, *DATABASE_ERRORS):
        return None


PAGE = Page("jobs", "/jobs", "jobs.html", load_jobs, "Jobs")
