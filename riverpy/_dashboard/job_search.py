"""JobSearch: the filters of a job list, which are in the URL query of the page. A search reads only
a limited number of jobs, so that it stays fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast
from urllib.parse import urlencode

import msgspec

from riverpy._calls.job_filters import check_filters
from riverpy._calls.job_page import plan_page
from riverpy._dashboard.errors import PageError
from riverpy._dashboard.paths import quote_name_for_sentence
from riverpy._dashboard.rendering import STATES_IN_DISPLAY_ORDER
from riverpy._postgres import jobs
from riverpy._postgres.damaged_jobs import read_jobs_in_parts
from riverpy._postgres.job_search import job_search
from riverpy._postgres.jobs import FINAL_STATES
from riverpy._timestamps import decode_wire_microseconds
from riverpy._tools.text import shorten_line
from riverpy.errors import ConfigError
from riverpy.job import JobColumn, JobRow

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from starlette.datastructures import QueryParams

    from riverpy._calls.job_filters import CheckedFilters
    from riverpy._calls.job_page import PagePlan
    from riverpy._dashboard.site import DashboardOptions
    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.job_search import FoundJob, SearchResult, SearchSource
    from riverpy.job_list import JobFilters, JobOrder

SEARCHED_JOBS_MAX = 10_000
"""The maximum number of jobs that a search reads from one source if it must filter these jobs, for
example by tag. A source is a state, a queue, or the newest jobs of the table."""
SORTED_JOBS_MAX = 2_000
"""The maximum number of jobs that a search reads from one source if all these jobs match and are
only sorted. The source `kinds` always has this limit, because it is useful only for kinds with few
jobs. If a kind has more jobs, the search uses another source: a state, a queue, or the newest
jobs."""
FILTER_LENGTH_MAX = 1_000
"""The maximum number of characters of a filter's text."""
LABEL_BY_FILTER = {
    "state": "State",
    "kind": "Kind",
    "queue": "Queue",
    "tag": "Tag",
    "error": "Text in the last error",
    "args": "Args",
    "metadata": "Metadata",
    "priority": "Priority",
    "id": "Ids",
}
"""The names of the filters in the URL query of the page, with their labels in the form."""
EXAMPLE_BY_FILTER = {"args": '{"customer": "acme"}', "metadata": '{"tenant": 7}'}
"""An example for each filter whose text is a JSON object."""
_WORDS_BY_FILTER = {
    "error": "text in the last error",
    "args": "args that contain",
    "metadata": "metadata that contain",
}
"""The words for some filters in a description of a search, such as `args that contain {"a": 1}`.
The other filters are described by their names, such as `kind mail`."""
_KEY_BY_FILTER = {
    "state": "states",
    "kind": "kinds",
    "queue": "queues",
    "priority": "priorities",
    "id": "ids",
    "tag": "tags_all",
}
"""The keys in JobFilters for filters that take a list of values."""
_SELECTIVE_SQL_PARTS = {
    *("kinds", "queues", "priorities", "tags_all", "tags_any", "metadata", "args", "error")
}
"""The filters that may exclude most of the jobs that a search reads. Each name is also the name of
the part of the SQL statement that applies the filter."""
_DESCRIPTION_BY_SOURCE: dict[SearchSource, str] = {
    "ids": "",
    "newest": "the newest {} jobs of the table",
    "kinds": "{} jobs of each kind",
    "ended": "the {} jobs of this state that ended last",
    "waiting": "the first {} jobs of this state",
    "queues": "the first {} jobs of this state in the queue",
}


class FoundJobs(NamedTuple):
    """One page of the jobs that a search has found."""

    jobs: list[JobRow]
    damaged: dict[int, str]
    """The server's errors for the jobs that it cannot read, by job id."""
    sampled_ids: list[int]
    """The ids of the jobs of this page, followed by those of further pages, up to a limit. The page
    groups all these jobs by their errors."""
    next_cursor: str | None
    """The cursor of the next page. None: this is the last page."""
    limit_note: str | None
    """A description of the jobs that were searched, if the search ended at a limit. None: all jobs
    were searched."""


class FoundJobIds(NamedTuple):
    """The ids of one page of the jobs that a search has found."""

    ids: list[int]
    sampled_ids: list[int]
    """The ids in `ids`, followed by those of further pages, up to a limit."""
    next_cursor: str | None
    """The cursor of the next page. None: this is the last page."""
    limit_note: str | None
    """A description of the jobs that were searched, if the search ended at a limit. None: all jobs
    were searched."""
    damaged: dict[int, str]
    """The server's errors for the jobs that it cannot read, by job id. It is not known whether
    these jobs pass the filters."""


