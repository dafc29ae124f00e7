"""Connections that are opened and closed leave nothing behind."""

from __future__ import annotations

import asyncio
import gc

from riverpy._postgres.driver import close_connection, close_pool, connect, create_pool

ROUND = 15
PATIENCE = 30.0


async def test_connections_leave_nothing(database_url: str) -> None:
    """Connections and pools that were opened, used with a timeout and closed leave no objects and
    no tasks (ME-05, without TLS)."""

    async def come_and_go() -> None:
        for _ in range(ROUND):
            connection = await connect(database_url)
            await connection.fetchval("SELECT 1", timeout=PATIENCE)
            await close_connection(connection)
            pool = await create_pool(
                database_url, max_size=2, through_pooler=False, command_timeout=PATIENCE
            )
            async with pool.acquire() as pooled:
                await pooled.fetchval("SELECT 1")
            await close_pool(pool)  # if the server does not answer, the pool is cut

    async def counts() -> tuple[int, int]:
        await asyncio.sleep(0)
        gc.collect()
        return len(gc.get_objects()), len(asyncio.all_tasks())

    await come_and_go()
    await come_and_go()
    objects, tasks = await counts()
    await come_and_go()
    async with asyncio.timeout(PATIENCE):  # the loop may still have to process the last close
        while (later := await counts())[0] - objects >= ROUND or later[1] > tasks:
            await asyncio.sleep(0.01)
