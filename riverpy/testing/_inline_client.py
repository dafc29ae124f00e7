"""InlineClient: works jobs in the transaction of a test, and is the client that these jobs use."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, NoReturn

import anyio

from riverpy._calls.base import open_savepoint
from riverpy._client_arguments import make_insert_settings
from riverpy._clock import Clock
from riverpy._insert.inserter import Inserter
from riverpy._insert.recorder import without_recorder
from riverpy._plugins import PluginLists
from riverpy._postgres.transactions import validate_and_adapt_tx
from riverpy.client import Client
from riverpy.context import running_blocking_client
from riverpy.errors import ClientStateError, UniqueConflictError
from riverpy.testing._blocking_client import BlockingTestClient
from riverpy.testing._inline_run import InlineJobRunner
from riverpy.testing._session_turns import hold_shared_turn
from riverpy.testing._transaction_guard import JobSavepoint
from riverpy.worker import Workers

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from riverpy._calls.base import TransactionIsolation
    from riverpy._postgres.driver import Pool, Transaction
    from riverpy._postgres.sessions.protocols import CallerTransaction
    from riverpy.config import Config
    from riverpy.insert_opts import (
        InsertManyParams,
        InsertOpts,
        InsertResult,
        JobInsertParams,
    )
    from riverpy.job import JobArgs, JobRow, RawArgs
    from riverpy.middleware import InsertInner
    from riverpy.periodic import PeriodicJob
    from riverpy.testing._inline_connection import TransactionOpener
    from riverpy.testing._test_transaction import TestTransaction
    from riverpy.testing.work_result import WorkResult


class _UniqueKeyRemovalMiddleware:
    """A middleware that inserts all jobs without their unique keys."""

    async def insert_many(
        self, params: Sequence[JobInsertParams], do_inner: InsertInner, /
    ) -> None:
        """Remove the unique key of each job."""
        for job in params:
            job.unique_key = None
        await do_inner()


class InlineClient(Client):
    """A client whose calls without `tx` run in the transaction of a test. It opens no connection,
    and works single jobs with `work_job`."""

    def __init__(
        self,
        transaction: TestTransaction,
        workers: Workers | None,
        config: Config | None,
        *,
        periodic_jobs: Iterable[PeriodicJob] = (),
    ) -> None:
        super().__init__(workers=workers, config=config, periodic_jobs=periodic_jobs)
        self._tx, self._test_transaction = transaction.tx, transaction
        self._lock = _ReentrantTaskLock()

    @asynccontextmanager
    async def _transaction(
        self,
        tx: CallerTransaction | None,
        *,
        isolation: TransactionIsolation | None = "read_committed",
    ) -> AsyncGenerator[Transaction]:
        if tx is not None:
            async with super()._transaction(tx, isolation=isolation) as connection:
                yield connection
            return
        async with hold_shared_turn(), self._lock.hold(), open_savepoint(self._tx) as connection:
            yield connection

    @asynccontextmanager
    async def _open_test_transaction(
        self, *, isolation: TransactionIsolation | None = "read_committed"
    ) -> AsyncGenerator[Transaction]:
        """Open a savepoint for statements of riverpy's testing tools.

        With the isolation `autocommit`, no savepoint is opened. Use this only for single statements
        that do not fail, because a failed statement aborts the test's transaction."""
        if isolation != "autocommit":
            async with self._transaction(None) as connection:
                yield connection
            return
        async with hold_shared_turn(), self._lock.hold():
            yield validate_and_adapt_tx(self._tx)

    def _get_open_pool(self) -> Pool:
        _refuse_connection()

    async def work_job(self, job_id: int) -> WorkResult:
        """Work one waiting job in the test's transaction, as `InlineJobRunner.work_job` does."""
        return await _work_job(self.make_inline_job_runner(), job_id)

    def make_inline_job_runner(self) -> InlineJobRunner:
        """Return an object that works a job in the transaction of the test."""
        parts = self._make_client_parts(None, self._workers or Workers())
        guard, transaction = JobSavepoint(self._tx), self._test_transaction
        blocking_client: BlockingTestClient | None = None
        if transaction.blocking_tx is not None:
            blocking_client = BlockingTestClient(
                transaction.blocking_tx, self._workers, self._config
            )
        token = running_blocking_client.set(blocking_client)
        try:  # InlineJobRunner copies the context variables now. Its jobs run with this copy
            return InlineJobRunner(
                self, parts, self._open_test_transaction, guard, transaction.thread
            )
        finally:
            running_blocking_client.reset(token)

    @staticmethod
    def make_inline_job_runner_on_pool(client: Client) -> InlineJobRunner:
        """Return an object that works a job with connections of an open client's pool."""
        parts = client._make_client_parts(None, client.workers or Workers())  # noqa: SLF001 (own class)
        return InlineJobRunner(client, parts, InlineClient.get_transaction_opener(client), None)

    @staticmethod
    def get_inserter(client: Client) -> Inserter:
        """Return the object that checks and inserts jobs for a client."""
        return client._inserter  # noqa: SLF001 (own class)

    @staticmethod
    def get_transaction_opener(client: Client) -> TransactionOpener:
        """Return a function that opens transactions on the client's pool. If the client is an
        `InlineClient`, the function opens savepoints in the test's transaction instead."""
        if isinstance(client, InlineClient):
            return client._open_test_transaction  # noqa: SLF001 (own class)
        return partial(client._transaction, None)  # noqa: SLF001 (own class)

    async def insert_test_job(
        self, args: JobArgs | RawArgs, opts: InsertOpts | None, *, is_unique: bool
    ) -> JobRow:
        """Insert a job that a test is going to work. If `is_unique` is False, the job is inserted
        without its unique key.

        Raises:
            UniqueConflictError: another job has the same unique key.
        """
        inserter = self._inserter if is_unique else self._inserter_without_unique_keys
        async with self._transaction(None) as connection:
            # Store this job in the database, even inside `recording()`. The recording must contain
            # only the jobs that this job inserts.
            with without_recorder():
                inserted = await inserter.insert(args, opts, tx=connection)
        if inserted.unique_skipped_as_duplicate:
            raise UniqueConflictError(
                f"the job was not inserted, because job {inserted.job.id} has the same unique key"
            )
        return inserted.job

    @cached_property
    def _inserter_without_unique_keys(self) -> Inserter:
        config = self._config
        return Inserter(
            _refuse_connection,
            schema=config.schema,
            insert_settings=make_insert_settings(config, self._workers),
            plugins=PluginLists(
                config.plugins, config.hooks, [*config.middleware, _UniqueKeyRemovalMiddleware()]
            ),
            clock=Clock(),
        )

    async def insert(
        self,
        args: JobArgs | RawArgs,
        opts: InsertOpts | None = None,
        *,
        tx: CallerTransaction | None = None,
    ) -> InsertResult:
        """Insert a job, as `Client.insert` does. Without `tx`, insert in the test's transaction."""
        async with self._transaction(tx) as connection:
            return await super().insert(args, opts, tx=connection)

    async def insert_many(
        self, params: Sequence[InsertManyParams], *, tx: CallerTransaction | None = None
    ) -> list[InsertResult]:
        """Insert jobs, as `Client.insert_many` does. Without `tx`, insert in the test's
        transaction."""
        async with self._transaction(tx) as connection:
            return await super().insert_many(params, tx=connection)

    async def insert_many_fast(
        self, params: Sequence[InsertManyParams], *, tx: CallerTransaction | None = None
    ) -> int:
        """Insert jobs, as `Client.insert_many_fast` does. Without `tx`, insert in the test's
        transaction."""
        async with self._transaction(tx) as connection:
            return await super().insert_many_fast(params, tx=connection)


async def work_job_on_pool(client: Client, job_id: int) -> WorkResult:
    """Work one waiting job with connections of an open client's pool."""
    return await _work_job(InlineClient.make_inline_job_runner_on_pool(client), job_id)


async def _work_job(run: InlineJobRunner, job_id: int) -> WorkResult:
    try:
        return await run.work_job(job_id)
    finally:
        run.close()


def _refuse_connection() -> NoReturn:
    raise ClientStateError(
        "this call needs a connection of its own, and a job that a test works in its transaction "
        "has none: work this job with a running client, or replace the call in the test"
    )


class _ReentrantTaskLock:
    """A reentrant lock: the task that holds the lock can acquire it again."""

    def __init__(self) -> None:
        self._lock = anyio.Lock(fast_acquire=True)

    @asynccontextmanager
    async def hold(self) -> AsyncGenerator[None]:
        """Hold the lock in the `async with` block."""
        if self._lock.statistics().owner == anyio.get_current_task():
            yield
            return
        async with self._lock:
            yield