class SearchError(PageError):
    """A search with an invalid filter or cursor. The page shows what to correct."""

    def __init__(self, problem: str, texts: Mapping[str, str], field: str) -> None:
        """Create the error.

        Args:
            problem: what is wrong and what to write instead, in sentences.
            texts: the texts of the filters in the search.
            field: the name of the invalid filter. Empty: the problem is not in a filter.
        """
        super().__init__(400, problem, "Go back, and correct the filters.")
        self.texts, self.field = texts, field


class JobSearch(NamedTuple):
    """A search for jobs, from the URL query of a page or from a form."""

    texts: Mapping[str, str]
    """The texts of the filters in the search, by their names in the URL query."""
    filters: CheckedFilters
    after: str | None

    @property
    def state(self) -> str:
        """The state of the jobs. Empty: all states."""
        return self.texts.get("state", "")

    def describe(self) -> str:
        """Return the filters in words."""
        return ", ".join(
            f"{_WORDS_BY_FILTER.get(name, name)} {text}" for name, text in self.texts.items()
        )

    def require_allowed_filters(self, options: DashboardOptions) -> None:
        """Raise SearchError if a filter would reveal args that the dashboard hides."""
        if "args" in self.texts and (options.hide_args or options.mask is not None):
            raise SearchError(
                "Args: this dashboard hides args (hide_args or mask), and a filter would reveal "
                "them. Leave this filter empty.",
                self.texts,
                "args",
            )

    def make_path(self, **changes: str) -> str:
        """Return the path of the page with this search. `changes` replaces the texts of some
        filters."""
        values = {key: value for key, value in {**self.texts, **changes}.items() if value}
        return "/jobs" + (f"?{urlencode(values)}" if values else "")


def parse_search(query: QueryParams, *, non_filter_names: Collection[str] = ()) -> JobSearch:
    """Parse the search in the URL query of a page or in the fields of a form.

    Args:
        query: the parameters of the URL query, or the fields of the form.
        non_filter_names: the names of parameters that are not filters.

    Raises:
        SearchError: a parameter is unknown or repeated, or a filter is invalid.
    """
    texts = {name: text for name in LABEL_BY_FILTER if (text := query.get(name, "").strip())}
    for name in query:
        if name not in LABEL_BY_FILTER and name not in non_filter_names:
            known = ", ".join(LABEL_BY_FILTER)
            raise SearchError(
                f"There is no filter {quote_name_for_sentence(name)}. The filters are {known}.",
                texts,
                "",
            )
        if name in LABEL_BY_FILTER and len(query.getlist(name)) > 1:
            raise SearchError(f"{LABEL_BY_FILTER[name]} is given twice.", texts, name)
    filters = check_filters(parse_filters(texts))
    return JobSearch(texts, filters, query.get("after"))


def parse_filters(texts: Mapping[str, str]) -> JobFilters:
    """Convert the texts of filters to JobFilters. The keys of `texts` are the names in the URL
    query.

    Raises:
        SearchError: the text of a filter is invalid.
    """
    filters: dict[str, object] = {}
    for name, text in texts.items():
        try:
            key, value = _KEY_BY_FILTER.get(name, name), _parse_filter(name, text)
            check_filters(cast("JobFilters", {key: value}))
        except (ConfigError, ValueError, RecursionError) as error:
            raise SearchError(_explain_filter_error(name, text, error), texts, name) from None
        filters[key] = value
    return cast("JobFilters", filters)


def _parse_filter(name: str, text: str) -> object:
    if len(text) > FILTER_LENGTH_MAX:
        raise ConfigError(f"the text has more than {FILTER_LENGTH_MAX:,} characters")
    if name in EXAMPLE_BY_FILTER:
        return msgspec.json.decode(text)
    if name == "error":
        return text
    if name == "id":
        return [_parse_number(part) for part in text.replace(",", " ").split()]
    return [_parse_number(text) if name == "priority" else text]


def _parse_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ValueError
    return int(text)


def _explain_filter_error(name: str, text: str, error: Exception) -> str:
    """Return sentences about what is wrong with the text of a filter and what to write instead."""
    if len(text) <= FILTER_LENGTH_MAX:
        if name == "state":
            known = ", ".join(STATES_IN_DISPLAY_ORDER)
            return f"There is no state {shorten_line(text, 100)}. Choose one of {known}."
        if name == "priority":
            return "Priority: choose a whole number from 1 to 4."
        if name == "id":
            return "Ids: write whole numbers from 1, such as 12 13."
        if name in EXAMPLE_BY_FILTER:
            is_json = not isinstance(error, msgspec.DecodeError | RecursionError)
            problem = "not a JSON object with a key" if is_json else "not valid JSON"
            example = EXAMPLE_BY_FILTER[name]
            return f"{LABEL_BY_FILTER[name]}: {problem}. Write an object, such as {example}."
    return f"{LABEL_BY_FILTER[name]}: {error}."


