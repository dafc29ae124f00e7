"""One typed function per block of `sql/queries/river_job_rescue.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._db.jobs import Stamp
from riverpy._sql import query
from riverpy.job import wire_timestamp

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from asyncpg import Record

    from riverpy.drivers.asyncpg import Transaction

_FILE = "river_job_rescue"


class Claim(NamedTuple):
    """A running attempt, and whose it is."""

    stamp: Stamp
    client_id: str


async def job_running_of(
    connection: Transaction,
    schema: str | None,
    *,
    client_ids: Sequence[str],
    queues: Sequence[str] | None,
    after: int,
    limit: int,
) -> list[Claim]:
    """The running attempts of these clients with an id above `after`, lowest first; None stands for
    all queues."""
    values: dict[str, object] = {"after": after, "client_id": client_ids, "limit": limit}
    rows = await _fetch_scoped(connection, "job_running_of", schema, queues, values)
    return [Claim(Stamp(row[0], row[1], wire_timestamp(row[2])), row[3]) for row in rows]


async def job_stuck(
    connection: Transaction,
    schema: str | None,
    *,
    age: timedelta,
    queues: Sequence[str] | None,
    after: int,
    limit: int,
) -> list[Record]:
    """The jobs that run for longer than `age` with an id above `after`, lowest first; None stands
    for all queues. Behind the columns of a job stand the seconds that it runs."""
    values: dict[str, object] = {"after": after, "age": age, "limit": limit}
    return await _fetch_scoped(connection, "job_stuck", schema, queues, values)


class Rescue(NamedTuple):
    """An attempt to end for its client is gone."""

    stamp: Stamp
    client_id: str | None
    """Whose it was."""
    delay: float = 0.0
    """Seconds until the job is due again, if it can run again."""


async def job_rescue(
    connection: Transaction, schema: str | None, rescues: Sequence[Rescue], *, error: str
) -> dict[int, str]:
    """End attempts with this error; returns the state of each job whose attempt was ended."""
    statement = query(_FILE, "job_rescue", schema)
    values: dict[str, object] = {
        "id": [rescue.stamp.id for rescue in rescues],
        "attempt": [rescue.stamp.attempt for rescue in rescues],
        "attempted_at": [rescue.stamp.attempted_at for rescue in rescues],
        "delay": [rescue.delay for rescue in rescues],
        "error": error,
        "schema": schema,
    }
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return {row[0]: row[1] for row in rows}


async def _fetch_scoped(
    connection: Transaction,
    name: str,
    schema: str | None,
    queues: Sequence[str] | None,
    values: dict[str, object],
) -> list[Record]:
    if queues is not None:
        name, values = f"{name}_in_queues", {**values, "queues": queues}
    statement = query(_FILE, name, schema)
    return await connection.fetch(statement.text, *statement.arguments(values))
