"""ListeningMethods: the one connection for LISTEN that all waits and subscriptions of a client
share."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from riverpy._calls.base import ClientMethods
from riverpy._postgres.connection import ConnectionOutageTracker
from riverpy._postgres.connector import Connector
from riverpy._postgres.driver import is_pool
from riverpy._postgres.notifier import Notifier
from riverpy._waiting.listener import SharedListener
from riverpy._waiting.pool_connection import SharedPoolConnection

if TYPE_CHECKING:
    from riverpy._postgres.driver import Connection, Pool

LISTENING_OUTAGE_EFFECT = "waits and subscriptions poll, and the client keeps connecting"
LISTENER_POOL_SIZE_MIN = 2
"""The client uses a connection of the caller's pool for LISTEN only if the pool's `max_size` is at
least this number."""


class ListeningMethods(ClientMethods):
    """The base class of WaitMethods and EventMethods. It owns the client's connection for
    LISTEN."""

    @cached_property
    def _listener(self) -> SharedListener:
        self._listener_outage_tracker = ConnectionOutageTracker(
            outage_effect=LISTENING_OUTAGE_EFFECT, client_id=self.id
        )
        return SharedListener(self._make_notifier, self._listener_outage_tracker)

    @cached_property
    def _shared_pool_connection(self) -> SharedPoolConnection:
        return SharedPoolConnection(self._get_open_pool)

    def _make_notifier(self) -> Notifier | None:
        """Create the notifier, which receives notifications on its own connection or on one from
        the caller's pool. Return None if `poll_only` is set, if the connection leads to a pooler,
        or if the pool is too small."""
        config, database = self._config, self._database
        if config.poll_only or (config.pooler and config.listen_url is None):
            return None
        connect = Connector(self.database_url, config, self._password).connect_for_notifications
        if is_pool(database) and config.listen_url is None:
            if database.get_max_size() < LISTENER_POOL_SIZE_MIN:
                return None
            pool_of_caller = database

            async def connect() -> Connection:
                return await _take_connection_out_of_pool(pool_of_caller)

        quiet = config.quiet_interval
        return Notifier(
            connect,
            schema=config.schema,
            reserved=self._shared_pool_connection,
            outage=self._listener_outage_tracker,
            resync=lambda: None,
            probe_interval_min=0.0 if quiet is None else quiet.total_seconds(),
            trace_internal=config.trace_internal,
        )


async def _take_connection_out_of_pool(pool: Pool) -> Connection:
    """Take a connection out of the caller's pool and keep it. When the connection is closed, the
    pool can open another one in its place."""
    connection: Any = await pool.acquire()
    return connection
