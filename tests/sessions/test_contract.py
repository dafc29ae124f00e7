"""Inserts in a caller's transaction of every kind: the job is there exactly if the data is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from riverpy import Client, Config
from tests.sessions.kinds import KINDS
from tests.work.rig import Task

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema
    from tests.sessions.kinds import Caller


@pytest.fixture(params=KINDS)
async def caller(request: pytest.FixtureRequest, schema: Schema) -> AsyncGenerator[Caller]:
    """A caller of each kind, in a transaction, and a table `data` for what it writes."""
    await schema.execute("create table if not exists data (n int)")
    async with KINDS[request.param](schema.url) as caller:
        yield caller
    await schema.execute("drop table data")


@pytest.fixture
def client(schema: Schema) -> Client:
    """A client that is not open: all its calls need `tx`."""
    return Client(config=Config(schema=schema.name))


async def stored(schema: Schema) -> tuple[list[int], list[int]]:
    """Return the committed data, and the jobs."""
    data = await schema.fetch("select n from data order by n")
    jobs = await schema.fetch("select (args->>'n')::int from river_job order by id")
    return [row[0] for row in data], [row[0] for row in jobs]


async def write(caller: Caller, schema: Schema, n: int) -> None:
    await caller.execute(f"insert into {schema.name}.data values ({n})")


async def test_commit_and_rollback(caller: Caller, client: Client, schema: Schema) -> None:
    """After a commit the job and the data are there. After a rollback neither is, even if the
    insert was the first statement."""
    await client.insert(Task(1), tx=caller.tx)
    await write(caller, schema, 1)
    await caller.rollback()
    assert await stored(schema) == ([], [])
    await caller.begin()
    await write(caller, schema, 2)
    await client.insert(Task(2), tx=caller.tx)
    await caller.commit()
    assert await stored(schema) == ([2], [2])
