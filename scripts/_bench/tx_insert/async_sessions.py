"""The async kinds of sessions, and the inserts that each of them takes.

A session is opened once. Each transaction runs the caller's own INSERT and, if there is one, the
insert of the job.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import riverpy
from scripts._bench.riverpy_jobs import Noop
from scripts._bench.tx_insert.texts import (
    ARGS,
    KIND,
    ORDER_VALUES,
    QUEUE,
    TEXTS,
    VALUES,
    as_named,
    as_psycopg,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    Insert = Callable[[Any], Awaitable[object]]


class AsyncKind:
    """A kind of session: how to begin a transaction, and what can insert in it."""

    transaction: Callable[[], AbstractAsyncContextManager[Any]]
    """Begin a transaction, and commit it at the end of the block."""
    order: Insert
    """The caller's own INSERT."""
    inserts: dict[str, Insert]
    """The inserts of a job, by name."""


@asynccontextmanager
async def asyncpg_kind(url: str) -> AsyncGenerator[AsyncKind]:
    """A connection of asyncpg."""
    import asyncpg

    connection = await asyncpg.connect(url)

    @asynccontextmanager
    async def transaction() -> AsyncGenerator[Any]:
        async with connection.transaction():
            yield connection

    kind = AsyncKind()
    kind.transaction = transaction
    kind.order = lambda tx: tx.execute(TEXTS["order"], "note")
    kind.inserts = {
        "row": lambda tx: tx.fetch(TEXTS["row"], ARGS, KIND, QUEUE),
        "row_notify": lambda tx: tx.fetch(TEXTS["row_notify"], ARGS, KIND, QUEUE),
        "riverpy": _riverpy(),
        "pgqueuer": _pgqueuer_asyncpg,
    }
    yield kind
    await connection.close()


@asynccontextmanager
async def psycopg_kind(url: str) -> AsyncGenerator[AsyncKind]:
    """An async connection of psycopg. PgQueuer demands autocommit outside of transactions."""
    import psycopg

    connection = await psycopg.AsyncConnection.connect(url, autocommit=True)

    @asynccontextmanager
    async def transaction() -> AsyncGenerator[Any]:
        async with connection.transaction():
            yield connection

    kind = AsyncKind()
    kind.transaction = transaction
    kind.order = lambda tx: tx.execute(as_psycopg("order"), ORDER_VALUES)
    kind.inserts = {
        "row": lambda tx: tx.execute(as_psycopg("row"), VALUES),
        "row_notify": lambda tx: tx.execute(as_psycopg("row_notify"), VALUES),
        "riverpy": _riverpy(),
        "pgqueuer": _pgqueuer_psycopg,
        "procrastinate": _procrastinate,
        "chancy": _chancy,
    }
    yield kind
    await connection.close()


@asynccontextmanager
async def sqlalchemy_kind(url: str, driver: str) -> AsyncGenerator[AsyncKind]:
    """A session of SQLAlchemy for each transaction, on one pooled connection."""
    from sqlalchemy import make_url, text
    from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

    engine = create_async_engine(make_url(url).set(drivername=f"postgresql+{driver}"))
    texts = {name: text(as_named(name)) for name in ("order", "row", "row_notify")}
    kind = AsyncKind()
    kind.transaction = async_sessionmaker(engine).begin
    kind.order = lambda tx: tx.execute(texts["order"], ORDER_VALUES)
    kind.inserts = {
        "row": lambda tx: tx.execute(texts["row"], VALUES),
        "row_notify": lambda tx: tx.execute(texts["row_notify"], VALUES),
        "riverpy": _riverpy(),
        "riverqueue": _riverqueue(engine),
    }
    yield kind
    await engine.dispose()


ASYNC_KINDS: dict[str, Callable[[str], AbstractAsyncContextManager[AsyncKind]]] = {
    "asyncpg": asyncpg_kind,
    "psycopg_async": psycopg_kind,
    "sqlalchemy_async_asyncpg": lambda url: sqlalchemy_kind(url, "asyncpg"),
    "sqlalchemy_async_psycopg": lambda url: sqlalchemy_kind(url, "psycopg"),
}


def _riverpy() -> Insert:
    client = riverpy.Client()
    return lambda tx: client.insert(Noop(), tx=tx)


async def _pgqueuer_asyncpg(tx: Any) -> None:
    from pgqueuer.db import AsyncpgDriver
    from pgqueuer.queries import Queries

    await Queries(AsyncpgDriver(tx)).enqueue("noop", b"{}")


async def _pgqueuer_psycopg(tx: Any) -> None:
    from pgqueuer.db import PsycopgDriver
    from pgqueuer.queries import Queries

    await Queries(PsycopgDriver(tx)).enqueue("noop", b"{}")


async def _procrastinate(tx: Any) -> None:
    from scripts._bench.tx_insert.peer_apps import procrastinate_task

    await procrastinate_task().configure(connection=tx).defer_async()


async def _chancy(tx: Any) -> None:
    from psycopg.rows import dict_row

    from scripts._bench.tx_insert.peer_apps import chancy_app

    chancy, job = chancy_app()
    async with tx.cursor(row_factory=dict_row) as cursor:
        await chancy.push_many_ex(cursor, [job])


def _riverqueue(engine: Any) -> Insert:
    async def insert(tx: Any) -> None:
        from scripts._bench.tx_insert.peer_apps import RiverqueueArgs, riverqueue_client

        await riverqueue_client(engine, is_async=True).insert_tx(tx, RiverqueueArgs())

    return insert
