"""LoopPool: a pool for SQLAlchemy that reuses a connection only in the event loop that opened
it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sqlalchemy import NullPool
from sqlalchemy.util import greenlet_spawn

from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._postgres.test_databases import reset_session
from riverpy.testing.kept_connections import open_loops

if TYPE_CHECKING:
    from sqlalchemy.pool import ConnectionPoolEntry


class LoopPool(NullPool):
    """A pool without a size limit, for an async SQLAlchemy engine with asyncpg.

    In an event loop that runs tests, the pool keeps idle connections for later sessions of this
    test and later tests. In any other loop, the pool closes each connection after its use."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._idle: WeakKeyDictionary[Any, list[ConnectionPoolEntry]] = WeakKeyDictionary()
        open_loops.add_resource(self)

    def _do_get(self) -> ConnectionPoolEntry:
        idle = self._idle.get(asyncio.get_running_loop())
        return idle.pop() if idle else self._create_connection()

    def _do_return_conn(self, record: ConnectionPoolEntry) -> None:
        if not _reset_pooled_connection(record):
            record.close()
            return
        self._idle.setdefault(asyncio.get_running_loop(), []).append(record)

    async def close_in_loop(self) -> None:
        """Close the idle connections of the running event loop."""
        for entry in self._idle.pop(asyncio.get_running_loop(), []):
            await greenlet_spawn(entry.close)


def _reset_pooled_connection(entry: ConnectionPoolEntry) -> bool:
    """Reset the session of a released connection, so that it can be used again. Return False if it
    must be closed instead, because it is lost or its event loop does not run tests."""
    adapter: Any = entry.dbapi_connection
    if adapter is None or not open_loops.is_open(asyncio.get_running_loop()):
        return False
    try:
        adapter.run_async(reset_session)
    except DATABASE_ERRORS:
        return False
    return True
