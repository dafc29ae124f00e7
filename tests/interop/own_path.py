"""Workers that reach the server over a proxy of their own, which counts and breaks connections."""

from __future__ import annotations

from contextlib import asynccontextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

from tests.interop.river_go import RiverGo
from tests.interop.working import Fleet
from tests.kit.proxy import proxied

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from tests._database import Schema
    from tests.interop.working import ProcessWorker, Worker
    from tests.kit.proxy import Proxy


@asynccontextmanager
async def fleet_over_proxy(binary: Path, schema: Schema) -> AsyncGenerator[tuple[Fleet, Proxy]]:
    """A fleet whose workers all use one proxy."""
    async with proxied(schema.url) as proxy:
        through = copy(schema)
        through.url = proxy.url
        yield Fleet(RiverGo(binary, proxy.url, schema.name), through), proxy


@asynccontextmanager
async def worker_over_proxy(
    binary: Path, schema: Schema, language: str, **settings: Any
) -> AsyncGenerator[tuple[Worker, Proxy]]:
    """A worker as `Fleet.worker`, and its proxy."""
    async with (
        fleet_over_proxy(binary, schema) as (fleet, proxy),
        fleet.worker(language, **settings) as worker,
    ):
        yield worker, proxy


@asynccontextmanager
async def process_over_proxy(
    binary: Path, schema: Schema, language: str, **settings: Any
) -> AsyncGenerator[tuple[ProcessWorker, Proxy]]:
    """A worker as `Fleet.process`, and its proxy."""
    async with (
        fleet_over_proxy(binary, schema) as (fleet, proxy),
        fleet.process(language, **settings) as worker,
    ):
        yield worker, proxy
