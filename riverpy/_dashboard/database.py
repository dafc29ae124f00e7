"""Access of the dashboard to the database: read-only transactions with timeouts, and background
tasks."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import anyio

from riverpy._log import get_logger
from riverpy._log_events import DASHBOARD_TASK_FAILED
from riverpy._tools.top.statements import set_statement_timeout
from riverpy._waiting.background_task import BackgroundTask

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from riverpy._postgres.driver import Pool, Transaction
    from riverpy.client import Client

STATEMENT_TIMEOUT = timedelta(seconds=5)
"""The timeout of each statement that reads data for a page."""
PAGE_READ_TIMEOUT = 15.0
"""The timeout in seconds of each `acquire_connection` block, including the wait for a connection
from the pool."""


def get_pool(client: Client) -> Pool:
    """Return the pool of the client.

    Raises:
        ClientStateError: the client is not open.
    """
    return client._get_open_pool()  # noqa: SLF001 (own class)  # pyright: ignore[reportPrivateUsage]


def start_background_task(client: Client, name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Start a background task of the client. The task is cancelled when the client closes. If it
    fails, its error is logged.

    Raises:
        ClientStateError: the client is not open.
    """
    get_pool(client)
    background_tasks = client._background_tasks  # noqa: SLF001 (own class)  # pyright: ignore[reportPrivateUsage]

    async def run_and_forget() -> None:
        """Call `run`, then remove this task from the client's background tasks."""
        try:
            await run()
        finally:
            background_tasks.discard(task)

    def log_failure(error: Exception) -> None:
        get_logger().error(DASHBOARD_TASK_FAILED, task=name, exc_info=error)

    task = BackgroundTask(name, run_and_forget, log_failure)
    background_tasks.add(task)
    task.start()


@asynccontextmanager
async def acquire_connection(client: Client) -> AsyncGenerator[Transaction]:
    """Take a connection from the client's pool for the `async with` block. The block, with the wait
    for the connection, may last for at most `PAGE_READ_TIMEOUT`."""
    pool = get_pool(client)
    reason = f"the database did not answer within {PAGE_READ_TIMEOUT:g} s"
    with anyio.fail_after(PAGE_READ_TIMEOUT, reason=reason):
        connection = await pool.acquire()
        try:
            yield connection
        finally:
            await pool.release(connection)


@asynccontextmanager
async def open_read_transaction(client: Client) -> AsyncGenerator[Transaction]:
    """Open a read-only transaction, in which all statements see the same snapshot."""
    async with (
        acquire_connection(client) as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        await set_statement_timeout(connection, STATEMENT_TIMEOUT)
        yield connection
