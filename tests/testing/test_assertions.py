"""Assertions on inserted jobs, over every kind of session."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import Client, Config
from riverpy.testing import require_inserted
from tests.sessions.kinds import ALL_KINDS
from tests.testing.args import Welcome

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema
    from tests.sessions.kinds import Caller


@pytest.fixture(params=ALL_KINDS)
async def caller(request: pytest.FixtureRequest, schema: Schema) -> AsyncGenerator[Caller]:
    """A caller of each kind, in a transaction."""
    async with ALL_KINDS[request.param](schema.url) as caller:
        yield caller


async def test_require_inserted_reads_with_every_kind_of_session(
    caller: Caller, schema: Schema
) -> None:
    """A job that is not committed is found over its own session, and a failure shows it."""
    client: Any = caller.make_client(Config(schema=schema.name))
    await client.insert(Welcome(1), tx=caller.tx)

    async def check(**fields: Any) -> Any:
        def call() -> Any:
            return require_inserted(Welcome, tx=caller.tx, schema=schema.name, **fields)

        found = await caller.call(call)
        return await found if inspect.isawaitable(found) else found

    job = await check(user_id=1, queue="mail")
    assert (job.args, job.state) == (Welcome(1), "available")
    with pytest.raises(AssertionError, match=r"user_id: expected 2, found 1"):
        await check(user_id=2)


async def test_require_inserted_reads_from_a_pool_and_a_client(schema: Schema) -> None:
    """A committed job is found through an open client, its pool, and a connection outside of a
    transaction."""
    async with Client(schema.url, config=Config(schema=schema.name)) as client:
        await client.insert(Welcome(1))
        await require_inserted(Welcome(1), tx=client)
        pool = client._get_open_pool()
        await require_inserted(Welcome(1), tx=pool, schema=schema.name)
        async with pool.acquire() as connection:
            await require_inserted(Welcome(1), tx=connection, schema=schema.name)
