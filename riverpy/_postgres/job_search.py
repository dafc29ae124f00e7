"""The statements with which the dashboard searches jobs, counts their errors and lists their kinds.
Each reads a limited number of jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

from riverpy._postgres.damaged_jobs import read_jobs_in_parts
from riverpy._postgres.driver import PostgresError, is_damaged_or_untranslatable_error
from riverpy._postgres.sql_files import get_query, get_query_with_conditional_parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.job_lists import PageStatement
    from riverpy._postgres.sql_files import Query

SearchSource: TypeAlias = Literal["ids", "newest", "kinds", "ended", "waiting", "queues"]
"""Which jobs a search reads. The ids, kinds, states and queues come from the search's filters.

- `ids`: the jobs with these ids.
- `newest`: the newest jobs of the table.
- `kinds`: jobs of these kinds.
- `ended`: for each of these states, the jobs that ended last.
- `waiting`: for each of these states, the first jobs in the order in which clients claim jobs.
- `queues`: for each of these states and each of these queues, the first jobs in the same order.
"""

_SQL_FILE = "riverpy_dashboard"
_WIDE_COLUMN_FILTERS = {"tags_all", "tags_any", "metadata", "args", "error"}
"""The filters that read wide columns. The server may be unable to read a wide column of a damaged
row."""


class FoundJob(NamedTuple):
    """A job that a search has found."""

    job_id: int
    kind: str
    queue: str
    time: bytes | None
    """The time by which the list is sorted. None: the job has no such time."""


class SearchResult(NamedTuple):
    """One page of a search."""

    found_jobs: list[FoundJob]
    searched_count: int
    """The number of jobs that the search has read."""
    damaged: dict[int, str]
    """The server's error by job id, for each searched job that the server cannot read. Such a job
    passes no filter that reads a wide column, such as the args."""


async def job_search(
    connection: Transaction,
    schema: str | None,
    page: PageStatement,
    source: SearchSource,
    candidates_max: int,
) -> SearchResult:
    """Return one page of the jobs that pass the filters. `source` selects which jobs the search
    reads. `candidates_max` is the maximum number of these jobs for each kind (`kinds`), for each
    state (`ended` and `waiting`), for each queue and state (`queues`), or in total (`newest`).

    If the server cannot read some of these jobs, find out which, and search again without reading
    their wide columns. `connection` must be in a transaction.
    """
    parts = {*page.sql_parts, f"from_{source}", "candidates"}
    values = page.parameter_values | {"candidates": candidates_max}
    try:
        async with connection.transaction():
            return await _fetch_search_page(connection, schema, page, parts, values)
    except PostgresError as error:
        if not is_damaged_or_untranslatable_error(error):
            raise
        statement = get_query_with_conditional_parts(
            _SQL_FILE, "job_search_candidates", schema, frozenset(parts)
        )
        rows = await statement.fetch(connection, **_pick_parameter_values(values, statement))
        check = get_query(_SQL_FILE, "job_search_check_damage", schema)
        _, damaged = await read_jobs_in_parts(
            connection, [row[0] for row in rows], lambda part: check.fetch(connection, id=part)
        )
        if not damaged:
            raise
    parts = {f"readable_{part}" if part in _WIDE_COLUMN_FILTERS else part for part in parts}
    found = await _fetch_search_page(
        connection, schema, page, parts, {**values, "damaged": list(damaged)}
    )
    return found._replace(damaged=damaged)


async def _fetch_search_page(
    connection: Transaction,
    schema: str | None,
    page: PageStatement,
    parts: set[str],
    values: Mapping[str, object],
) -> SearchResult:
    name = "job_search_by_id" if page.sort_order == "by_id" else "job_search_by_time"
    if page.sort_order == "by_finalized_at":
        parts = {*parts, "by_finalized_at", "states"}
    if "states" in parts:
        states = cast("list[str]", values["states"])
        parts = parts.union(f"state_{state}" for state in states)
    statement = get_query_with_conditional_parts(_SQL_FILE, name, schema, frozenset(parts))
    rows = await statement.fetch(connection, **_pick_parameter_values(values, statement))
    found_jobs = [FoundJob(*row[:4]) for row in rows if row[0] is not None]
    return SearchResult(found_jobs, rows[0][4], {})


def _pick_parameter_values(values: Mapping[str, object], statement: Query) -> dict[str, Any]:
    """Return the entries of `values` whose names are parameters of the statement."""
    return {key: values[key] for key in statement.parameters}


async def job_count_last_errors(
    connection: Transaction,
    schema: str | None,
    ids: Sequence[int],
    *,
    length_max: int,
    bytes_max: int,
) -> list[tuple[str, str | None, int]]:
    """Count the jobs with these ids by kind and by the first `length_max` characters of their last
    error. Return a list of kind, error and count. The error is None for jobs without an error, and
    for jobs whose errors have more than `bytes_max` bytes. Jobs that the server cannot read are
    left out. `connection` must be in a transaction."""
    statement = get_query(_SQL_FILE, "job_count_last_errors", schema)
    parts, _ = await read_jobs_in_parts(
        connection,
        ids,
        lambda part: statement.fetch(connection, id=part, characters=length_max, bytes=bytes_max),
    )
    return [(row[0], row[1], row[2]) for part in parts for row in part]


async def job_list_kinds(
    connection: Transaction, schema: str | None, *, after: str, limit: int
) -> list[str]:
    """Return up to `limit` kinds of stored jobs that come after `after` in the server's sort
    order."""
    statement = get_query(_SQL_FILE, "kinds", schema)
    return [row[0] for row in await statement.fetch(connection, after=after, limit=limit)]
