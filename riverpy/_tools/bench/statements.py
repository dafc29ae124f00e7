"""One typed function per block of `sql/queries/bench.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.sql_files import query

if TYPE_CHECKING:
    from riverpy._postgres.driver import Transaction


async def bench_job_count(connection: Transaction, schema: str | None) -> int:
    """Return the number of jobs."""
    return await connection.fetchval(query("bench", "bench_job_count", schema).text)


async def bench_truncate(connection: Transaction, schema: str | None) -> None:
    """Delete all jobs."""
    await connection.execute(query("bench", "bench_truncate", schema).text)


async def bench_settle(connection: Transaction, schema: str | None) -> None:
    """Vacuum and analyze the table of jobs. The connection must not be in a transaction."""
    await connection.execute(query("bench", "bench_settle", schema).text)


async def bench_completed(connection: Transaction, schema: str | None, queue: str) -> int:
    """Return how many jobs of the queue were completed at their first attempt."""
    return await connection.fetchval(query("bench", "bench_completed", schema).text, queue)


class Server(NamedTuple):
    """The server of one connection."""

    pid: int
    """The process id of the connection on the server."""
    is_local: bool
    """Whether the connection uses a Unix socket or an address of this machine."""
    version: str


async def bench_server(connection: Transaction) -> Server:
    """Return the server of this connection."""
    (row,) = await connection.fetch(query("bench", "bench_server", None).text)
    return Server(*row)
