"""What the async fixtures of the pytest plugin open, as async context managers."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from riverpy._postgres.driver import close_connection, connect

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

    from riverpy._postgres.driver import Connection


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
async def open_session(engine: AsyncEngine) -> AsyncGenerator[AsyncSession]:
    """Open a session in a transaction. Its commits release a savepoint. Roll all back at the
    end."""
    from sqlalchemy.ext.asyncio import AsyncSession

    async with engine.connect() as connection:
        transaction = await connection.begin()
        async with AsyncSession(
            connection, join_transaction_mode="create_savepoint", expire_on_commit=False
        ) as session:
            yield session
        await transaction.rollback()
