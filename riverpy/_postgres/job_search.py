"""The statement that searches jobs for the dashboard, with a limit on what it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, cast

from riverpy._postgres.sql_files import get_query, get_query_with_parts

if TYPE_CHECKING:
    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.job_lists import PageStatement

SearchSource: TypeAlias = Literal["ids", "newest", "kinds", "ended", "waiting", "queues"]
"""Where a search takes its jobs from: those with the ids; the newest of the table; those of the
kinds; those that ended last in the states; the first of the states in the order of claims; the
first of the states in each of the queues."""


class FoundPlace(NamedTuple):
    """The place of a job in a list."""

    job_id: int
    kind: str
    queue: str
    time: bytes | None
    """The time by which the list is ordered; None: there is none."""


class SearchResult(NamedTuple):
    """One page of a search."""

    places: list[FoundPlace]
    searched_count: int
    """The number of jobs that were searched."""


async def job_search(
    connection: Transaction,
    schema: str | None,
    page: PageStatement,
    source: SearchSource,
    candidates_max: int,
) -> SearchResult:
    """Return one page of the jobs that pass the filters, among at most `candidates_max` jobs for
    each state, kind or queue."""
    parts = {*page.sql_parts, f"from_{source}", "candidates"}
    values = page.parameter_values | {"candidates": candidates_max}
    name = "job_search_by_id" if page.sort_order == "by_id" else "job_search_by_time"
    if page.sort_order == "by_finalized_at":
        parts |= {"by_finalized_at", "states"}
    if "states" in parts:
        states = cast("list[str]", values["states"])
        parts |= {f"state_{state}" for state in states}
    statement = get_query_with_parts("riverpy_dashboard", name, schema, frozenset(parts))
    rows = await statement.fetch(connection, **{key: values[key] for key in statement.parameters})
    places = [FoundPlace(*row[:4]) for row in rows if row[0] is not None]
    return SearchResult(places, rows[0][4])


async def list_kinds(
    connection: Transaction, schema: str | None, *, after: str, limit: int
) -> list[str]:
    """Return the first `limit` kinds of stored jobs behind `after`, sorted by the server."""
    statement = get_query("riverpy_dashboard", "kinds", schema)
    return [row[0] for row in await statement.fetch(connection, after=after, limit=limit)]
