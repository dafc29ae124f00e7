"""Client: the calls of `riverpy.Client` for code that is not async."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from riverpy._client_arguments import check_client_arguments
from riverpy._without_loop import run_without_loop
from riverpy.config import Config
from riverpy.sync._calls import BlockingCalls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._postgres.sessions.protocols import BlockingTransaction, CallerTransaction
    from riverpy.insert_opts import InsertManyParams, InsertOpts, InsertResult
    from riverpy.job import JobArgs, RawArgs
    from riverpy.worker import Workers


def _give_tx(tx: BlockingTransaction | None) -> CallerTransaction | None:
    """Return the same object. The calls below take all kinds, and check which kind it is."""
    return cast("CallerTransaction | None", tx)


class Client:
    """A River client for code that is not async: it inserts jobs, and changes jobs and queues.
    `riverpy worker` works the jobs.

    Each call blocks the thread until the server has answered. Threads may share a client. The
    names, arguments and results of the methods are those of `riverpy.Client`.
    """

    def __init__(self, *, workers: Workers | None = None, config: Config | None = None) -> None:
        """Create a client.

        Args:
            workers: the workers by kind. A client with workers refuses to insert other kinds unless
                it is configured to accept them.
            config: the settings. Only those for inserts apply, and `schema`, `id` and `name`.

        Raises:
            ConfigError: an argument is not allowed.
        """
        check_client_arguments(workers, config)
        self._config = config or Config()
        self._calls = BlockingCalls(self._config, workers)

    @property
    def config(self) -> Config:
        """The settings."""
        return self._config

    def insert(
        self,
        args: JobArgs | RawArgs,
        opts: InsertOpts | None = None,
        *,
        tx: BlockingTransaction | None = None,
    ) -> InsertResult:
        """Insert a job.

        Args:
            args: the args of the job.
            opts: the options of this insert. They override the options of the args class.
            tx: your connection or session, in a transaction. The job exists when the transaction
                commits.

        Raises:
            InsertError: the job is not allowed; nothing was sent.
            ConfigError: a hook or middleware waits. Nothing was stored.
            TransactionError: `tx` is closed, aborted or not in a transaction.
            TypeError: `tx` has a type that riverpy does not know, or is async.
            SchemaMissingError: the database has no River tables.
        """
        return run_without_loop(self._calls.inserter.insert(args, opts, tx=_give_tx(tx)))

    def insert_many(
        self, params: Sequence[InsertManyParams], *, tx: BlockingTransaction | None = None
    ) -> list[InsertResult]:
        """Insert jobs in one statement, all or none. The results are in the order of the jobs.

        Raises:
            InsertError: there is no job, or a job is not allowed; nothing was sent.
            ConfigError, TransactionError, TypeError, SchemaMissingError: as `insert`.
        """
        return run_without_loop(self._calls.inserter.insert_many(params, tx=_give_tx(tx)))

    def insert_many_fast(
        self, params: Sequence[InsertManyParams], *, tx: BlockingTransaction | None = None
    ) -> int:
        """Insert jobs by COPY, all or none. This is the fastest way. Returns the number of jobs.

        Raises:
            UniqueConflictError: a job with the same unique key exists. No job was inserted, and
                `tx` stays usable.
            InsertError: as `insert_many`. Or `tx` is a session of SQLAlchemy, which has no COPY.
            ConfigError, TransactionError, TypeError, SchemaMissingError: as `insert`.
        """
        return run_without_loop(self._calls.inserter.insert_many_fast(params, tx=_give_tx(tx)))
