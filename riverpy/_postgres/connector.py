"""Connector: makes the connections of one run, each with the settings of its purpose."""

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
"""How long a completion waits for a row that somebody's transaction has locked, before it goes on
without it."""
STATEMENT_LIMIT = timedelta(seconds=8)
"""After which the server ends a statement of ours. It is less than claims and results may take
here, so that a slow statement ends with an error of the server and keeps its connection."""
LISTENER_NAME = "riverpy listener"
REINDEX_NAME = "riverpy reindex"


class Connector:
    """Each method makes a new connection, and raises ConfigError, DatabaseError or one of
    DATABASE_ERRORS."""

    def __init__(self, url: str | None, config: Config) -> None:
        """Make it; nothing is connected.

        Args:
            url: of the database; None: the PG* variables say where it is.
            config: the client's.
        """
        self._url, self._config = url, config

    async def claims(self) -> Connection:
        """For claims, whose commits may wait for those of the results to be durable."""
        settings = {"plan_cache_mode": "force_custom_plan"}
        if not self._config.durable_claims:
            settings["synchronous_commit"] = "off"
        return await self._raw("riverpy claims", settings)

    async def results(self) -> Connection:
        """For what became of jobs."""
        settings = {"plan_cache_mode": "force_custom_plan", "lock_timeout": LOCK_TIMEOUT}
        return await self._raw("riverpy results", settings)

    async def reserved(self) -> Connection:
        """For the lease, signs of life and what else must never wait for jobs."""
        return await self._limited("riverpy reserved", {})

    async def listener(self) -> Connection:
        """For LISTEN, past a pooler where that is configured."""
        if self._config.listen_url is not None:
            return await self._past_pooler(LISTENER_NAME)
        return await connect(self._url, application_name=LISTENER_NAME, pooled=self._config.pooler)

    async def maintenance(self, name: str) -> Connection:
        """For the maintenance of a term."""
        return await connect_maintenance(self._url, name, pooled=self._config.pooler)

    @property
    def reindexer(self) -> Callable[[], Awaitable[Connection]] | None:
        """What makes a session for the reindexer. None: a pooler in transaction mode can carry
        none, and no way past it is configured."""
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
