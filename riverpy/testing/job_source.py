"""Reads the jobs that a test has inserted, with a connection, a session, a pool or a client."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from riverpy._calls.job_page import JOB_LIMIT_MAX
from riverpy._postgres.driver import is_asyncpg_connection, is_in_transaction, is_pool
from riverpy._postgres.sessions.adapter import adapt_session
from riverpy._postgres.sessions.session import CallerSession, CallerTransactionState
from riverpy._postgres.transactions import is_blocking_transaction
from riverpy._without_loop import make_async_context_manager
from riverpy.client import Client
from riverpy.config import Config
from riverpy.errors import ConfigError
from riverpy.sync import Client as BlockingClient
from riverpy.sync._calls import BlockingClientCoroutines

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from riverpy._postgres.driver import Pool
    from riverpy._postgres.sessions.protocols import BlockingTransaction, CallerTransaction
    from riverpy.job import JobRow

AsyncSource: TypeAlias = "CallerTransaction | Pool | Client"
"""The types of `tx` in assertions for async code."""
BlockingSource: TypeAlias = "BlockingTransaction | BlockingClient"
"""The types of `tx` in assertions for code that is not async."""


def is_blocking_source(source: object) -> bool:
    """Return whether `source` is blocking, so that its jobs are read without `await`."""
    return isinstance(source, BlockingClient) or is_blocking_transaction(source)


async def read_jobs(
    source: AsyncSource | BlockingSource,
    schema: str | None,
    kinds: Sequence[str] | None,
    *,
    limit: int = JOB_LIMIT_MAX,
) -> list[JobRow]:
    """Return the newest `limit` jobs of these kinds, in the order of their ids. With `kinds` None,
    return jobs of all kinds.

    Raises:
        ConfigError: `limit` has its default of 10,000, and 10,000 jobs or more match.
        TypeError: riverpy does not know the type of the source.
        TransactionError: the transaction is aborted or closed.
    """
    filters: Any = {} if kinds is None else {"kinds": list(kinds)}
    options: Any = {"descending": True, "limit": limit, **filters}
    if isinstance(source, Client):
        page = await source.job_list(**options)
    elif isinstance(source, BlockingClient):
        page = source.job_list(**options)
    else:
        calls = BlockingClientCoroutines(None, Config(schema=schema), None)
        async with _ensure_transaction(source) as tx:
            page = await calls.job_list(tx=cast("CallerTransaction", tx), **options)
    if len(page.jobs) == JOB_LIMIT_MAX:
        raise ConfigError(
            f"the table has {JOB_LIMIT_MAX:,} jobs or more: assertions on jobs are for the "
            "database of a test"
        )
    return page.jobs[::-1]


@asynccontextmanager
async def _ensure_transaction(source: object) -> AsyncGenerator[object]:
    """Return a context manager for a connection or session in a transaction. If the source is not
    in a transaction, the context manager opens one and ends it."""
    if is_pool(source):
        async with source.acquire() as connection, connection.transaction():
            yield connection
    elif is_asyncpg_connection(source):
        async with nullcontext() if is_in_transaction(source) else source.transaction():
            yield source
    else:
        async with _begin_if_needed(adapt_session(source)):
            yield source


def _begin_if_needed(session: CallerSession | None) -> AbstractAsyncContextManager[object]:
    """Return a context manager that opens a transaction if the session is a psycopg connection and
    not in a transaction. Sessions of other libraries begin a transaction by themselves."""
    if (
        not isinstance(session, CallerSession)
        or session.library != "psycopg"
        or session.get_state() is not CallerTransactionState.NO_TRANSACTION
    ):
        return nullcontext()
    block: Any = cast("Any", session.native_session).transaction()
    return make_async_context_manager(block) if session.is_blocking else block
