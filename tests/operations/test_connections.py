"""The connection budget of docs/operations.md, counted by the server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio

from tests.work.rig import PATIENCE, Rig, Task

if TYPE_CHECKING:
    from tests._database import Schema

OF_A_WORKER = {"riverpy listener", "riverpy claims", "riverpy results", "riverpy reserved"}
OF_THE_LEADER = {"riverpy maintenance"}
CLEANING = "riverpy cleaning"
"""The connection that the leader opens when it first cleans up."""
POOL = "riverpy"
POOL_SIZE = 3


async def opened(schema: Schema) -> dict[str, int]:
    """Return the number of connections by name, without the clean-up connection."""
    rows = await schema.fetch(
        "SELECT application_name AS name, count(*) AS number FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name ~ '^riverpy' GROUP BY 1"
    )
    found = {row["name"]: row["number"] for row in rows}
    assert found.pop(CLEANING, 0) <= 1
    return found


async def until_opened(schema: Schema, expected: dict[str, int]) -> None:
    """Wait until exactly these connections are open."""
    found: dict[str, int] = {}
    with anyio.move_on_after(PATIENCE):
        while (found := await opened(schema)) != expected:
            await asyncio.sleep(0.01)
        return
    raise AssertionError(f"{found} are open, not {expected}")


async def test_budget(schema: Schema) -> None:
    """Two workers, one of them the leader, and an inserting program open the connections that the
    page lists."""
    rig = Rig(schema)

    rig.register_task()
    await until_opened(schema, {})
    workers = dict.fromkeys(OF_A_WORKER, 2) | dict.fromkeys(OF_THE_LEADER, 1)
    async with rig.working(), rig.working():
        await until_opened(schema, workers)
        async with rig.client(queues={}, pool_size=POOL_SIZE) as inserter:
            await until_opened(schema, workers)
            async with anyio.create_task_group() as inserts:
                for number in range(10 * POOL_SIZE):
                    inserts.start_soon(inserter.insert, Task(number))
            assert (await opened(schema)).get(POOL, 0) <= POOL_SIZE
        await until_opened(schema, workers)
    await until_opened(schema, {})
