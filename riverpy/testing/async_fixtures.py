"""What the async fixtures of the pytest plugin open, as async context managers."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from riverpy._postgres.driver import close_connection, connect

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Sequence

    from sqlalchemy import Connection as SqlalchemyConnection
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import (
        AsyncConnection,
        AsyncEngine,
        AsyncSession,
        async_sessionmaker,
    )
    from sqlalchemy.orm import sessionmaker

    from riverpy._postgres.driver import Connection

    SessionMaker: TypeAlias = async_sessionmaker[Any] | sessionmaker[Any]
    Bind: TypeAlias = AsyncConnection | AsyncEngine | SqlalchemyConnection | Engine


@asynccontextmanager
async def open_connection(url: str) -> AsyncGenerator[Connection]:
    """Open an asyncpg connection in a transaction. Roll it back at the end."""
    connection = await connect(url, application_name="riverpy_connection")
    try:
        transaction: Any = connection.transaction()
        await transaction.start()
        yield connection
        if connection.is_in_transaction():
            await transaction.rollback()
    finally:
        await close_connection(connection)


@asynccontextmanager
async def open_session(
    engine: AsyncEngine, session_makers: Sequence[SessionMaker]
) -> AsyncGenerator[AsyncSession]:
    """Open a session in a transaction. Its commits release a savepoint. During the block the
    sessions of `session_makers` join the transaction. Roll all back at the end."""
    from sqlalchemy.ext.asyncio import AsyncSession

    async with engine.connect() as connection:
        transaction = await connection.begin()
        with bind_session_makers(select_session_makers(session_makers, is_async=True), connection):
            async with AsyncSession(
                connection, join_transaction_mode="create_savepoint", expire_on_commit=False
            ) as session:
                yield session
        await transaction.rollback()


def select_session_makers(
    session_makers: Sequence[SessionMaker], *, is_async: bool
) -> list[SessionMaker]:
    """Return the makers of sessions for async code, or the others."""
    from sqlalchemy.ext.asyncio import async_sessionmaker

    return [one for one in session_makers if isinstance(one, async_sessionmaker) == is_async]


@contextmanager
def bind_session_makers(session_makers: Sequence[SessionMaker], bind: Bind) -> Generator[None]:
    """During the block, let the sessions of the makers use a connection in a transaction, or an
    engine."""
    settings = [dict(maker.kw) for maker in session_makers]
    for maker in session_makers:
        maker.configure(bind=bind, join_transaction_mode="create_savepoint")
    try:
        yield
    finally:
        for maker, before in zip(session_makers, settings, strict=True):
            maker.kw = before
