"""Workers with a proxy of their own, which counts and breaks their connections."""

from __future__ import annotations

from contextlib import asynccontextmanager
from copy import copy
from typing import TYPE_CHECKING, TypeVar

from tests.interop.river_go import RiverGo
from tests.interop.working import Fleet
from tests.kit.proxy import proxied

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tests._database import Schema
    from tests.kit.proxy import Proxy

W = TypeVar("W")


@asynccontextmanager
async def proxied_worker(
    binary: Path, schema: Schema, start: Callable[[Fleet], AbstractAsyncContextManager[W]]
) -> AsyncGenerator[tuple[W, Proxy]]:
    """Run a worker that `start` starts in a fleet of its own, and its proxy."""
    async with proxied(schema.url) as proxy:
        through = copy(schema)
        through.url = proxy.url
        fleet = Fleet(RiverGo(binary, proxy.url, schema.name), through)
        async with start(fleet) as worker:
            yield worker, proxy
