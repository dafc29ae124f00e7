"""Fixtures: an inserter on its own schema."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from riverpy._clock import Clock
from riverpy._insert.inserter import Inserter
from riverpy._insert.row import InsertSettings
from riverpy._plugins import PluginLists
from tests.kit.pgbouncer import detour

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema

RULES = InsertSettings(default_max_attempts=25)


@asynccontextmanager
async def inserter_on(
    url: str, schema: str | None, *, rules: InsertSettings = RULES, size: int = 5, **settings: str
) -> AsyncGenerator[Inserter]:
    """Open an inserter with its own pool."""
    pool: Any = asyncpg.create_pool(
        url if settings else detour(url),
        min_size=0,
        max_size=size,
        command_timeout=60,
        server_settings=settings,
        statement_cache_size=100 if settings or detour(url) == url else 0,
    )
    async with pool:
        yield Inserter(
            pool.acquire, schema=schema, insert_settings=rules, plugins=PluginLists(), clock=Clock()
        )
        assert pool.get_idle_size() == pool.get_size(), "a connection was not given back"


@pytest.fixture
async def inserter(schema: Schema) -> AsyncGenerator[Inserter]:
    """An inserter on the test's schema."""
    async with inserter_on(schema.url, schema.name) as inserter:
        yield inserter
