"""Statements for tests that move the times of rows into the past, as if time had passed: one typed
function per SQL statement in `sql/queries/moved_time.sql`."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from riverpy._postgres.sql_files import get_query

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from riverpy._postgres.driver import Transaction

_SQL_FILE = "moved_time"
_MICROSECOND = timedelta(microseconds=1)


async def move_times_of_jobs_into_past(
    connection: Transaction,
    schema: str | None,
    distance: timedelta,
    *,
    distance_by_job_id: Mapping[int, timedelta],
) -> None:
    """Move all times of all jobs into the past. `distance_by_job_id` has the distance for some
    jobs. All other jobs move by `distance`."""
    await get_query(_SQL_FILE, "move_times_of_jobs_into_past", schema).execute(
        connection,
        by=_format_interval(distance),
        ids=[str(job_id) for job_id in distance_by_job_id],
        moves=[_format_interval(move) for move in distance_by_job_id.values()],
    )


async def move_times_of_periodic_jobs_into_past(
    connection: Transaction, schema: str | None, distance: timedelta
) -> None:
    """Move all times of all periodic jobs into the past by `distance`."""
    await get_query(_SQL_FILE, "move_times_of_periodic_jobs_into_past", schema).execute(
        connection, by=_format_interval(distance)
    )


async def get_time_until_next_periodic_run(
    connection: Transaction, schema: str | None, ids: Sequence[str]
) -> timedelta | None:
    """Return the time until the first of these periodic jobs has its next run. Paused periodic jobs
    are left out. Return None if no next run is stored."""
    text = await get_query(_SQL_FILE, "find_next_periodic_run", schema).fetchval(
        connection, ids=list(ids)
    )
    return None if text is None else int(text) * _MICROSECOND


def _format_interval(duration: timedelta) -> str:
    return f"{duration // _MICROSECOND} microseconds"
