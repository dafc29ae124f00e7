"""Connector: makes the connections of a run, each with the settings for its purpose."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from riverpy._postgres.connection import (
    MAINTENANCE_STATEMENT_LIMIT,
    connect_limited,
    connect_maintenance,
    cut_on_error,
    limit_statements,
)
from riverpy._postgres.driver import connect, use_raw_timestamps

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy._postgres.driver import Connection
    from riverpy.config import Config

LOCK_TIMEOUT = "100ms"
"""How long a statement that stores results waits for a locked row before it fails."""
STATEMENT_LIMIT = timedelta(seconds=8)
"""The server's `statement_timeout`. This limit is shorter than our own timeouts for claims and
results, so a slow statement ends with an error of the server, and the connection stays usable."""
LISTENER_NAME = "riverpy listener"
REINDEX_NAME = "riverpy reindex"


class Connector:
    """Makes connections. Each method raises ConfigError, DatabaseError or one of
    DATABASE_ERRORS."""

    def __init__(self, url: str | None, config: Config) -> None:
        """Create the connector. It opens no connection.

        Args:
            url: the URL of the database. None means the `PG*` variables.
            config: the configuration of the client.
        """
        self._url, self._config = url, config

    async def claims(self) -> Connection:
        """Return a connection for claims. Unless `durable_claims` is set, the commit of a claim is
        not flushed to disk at once. The commit of the job's result flushes it."""
        settings = {"plan_cache_mode": "force_custom_plan"}
        if not self._config.durable_claims:
            settings["synchronous_commit"] = "off"
        return await self._raw("riverpy claims", settings)

    async def results(self) -> Connection:
        """Return a connection for results."""
        settings = {"plan_cache_mode": "force_custom_plan", "lock_timeout": LOCK_TIMEOUT}
        return await self._raw("riverpy results", settings)

    async def reserved(self) -> Connection:
        """Return a connection for leases, heartbeats and other statements that must not wait for
        jobs."""
        return await self._limited("riverpy reserved", {})

    async def listener(self) -> Connection:
        """Return a connection for LISTEN, to `listen_url` if that is set."""
        if self._config.listen_url is not None:
            return await self._past_pooler(LISTENER_NAME)
        return await connect(self._url, application_name=LISTENER_NAME, pooled=self._config.pooler)

    async def maintenance(self, name: str) -> Connection:
        """Return a connection for the maintenance of a term."""
        return await connect_maintenance(self._url, name, pooled=self._config.pooler)

    @property
    def reindexer(self) -> Callable[[], Awaitable[Connection]] | None:
        """Return a function that connects for the reindexer. None: all URLs lead to a pooler in
        transaction mode."""
        if not self._config.pooler:
            return lambda: self._limited(REINDEX_NAME, {}, MAINTENANCE_STATEMENT_LIMIT)
        return None if self._config.listen_url is None else self._reindexer_past_pooler

    async def _reindexer_past_pooler(self) -> Connection:
        connection = await self._past_pooler(REINDEX_NAME)
        with cut_on_error(connection):
            await limit_statements(connection, MAINTENANCE_STATEMENT_LIMIT)
        return connection

    async def _past_pooler(self, name: str) -> Connection:
        return await connect(self._config.listen_url, application_name=name, setting="listen_url")

    async def _raw(self, name: str, settings: dict[str, str]) -> Connection:
        connection = await self._limited(name, settings)
        with cut_on_error(connection):
            await use_raw_timestamps(connection)
        return connection

    async def _limited(
        self, name: str, settings: dict[str, str], limit: timedelta = STATEMENT_LIMIT
    ) -> Connection:
        return await connect_limited(
            self._url, name, limit=limit, pooled=self._config.pooler, settings=settings
        )
