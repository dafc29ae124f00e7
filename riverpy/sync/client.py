"""Client: a client for code that is not async, with the methods of `riverpy.Client`."""

from __future__ import annotations

from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast, overload

from riverpy._calls.executions import KEY_RETENTION_DEFAULT, KEY_WAIT_TIMEOUT_DEFAULT
from riverpy._calls.job_lists import PAGE_SIZE_DEFAULT
from riverpy._calls.job_page import JOB_LIMIT_DEFAULT
from riverpy._calls.queues import QUEUE_LIST_LIMIT_DEFAULT
from riverpy._client_arguments import check_client_arguments
from riverpy._without_loop import iterate_without_loop, run_without_loop
from riverpy.config import Config
from riverpy.errors import ConfigError
from riverpy.sync._calls import BlockingClientCoroutines
from riverpy.sync._choice import make_blocking_database
from riverpy.sync._waits import BlockingWaitMethods

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        Callable,
        Coroutine,
        Iterator,
        Mapping,
        Sequence,
    )
    from datetime import timedelta
    from types import TracebackType

    from riverpy._postgres.passwords import PasswordFunction
    from riverpy._postgres.sessions.protocols import BlockingTransaction, CallerTransaction
    from riverpy.client import Client as AsyncClient
    from riverpy.executions import Execution
    from riverpy.insert_opts import InsertManyParams, InsertOpts, InsertResult
    from riverpy.job import JobArgs, JobRow, RawArgs
    from riverpy.job_list import JobChanges, JobFilters, JobOrder, JobPage
    from riverpy.queue import Queue
    from riverpy.sync._protocols import Database
    from riverpy.worker import Workers

ResultT = TypeVar("ResultT")
TransactionT = TypeVar("TransactionT", bound="BlockingTransaction")


def _cast_tx(tx: BlockingTransaction | None) -> CallerTransaction | None:
    """Return `tx` unchanged, but with another type for the type checker. The called methods check
    the real type."""
    return cast("CallerTransaction | None", tx)


