"""The page that lists jobs by state and filters."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, get_args

from riverpy._dashboard.database import open_read_transaction
from riverpy._dashboard.job_actions import JobAction, list_possible_actions
from riverpy._dashboard.job_errors import (
    GROUPED_JOBS_MAX,
    STATES_WITH_ERROR_GROUPS,
    STATES_WITH_ERRORS,
    get_last_error_line,
    read_error_groups,
)
from riverpy._dashboard.job_search import (
    EXAMPLE_BY_FILTER,
    LABEL_BY_FILTER,
    SearchError,
    find_jobs,
    parse_search,
)
from riverpy._dashboard.page import RESPONSE_STATUS_KEY, Page
from riverpy._dashboard.paths import quote_name_for_sentence
from riverpy._dashboard.rendering import format_capped_count
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._postgres.transactions import read_server_time
from riverpy._tools.text import shorten_line
from riverpy.errors import RiverError
from riverpy.job import JobState, get_raw_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from riverpy._dashboard.job_search import FoundJobs, JobSearch
    from riverpy._dashboard.page import PageRequest
    from riverpy._dashboard.site import Site
    from riverpy._tools.top.status import OverallStatus
    from riverpy.job import JobRow

JOBS_PER_PAGE = 50
BULK_RUNS_SHOWN_MAX = 3
ARGS_LENGTH_SHOWN_MAX = 80
"""The maximum number of characters of a job's args that the list shows."""
MASKED_ARGS_LENGTH_MAX = 20_000
"""The maximum number of characters of args that are masked for the list. Longer args are not shown,
because masking takes long."""
TICK_ALL = "all"
"""The value of the query parameter `tick` that ticks the checkboxes of all jobs on the page."""
_NON_FILTER_PARAMETERS = ("after", "tick")
"""The query parameters of the page that are not filters."""


class ListedJob(NamedTuple):
    """A job with the texts that the list shows."""

    job: JobRow
    args: str
    """The start of the args, or the reason why they are not shown."""
    error: str
    """The first line of the last error. Empty: the list shows no error."""
    state: str


async def load_job_list_page(view: PageRequest) -> Mapping[str, object]:
    """Read one page of jobs. If a filter is invalid, return only the values of the search form."""
    form = {"labels": LABEL_BY_FILTER, "examples": EXAMPLE_BY_FILTER}
    try:
        search = _read_page_search(view)
        return {**form, "wrong": None, "texts": search.texts, **await _load_job_list(view, search)}
    except SearchError as error:
        return {
            **form,
            "wrong": error,
            "texts": error.texts,
            RESPONSE_STATUS_KEY: error.status_code,
        }


def _read_page_search(view: PageRequest) -> JobSearch:
    """Return the search in the query of the page.

    Raises:
        SearchError: a parameter is invalid, or its filter would reveal hidden args.
    """
    search = parse_search(view.query, non_filter_names=_NON_FILTER_PARAMETERS)
    search.require_allowed_filters(view.site.options)
    tick = view.query.get("tick", TICK_ALL)
    if tick != TICK_ALL:
        problem = (
            f"`tick` cannot be {quote_name_for_sentence(tick)}. The only value is `{TICK_ALL}`."
        )
        raise SearchError(problem, search.texts, "")
    return search


async def _load_job_list(view: PageRequest, search: JobSearch) -> Mapping[str, object]:
    schema = view.site.client.config.schema
    state = JobState(search.state) if search.state else None
    has_groups = state in STATES_WITH_ERROR_GROUPS and not search.after
    sampled_max = GROUPED_JOBS_MAX if has_groups else 0
    async with open_read_transaction(view.site.client) as tx:
        now = await read_server_time(tx)
        found = await find_jobs(tx, schema, search, limit=JOBS_PER_PAGE, sampled_max=sampled_max)
        groups = (
            await read_error_groups(tx, schema, search, found.sampled_ids) if has_groups else None
        )
    status = await _read_status_or_none(view)
    return {
        "now": now,
        "search": search,
        "found": found,
        "listed": list(_make_listed_jobs(view.site, found.jobs)),
        "groups": groups,
        "groups_max": GROUPED_JOBS_MAX,
        "has_errors": state is None or state in STATES_WITH_ERRORS,
        "is_ticked": "tick" in view.query,
        "status": status,
        "actions": get_args(JobAction) if state is None else list_possible_actions(state),
        "all_text": _describe_bulk_target(search, found, status) if search.state else "",
        "bulk_runs": view.site.bulk_runs.list_newest_first()[:BULK_RUNS_SHOWN_MAX],
    }


def _make_listed_jobs(site: Site, jobs: Sequence[JobRow]) -> Iterator[ListedJob]:
    """Yield each job with the texts that the list shows. If the function `mask` fails for a job, it
    is not called for further jobs of this kind, so that the log does not repeat the failure."""
    failed_kinds: set[str] = set()
    for job in jobs:
        if site.options.hide_args:
            text = "args hidden (hide_args)"
        elif site.options.mask is not None and len(job.encoded_args) > MASKED_ARGS_LENGTH_MAX:
            text = f"args of {len(job.encoded_args):,} characters: open the job"
        elif job.kind in failed_kinds:
            text = "args hidden (mask failed)"
        elif (shown := site.get_visible_args(job).json_text) is None:
            failed_kinds.add(job.kind)
            text = "args hidden (mask failed)"
        else:
            text = shorten_line(shown, ARGS_LENGTH_SHOWN_MAX)
        yield ListedJob(job, text, get_last_error_line(job), get_raw_state(job))


def _describe_bulk_target(search: JobSearch, found: FoundJobs, status: OverallStatus | None) -> str:
    """Return a name for the jobs that a bulk change would change, such as `All 5 running jobs`."""
    noun = f"{search.state} jobs"
    has_filters = len(search.texts) > 1
    is_whole = not (search.after or found.next_cursor or found.limit_note or found.damaged)
    if is_whole and len(found.jobs) == 1:
        return f"The {search.state} job" + (" that matches" if has_filters else "")
    number = ""
    if is_whole:
        number = f"{len(found.jobs):,} "
    elif not has_filters and status is not None:
        number = f"{format_capped_count(status.totals[JobState(search.state)], status.cap)} "
    return f"All {number}{noun}" + (" that match" if has_filters else "")


async def _read_status_or_none(view: PageRequest) -> OverallStatus | None:
    """Return the status of clients and queues, for the job counts beside the states. Return None if
    it cannot be read. The list then shows no counts."""
    try:
        return await view.site.statuses.read()
    except (RiverError, *DATABASE_ERRORS):
        return None


PAGE = Page("jobs", "/jobs", "jobs.html", load_job_list_page, "Jobs")