async def find_jobs(
    tx: Transaction, schema: str | None, search: JobSearch, *, limit: int, sampled_max: int = 0
) -> FoundJobs:
    """Return one page of the jobs that pass the filters. The result's `sampled_ids` contains the
    ids of this page, and of further pages up to `sampled_max` ids in total.

    Raises:
        SearchError: the cursor is invalid.
    """
    found = await find_job_ids(tx, schema, search, limit=limit, sampled_max=sampled_max)
    rows, damaged = await read_jobs(tx, schema, found.ids)
    damaged |= dict(list(found.damaged.items())[:limit])
    return FoundJobs(rows, damaged, found.sampled_ids, found.next_cursor, found.limit_note)


async def read_jobs(
    tx: Transaction, schema: str | None, ids: Sequence[int]
) -> tuple[list[JobRow], dict[int, str]]:
    """Return the jobs with these ids, in the order of `ids`. Jobs that do not exist are left out.
    Also return the server's errors for the jobs that it cannot read, by job id."""
    parts, damaged = await read_jobs_in_parts(
        tx, ids, lambda part: jobs.job_get_many(tx, schema, part)
    )
    rows = {row[JobColumn.ID]: JobRow(tuple(row)) for part in parts for row in part}
    return [rows[job_id] for job_id in ids if job_id in rows], damaged


async def find_job_ids(
    tx: Transaction, schema: str | None, search: JobSearch, *, limit: int, sampled_max: int = 0
) -> FoundJobIds:
    """Return the ids of one page of the jobs that pass the filters, in the order of the list.

    Raises:
        SearchError: the cursor is invalid.
    """
    plan = _plan_search(search, max(limit, sampled_max))
    first, *others = _choose_search_sources(search)
    found, note = await _search_jobs_from_source(tx, schema, plan, first)
    for source in others:
        if note is not None:
            found, note = await _search_jobs_from_source(tx, schema, plan, source)
    places = sorted(found.found_jobs, key=_get_found_job_sort_key, reverse=plan.descending)
    cursor = None
    if len(places) >= limit:
        last = places[limit - 1]
        time = None if last.time is None else decode_wire_microseconds(last.time)
        cursor = plan.make_cursor(last.job_id, last.kind, last.queue, time)
    ids = [place.job_id for place in places]
    return FoundJobIds(ids[:limit], ids, cursor, note, found.damaged)


def _plan_search(search: JobSearch, limit: int) -> PagePlan:
    has_ended = search.state in FINAL_STATES
    order: JobOrder = "id" if not search.state else "finalized_at" if has_ended else "time"
    try:
        return plan_page(
            search.filters,
            order,
            descending=has_ended or not search.state,
            limit=limit,
            after=search.after,
        )
    except ConfigError:
        problem = "This page link is not valid. Open the first page."
        raise SearchError(problem, search.texts, "") from None


async def _search_jobs_from_source(
    tx: Transaction, schema: str | None, plan: PagePlan, source: SearchSource
) -> tuple[SearchResult, str | None]:
    """Search the jobs of one source, such as the newest jobs of the table. Return the result and a
    description of the searched jobs. The description is None if the search did not reach its
    limit."""
    limit = _choose_limit(plan, source)
    found = await job_search(tx, schema, plan.statement, source, limit)
    if source == "ids" or found.searched_count < limit:
        return found, None
    return found, _DESCRIPTION_BY_SOURCE[source].format(f"{limit:,}")


def _choose_limit(plan: PagePlan, source: SearchSource) -> int:
    """Return the maximum number of jobs that a search of this source reads."""
    given = _SELECTIVE_SQL_PARTS.intersection(plan.statement.sql_parts) - {source}
    return SORTED_JOBS_MAX if source == "kinds" or not given else SEARCHED_JOBS_MAX


def _choose_search_sources(search: JobSearch) -> list[SearchSource]:
    """Return the sources for a search, the best first. If the search of one source reaches its
    limit, the next source is searched instead."""
    given = search.filters.values
    if "ids" in given:
        return ["ids"]
    sources: list[SearchSource] = ["kinds"] if "kinds" in given else []
    if not search.state:
        return [*sources, "newest"]
    if search.state in FINAL_STATES:
        return [*sources, "ended"]
    return [*sources, "queues" if "queues" in given else "waiting"]


def _get_found_job_sort_key(place: FoundJob) -> tuple[bool, int, int]:
    time = None if place.time is None else decode_wire_microseconds(place.time)
    return time is None, time or 0, place.job_id
