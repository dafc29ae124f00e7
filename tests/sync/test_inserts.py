"""`riverpy.sync.Client` has the calls of `riverpy.Client`. Each refuses the other's sessions."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest

import riverpy.sync
from riverpy import Config, RawArgs
from tests.client.test_caller_transactions import CALLS
from tests.sessions.kinds import BLOCKING_KINDS, KINDS

if TYPE_CHECKING:
    from tests._database import Schema

ARGS = RawArgs("task", "{}")


@pytest.mark.parametrize("kind", ["blocking-psycopg", "blocking-session-psycopg2"])
async def test_blocking_sessions(kind: str, schema: Schema) -> None:
    """An async client refuses a blocking session, with the name of the client for it."""
    async with BLOCKING_KINDS[kind](schema.url) as caller:
        with pytest.raises(TypeError, match=r"blocks the event loop: use riverpy\.sync\.Client"):
            await riverpy.Client().insert(ARGS, tx=caller.tx)


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
