"""One typed function per block of `sql/queries/bench.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.sql_files import query

if TYPE_CHECKING:
    from riverpy._postgres.driver import Transaction


async def bench_job_count(connection: Transaction, schema: str | None) -> int:
    """How many jobs there are."""
    return await connection.fetchval(query("bench", "bench_job_count", schema).text)


async def bench_truncate(connection: Transaction, schema: str | None) -> None:
    """Delete all jobs."""
    await connection.execute(query("bench", "bench_truncate", schema).text)


async def bench_settle(connection: Transaction, schema: str | None) -> None:
    """Vacuum and analyze the jobs; the connection must be in no transaction."""
    await connection.execute(query("bench", "bench_settle", schema).text)


async def bench_completed(connection: Transaction, schema: str | None, queue: str) -> int:
    """How many jobs of the queue were completed at their first attempt."""
    return await connection.fetchval(query("bench", "bench_completed", schema).text, queue)


class Server(NamedTuple):
    """What is known of a server from one connection."""

    pid: int
    """Of the connection's process there."""
    is_local: bool
    """The connection is a Unix socket or to this machine's own address."""
    version: str


async def bench_server(connection: Transaction) -> Server:
    """The server of this connection."""
    (row,) = await connection.fetch(query("bench", "bench_server", None).text)
    return Server(*row)
