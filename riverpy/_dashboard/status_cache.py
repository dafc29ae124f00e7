"""StatusCache: a cache for the status of clients and queues. All pages and users share it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio

from riverpy._dashboard.database import acquire_connection
from riverpy._tools.top.status import StatusReaderOnConnection

if TYPE_CHECKING:
    from riverpy._tools.top.status import OverallStatus
    from riverpy.client import Client

STATUS_AGE_MAX = 1.5
"""How long the cache returns the last status without a new read, in seconds. If the last read
failed, the cache raises the error of this read for the same time."""
STATUS_PAUSE_FACTOR = 9.0
"""After a slow read, the cache returns the status for nine times the duration of the read, so that
reads take at most a tenth of the time. `STATUS_PAUSE_MAX` limits how long it does so."""
STATUS_PAUSE_MAX = 10.0
"""The maximum time for which the cache returns a status after a slow read, in seconds. It is short,
because pages must soon show that the database does not answer."""
TABLE_CHECK_INTERVAL = 60.0
"""The time in seconds after which the cache checks again which tables exist. A migration may have
added tables."""


class StatusCache:
    """Caches the status of clients and queues in a schema. A request that arrives during a read
    waits for the result of that read."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = anyio.Lock()
        self._statements: StatusReaderOnConnection | None = None
        self._status: OverallStatus | None = None
        self._error: Exception | None = None
        """The error of the last read. Requests that wait for the read receive this error too.
        Otherwise each of them would wait for a database that does not answer."""
        self._expires_at = self._tables_expire_at = 0.0
        self._read_began_at = self._changed_at = 0.0
        """`_read_began_at` is the start of the last read. `_changed_at` is the time of the last
        known change in the database. Both are monotonic times."""

    async def read(self) -> OverallStatus:
        """Return a status that is at most a few seconds old.

        Raises:
            ClientStateError: the client is not open.
            ConfigError, DatabaseError, or one of DATABASE_ERRORS: the read failed.
        """
        async with self._lock:
            if time.monotonic() < self._expires_at and self._error is not None:
                raise self._error
            is_old = self._read_began_at < self._changed_at or time.monotonic() >= self._expires_at
            if self._status is None or is_old:
                return await self._read_and_cache_status()
            return self._status

    def invalidate_before(self, changed_at: float) -> None:
        """Do not use a status whose read began before `changed_at`, the monotonic time of a change
        in the database."""
        self._changed_at = max(self._changed_at, changed_at)

    async def _read_and_cache_status(self) -> OverallStatus:
        self._read_began_at = time.monotonic()
        try:
            self._status = await self._read_new_status()
        except Exception as error:
            self._error = error
            self._expires_at = time.monotonic() + STATUS_AGE_MAX
            raise
        self._error = None
        pause = max(STATUS_AGE_MAX, min(self._status.took * STATUS_PAUSE_FACTOR, STATUS_PAUSE_MAX))
        self._expires_at = time.monotonic() + pause
        return self._status

    async def _read_new_status(self) -> OverallStatus:
        began = time.monotonic()
        async with acquire_connection(self._client) as connection:
            if self._statements is None or began >= self._tables_expire_at:
                statements = StatusReaderOnConnection(self._client.config.schema)
                await statements.check_server_and_tables(connection, self._client.database_url)
                self._statements = statements
                self._tables_expire_at = began + TABLE_CHECK_INTERVAL
            return await self._statements.read(connection, began)
