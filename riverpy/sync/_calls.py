"""BlockingCalls: the calls of `riverpy.Client` on blocking connections, still as coroutines."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from riverpy._calls.base import open_savepoint
from riverpy._calls.executions import ExecutionMethods
from riverpy._calls.job_batches import JobBatchMethods
from riverpy._calls.job_lists import JobListMethods
from riverpy._calls.jobs import JobMethods
from riverpy._calls.queues import QueueMethods
from riverpy._client_arguments import make_insert_settings
from riverpy._clock import Clock
from riverpy._insert.inserter import Inserter
from riverpy._names import make_unique_id
from riverpy._plugins import PluginLists
from riverpy.errors import ClientStateError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy._postgres.driver import Pool, Transaction
    from riverpy._postgres.sessions.protocols import CallerTransaction
    from riverpy.config import Config
    from riverpy.worker import Workers


class BlockingCalls(JobMethods, JobListMethods, JobBatchMethods, QueueMethods, ExecutionMethods):
    """The calls of a client without an event loop. `run_without_loop` runs them."""

    def __init__(self, config: Config, workers: Workers | None) -> None:
        self._config = config
        self._database = self._password = None
        self._workers = workers
        self._id = config.id or make_unique_id(config.name)

    @property
    def is_running(self) -> bool:
        return False

    @property
    def id(self) -> str:
        return self._id

    @property
    def database_url(self) -> str | None:
        return None

    def _get_open_pool(self) -> Pool:
        raise ClientStateError("a client without an event loop has no asyncpg pool")

    @asynccontextmanager
    async def _transaction(
        self,
        tx: CallerTransaction | None,
        *,
        isolation: Literal["read_committed", "repeatable_read"] | None = "read_committed",
    ) -> AsyncGenerator[Transaction]:
        if tx is None:
            raise ClientStateError("give a transaction with tx=: the client has no database")
        async with open_savepoint(tx) as connection:
            yield connection

    @cached_property
    def inserter(self) -> Inserter:
        """The inserter of the client."""
        return Inserter(
            lambda: self._transaction(None),
            schema=self._config.schema,
            insert_settings=make_insert_settings(self._config, self._workers),
            plugins=PluginLists(self._config.plugins, self._config.hooks, self._config.middleware),
            clock=Clock(),
        )
