"""Searches of the list of jobs: their filters in the address of the page, and their limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast
from urllib.parse import urlencode

import msgspec

from riverpy._calls.job_filters import check_filters
from riverpy._calls.job_page import plan_page
from riverpy._dashboard.errors import PageError
from riverpy._postgres import jobs
from riverpy._postgres.damaged_jobs import read_jobs_in_parts
from riverpy._postgres.job_search import job_search
from riverpy._postgres.jobs import FINAL_STATES
from riverpy._timestamps import decode_wire_timestamp
from riverpy.errors import ConfigError
from riverpy.job import JobColumn, JobRow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.datastructures import QueryParams

    from riverpy._calls.job_filters import CheckedFilters
    from riverpy._calls.job_page import PagePlan
    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.job_search import FoundPlace, SearchResult, SearchSource
    from riverpy.job_list import JobFilters, JobOrder

SEARCHED_JOBS_MAX = 10_000
"""The maximum number of jobs of a state or queue that a list with further filters searches."""
LISTED_JOBS_MAX = 2_000
"""The maximum number of jobs of a state or queue that a list without further filters orders. A
search of a kind reads no more, because it seldom reads all jobs of the kind."""
VALUE_LENGTH_MAX = 1_000
"""The maximum number of characters of a filter."""
FILTER_NAMES = ("state", "id", "kind", "queue", "priority", "tag", "metadata", "error")
"""The filters in the address of the page, in the order of the form."""
_FILTER_PARTS = {"kinds", "queues", "priorities", "tags_all", "tags_any", "metadata", "error"}
"""The parts of a statement whose filters may drop most jobs."""
_DESCRIPTION_BY_SOURCE: dict[SearchSource, str] = {
    "ids": "",
    "newest": "the newest {} jobs of the table",
    "kinds": "{} jobs of each kind",
    "ended": "the {} jobs of this state that ended last",
    "waiting": "the first {} jobs of this state",
    "queues": "the first {} jobs of this state in the queue",
}


class FoundJobs(NamedTuple):
    """One page of a list."""

    jobs: list[JobRow]
    damaged: dict[int, str]
    """The jobs that the server cannot read: the server's errors by id."""
    next_cursor: str | None
    """The cursor of the next page. None: this page is the last one."""
    limit_note: str | None
    """What was searched, if not all jobs were searched. None: all were searched."""


class FoundPlaces(NamedTuple):
    """The ids of one page of a list."""

    ids: list[int]
    next_cursor: str | None
    """As in FoundJobs."""
    limit_note: str | None
    """As in FoundJobs."""
    damaged: dict[int, str]
    """The jobs that the server cannot read, so that it is not known whether they pass the filters:
    the server's errors by id."""


class JobSearch(NamedTuple):
    """The filters of a list of jobs, as the address of the page has them."""

    texts: Mapping[str, str]
    """The texts of the filters that are given, by the names in the address."""
    filters: CheckedFilters
    after: str | None

    @property
    def state(self) -> str:
        """The state of the jobs; empty: all states."""
        return self.texts.get("state", "")

    def describe(self) -> str:
        """Return the filters in words."""
        names = {"error": "text in the last error"}
        return ", ".join(f"{names.get(name, name)} {text}" for name, text in self.texts.items())

    def make_path(self, **changes: str) -> str:
        """Return the path of the list with changed filters."""
        values = {key: value for key, value in {**self.texts, **changes}.items() if value}
        return "/jobs" + (f"?{urlencode(values)}" if values else "")


def read_search(query: QueryParams) -> JobSearch:
    """Return the filters in the address of a page.

    Raises:
        PageError: a filter is wrong.
    """
    texts = {name: text for name in FILTER_NAMES if (text := query.get(name, "").strip())}
    try:
        return JobSearch(texts, check_filters(parse_filters(texts)), query.get("after"))
    except (ConfigError, ValueError, msgspec.DecodeError) as error:
        raise PageError(
            400, f"This list cannot be shown: {error}.", "Go back, and correct the filters."
        ) from None


