"""Calls of riverpy's client beside a bare statement with the same result, as a program.

URL: {"ms": {measure: {"riverpy": ..., "bare": ...}}}

riverpy and the bare statement take turns in one process, on one database with River's tables. The
bare code encodes args and hashes keys too, and its statements are prepared.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import asyncpg
import msgspec
import uvloop

from riverpy import Client, Config, InsertManyParams, InsertOpts, UniqueOpts
from tests.kit.statements import read_statements

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TURNS = 7
JOBS = 1000
QUEUES = 300
TASKS = 100
GETS_OF_A_TASK = 10
POOL_SIZE = 10
_STATEMENTS = read_statements(Path(__file__).with_name("calls.sql"))


class Numbered(msgspec.Struct):
    """Args of a job with a number."""

    kind: ClassVar[str] = "numbered"
    number: int


class Calls:
    """The calls that are measured, and the bare statements beside them."""

    def __init__(self, client: Client, pool: asyncpg.Pool) -> None:
        self._client, self._pool = client, pool
        self._number = 0

    async def measure(self) -> dict[str, dict[str, float]]:
        """Return the milliseconds of each call and of the bare statement."""
        found: dict[str, dict[str, float]] = {}
        for name, riverpy, bare in (
            ("insert_many_unique", self._insert_unique, self._insert_unique_bare),
            ("insert_many_mixed", self._insert_mixed, self._insert_mixed_bare),
            ("job_cancel_many", self._cancel, self._cancel_bare),
            ("queue_pause_300", self._pause, self._pause_bare),
            ("job_get_100_tasks", self._get, self._get_bare),
        ):
            sides = {"riverpy": riverpy, "bare": bare}
            times: dict[str, list[float]] = {side: [] for side in sides}
            for turn in range(TURNS + 1):
                for side in list(sides)[:: 1 if turn % 2 else -1]:
                    await self._pool.execute(_STATEMENTS["empty"])
                    seconds = await sides[side]()
                    if turn:  # the first turn prepares statements
                        times[side].append(seconds * 1e3)
            found[name] = {side: statistics.median(each) for side, each in times.items()}
        return found

    async def _insert_unique(self) -> float:
        opts = InsertOpts(unique_opts=UniqueOpts(by_args=True))
        return await self._insert([InsertManyParams(args, opts) for args in self._take_args()])

    async def _insert_mixed(self) -> float:
        unique = InsertOpts(unique_opts=UniqueOpts(by_args=True))
        plain = InsertOpts(priority=2, queue="other", tags=["mixed"])
        return await self._insert(
            [
                InsertManyParams(args, unique if number % 2 else plain)
                for number, args in enumerate(self._take_args())
            ]
        )

    async def _insert(self, params: list[InsertManyParams]) -> float:
        began = time.perf_counter()
        await self._client.insert_many(params)
        return time.perf_counter() - began

    async def _insert_unique_bare(self) -> float:
        return await self._insert_bare(is_mixed=False)

    async def _insert_mixed_bare(self) -> float:
        return await self._insert_bare(is_mixed=True)

    async def _insert_bare(self, *, is_mixed: bool) -> float:
        jobs = self._take_args()
        began = time.perf_counter()
        args = [json.dumps({"number": one.number}) for one in jobs]
        keys = [
            None if is_mixed and number % 2 == 0 else hashlib.sha256(text.encode()).digest()
            for number, text in enumerate(args)
        ]
        queues = ["default" if key else "other" for key in keys]
        priorities = [1 if key else 2 for key in keys]
        await self._pool.fetch(_STATEMENTS["insert_many"], args, keys, queues, priorities)
        return time.perf_counter() - began

    async def _cancel(self) -> float:
        await self._pool.execute(_STATEMENTS["fill"], JOBS)
        began = time.perf_counter()
        changes = await self._client.job_cancel_many(kinds=["filled"])
        assert changes.changed == JOBS
        return time.perf_counter() - began

    async def _cancel_bare(self) -> float:
        await self._pool.execute(_STATEMENTS["fill"], JOBS)
        began = time.perf_counter()
        await self._pool.fetch(_STATEMENTS["cancel"], ["filled"])
        return time.perf_counter() - began

    async def _pause(self) -> float:
        await self._pool.execute(_STATEMENTS["fill_queues"], QUEUES)
        began = time.perf_counter()
        for number in range(1, QUEUES + 1):
            await self._client.queue_pause(f"queue_{number}")
        return time.perf_counter() - began

    async def _pause_bare(self) -> float:
        await self._pool.execute(_STATEMENTS["fill_queues"], QUEUES)
        began = time.perf_counter()
        for number in range(1, QUEUES + 1):
            await self._pool.fetch(_STATEMENTS["pause"], f"queue_{number}")
        return time.perf_counter() - began

    async def _get(self) -> float:
        return await self._get_by_tasks(self._client.job_get)

    async def _get_bare(self) -> float:
        return await self._get_by_tasks(
            lambda job_id: self._pool.fetchrow(_STATEMENTS["get"], job_id)
        )

    async def _get_by_tasks(self, get: Callable[[int], Awaitable[object]]) -> float:
        ids = [row[0] for row in await self._pool.fetch(_STATEMENTS["fill"], TASKS)]

        async def get_often(job_id: int) -> None:
            for _ in range(GETS_OF_A_TASK):
                await get(job_id)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for job_id in ids:
                group.create_task(get_often(job_id))
        return time.perf_counter() - began

    def _take_args(self) -> list[Numbered]:
        self._number += JOBS
        return [Numbered(number) for number in range(self._number, self._number + JOBS)]


async def main(url: str) -> None:
    """Measure all calls, and print the result."""
    async with (
        asyncpg.create_pool(url, min_size=POOL_SIZE, max_size=POOL_SIZE) as pool,
        Client(url, config=Config(pool_size=POOL_SIZE)) as client,
    ):
        print(json.dumps({"ms": await Calls(client, pool).measure()}))


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
