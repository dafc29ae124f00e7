"""Connector: makes the connections of one run of a client, each with the settings for its
purpose."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from riverpy._postgres.connection import (
    MAINTENANCE_STATEMENT_TIMEOUT,
    connect_for_maintenance,
    connect_with_statement_timeout,
)
from riverpy._postgres.driver import connect, terminate_on_error, use_raw_timestamps

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy._postgres.driver import Connection
    from riverpy._postgres.passwords import PasswordSource
    from riverpy.config import Config

RESULT_LOCK_TIMEOUT = "100ms"
"""If a statement that stores results waits for a locked row for longer than this, it fails."""
JOB_STATEMENT_TIMEOUT = timedelta(seconds=8)
"""The server's `statement_timeout` for claims and results of jobs. riverpy's own timeouts are
longer. So the server ends a slow statement before riverpy does, and the connection stays usable."""


class Connector:
    """Makes the connections of one run of a client. A method that cannot connect raises ConfigError
    or one of DATABASE_ERRORS."""

    def __init__(
        self, url: str | None, config: Config, password: PasswordSource | None = None
    ) -> None:
        """Store the arguments, and make no connection yet. A `url` of None means the environment
        variables `PG*`. `password` returns the password for each connection."""
        self._url, self._config, self._password = url, config, password

    async def connect_for_claims(self) -> Connection:
        """Return a connection for claims of jobs. If `Config.durable_claims` is False, PostgreSQL
        does not flush the commit of a claim to disk at once. The commit of the job's result also
        flushes the claim."""
        settings = {} if self._config.durable_claims else {"synchronous_commit": "off"}
        return await self._connect_for_jobs("riverpy claims", settings)

    async def connect_for_results(self) -> Connection:
        """Return a connection for statements that store the results of jobs."""
        return await self._connect_for_jobs(
            "riverpy results", {"lock_timeout": RESULT_LOCK_TIMEOUT}
        )

    async def connect_for_leases_and_heartbeats(self) -> Connection:
        """Return a connection for leases, heartbeats and other statements that must not wait for
        the claims or results of jobs."""
        return await connect_with_statement_timeout(
            self._url,
            "riverpy reserved",
            statement_timeout=JOB_STATEMENT_TIMEOUT,
            through_pooler=self._config.pooler,
            password=self._password,
        )

    async def connect_for_fleet_events(self) -> Connection:
        """Return a connection for statements that send events to other clients."""
        return await connect_with_statement_timeout(
            self._url,
            "riverpy fleet",
            statement_timeout=JOB_STATEMENT_TIMEOUT,
            through_pooler=self._config.pooler,
            password=self._password,
        )

    async def connect_for_inserts(self) -> Connection:
        """Return a connection for inserts. One statement may insert the jobs of several insert
        calls. The session gets no `statement_timeout`, because riverpy itself limits the time of
        each statement. A shorter `statement_timeout` of the database role also applies."""
        connection = await connect(
            self._url,
            application_name="riverpy inserts",
            through_pooler=self._config.pooler,
            password=self._password,
        )
        with terminate_on_error(connection):
            await use_raw_timestamps(connection)
        return connection

    async def connect_for_notifications(self) -> Connection:
        """Return a connection for LISTEN. It uses `Config.listen_url` if this is set."""
        name, listen_url = "riverpy listener", self._config.listen_url
        if listen_url is not None:
            return await connect(
                listen_url,
                application_name=name,
                url_setting_name="listen_url",
                password=self._password,
            )
        return await connect(
            self._url,
            application_name=name,
            through_pooler=self._config.pooler,
            password=self._password,
        )

    async def connect_for_maintenance(self, application_name: str) -> Connection:
        """Return a connection for the maintenance services of a leader."""
        return await connect_for_maintenance(
            self._url,
            application_name,
            through_pooler=self._config.pooler,
            password=self._password,
        )

    @property
    def reindexer_connect_function(self) -> Callable[[], Awaitable[Connection]] | None:
        """The function that makes connections for the reindexer. None: the reindexer cannot
        connect, because all URLs lead to a pooler in transaction mode."""
        url = self._config.listen_url if self._config.pooler else self._url
        if url is None and self._config.pooler:
            return None
        limit = MAINTENANCE_STATEMENT_TIMEOUT
        return partial(
            connect_with_statement_timeout,
            url,
            "riverpy reindex",
            statement_timeout=limit,
            through_pooler=False,
            password=self._password,
        )

    async def _connect_for_jobs(
        self, application_name: str, session_settings: dict[str, str]
    ) -> Connection:
        connection = await connect_with_statement_timeout(
            self._url,
            application_name,
            statement_timeout=JOB_STATEMENT_TIMEOUT,
            through_pooler=self._config.pooler,
            session_settings={"plan_cache_mode": "force_custom_plan", **session_settings},
            password=self._password,
        )
        with terminate_on_error(connection):
            await use_raw_timestamps(connection)
        return connection
