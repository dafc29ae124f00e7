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
    """Lock the schema of a run until the connection ends. False: another run holds the lock."""
    ((is_held,),) = await _fetch(connection, "demo_lock", None, {"schema": schema})
    return is_held


async def demo_ended(connection: Transaction) -> list[str]:
    """Lock the schemas of ended runs. Return the statements that drop them."""
    return [row[0] for row in await _fetch(connection, "demo_ended", None)]


async def demo_create_schema(connection: Transaction, schema: str) -> None:
    """Create the schema if it is missing."""
    for (command,) in await _fetch(connection, "demo_create_schema", None, {"schema": schema}):
        await connection.execute(command)


class JobCount(NamedTuple):
    """The number of jobs of a schema."""

    all: int
    left: int
    """Jobs that have not ended."""
    running: int


async def demo_count(connection: Transaction, schema: str) -> JobCount:
    """Return the number of jobs."""
    (row,) = await _fetch(connection, "demo_count", schema)
    return JobCount(*row)


class Summary(NamedTuple):
    """The jobs of one kind that ended in one state. Times are in seconds, as p50 and p95."""

    kind: str
    state: str
    jobs: int
    attempts: int
    rate: float | None
    """Jobs per second from the first claim to the last end. None: all at one moment."""
    wait: tuple[float | None, float | None] | None
    run: tuple[float | None, float | None] | None
    bytes_in: int | None
    bytes_out: int | None


async def demo_summary(connection: Transaction, schema: str) -> list[Summary]:
    """Return the summary of each kind and state."""
    return [Summary(*row) for row in await _fetch(connection, "demo_summary", schema)]


async def demo_unreadable(connection: Transaction, schema: str) -> dict[int, str]:
    """Return the jobs that could not read their file, with the error."""
    return {row[0]: row[1] for row in await _fetch(connection, "demo_unreadable", schema)}


class ExpectedJob(NamedTuple):
    """How a job should end."""

    id: int
    state: str
    attempt: int
    errors: int
    snoozes: int


class UnexpectedJob(NamedTuple):
    """A job that did not end as expected."""

    id: int
    kind: str | None
    wanted: str | None
    found: str | None
    attempt: int | None
    errors: int
    last_error: str | None


async def demo_unintended(
    connection: Transaction, schema: str, expected: Sequence[ExpectedJob]
) -> list[UnexpectedJob]:
    """Return the jobs that did not end as expected, are missing, or should not exist."""
    columns = zip(*expected, strict=True)
    values = dict(zip(ExpectedJob._fields, map(list, columns), strict=True))
    rows = await _fetch(connection, "demo_unintended", schema, values)
    return [UnexpectedJob(*row) for row in rows]


async def demo_duplicates(connection: Transaction, schema: str) -> list[tuple[str, str, int]]:
    """Return kind, args and number of the jobs that exist more than once."""
    return [(row[0], row[1], row[2]) for row in await _fetch(connection, "demo_duplicates", schema)]


async def demo_without_output(connection: Transaction, schema: str) -> list[int]:
    """Return the completed jobs without a digest."""
    return [row[0] for row in await _fetch(connection, "demo_without_output", schema)]


async def demo_sample(
    connection: Transaction, schema: str, *, limit: int, size_max: int
) -> list[tuple[int, str]]:
    """Return id and path of some completed jobs whose files have at most `size_max` bytes."""
    values = {"limit": limit, "size_max": size_max}
    rows = await _fetch(connection, "demo_sample", schema, values)
    return [(row[0], row[1]) for row in rows]


async def demo_wrong_digests(
    connection: Transaction, schema: str, contents: Sequence[tuple[int, bytes]]
) -> list[tuple[int, str]]:
    """Return id and path of the jobs whose digest does not match the content."""
    values = {"id": [one[0] for one in contents], "content": [one[1] for one in contents]}
    rows = await _fetch(connection, "demo_wrong_digests", schema, values)
    return [(row[0], row[1]) for row in rows]
