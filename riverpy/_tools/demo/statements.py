"""One typed function per block of `sql/queries/demo.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from riverpy._postgres.sql_files import query

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Record

    from riverpy._postgres.driver import Transaction


async def _fetch(
    connection: Transaction, name: str, schema: str | None, values: dict[str, Any] | None = None
) -> list[Record]:
    statement = query("demo", name, schema)
    return await connection.fetch(statement.text, *statement.arguments(values or {}))


async def demo_lock(connection: Transaction, schema: str) -> bool:
    """Hold the name of a run's schema until the connection ends; False if another run has it."""
    ((is_held,),) = await _fetch(connection, "demo_lock", None, {"schema": schema})
    return is_held


async def demo_ended(connection: Transaction) -> list[str]:
    """Lock the schemas of runs that have ended; returns the statements that drop them."""
    return [row[0] for row in await _fetch(connection, "demo_ended", None)]


async def demo_create_schema(connection: Transaction, schema: str) -> None:
    """Make the schema, if it is not there."""
    for (command,) in await _fetch(connection, "demo_create_schema", None, {"schema": schema}):
        await connection.execute(command)


class JobCount(NamedTuple):
    """How many jobs a schema has."""

    all: int
    left: int
    """Those that have not ended."""
    running: int


async def demo_count(connection: Transaction, schema: str) -> JobCount:
    """Count the jobs."""
    (row,) = await _fetch(connection, "demo_count", schema)
    return JobCount(*row)


class Summary(NamedTuple):
    """The jobs of one kind that ended in one state. Times are seconds, each as p50 and p95."""

    kind: str
    state: str
    jobs: int
    attempts: int
    rate: float | None
    """Jobs a second, from the first claim to the last end. None for a single moment."""
    wait: tuple[float | None, float | None] | None
    run: tuple[float | None, float | None] | None
    bytes_in: int | None
    bytes_out: int | None


async def demo_summary(connection: Transaction, schema: str) -> list[Summary]:
    """What happened to the jobs of each kind."""
    return [Summary(*row) for row in await _fetch(connection, "demo_summary", schema)]


async def demo_unreadable(connection: Transaction, schema: str) -> dict[int, str]:
    """The jobs that gave up on a file, and why."""
    return {row[0]: row[1] for row in await _fetch(connection, "demo_unreadable", schema)}


class Intention(NamedTuple):
    """How a job is meant to end."""

    id: int
    state: str
    attempt: int
    errors: int
    snoozes: int


class Unintended(NamedTuple):
    """A job that did not end so."""

    id: int
    kind: str | None
    wanted: str | None
    found: str | None
    attempt: int | None
    errors: int
    last_error: str | None


async def demo_unintended(
    connection: Transaction, schema: str, intentions: Sequence[Intention]
) -> list[Unintended]:
    """The jobs that stand otherwise than intended, that are missing, or too many."""
    columns = zip(*intentions, strict=True)
    values = dict(zip(Intention._fields, map(list, columns), strict=True))
    rows = await _fetch(connection, "demo_unintended", schema, values)
    return [Unintended(*row) for row in rows]


async def demo_duplicates(connection: Transaction, schema: str) -> list[tuple[str, str, int]]:
    """Kind, args and number of jobs that exist more than once."""
    return [(row[0], row[1], row[2]) for row in await _fetch(connection, "demo_duplicates", schema)]


async def demo_without_output(connection: Transaction, schema: str) -> list[int]:
    """The files that count as done and have no digest."""
    return [row[0] for row in await _fetch(connection, "demo_without_output", schema)]


async def demo_sample(
    connection: Transaction, schema: str, *, limit: int, size_max: int
) -> list[tuple[int, str]]:
    """Id and path of some files that are done and have at most `size_max` bytes."""
    values = {"limit": limit, "size_max": size_max}
    rows = await _fetch(connection, "demo_sample", schema, values)
    return [(row[0], row[1]) for row in rows]


async def demo_wrong_digests(
    connection: Transaction, schema: str, contents: Sequence[tuple[int, bytes]]
) -> list[tuple[int, str]]:
    """Id and path of the jobs whose digest is not that of the content."""
    values = {"id": [one[0] for one in contents], "content": [one[1] for one in contents]}
    rows = await _fetch(connection, "demo_wrong_digests", schema, values)
    return [(row[0], row[1]) for row in rows]
