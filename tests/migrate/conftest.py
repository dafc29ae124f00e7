"""A database of its own for each test of the migrator, with one more schema in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests._database import connected, create_database, drop_database, new_database_name

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import asyncpg


@pytest.fixture
async def connection(fresh_database_url: str) -> AsyncGenerator[asyncpg.Connection[Any]]:
    """A connection to an empty database that has the schemas `public` and `MixedCase_1`."""
    async with connected(fresh_database_url) as connection:
        await connection.execute('CREATE SCHEMA "MixedCase_1"')
        yield connection


@pytest.fixture
async def each_connection(each_server_url: str) -> AsyncGenerator[asyncpg.Connection[Any]]:
    """As `connection`, once on each server."""
    name = new_database_name()
    async with connected(await create_database(each_server_url, name)) as connection:
        await connection.execute('CREATE SCHEMA "MixedCase_1"')
        yield connection
    await drop_database(each_server_url, name)
