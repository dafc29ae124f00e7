"""One typed function per block of `sql/queries/river_job_damage.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._postgres.sql_files import query

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._postgres.driver import Transaction

_FILE = "river_job_damage"


async def job_damage_candidates(
    connection: Transaction, schema: str | None, *, states: Sequence[str], limit: int
) -> list[int]:
    """The ids of the first jobs in each of these states, up to `limit` of each."""
    statement = query(_FILE, "job_damage_candidates", schema)
    values: dict[str, object] = {"state": list(states), "limit": limit}
    return [row[0] for row in await connection.fetch(statement.text, *statement.arguments(values))]


async def job_damage_check(connection: Transaction, schema: str | None, ids: Sequence[int]) -> None:
    """Read the columns of jobs that other statements read of many jobs.

    Raises:
        PostgresError: one of them is damaged, and `is_damage` of the error is True.
    """
    statement = query(_FILE, "job_damage_check", schema)
    await connection.fetch(statement.text, *statement.arguments({"id": list(ids)}))
