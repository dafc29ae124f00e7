"""Tasks that insert at the same time, for all programs in Python."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CALLERS = 100


async def call_from_tasks(count: int, call: Callable[[int], Awaitable[object]]) -> None:
    """Make this many calls in `CALLERS` tasks. Each task makes one call after the other."""
    left = iter(range(count))

    async def make_calls() -> None:
        for number in left:
            await call(number)

    await asyncio.gather(*(make_calls() for _ in range(CALLERS)))
