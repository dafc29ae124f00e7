"""Keeps the connections of tests open, so that later tests in the same event loop use them again.

A new connection is slow: the server starts a process, which reads the catalogs, and the first use
of each statement costs one more round trip. Before a connection is used again, the settings, locks
and temporary tables of its session are reset. The pytest plugin registers each event loop that runs
tests.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from riverpy._postgres.driver import DATABASE_ERRORS, close_connection, connect
from riverpy._postgres.test_databases import reset_session

if TYPE_CHECKING:
    from riverpy._postgres.driver import Connection


class LoopResource(Protocol):
    """An object that keeps connections for each event loop, such as a pool."""

    async def close_in_loop(self) -> None:
        """Close the connections of the running event loop."""


class KeptConnections:
    """Keeps one idle asyncpg connection for each event loop and URL."""

    def __init__(self) -> None:
        self._idle: WeakKeyDictionary[Any, dict[str, Connection]] = WeakKeyDictionary()

    async def acquire(self, url: str, application_name: str) -> Connection:
        """Return the idle connection to this URL of the running event loop, or a new one."""
        idle = self._idle.get(asyncio.get_running_loop(), {}).pop(url, None)
        if idle is not None and not idle.is_closed():
            return idle
        return await connect(url, application_name=application_name)

    async def release(self, url: str, connection: Connection) -> None:
        """Reset the session of a connection and keep it for later tests of the running event loop.
        Close the connection instead if no later test can use it."""
        loop = asyncio.get_running_loop()
        idle = self._idle.setdefault(loop, {})
        if not connection.is_closed() and url not in idle and open_loops.is_open(loop):
            with suppress(*DATABASE_ERRORS):
                await reset_session(connection)
                idle[url] = connection
                return
        await close_connection(connection)

    async def close_in_loop(self) -> None:
        """Close the idle connections of the running event loop."""
        for connection in self._idle.pop(asyncio.get_running_loop(), {}).values():
            await close_connection(connection)


class OpenTestLoops:
    """The event loops that run tests. When a test loop ends, its idle connections are closed."""

    def __init__(self) -> None:
        self._loops: set[asyncio.AbstractEventLoop] = set()
        self._resources: list[LoopResource] = []

    def is_open(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether the loop runs tests. Idle connections are kept only in these loops,
        because they are closed when such a loop ends."""
        return loop in self._loops

    def add_resource(self, resource: LoopResource) -> None:
        """Register an object. At the end of each test loop, its `close_in_loop` is called."""
        self._resources.append(resource)

    async def register_running_loop(self) -> None:
        """Register the running event loop as one that runs tests."""
        self._loops.add(asyncio.get_running_loop())

    async def unregister_running_loop(self) -> None:
        """Unregister the running event loop, and close its idle connections."""
        self._loops.discard(asyncio.get_running_loop())
        for resource in self._resources:
            await resource.close_in_loop()


open_loops = OpenTestLoops()
kept_connections = KeptConnections()
open_loops.add_resource(kept_connections)
