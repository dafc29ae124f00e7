"""The statements that list jobs, and that change many jobs: one typed function for each SQL
statement in `sql/queries/river_job_list.sql` and `river_job_batch.sql`. They set no timeout: the
callers do.

The parts of a statement are the names of its filters and of its order. `values` has a value for
each parameter that the parts use, and may have more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, cast

from riverpy._postgres.sql_files import get_query, get_query_with_parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from asyncpg import Record

    from riverpy._postgres.driver import Transaction

PageSortOrder: TypeAlias = Literal["by_id", "by_time", "by_finalized_at"]


class PageStatement(NamedTuple):
    """The statement that reads one page of a list."""

    sort_order: PageSortOrder
    """The order of the page."""
    sql_parts: frozenset[str]
    parameter_values: dict[str, object]


class BatchChangeResult(NamedTuple):
    """The result of a statement that changes some jobs."""

    changed_count: int
    running_count: int
    """The number of running jobs. A cancellation changes them, other changes leave them out."""
    refused_job_ids: list[int]
    """The ids of jobs whose unique key another job has."""
    found_job_ids: list[int]
    """The ids of the jobs that passed the filters and were not locked."""


async def _fetch_rows(
    connection: Transaction,
    file_name: str,
    statement_name: str,
    schema: str | None,
    parts: Iterable[str],
    values: Mapping[str, object],
) -> list[Record]:
    chosen = frozenset(parts)
    if "states" in chosen:
        states = cast("Iterable[str]", values["states"])
        chosen = chosen.union(f"state_{state}" for state in states)
    statement = get_query_with_parts(file_name, statement_name, schema, chosen)
    return await statement.fetch(connection, **{key: values[key] for key in statement.parameters})


async def job_list(
    connection: Transaction, schema: str | None, page: PageStatement
) -> list[Record]:
    """Return the jobs of a page, in no particular order."""
    name = f"job_list_{page.sort_order}"
    return await _fetch_rows(
        connection, "river_job_list", name, schema, page.sql_parts, page.parameter_values
    )


async def job_list_positions(
    connection: Transaction, schema: str | None, page: PageStatement
) -> list[tuple[int, str, str, bytes | None]]:
    """Return id, kind, queue and time of each job of a page, in its order. Wide columns are only
    read if a filter needs them."""
    name = f"job_list_positions_{page.sort_order}"
    rows = await _fetch_rows(
        connection, "river_job_list", name, schema, page.sql_parts, page.parameter_values
    )
    return [(row[0], row[1], row[2], row[3]) for row in rows]


async def job_count(
    connection: Transaction, schema: str | None, filters: Mapping[str, object]
) -> int:
    """Return the number of jobs with these filters."""
    ((count,),) = await _fetch_rows(
        connection, "river_job_list", "job_count", schema, filters, filters
    )
    return count


async def job_count_up_to(
    connection: Transaction, schema: str | None, filters: Mapping[str, object], limit: int
) -> int:
    """Return the number of jobs with these filters. Counting ends at `limit`."""
    values = {**filters, "limit": limit}
    ((count,),) = await _fetch_rows(
        connection, "river_job_list", "job_count_up_to", schema, filters, values
    )
    return count


async def job_delete(connection: Transaction, schema: str | None, job_id: int) -> Record | None:
    """Delete a job unless it is running. Return its row."""
    rows = await get_query("river_job_batch", "job_delete", schema).fetch(connection, id=job_id)
    return rows[0] if rows else None


async def job_delete_many(
    connection: Transaction, schema: str | None, filters: Mapping[str, object], limit: int
) -> list[Record]:
    """Delete the first jobs with these filters, and return them in no particular order."""
    values = {**filters, "limit": limit}
    return await _fetch_rows(
        connection, "river_job_batch", "job_delete_many", schema, filters, values
    )


async def job_get_last_id(connection: Transaction, schema: str | None) -> int:
    """Return the largest id. 0: there is no job."""
    ((last_id,),) = await get_query("river_job_batch", "job_get_last_id", schema).fetch(connection)
    return last_id


async def job_list_ids_in_range(
    connection: Transaction,
    schema: str | None,
    filters: Mapping[str, object],
    *,
    after_id: int,
    last_id: int,
    limit: int,
) -> list[int]:
    """Return the ids of the next jobs with these filters, sorted."""
    values = {**filters, "after_id": after_id, "last_id": last_id, "limit": limit}
    rows = await _fetch_rows(
        connection, "river_job_batch", "job_list_ids_in_range", schema, filters, values
    )
    return [row[0] for row in rows]


async def job_retry_batch(
    connection: Transaction,
    schema: str | None,
    filters: Mapping[str, object],
    batch: Sequence[int],
) -> BatchChangeResult:
    """Retry these jobs if they pass the filters."""
    return await _change_batch(connection, "job_retry_batch", schema, filters, batch)


async def job_cancel_batch(
    connection: Transaction,
    schema: str | None,
    filters: Mapping[str, object],
    batch: Sequence[int],
) -> BatchChangeResult:
    """Cancel these jobs if they pass the filters."""
    return await _change_batch(connection, "job_cancel_batch", schema, filters, batch)


async def job_delete_batch(
    connection: Transaction,
    schema: str | None,
    filters: Mapping[str, object],
    batch: Sequence[int],
) -> BatchChangeResult:
    """Delete these jobs if they pass the filters."""
    return await _change_batch(connection, "job_delete_batch", schema, filters, batch)


async def _change_batch(
    connection: Transaction,
    statement_name: str,
    schema: str | None,
    filters: Mapping[str, object],
    batch: Sequence[int],
) -> BatchChangeResult:
    values = {**filters, "batch": list(batch)}
    (row,) = await _fetch_rows(
        connection, "river_job_batch", statement_name, schema, filters, values
    )
    return BatchChangeResult(*row)


async def job_match_filters(
    connection: Transaction,
    schema: str | None,
    filters: Mapping[str, object],
    batch: Sequence[int],
) -> dict[int, bool]:
    """Return for each of these jobs that exists whether it passes the filters."""
    values = {**filters, "batch": list(batch)}
    rows = await _fetch_rows(
        connection, "river_job_batch", "job_match_filters", schema, filters, values
    )
    return {row[0]: row[1] for row in rows}
