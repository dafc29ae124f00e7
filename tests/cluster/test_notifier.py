"""What the listener knows of itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio

from tests.kit.proxy import proxied
from tests.work.rig import PATIENCE, Rig, Task

if TYPE_CHECKING:
    from riverpy import Job
    from tests._database import Schema


async def test_lost_listener_hears_nothing(schema: Schema) -> None:
    """While the listener cannot connect again nobody takes it for one that hears, though all else
    of the client goes on; once it can, it is one."""

    async def until(is_notified: bool) -> None:
        with anyio.fail_after(PATIENCE, reason=f"it is not taken for {is_notified=}"):
            while run._is_notified() is not is_notified:
                await asyncio.sleep(0.005)

    rig = Rig(schema)

    @rig.job
    async def work(job: Job[Task]) -> None:
        pass

    async with proxied(schema.url) as proxy, rig.working(listen_url=proxy.url) as client:
        run: Any = client._run
        await until(is_notified=True)
        proxy.refusing = True
        assert proxy.cut("riverpy listener") == 1
        await until(is_notified=False)
        proxy.refusing = False
        await until(is_notified=True)
