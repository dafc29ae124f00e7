"""TestWorker: works single jobs in the transaction of a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, overload

from riverpy._client_arguments import check_client_arguments
from riverpy.testing._inline_client import InlineClient
from riverpy.testing._test_transaction import TestTransaction, run_in_transaction

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from riverpy._postgres.sessions.protocols import BlockingTransaction, CallerTransaction
    from riverpy.config import Config
    from riverpy.insert_opts import InsertOpts
    from riverpy.job import JobArgs, JobRow, RawArgs
    from riverpy.testing.work_result import WorkResult
    from riverpy.worker import Workers


class TestWorker:
    """Works single jobs in the transaction of a test, with the same hooks, middleware, timeouts and
    retries as a running client."""

    __test__: ClassVar[bool] = False  # pytest must not collect this class

    def __init__(self, workers: Workers, config: Config | None = None) -> None:
        """Create a test worker. It opens no connection.

        Args:
            workers: the workers by kind.
            config: the settings, as for a client: hooks, middleware, timeouts, retry policy, schema
                and so on. Default: `Config()`.

        Raises:
            ConfigError: an argument has the wrong type.
        """
        check_client_arguments(workers, config)
        self._workers, self._config = workers, config

    @overload
    def work(
        self,
        args: JobArgs | RawArgs,
        opts: InsertOpts | None = None,
        *,
        unique: bool = False,
        tx: BlockingTransaction,
    ) -> WorkResult: ...
    @overload
    def work(
        self,
        args: JobArgs | RawArgs,
        opts: InsertOpts | None = None,
        *,
        unique: bool = False,
        tx: CallerTransaction,
    ) -> Coroutine[object, None, WorkResult]: ...
    def work(
        self,
        args: JobArgs | RawArgs,
        opts: InsertOpts | None = None,
        *,
        unique: bool = False,
        tx: BlockingTransaction | CallerTransaction,
    ) -> WorkResult | Coroutine[object, None, WorkResult]:
        """Insert a job and work it at once, in your transaction. Returns the result of the attempt.

        With an async session, use `await test_worker.work(…)`. With a blocking session, call it
        without `await`. Then blocking jobs run in the thread of the caller, and async jobs in an
        event loop of another thread.

        Args:
            args: the args of the job.
            opts: the options of the insert. A job that is due later is worked at once too.
            unique: whether to use the unique options of the job. Default False: the job is inserted
                without a unique key.
            tx: your connection or session, in a transaction. Nothing is committed.

        Raises:
            InsertError, UnknownJobKindError: the job is not allowed.
            ClientStateError: the job is pending, or its code does not end after its timeout.
            UniqueConflictError: `unique` is True, and another job has the same unique key.
            TransactionError: `tx` is closed, aborted or not in a transaction, or the code of the
                job has ended or aborted it.
            SchemaMissingError: the database has no River tables.
        """

        async def work(transaction: TestTransaction) -> WorkResult:
            client = InlineClient(transaction, self._workers, self._config)
            job = await client.insert_test_job(args, opts, is_unique=unique)
            return await client.work_job(job.id)

        return run_in_transaction(tx, work)

    @overload
    def work_job(self, job: JobRow | int, *, tx: BlockingTransaction) -> WorkResult: ...
    @overload
    def work_job(
        self, job: JobRow | int, *, tx: CallerTransaction
    ) -> Coroutine[object, None, WorkResult]: ...
    def work_job(
        self, job: JobRow | int, *, tx: BlockingTransaction | CallerTransaction
    ) -> WorkResult | Coroutine[object, None, WorkResult]:
        """Work an existing job at once, in your transaction. Returns the result of the attempt.

        Args:
            job: the job, or its id. It must be available, retryable or scheduled. It need not be
                due.
            tx: as for `work`.

        Raises:
            ClientStateError: the job is pending, running or ended; or its code does not end
                after its timeout.
            NotFoundError: there is no such job.
            TransactionError: as `work`.
        """

        async def work(transaction: TestTransaction) -> WorkResult:
            client = InlineClient(transaction, self._workers, self._config)
            return await client.work_job(job if isinstance(job, int) else job.id)

        return run_in_transaction(tx, work)
