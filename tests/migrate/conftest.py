"""A database of its own for each test of the migrator, with one more schema in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import asyncpg
import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def connection(fresh_database_url: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection to an empty database that has the schemas `public` and `MixedCase_1`."""
    connection = await asyncpg.connect(fresh_database_url, timeout=10)
    await connection.execute('CREATE SCHEMA "MixedCase_1"')
    yield connection
    connection.terminate()
