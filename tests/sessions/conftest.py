"""Fixtures: callers of every kind, and a client for their transactions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from riverpy import Client, Config
from tests.sessions.kinds import ALL_KINDS, KINDS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema
    from tests.sessions.kinds import Caller


@pytest.fixture(autouse=True)
async def _data(schema: Schema) -> AsyncGenerator[None]:
    """A table `data` for what a caller writes."""
    await schema.execute("create table data (n int primary key)")
    yield
    await schema.execute("drop table data")


@pytest.fixture(params=ALL_KINDS)
async def caller(
    request: pytest.FixtureRequest, schema: Schema, _data: None
) -> AsyncGenerator[Caller]:
    """A caller of each kind, in a transaction."""
    async with ALL_KINDS[request.param](schema.url) as caller:
        yield caller


@pytest.fixture(params=KINDS)
async def async_caller(
    request: pytest.FixtureRequest, schema: Schema, _data: None
) -> AsyncGenerator[Caller]:
    """A caller of each kind for async code, in a transaction."""
    async with KINDS[request.param](schema.url) as caller:
        yield caller


@pytest.fixture
def client(schema: Schema) -> Client:
    """A client that is not open: all its calls need `tx`."""
    return Client(config=Config(schema=schema.name))
