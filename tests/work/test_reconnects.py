"""Connections that come and go: nothing of them is kept."""

from __future__ import annotations

import asyncio
import gc

from riverpy.drivers.asyncpg import close, close_pool, connect, create_pool

ROUND = 15


async def test_connections_leave_nothing(database_url: str) -> None:
    """ME-05, scaled and without TLS: connections and pools that were opened, used with a limit and
    closed leave no objects and no tasks."""

    async def counts() -> tuple[int, int]:
        for _ in range(ROUND):
            connection = await connect(database_url)
            await connection.fetchval("SELECT 1", timeout=10)
            await close(connection)
            pool = await create_pool(database_url, max_size=2, pooled=False, command_timeout=10)
            async with pool.acquire() as pooled:
                await pooled.fetchval("SELECT 1")
            assert await close_pool(pool)
        await asyncio.sleep(0)
        gc.collect()
        return len(gc.get_objects()), len(asyncio.all_tasks())

    await counts()
    objects, tasks = await counts()
    later_objects, later_tasks = await counts()
    assert later_objects - objects < ROUND
    assert later_tasks == tasks
