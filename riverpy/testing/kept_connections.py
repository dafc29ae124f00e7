"""Connections that the tests of one event loop use one after the other.

For a new connection the server starts a process, which reads the catalogs again, and each statement
costs one more round trip. So a connection that a test has released waits for the next test of its
event loop. The settings, locks and temporary tables of its session are reset. The pytest plugin
says when a loop begins and ends.
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
    """A resource with connections in event loops, such as a pool."""

    async def close_in_loop(self) -> None:
        """Close the connections of the running event loop."""


class KeptConnections:
    """The idle connections of asyncpg, by event loop and URL."""

    def __init__(self) -> None:
        self._idle: WeakKeyDictionary[Any, dict[str, Connection]] = WeakKeyDictionary()

    async def acquire(self, url: str, application_name: str) -> Connection:
        """Return the idle connection of the running event loop, or a new one."""
        idle = self._idle.get(asyncio.get_running_loop(), {}).pop(url, None)
        if idle is not None and not idle.is_closed():
            return idle
        return await connect(url, application_name=application_name)

    async def release(self, url: str, connection: Connection) -> None:
        """Reset the session of a connection for a later test of the running event loop, or close
        it if no test can use it."""
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


class OpenLoops:
    """The event loops that run tests, and the resources with connections in them."""

    def __init__(self) -> None:
        self._loops: set[asyncio.AbstractEventLoop] = set()
        self._resources: list[LoopResource] = []

    def is_open(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether the loop runs tests, so that its connections are closed at its end."""
        return loop in self._loops

    def add_resource(self, resource: LoopResource) -> None:
        """Add something whose connections are closed at the end of each loop."""
        self._resources.append(resource)

    async def register_running_loop(self) -> None:
        """Register the running event loop as one that runs tests."""
        self._loops.add(asyncio.get_running_loop())

    async def unregister_running_loop(self) -> None:
        """Unregister the running event loop, and close its idle connections."""
        self._loops.discard(asyncio.get_running_loop())
        for resource in self._resources:
            await resource.close_in_loop()


open_loops = OpenLoops()
kept_connections = KeptConnections()
open_loops.add_resource(kept_connections)