class Client(BlockingWaitMethods):
    """A River client for code that is not async. It inserts jobs, and changes jobs and queues, but
    does not work jobs: `riverpy worker` does.

    The methods have the same names, arguments and results as those of `riverpy.Client`, whose
    documentation applies too. Each call blocks the thread until the server has answered. Threads
    may share a client.

    Most calls take `tx=`: your connection or session, in a transaction. The effect of such a call
    is visible to other sessions when you commit the transaction. A call without `tx` runs in its
    own transaction on the client's database.
    """

    def __init__(
        self,
        database: Database | None = None,
        *,
        workers: Workers | None = None,
        config: Config | None = None,
        password: PasswordFunction | None = None,
    ) -> None:
        """Create a client. It opens no connection.

        Args:
            database: an `Engine` of SQLAlchemy, a `ConnectionPool` or `Connection` of psycopg, or a
                `postgres://` URL. With a URL, the client opens up to `Config.pool_size` connections
                with psycopg, the first one in the first call. `close`, or the end of `with
                client:`, closes them. The client never closes an engine, pool or connection of the
                caller. None: only calls with `tx=` work.
            workers: the workers by kind. A client with workers refuses to insert jobs of other
                kinds, except if `Config.skip_unknown_job_check` is True.
            config: the settings. A blocking client uses only the settings for inserts, `schema`,
                `id` and `name`, and with a URL also `pool_size` and `pooler`.
            password: a function, async or not, that returns the password. The client calls it in a
                thread for each new connection. If this function is given, the URL must not have a
                password.

        Raises:
            ConfigError: an argument is not allowed, or psycopg is not installed.
        """
        check_client_arguments(workers, config)
        self._config = config or Config()
        self._database = make_blocking_database(database, self._config, password)
        self._calls: BlockingClientCoroutines | AsyncClient = BlockingClientCoroutines(
            self._database, self._config, workers
        )

    @property
    def config(self) -> Config:
        """The settings of the client."""
        return self._config

    # -- opening and closing

    def open(self) -> None:
        """Open a connection if the client was created with a URL, so that errors appear now and not
        in the first call. Otherwise do nothing. A closed client can be opened again.

        Raises:
            ConfigError: no database was given, or its URL leads to a pooler and `Config.pooler` is
                not set.
            ClientStateError: `open` was called already in this process.
            OSError: the database cannot be reached, or refuses the connection.
        """
        if self._database is None:
            raise ConfigError('give the client a database: riverpy.sync.Client("postgres://…")')
        self._database.open()

    def close(self) -> None:
        """Close the connections if the client was created with a URL. Otherwise do nothing.

        Calls that already run continue, and their connections are closed when they end. New calls
        without `tx` raise ClientStateError."""
        if self._database is not None:
            self._database.close()

    def __enter__(self) -> Self:
        """Open the client, as `open` does."""
        self.open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Close the client, as `close` does."""
        self.close()

    def _run_coroutine(
        self, call: Coroutine[Any, Any, ResultT], tx: BlockingTransaction | None
    ) -> ResultT:
        """Run a coroutine of `_calls` to its end, and return its result."""
        return run_without_loop(call)

    def _require_blocking_connection(self, tx: BlockingTransaction | None) -> None:
        """Raise ClientStateError if `run_once` would pass an async connection to its function."""

    def _iterate_results(
        self, found: AsyncGenerator[ResultT], tx: BlockingTransaction | None
    ) -> Iterator[ResultT]:
        """Return an iterator over the results of an async generator."""
        return iterate_without_loop(found)

    # -- inserting

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
            tx: your connection or session, in a transaction. The job is visible to workers when you
                commit. Default: a transaction on the client's database.

        Raises:
            InsertError: the job is not allowed; nothing was sent.
            ConfigError: a hook or middleware awaits something that needs an event loop. Nothing was
                stored.
            TransactionError: `tx` is closed, aborted or not in a transaction.
            TypeError: `tx` has a type that riverpy does not know, or is async.
            SchemaMissingError: the database has no River tables.
            ClientStateError: there is no `tx`, and the client has no database or is closed.
        """
        return self._run_coroutine(self._calls.insert(args, opts, tx=_cast_tx(tx)), tx)

    def insert_many(
        self, params: Sequence[InsertManyParams], *, tx: BlockingTransaction | None = None
    ) -> list[InsertResult]:
        """Insert jobs in one statement. If the call raises an error, no job is inserted. Returns
        the results in the order of `params`.

        Raises:
            InsertError: `params` is empty, or a job is not allowed. Nothing was sent.
            RiverError, TypeError: as `insert`.
        """
        return self._run_coroutine(self._calls.insert_many(params, tx=_cast_tx(tx)), tx)

    def insert_many_fast(
        self, params: Sequence[InsertManyParams], *, tx: BlockingTransaction | None = None
    ) -> int:
        """Insert jobs with COPY, which is the fastest way. If the call raises an error, no job is
        inserted. Returns the number of inserted jobs.

        Raises:
            UniqueConflictError: a job with the same unique key exists. No job was inserted, and
                `tx` stays usable.
            InsertError: as `insert_many`; or riverpy cannot use COPY on this kind of connection.
            RiverError, TypeError: as `insert`.
        """
        return self._run_coroutine(self._calls.insert_many_fast(params, tx=_cast_tx(tx)), tx)

    # -- one job

    def job_get(self, job_id: int, *, tx: BlockingTransaction | None = None) -> JobRow:
        """Return one job.

        Raises:
            ConfigError: the id is not a 64-bit integer.
            NotFoundError: there is no job with this id.
            JobDamagedError: the server cannot read the job.
        """
        return self._run_coroutine(self._calls.job_get(job_id, tx=_cast_tx(tx)), tx)

    def job_cancel(self, job_id: int, *, tx: BlockingTransaction | None = None) -> JobRow:
        """Cancel a job, as `riverpy.Client.job_cancel` does. Returns the job.

        Raises:
            ConfigError, NotFoundError, JobDamagedError: as `job_get`.
        """
        return self._run_coroutine(self._calls.job_cancel(job_id, tx=_cast_tx(tx)), tx)

    def job_retry(self, job_id: int, *, tx: BlockingTransaction | None = None) -> JobRow:
        """Make a job available now, as `riverpy.Client.job_retry` does. Returns the job.

        Raises:
            ConfigError, NotFoundError, JobDamagedError: as `job_get`.
            UniqueConflictError: another job has the same unique key now.
        """
        return self._run_coroutine(self._calls.job_retry(job_id, tx=_cast_tx(tx)), tx)

    def job_update(
        self, job_id: int, *, output: object, tx: BlockingTransaction | None = None
    ) -> JobRow:
        """Set the output of a job, as `riverpy.Client.job_update` does. Returns the job.

        Raises:
            ArgsError: the output cannot be encoded as JSON, or is larger than 32 MiB as JSON.
            ConfigError, NotFoundError, JobDamagedError: as `job_get`.
        """
        return self._run_coroutine(
            self._calls.job_update(job_id, output=output, tx=_cast_tx(tx)), tx
        )

    def job_delete(self, job_id: int, *, tx: BlockingTransaction | None = None) -> JobRow:
        """Delete a job. Returns the deleted job.

        Raises:
            JobRunningError: the job is running. Nothing was changed.
            ConfigError, NotFoundError, JobDamagedError: as `job_get`.
        """
        return self._run_coroutine(self._calls.job_delete(job_id, tx=_cast_tx(tx)), tx)

    # -- many jobs

    def job_list(
        self,
        *,
        order_by: JobOrder = "id",
        descending: bool = False,
        limit: int = JOB_LIMIT_DEFAULT,
        after: str | JobRow | None = None,
        tx: BlockingTransaction | None = None,
        **filters: Unpack[JobFilters],
    ) -> JobPage:
        """Return one page of the jobs that match all filters, as `riverpy.Client.job_list` does.

        Raises:
            ConfigError: a filter, the order, the limit or the cursor is not allowed.
            JobDamagedError: there is a filter on metadata or errors, and the server cannot read one
                of the jobs that it must compare with this filter.
        """
        call = self._calls.job_list(
            order_by=order_by,
            descending=descending,
            limit=limit,
            after=after,
            tx=_cast_tx(tx),
            **filters,
        )
        return self._run_coroutine(call, tx)

    def jobs(
        self,
        *,
        order_by: JobOrder = "id",
        descending: bool = False,
        page_size: int = PAGE_SIZE_DEFAULT,
        after: str | JobRow | None = None,
        tx: BlockingTransaction | None = None,
        **filters: Unpack[JobFilters],
    ) -> Iterator[JobRow]:
        """Iterate over all jobs that match all filters, as `riverpy.Client.jobs` does.

        Raises:
            ConfigError: as `job_list`. This call raises it, before the iteration.
            JobDamagedError: the server cannot read some of the jobs. The iteration raises it after
                the last job that can be read.
        """
        found = self._calls.jobs(
            order_by=order_by,
            descending=descending,
            page_size=page_size,
            after=after,
            tx=_cast_tx(tx),
            **filters,
        )
        return self._iterate_results(found, tx)

    def job_count(
        self, *, tx: BlockingTransaction | None = None, **filters: Unpack[JobFilters]
    ) -> int:
        """Return the number of jobs that match all filters. The server reads all these jobs, so
        this can be slow.

        Raises:
            ConfigError: a filter is not allowed.
        """
        return self._run_coroutine(self._calls.job_count(tx=_cast_tx(tx), **filters), tx)

    def job_delete_many(
        self,
        *,
        limit: int = JOB_LIMIT_DEFAULT,
        unsafe_all: bool = False,
        tx: BlockingTransaction | None = None,
        **filters: Unpack[JobFilters],
    ) -> list[JobRow]:
        """Delete up to `limit` jobs that match all filters, the lowest ids first, as
        `riverpy.Client.job_delete_many` does. Returns the deleted jobs.

        Raises:
            ConfigError: a filter or the limit is not allowed; or no filter is given, and
                `unsafe_all` is False.
            JobDamagedError: the server cannot read one of the jobs. Nothing was changed.
        """
        call = self._calls.job_delete_many(
            limit=limit, unsafe_all=unsafe_all, tx=_cast_tx(tx), **filters
        )
        return self._run_coroutine(call, tx)

    def job_retry_many(
        self,
        *,
        limit: int | None = None,
        on_progress: Callable[[JobChanges], object] | None = None,
        tx: BlockingTransaction | None = None,
        **filters: Unpack[JobFilters],
    ) -> JobChanges:
        """Make all jobs that match all filters available now, as `riverpy.Client.job_retry_many`
        does.

        Raises:
            ConfigError: no filter is given, or a filter, the limit or `on_progress` is not allowed.
        """
        call = self._calls.job_retry_many(
            limit=limit, on_progress=on_progress, tx=_cast_tx(tx), **filters
        )
        return self._run_coroutine(call, tx)

    def job_cancel_many(
        self,
        *,
        limit: int | None = None,
        on_progress: Callable[[JobChanges], object] | None = None,
        tx: BlockingTransaction | None = None,
        **filters: Unpack[JobFilters],
    ) -> JobChanges:
        """Cancel all jobs that match all filters, as `riverpy.Client.job_cancel_many` does.

        Raises:
            ConfigError: as `job_retry_many`.
        """
        call = self._calls.job_cancel_many(
            limit=limit, on_progress=on_progress, tx=_cast_tx(tx), **filters
        )
        return self._run_coroutine(call, tx)

    def job_delete_in_batches(
        self,
        *,
        limit: int | None = None,
        on_progress: Callable[[JobChanges], object] | None = None,
        tx: BlockingTransaction | None = None,
        **filters: Unpack[JobFilters],
    ) -> JobChanges:
        """Delete all jobs that match all filters, as `riverpy.Client.job_delete_in_batches` does.

        Raises:
            ConfigError: as `job_retry_many`.
        """
        call = self._calls.job_delete_in_batches(
            limit=limit, on_progress=on_progress, tx=_cast_tx(tx), **filters
        )
        return self._run_coroutine(call, tx)

    # -- queues, periodic jobs and the leader

    def queue_get(self, name: str, *, tx: BlockingTransaction | None = None) -> Queue:
        """Return one queue.

        Raises:
            NotFoundError: no client has worked a queue with this name.
        """
        return self._run_coroutine(self._calls.queue_get(name, tx=_cast_tx(tx)), tx)

    def queue_list(
        self, *, limit: int = QUEUE_LIST_LIMIT_DEFAULT, tx: BlockingTransaction | None = None
    ) -> list[Queue]:
        """Return the queues, sorted by name, as `riverpy.Client.queue_list` does.

        Raises:
            ConfigError: `limit` is below 1.
        """
        return self._run_coroutine(self._calls.queue_list(limit=limit, tx=_cast_tx(tx)), tx)

    def queue_lags(
        self, names: Sequence[str], *, tx: BlockingTransaction | None = None
    ) -> dict[str, timedelta]:
        """Return, for each queue in `names`, how long its oldest due job has been waiting. Zero: no
        job waits.

        Raises:
            ConfigError: a queue name is not allowed.
        """
        return self._run_coroutine(self._calls.queue_lags(names, tx=_cast_tx(tx)), tx)

    def queue_update(
        self, name: str, *, metadata: Mapping[str, object], tx: BlockingTransaction | None = None
    ) -> Queue:
        """Replace the metadata of a queue, and notify all clients. Returns the queue.

        Raises:
            ArgsError: the metadata is not a JSON object, or does not fit into a notification of
                7,999 bytes.
            NotFoundError: no client has worked a queue with this name.
        """
        return self._run_coroutine(
            self._calls.queue_update(name, metadata=metadata, tx=_cast_tx(tx)), tx
        )

    def queue_pause(self, name: str, *, tx: BlockingTransaction | None = None) -> None:
        """Stop all clients from claiming jobs of a queue, or of all queues if the name is `*`.

        Raises:
            NotFoundError: no client has worked a queue with this name.
        """
        self._run_coroutine(self._calls.queue_pause(name, tx=_cast_tx(tx)), tx)

    def queue_resume(self, name: str, *, tx: BlockingTransaction | None = None) -> None:
        """Let all clients claim jobs of a paused queue again, or of all queues if the name is `*`.

        Raises:
            NotFoundError: no client has worked a queue with this name.
        """
        self._run_coroutine(self._calls.queue_resume(name, tx=_cast_tx(tx)), tx)

    def periodic_pause(self, job_id: str, *, tx: BlockingTransaction | None = None) -> None:
        """Pause a periodic job: the leader inserts no jobs for it until `periodic_resume` is
        called.

        Raises:
            NotFoundError: no leader has registered a periodic job with this id.
            SchemaMissingError: migration 2 of riverpy's own tables is not applied.
        """
        self._run_coroutine(self._calls.periodic_pause(job_id, tx=_cast_tx(tx)), tx)

    def periodic_resume(self, job_id: str, *, tx: BlockingTransaction | None = None) -> None:
        """Resume a paused periodic job. No jobs are inserted for runs that were due during the
        pause.

        Raises:
            NotFoundError, SchemaMissingError: as `periodic_pause`.
        """
        self._run_coroutine(self._calls.periodic_resume(job_id, tx=_cast_tx(tx)), tx)

    def periodic_run(self, job_id: str, *, tx: BlockingTransaction | None = None) -> None:
        """Request that the leader inserts one job of a periodic job now, in addition to the
        schedule.

        Raises:
            NotFoundError, SchemaMissingError: as `periodic_pause`.
        """
        self._run_coroutine(self._calls.periodic_run(job_id, tx=_cast_tx(tx)), tx)

    def request_resign(self, *, tx: BlockingTransaction | None = None) -> None:
        """Request that the leader of this client's leader domain resigns, so that another client
        can become leader, as `riverpy.Client.request_resign` does."""
        self._run_coroutine(self._calls.request_resign(tx=_cast_tx(tx)), tx)

    # -- functions that run once for each key

    @overload
    def run_once(
        self,
        key: str,
        fn: Callable[[Any], ResultT],
        *,
        kept: timedelta | None = ...,
        wait: timedelta = ...,
        tx: None = None,
    ) -> Execution[ResultT]: ...

    @overload
    def run_once(
        self,
        key: str,
        fn: Callable[[TransactionT], ResultT],
        *,
        kept: timedelta | None = ...,
        wait: timedelta = ...,
        tx: TransactionT,
    ) -> Execution[ResultT]: ...

    def run_once(
        self,
        key: str,
        fn: Callable[[Any], ResultT],
        *,
        kept: timedelta | None = KEY_RETENTION_DEFAULT,
        wait: timedelta = KEY_WAIT_TIMEOUT_DEFAULT,
        tx: BlockingTransaction | None = None,
    ) -> Execution[ResultT]:
        """Call a function that writes to the database, but only once for each key, as
        `riverpy.Client.run_once` does.

        Args:
            key: identifies what the function does: 1 to 255 characters.
            fn: a plain function. It receives `tx` or, without `tx`, the connection of a new
                transaction: a `Connection` of SQLAlchemy or psycopg. It must write only with this
                connection.
            kept: how long the key is stored. Default 30 days. None: forever.
            wait: how long to wait while another call with this key runs. Default 10 seconds.
            tx: as for `insert`.

        Raises:
            ConfigError: the key or a duration is not allowed, or `fn` does not take one argument,
                or is async.
            SchemaMissingError: the migrations of riverpy's own tables are not applied.
            TransactionError: `fn` has ended the transaction, or `tx` is not usable.
            ClientStateError: there is no `tx`, and the client has no database, is closed, or comes
                from `current_client`.
            Exception: the error that `fn` raised, or a database error.
        """
        self._require_blocking_connection(tx)
        if iscoroutinefunction(fn):
            raise ConfigError("fn must be a plain function; riverpy.Client takes async ones")

        async def run_function(connection: Any) -> ResultT:
            return fn(connection)

        function: Any = run_function if callable(fn) else fn
        call = self._calls.run_once(key, function, kept=kept, wait=wait, tx=cast("Any", tx))
        return cast("Execution[ResultT]", self._run_coroutine(call, tx))
