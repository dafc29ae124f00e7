"""BlockingClientCoroutines: the methods of `riverpy.sync.Client`, as coroutines that use blocking
connections.

They share their code with `riverpy.Client`. They never await anything that needs an event loop, so
`run_without_loop` can run them.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from riverpy._calls.base import open_savepoint
from riverpy._calls.executions import RunOnceMethods
from riverpy._calls.job_batches import JobBatchMethods
from riverpy._calls.job_lists import JobListMethods
from riverpy._calls.jobs import JobMethods
from riverpy._calls.leadership import LeadershipMethods
from riverpy._calls.periodic_jobs import PeriodicJobMethods
from riverpy._calls.queues import QueueMethods
from riverpy._client_arguments import make_insert_clock, make_insert_settings
from riverpy._insert.errors import translate_insert_errors, translate_notify_channel_error
from riverpy._insert.inserter import Inserter
from riverpy._names import make_unique_id
from riverpy._plugins import PluginLists
from riverpy._without_loop import make_async_context_manager
from riverpy.errors import ClientStateError
from riverpy.sync._waits import PollingWaitMethods

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager
    from typing import Any

    from riverpy._calls.base import TransactionIsolation
    from riverpy._insert.inserter import Args, SendRows
    from riverpy._insert.row import PreparedJob
    from riverpy._postgres.driver import Pool, Transaction
    from riverpy._postgres.inserts import InsertRow, QueuesToNotify
    from riverpy._postgres.sessions.protocols import CallerTransaction
    from riverpy.config import Config
    from riverpy.insert_opts import InsertManyParams, InsertOpts, InsertResult
    from riverpy.sync._database import BlockingDatabase
    from riverpy.worker import Workers

T = TypeVar("T")


class BlockingClientCoroutines(
    JobMethods,
    JobListMethods,
    JobBatchMethods,
    QueueMethods,
    LeadershipMethods,
    PeriodicJobMethods,
    RunOnceMethods,
    PollingWaitMethods,
):
    """The methods of a blocking client, as coroutines that `run_without_loop` runs to their end."""

    def __init__(
        self, database: BlockingDatabase | None, config: Config, workers: Workers | None
    ) -> None:
        self._config = config
        self._database = self._password = None
        self._blocking_database = database
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
        return self._blocking_database and self._blocking_database.url

    def _get_open_pool(self) -> Pool:
        raise ClientStateError("a client without an event loop has no asyncpg pool")

    @asynccontextmanager
    async def _transaction(
        self,
        tx: CallerTransaction | None,
        *,
        isolation: TransactionIsolation | None = "read_committed",
    ) -> AsyncGenerator[Transaction]:
        if tx is not None:
            async with open_savepoint(tx) as connection:
                yield connection
            return
        database = self._blocking_database
        if database is None:
            raise ClientStateError(
                "the client has no database: give a transaction with tx=, or create it as "
                'riverpy.sync.Client("postgres://…")'
            )
        if not database.is_open:
            raise ClientStateError("the client is closed: use `with client:`, or give tx=")
        session: Any
        level = "read_committed" if isolation == "autocommit" else isolation
        async with make_async_context_manager(database.transaction(level)) as session:
            with translate_notify_channel_error():
                yield session

    async def insert(
        self, args: Args, opts: InsertOpts | None, *, tx: CallerTransaction | None
    ) -> InsertResult:
        """Insert a job, as `riverpy.Client.insert` does."""
        return await self.inserter.insert(args, opts, tx=tx)

    async def insert_many(
        self, params: Sequence[InsertManyParams], *, tx: CallerTransaction | None
    ) -> list[InsertResult]:
        """Insert jobs, as `riverpy.Client.insert_many` does."""
        return await self.inserter.insert_many(params, tx=tx)

    async def insert_many_fast(
        self, params: Sequence[InsertManyParams], *, tx: CallerTransaction | None
    ) -> int:
        """Insert jobs with COPY, as `riverpy.Client.insert_many_fast` does."""
        return await self.inserter.insert_many_fast(params, tx=tx)

    @cached_property
    def inserter(self) -> Inserter:
        """The object that checks and inserts jobs for this client."""
        return _BlockingInserter(
            self._transaction,
            schema=self._config.schema,
            insert_settings=make_insert_settings(self._config, self._workers),
            plugins=PluginLists(self._config.plugins, self._config.hooks, self._config.middleware),
            clock=make_insert_clock(self._config),
        )


class _BlockingInserter(Inserter):
    """Inserts jobs with blocking connections."""

    def __init__(
        self,
        open_transaction: Callable[
            [CallerTransaction | None], AbstractAsyncContextManager[Transaction]
        ],
        **settings: Any,
    ) -> None:
        super().__init__(lambda: open_transaction(None), **settings)
        self._open_transaction = open_transaction

    async def _insert_with_plugins(
        self,
        tx: CallerTransaction | None,
        jobs: Sequence[PreparedJob],
        all_plugins: Sequence[PluginLists],
        send: SendRows[T],
    ) -> T:
        async def send_in_savepoint(rows: list[InsertRow]) -> T:
            with translate_insert_errors(connection, in_savepoint=True):
                return await send(connection, rows, self._find_queues_to_notify(rows))

        # Hooks and middleware run inside this transaction or savepoint. If a middleware awaits
        # something that needs an event loop, it gets a ConfigError. If this happens after
        # `do_inner`, the error rolls back the insert.
        async with self._open_transaction(tx) as connection:
            return await self._send_inside_hooks(jobs, all_plugins, send_in_savepoint)

    async def _send_rows_on_pool(
        self, rows: list[InsertRow], to_notify: QueuesToNotify, send: SendRows[T]
    ) -> T:
        with translate_insert_errors(None):
            async with AsyncExitStack() as pooled:
                context, connection = await self._acquire_pool_connection()
                pooled.push_async_exit(context)
                return await send(connection, rows, to_notify)