def parse_filters(texts: Mapping[str, str]) -> JobFilters:
    """Return the filters whose texts the address of a page has.

    Raises:
        ConfigError, ValueError: a text is wrong.
    """
    filters: dict[str, object] = {}
    for name, text in texts.items():
        if len(text) > VALUE_LENGTH_MAX:
            raise ConfigError(f"the filter {name} has more than {VALUE_LENGTH_MAX:,} characters")
    for name, key in (("state", "states"), ("kind", "kinds"), ("queue", "queues")):
        if name in texts:
            filters[key] = [texts[name]]
    if "id" in texts:
        filters["ids"] = [
            _parse_number("id", text) for text in texts["id"].replace(",", " ").split()
        ]
    if "priority" in texts:
        filters["priorities"] = [_parse_number("priority", texts["priority"])]
    if "tag" in texts:
        filters["tags_all"] = [texts["tag"]]
    if "metadata" in texts:
        filters["metadata"] = msgspec.json.decode(texts["metadata"])
    if "error" in texts:
        filters["error"] = texts["error"]
    return cast("JobFilters", filters)


def _parse_number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ConfigError(f"the filter {name} takes whole numbers, got {text!r}")
    return int(text)


async def find_jobs(
    tx: Transaction, schema: str | None, search: JobSearch, *, limit: int
) -> FoundJobs:
    """Return one page of the jobs that pass the filters.

    Raises:
        PageError: the cursor is wrong.
    """
    found = await find_job_ids(tx, schema, search, limit=limit)
    rows, damaged = await read_jobs(tx, schema, found.ids)
    damaged |= dict(list(found.damaged.items())[:limit])
    return FoundJobs(rows, damaged, found.next_cursor, found.limit_note)


async def read_jobs(
    tx: Transaction, schema: str | None, ids: Sequence[int]
) -> tuple[list[JobRow], dict[int, str]]:
    """Return the jobs with these ids that exist, in the order of the ids. Also return the server's
    errors about the jobs that it cannot read, by id."""
    parts, damaged = await read_jobs_in_parts(
        tx, ids, lambda part: jobs.job_get_many(tx, schema, part)
    )
    rows = {row[JobColumn.ID]: JobRow(tuple(row)) for part in parts for row in part}
    return [rows[job_id] for job_id in ids if job_id in rows], damaged


async def find_job_ids(
    tx: Transaction, schema: str | None, search: JobSearch, *, limit: int
) -> FoundPlaces:
    """Return the ids of one page of the jobs that pass the filters, in the order of the list.

    Raises:
        PageError: as `find_jobs`.
    """
    plan = _plan_search(search, limit)
    first, *others = _choose_sources(search)
    found, note = await _search_source(tx, schema, plan, first)
    for source in others:
        if note is not None:
            found, note = await _search_source(tx, schema, plan, source)
    places = sorted(found.places, key=_get_sort_key, reverse=plan.descending)
    cursor = None
    if len(places) == limit:
        last = places[-1]
        time = None if last.time is None else decode_wire_timestamp(last.time)
        cursor = plan.make_cursor(last.job_id, last.kind, last.queue, time)
    return FoundPlaces([place.job_id for place in places], cursor, note, found.damaged)


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
    except ConfigError as error:
        raise PageError(
            400, f"This list cannot be shown: {error}.", "Go back to the first page of the list."
        ) from None


async def _search_source(
    tx: Transaction, schema: str | None, plan: PagePlan, source: SearchSource
) -> tuple[SearchResult, str | None]:
    """Return the result of a search, and what it searched; None: all jobs that can match."""
    limit = _choose_limit(plan, source)
    found = await job_search(tx, schema, plan.statement, source, limit)
    if source == "ids" or found.searched_count < limit:
        return found, None
    return found, _DESCRIPTION_BY_SOURCE[source].format(f"{limit:,}")


def _choose_limit(plan: PagePlan, source: SearchSource) -> int:
    """Return how many jobs a search of a source reads."""
    given = _FILTER_PARTS.intersection(plan.statement.sql_parts) - {source}
    return LISTED_JOBS_MAX if source == "kinds" or not given else SEARCHED_JOBS_MAX


def _choose_sources(search: JobSearch) -> list[SearchSource]:
    """Return the sources of a search, the best first. The next one is used if the search of a
    source is not complete."""
    given = search.filters.values
    if "ids" in given:
        return ["ids"]
    sources: list[SearchSource] = ["kinds"] if "kinds" in given else []
    if not search.state:
        return [*sources, "newest"]
    if search.state in FINAL_STATES:
        return [*sources, "ended"]
    return [*sources, "queues" if "queues" in given else "waiting"]


def _get_sort_key(place: FoundPlace) -> tuple[bool, int, int]:
    time = None if place.time is None else decode_wire_timestamp(place.time)
    return time is None, time or 0, place.job_id
