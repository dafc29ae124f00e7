"""Inserts of `riverpy.sync.Client` in callers' transactions."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest

import riverpy.sync
from riverpy import Config, InsertManyParams, RawArgs
from tests.client.test_caller_transactions import CALLS
from tests.sessions.kinds import BLOCKING_KINDS, KINDS

if TYPE_CHECKING:
    from tests._database import Schema

ARGS = RawArgs("task", "{}")


@pytest.mark.parametrize("kind", BLOCKING_KINDS)
async def test_commit_and_rollback(kind: str, schema: Schema) -> None:
    """After a commit the jobs are there, and after a rollback they are not, even if the insert was
    the first statement. An async client refuses the session."""
    client = riverpy.sync.Client(config=Config(schema=schema.name))
    params = [InsertManyParams(ARGS)] * 2
    async with BLOCKING_KINDS[kind](schema.url) as caller:
        await caller.call(lambda: client.insert(ARGS, tx=caller.tx))
        await caller.rollback()
        assert await schema.jobs() == []
        await caller.begin()
        results = await caller.call(lambda: client.insert_many(params, tx=caller.tx))
        assert await schema.jobs() == []
        with pytest.raises(TypeError, match=r"blocks the event loop: use riverpy\.sync\.Client"):
            await riverpy.Client().insert(ARGS, tx=caller.tx)
        await caller.commit()
    assert [job["id"] for job in await schema.jobs()] == [result.job.id for result in results]


@pytest.mark.parametrize("kind", ["asyncpg", "psycopg", "sqlalchemy-session-asyncpg"])
async def test_async_sessions(kind: str, schema: Schema) -> None:
    """A session of async code is refused, with the name of the client for it."""
    client = riverpy.sync.Client(config=Config(schema=schema.name))
    async with KINDS[kind](schema.url) as caller:
        with pytest.raises(TypeError, match=r"which is async: use riverpy\.Client"):
            client.insert(ARGS, tx=caller.tx)


def test_every_call_is_there() -> None:
    """The blocking client has the same calls with `tx` as the async client, with the same
    parameters and defaults."""
    calls = {"insert", "insert_many", "insert_many_fast", *CALLS}
    for name in calls:
        expected, found = (
            [
                (one.name, one.kind, one.default)
                for one in inspect.signature(getattr(owner, name)).parameters.values()
            ]
            for owner in (riverpy.Client, riverpy.sync.Client)
        )
        assert found == expected, name
