"""The statements that list jobs, and that change many jobs: one typed function for each SQL
statement in `sql/queries/river_job_list.sql` and `river_job_batch.sql`. The callers of these
functions set timeouts.

The argument `filters` has the names and values of the filters that a call uses. The conditions of
all other filters are left out of the SQL text. `filters` may also have values that the statement
does not use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, cast

from riverpy._postgres.sql_files import get_query, get_query_with_conditional_parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from asyncpg import Record

    from riverpy._postgres.driver import Transaction

PageSortOrder: TypeAlias = Literal["by_id", "by_time", "by_finalized_at"]


class PageStatement(NamedTuple):
    """The statement that reads one page of a list of jobs."""

    sort_order: PageSortOrder
    """The order of the page."""
    sql_parts: frozenset[str]
    parameter_values: dict[str, object]


class BatchChangeResult(NamedTuple):
    """The result of a statement that retries, cancels or deletes some jobs."""

    changed_count: int
    running_count: int
    """The number of running jobs among the found jobs. A cancellation changes running jobs, but a
    retry or deletion does not."""
    refused_job_ids: list[int]
    """The ids of jobs that were not changed, because another job has their unique key."""
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
    statement = get_query_with_conditional_parts(file_name, statement_name, schema, chosen)
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
    """Return id, kind, queue and time of each job of a page, in the order of the page. The page is
    sorted by this time, which is returned as bytes. The time is None if the job has no such time,
    or if the page is sorted by id. Wide columns, such as the args, are read only if a filter needs
    them."""
    name = f"job_list_positions_{page.sort_order}"
    rows = await _fetch_rows(
        connection, "river_job_list", name, schema, page.sql_parts, page.parameter_values
    )
    return [(row[0], row[1], row[2], row[3]) for row in rows]


async def job_count(
    connection: Transaction, schema: str | None, filters: Mapping[str, object]
) -> int:
    """Return the number of jobs that pass all filters."""
    ((count,),) = await _fetch_rows(
        connection, "river_job_list", "job_count", schema, filters, filters
    )
    return count


async def job_count_up_to(
    connection: Transaction, schema: str | None, filters: Mapping[str, object], limit: int
) -> int:
    """Return the number of jobs that pass all filters. Counting ends at `limit`."""
    values = {**filters, "limit": limit}
    ((count,),) = await _fetch_rows(
        connection, "river_job_list", "job_count_up_to", schema, filters, values
    )
    return count


async def job_delete(connection: Transaction, schema: str | None, job_id: int) -> Record | None:
    """Delete a job if it is not running. Return the job's row from before the deletion, or None if
    the job does not exist. If the state in the row is `running`, the job was not deleted."""
    rows = await get_query("river_job_batch", "job_delete", schema).fetch(connection, id=job_id)
    return rows[0] if rows else None


async def job_delete_many(
    connection: Transaction, schema: str | None, filters: Mapping[str, object], limit: int
) -> list[Record]:
    """Delete up to `limit` jobs that pass all filters, lowest id first. Running and locked jobs are
    left out. Return the deleted jobs in no particular order."""
    values = {**filters, "limit": limit}
    return await _fetch_rows(
        connection, "river_job_batch", "job_delete_many", schema, filters, values
    )


async def job_get_last_id(connection: Transaction, schema: str | None) -> int:
    """Return the largest id of a job, or 0 if there is no job."""
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
    """Return up to `limit` ids of jobs that pass all filters, lowest first. The ids are above
    `after_id` and at most `last_id`."""
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
    """Retry jobs as `job_retry` does, if they pass all filters. `batch` has their ids. Locked jobs
    do not change."""
    return await _change_batch(connection, "job_retry_batch", schema, filters, batch)


async def job_cancel_batch(
    connection: Transaction,
    schema: str | None,
    filters: Mapping[str, object],
    batch: Sequence[int],
) -> BatchChangeResult:
    """Cancel jobs as `job_cancel` does, if they pass all filters. `batch` has their ids. Locked
    jobs do not change."""
    return await _change_batch(connection, "job_cancel_batch", schema, filters, batch)


async def job_delete_batch(
    connection: Transaction,
    schema: str | None,
    filters: Mapping[str, object],
    batch: Sequence[int],
) -> BatchChangeResult:
    """Delete jobs if they pass all filters. `batch` has their ids. Running and locked jobs do not
    change."""
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
    """Return whether each job of `batch` passes all filters, by job id. Jobs that do not exist are
    left out."""
    values = {**filters, "batch": list(batch)}
    rows = await _fetch_rows(
        connection, "river_job_batch", "job_match_filters", schema, filters, values
    )
    return {row[0]: row[1] for row in rows}
