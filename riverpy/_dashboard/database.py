"""Reads of the dashboard: transactions that only read, with limits."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import anyio

from riverpy._tools.top.statements import set_statement_timeout

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy._postgres.driver import Pool, Transaction
    from riverpy.client import Client

STATEMENT_TIMEOUT = timedelta(seconds=5)
"""The server cancels a statement of a page after this time."""
PAGE_READ_TIMEOUT = 15.0
"""Seconds that all reads of a page may take, with the wait for a connection of the pool."""


def get_pool(client: Client) -> Pool:
    """Return the pool of the client.

    Raises:
        ClientStateError: the client is not open.
    """
    return client._get_open_pool()  # noqa: SLF001 (own class)  # pyright: ignore[reportPrivateUsage]


@asynccontextmanager
async def open_connection(client: Client) -> AsyncGenerator[Transaction]:
    """Take a connection of the client's pool for a block of at most `PAGE_READ_TIMEOUT`."""
    pool = get_pool(client)
    reason = f"the database did not answer within {PAGE_READ_TIMEOUT:g} s"
    with anyio.fail_after(PAGE_READ_TIMEOUT, reason=reason):
        connection = await pool.acquire()
        try:
            yield connection
        finally:
            await pool.release(connection)


@asynccontextmanager
async def open_read(client: Client) -> AsyncGenerator[Transaction]:
    """Open a transaction that only reads. All statements see the same state."""
    async with (
        open_connection(client) as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        await set_statement_timeout(connection, STATEMENT_TIMEOUT)
        yield connection
