"""Inserter: inserts the jobs of one client, on its pool or in a caller's transaction."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar, cast

import anyio

from riverpy._clock import Backoff
from riverpy._error_text import format_error_with_type
from riverpy._insert.errors import translate_insert_errors
from riverpy._insert.insert_backlog import STATEMENT_BYTES_MAX, count_row_bytes
from riverpy._insert.notify_limiter import NotifyLimiter
from riverpy._insert.recorder import get_recorder
from riverpy._insert.replacement import merge_replacing_row
from riverpy._insert.retries import (
    ACQUIRE_CONNECTION_TIMEOUT,
    CONNECT_RETRY_DELAY_MAX,
    CONNECT_RETRY_DELAY_MIN,
    ROLLBACK_RETRIES_MAX,
    ROLLBACK_RETRY_DELAY_MAX,
    ROLLBACK_RETRY_DELAY_MIN,
    is_database_unavailable,
    is_rolled_back_for_conflict,
)
from riverpy._insert.row import (
    InsertSettings,
    PreparedJob,
    RowTemplates,
    make_insert_params,
    make_row_after_hooks,
    prepare_row,
    prepare_rows,
)
from riverpy._insert.shared_statement import SharedStatementSender
from riverpy._lifecycle import is_cancellation_of_current_task
from riverpy._log import ServerNotificationQueueLog
from riverpy._middleware_chain import run_middleware
from riverpy._plugins import plugin_name, read_class_plugins
from riverpy._postgres.connector import Connector
from riverpy._postgres.driver import DATABASE_ERRORS, is_notification_queue_full
from riverpy._postgres.inserts import (
    InsertRow,
    QueuesToNotify,
    job_insert,
    job_insert_with_copy,
    list_queues_with_due_jobs,
    notify_queues_of_inserts,
)
from riverpy._postgres.transactions import require_copy_support, savepoint, validate_and_adapt_tx
from riverpy._without_loop import refuse_wait_without_loop, sleep
from riverpy.errors import InsertError, TransactionError
from riverpy.insert_opts import InsertManyParams, InsertOpts, InsertResult
from riverpy.job import JobState, RawArgs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from riverpy._clock import Clock
    from riverpy._insert.recorder import InsertRecorder
    from riverpy._plugins import PluginLists
    from riverpy._postgres.driver import Connection, Pool, Transaction
    from riverpy._postgres.passwords import PasswordSource
    from riverpy._postgres.sessions.protocols import CallerTransaction
    from riverpy.config import Config
    from riverpy.job import JobArgs

T = TypeVar("T")
_get_class_plugins = lru_cache(maxsize=4096)(read_class_plugins)
Args: TypeAlias = "JobArgs | RawArgs"
SendRows: TypeAlias = "Callable[[Transaction, list[InsertRow], QueuesToNotify], Awaitable[T]]"
"""A function that inserts rows and notifies queues on a connection."""

INSERT_STATEMENT_BYTES_MAX = 900 * 1024 * 1024
"""The maximum size of the args and metadata in one statement, in bytes. PostgreSQL accepts messages
of up to 1 GiB."""
INSERT_STATEMENT_TIMEOUT = 600.0
"""The timeout of one statement in seconds. A shorter timeout of the pool takes precedence."""
NO_CONNECTION_ERROR_TEXT = (
    f"got no connection from the pool within {ACQUIRE_CONNECTION_TIMEOUT:g} s: increase "
    "Config(pool_size=…), find the code that keeps connections, or check that the database answers"
)
INSERT_HOOKS_TIMEOUT = 2.0
"""The timeout in seconds of the hooks and middleware of an insert, if riverpy itself has opened the
transaction. The timeout applies once before the insert statement, and again after it."""
SHARED_CALL_JOBS_MAX = 100
"""The maximum number of jobs in a call that shares its statement with other calls."""


def _iterate_checked_params(params: object) -> Iterator[InsertManyParams]:
    """Yield the jobs of a batch. Raise InsertError if the batch or one of its jobs has the wrong
    type."""
    if not isinstance(params, Iterable):
        raise InsertError(
            f"params must be a list of InsertManyParams, got {_describe_type(params)}"
        )
    for index, job in enumerate(cast("Iterable[object]", params)):
        if not isinstance(job, InsertManyParams):
            raise InsertError(
                f"params[{index}] must be InsertManyParams(args, opts), got {_describe_type(job)}"
            )
        yield job


def _describe_type(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _get_row_sort_key(row: InsertRow) -> str:
    """Return the sort key of a row. All batches send unique jobs in the same order, so that two
    batches cannot deadlock."""
    return row.unique_key or ""


def _make_duplicate_result(first: InsertResult, row: InsertRow) -> InsertResult:
    """Return the result of a row that is a duplicate of an earlier row of the same batch. `first`
    is the result of the first row with this unique key."""
    is_replaced = row.replace is not None and (
        first.is_replaced or not first.unique_skipped_as_duplicate
    )
    return InsertResult(first.job, True, is_replaced)


def _describe_hook(hook: object) -> str:
    return f"the hook {plugin_name(hook)}"


class SharedStatementSetup(NamedTuple):
    """The functions and settings of a client that its shared statements use. A shared statement
    inserts the jobs of several calls."""

    connect: Callable[[], Awaitable[Connection]]
    """Opens the connection that the client uses only for shared statements."""
    require_open: Callable[[], object]
    """Raises ClientStateError if the client is not open in this process and event loop."""
    trace_internal: bool


def make_shared_statement_setup(
    database: str | Pool | None,
    config: Config,
    password: PasswordSource | None,
    require_open: Callable[[], object],
) -> SharedStatementSetup | None:
    """Return the setup for shared statements (each inserts the jobs of several calls). Return None
    if `database` is not a URL. A caller's pool may run setup code each time a connection is
    acquired, so each call must acquire a connection from this pool."""
    if not isinstance(database, str):
        return None
    connector = Connector(database, config, password)
    return SharedStatementSetup(connector.connect_for_inserts, require_open, config.trace_internal)


class Inserter:
    """Inserts jobs for a client, on its pool or in a caller's transaction."""

    def __init__(
        self,
        acquire_from_pool: Callable[[], AbstractAsyncContextManager[Transaction]],
        *,
        schema: str | None,
        insert_settings: InsertSettings,
        plugins: PluginLists,
        clock: Clock,
        shared_insert_setup: SharedStatementSetup | None = None,
    ) -> None:
        """Create the inserter.

        `acquire_from_pool` provides a connection from the client's pool. `clock` gives the time for
        unique periods and for the rate limit of notifications. Without `shared_insert_setup`, calls
        do not share statements, and each call notifies its queues.
        """
        self._acquire_from_pool = acquire_from_pool
        self._schema = schema
        self._insert_settings = insert_settings
        self._client_plugins = plugins
        self._row_templates = RowTemplates()
        self._clock = clock
        self._notify_limiter = NotifyLimiter(clock)
        self._notification_queue_log = ServerNotificationQueueLog()
        self._shared_sender: SharedStatementSender | None = None
        if shared_insert_setup is not None:
            self._require_open = shared_insert_setup.require_open
            self._shared_sender = SharedStatementSender(
                shared_insert_setup.connect,
                schema=schema,
                notify_limiter=self._notify_limiter,
                notification_queue_log=self._notification_queue_log,
                should_notify=insert_settings.should_notify,
                trace_internal=shared_insert_setup.trace_internal,
            )

    async def close(self) -> None:
        """Send the jobs that still wait for a shared statement, for at most 5 seconds. Calls whose
        jobs were not sent by then fail with ClientStateError."""
        if self._shared_sender is not None:
            await self._shared_sender.close()

    async def insert(
        self, args: Args, opts: InsertOpts | None, *, tx: CallerTransaction | None
    ) -> InsertResult:
        """Insert one job in the same way as `insert_many`."""
        row = self._row_templates.make_row(args) if opts is None else None
        if row is None:
            (result,) = await self.insert_many([InsertManyParams(args, opts)], tx=tx)
        else:
            (result,) = await self._insert_rows(tx, [args], [row], self._send_insert_statement)
        return result

    async def insert_many(
        self, params: Sequence[InsertManyParams], *, tx: CallerTransaction | None
    ) -> list[InsertResult]:
        """Insert all jobs in one statement, or none. Several calls without `tx` may share a
        statement. The results are in the order of `params`.

        Jobs that are not unique get ids in the order of `params`. Unique jobs get ids in the order
        of their unique keys. If two jobs of the batch have the same unique key, the second is a
        duplicate of the first.

        Raises:
            InsertError, ConfigError: a job is not allowed. Nothing was sent.
            BaseException: the exception of a hook or middleware. Nothing was sent, unless
                middleware raised it after `do_inner`.
            TransactionError: `tx` is closed, aborted or not in a transaction.
            SchemaMissingError: River's tables are missing.
            TypeError: riverpy does not know the type of `tx`.
            asyncpg.PostgresError, OSError, TimeoutError: the database failed. Without `tx`, the
                jobs may be stored if the connection was lost.
        """
        return await self._insert_rows(tx, *self._make_rows(params), self._send_insert_statement)

    def prepare_periodic_job(
        self, args: Args, opts: InsertOpts, *, due_at: datetime
    ) -> PreparedJob:
        """Validate and encode one of the jobs that a periodic job inserts. This call does not
        insert the job. `due_at` is the time at which the job is due, by the server's clock. This
        time also determines the unique period.

        Raises:
            InsertError, ConfigError: the job is not allowed.
        """
        row = prepare_row(args, opts, settings=self._insert_settings, now=due_at)
        if row.state == JobState.AVAILABLE:
            row = row._replace(scheduled_at=due_at.astimezone(UTC).isoformat())
        return PreparedJob(args, row)

    async def insert_prepared_jobs(
        self, jobs: list[PreparedJob], *, tx: CallerTransaction | None
    ) -> list[InsertResult]:
        """Insert jobs from `prepare_periodic_job` in the transaction `tx`, which riverpy itself has
        opened, in the same way as `insert_many`.

        Raises:
            InsertError: a job is not allowed, a hook or middleware failed, or the hooks and
                middleware exceeded `INSERT_HOOKS_TIMEOUT`.
        """
        args, rows = zip(*jobs, strict=True)
        is_sending = False

        async def send(
            connection: Transaction, rows: list[InsertRow], to_notify: QueuesToNotify
        ) -> list[InsertResult]:
            nonlocal is_sending
            is_sending, scope.deadline = True, math.inf
            results = await self._send_insert_statement(connection, rows, to_notify)
            is_sending, scope.deadline = False, anyio.current_time() + INSERT_HOOKS_TIMEOUT
            return results

        with anyio.move_on_after(INSERT_HOOKS_TIMEOUT) as scope:
            try:
                return await self._insert_rows(tx, args, list(rows), send)
            except (InsertError, TransactionError, GeneratorExit):
                raise
            except BaseException as error:  # a SystemExit of a hook must not stop maintenance
                if is_cancellation_of_current_task(error) or (
                    is_sending and isinstance(error, DATABASE_ERRORS)
                ):
                    raise
                source = "the insert" if is_sending else "a hook or middleware of inserts"
                raise InsertError(f"{source} raised {format_error_with_type(error)}") from error
        raise InsertError(
            f"hooks and middleware of inserts took longer than {INSERT_HOOKS_TIMEOUT:g} s while a "
            "transaction was open: make them faster"
        )

    async def insert_many_fast(
        self, params: Sequence[InsertManyParams], *, tx: CallerTransaction | None
    ) -> int:
        """Insert all jobs with COPY, or none. Return the number of jobs.

        Raises:
            UniqueConflictError: a job with the same unique key exists, or two jobs of the batch
                have the same unique key. `tx` stays usable.
            Exception: the same errors as `insert_many`.
        """
        args, rows = self._make_rows(params)
        if any(row.replace is not None for row in rows):
            raise InsertError("insert_many_fast cannot replace jobs: use insert_many")
        return await self._insert_rows(tx, args, rows, self._send_copy_statement)

    def _make_rows(self, params: Sequence[InsertManyParams]) -> tuple[list[Args], list[InsertRow]]:
        now = self._clock.now()
        jobs = list(_iterate_checked_params(params))
        if not jobs:
            raise InsertError("there is nothing to insert: pass at least one job")
        rows = prepare_rows(
            jobs, settings=self._insert_settings, now=now, templates=self._row_templates
        )
        return [job.args for job in jobs], rows

    async def _insert_rows(
        self,
        tx: CallerTransaction | None,
        args: Sequence[Args],
        rows: list[InsertRow],
        send: SendRows[T],
    ) -> T:
        all_plugins = [
            self._client_plugins,
            *map(_get_class_plugins, dict.fromkeys(map(type, args))),
        ]
        recorder = get_recorder()
        if recorder is not None:
            jobs = [PreparedJob(*job) for job in zip(args, rows, strict=True)]
            return await self._send_inside_hooks(
                jobs, all_plugins, partial(self._record_rows, recorder, send)
            )
        if not any(plugins.has_insert_plugins for plugins in all_plugins):
            return await self._send_rows(tx, rows, send)
        jobs = [PreparedJob(*job) for job in zip(args, rows, strict=True)]
        return await self._insert_with_plugins(tx, jobs, all_plugins, send)

    async def _record_rows(
        self, recorder: InsertRecorder, send: SendRows[T], rows: list[InsertRow]
    ) -> T:
        """Pass rows to a test's recorder instead of the database. Return the same type of result as
        `send`."""
        is_copy = send == self._send_copy_statement
        results = recorder.record_rows(rows, now=self._clock.now(), refuses_duplicates=is_copy)
        found: object = len(results) if is_copy else results
        return cast("T", found)

    async def _insert_with_plugins(
        self,
        tx: CallerTransaction | None,
        jobs: Sequence[PreparedJob],
        all_plugins: Sequence[PluginLists],
        send: SendRows[T],
    ) -> T:
        return await self._send_inside_hooks(
            jobs, all_plugins, lambda rows: self._send_rows(tx, rows, send)
        )

    async def _send_inside_hooks(
        self,
        jobs: Sequence[PreparedJob],
        all_plugins: Sequence[PluginLists],
        send: Callable[[list[InsertRow]], Awaitable[T]],
    ) -> T:
        """Run `send` inside the hooks and middleware of these jobs. Return the result of `send`.

        The order is: the client's middleware, the middleware of each args class in the order of the
        jobs, the `insert_begin` hooks of each job (the client's hooks first), and `send`.
        """
        params = tuple(make_insert_params(job) for job in jobs)
        sent: list[T] = []

        async def call_hooks_and_send() -> Sequence[InsertResult]:
            for job in params:
                for plugins in (self._client_plugins, _get_class_plugins(type(job.args))):
                    for hook in plugins.insert_begin_hooks:
                        call = hook.insert_begin(job)
                        await refuse_wait_without_loop(call, partial(_describe_hook, hook))
            rows = [
                make_row_after_hooks(job, changed, settings=self._insert_settings)
                for job, changed in zip(jobs, params, strict=True)
            ]
            sent.append(await send(rows))
            results: object = sent[0]
            return cast("list[InsertResult]", results) if isinstance(results, list) else []

        await run_middleware(
            [middleware for plugins in all_plugins for middleware in plugins.insert_middleware],
            lambda middleware, do_inner: middleware.insert_many(params, do_inner),
            call_hooks_and_send,
            may_suppress_errors=False,
        )
        return sent[0]

    async def _send_rows(
        self, tx: CallerTransaction | None, rows: list[InsertRow], send: SendRows[T]
    ) -> T:
        if tx is None:
            if self._shared_sender is None or send != self._send_insert_statement:
                return await self._send_with_retries(rows, send)
            if len(rows) <= SHARED_CALL_JOBS_MAX and not any(row.unique_key for row in rows):
                size = count_row_bytes(rows)
                if size <= STATEMENT_BYTES_MAX:
                    self._require_open()
                    return cast("T", await self._shared_sender.insert(rows, size))
            return await self._send_with_retries(rows, send)
        connection = validate_and_adapt_tx(tx)
        with translate_insert_errors(connection):
            return await send(connection, rows, self._find_queues_to_notify(rows))

    def _find_queues_to_notify(self, rows: list[InsertRow]) -> QueuesToNotify:
        """Return the queues to notify for an insert in a caller's transaction."""
        if not self._insert_settings.should_notify:
            return QueuesToNotify([])
        return QueuesToNotify(list_queues_with_due_jobs(rows))

    # -- on the client's pool

    async def _send_with_retries(self, rows: list[InsertRow], send: SendRows[T]) -> T:
        backoff: Backoff | None = None
        should_notify = self._insert_settings.should_notify
        for retries in range(ROLLBACK_RETRIES_MAX + 1):
            try:
                return await self._send_and_notify(rows, send, should_notify=should_notify)
            except DATABASE_ERRORS as error:
                if should_notify and is_notification_queue_full(error):
                    should_notify = False
                    continue
                if not is_rolled_back_for_conflict(error) or retries == ROLLBACK_RETRIES_MAX:
                    raise
            backoff = backoff or Backoff(ROLLBACK_RETRY_DELAY_MIN, ROLLBACK_RETRY_DELAY_MAX)
            await sleep(backoff.next_delay())
        raise AssertionError("unreachable")

    async def _send_and_notify(
        self, rows: list[InsertRow], send: SendRows[T], *, should_notify: bool
    ) -> T:
        queues = list_queues_with_due_jobs(rows) if should_notify else []
        sender = self._shared_sender
        try:
            # The rate limiter needs `sender`, which sends the overdue notifications. Replaced jobs
            # may be in other queues, which the limiter does not know.
            if sender is None or any(row.replace is not None for row in rows):
                return await self._send_rows_on_pool(rows, QueuesToNotify(queues), send)
            return await self._send_with_rate_limit(rows, send, queues, sender)
        except DATABASE_ERRORS as error:
            if is_notification_queue_full(error):
                self._notification_queue_log.log_queue_state(is_full=True)
            raise

    async def _send_with_rate_limit(
        self,
        rows: list[InsertRow],
        send: SendRows[T],
        queues: list[str],
        sender: SharedStatementSender,
    ) -> T:
        """Send rows, and notify those of `queues` that no other statement has just notified.
        `sender` sends the overdue notifications (see `NotifyLimiter`)."""
        selection = self._notify_limiter.select_queues(queues)
        is_stored = False
        try:
            result = await self._send_rows_on_pool(rows, selection.queues_to_notify, send)
            is_stored = True
        finally:
            self._notify_limiter.record_statement_end(selection, is_stored=is_stored)
            sender.notify_overdue_queues_soon()
        return result

    async def _send_rows_on_pool(
        self, rows: list[InsertRow], to_notify: QueuesToNotify, send: SendRows[T]
    ) -> T:
        """Acquire a connection from the pool and call `send` with it. Both steps use one cancel
        scope, because a second scope would make a single insert noticeably slower."""
        pooled: AbstractAsyncContextManager[Transaction] | None = None
        reason = NO_CONNECTION_ERROR_TEXT
        try:
            with anyio.CancelScope() as scope, translate_insert_errors(None):
                scope.deadline = anyio.current_time() + ACQUIRE_CONNECTION_TIMEOUT
                pooled, connection = await self._acquire_pool_connection()
                reason = f"inserting jobs took longer than {INSERT_STATEMENT_TIMEOUT:g} s"
                scope.deadline = anyio.current_time() + INSERT_STATEMENT_TIMEOUT
                return await send(connection, rows, to_notify)
        finally:
            if pooled is not None:
                await pooled.__aexit__(None, None, None)
        raise TimeoutError(reason)

    async def _acquire_pool_connection(
        self,
    ) -> tuple[AbstractAsyncContextManager[Transaction], Transaction]:
        """Acquire a connection from the pool. Retry while the database is unavailable. Return the
        context manager that releases the connection, and the connection."""
        backoff: Backoff | None = None
        give_up_at = time.monotonic() + ACQUIRE_CONNECTION_TIMEOUT
        while True:
            pooled = self._acquire_from_pool()
            try:
                return pooled, await pooled.__aenter__()
            except DATABASE_ERRORS as error:
                if not is_database_unavailable(error) or time.monotonic() > give_up_at:
                    raise
            backoff = backoff or Backoff(CONNECT_RETRY_DELAY_MIN, CONNECT_RETRY_DELAY_MAX)
            await sleep(backoff.next_delay())

    # -- sending

    async def _send_insert_statement(
        self, connection: Transaction, rows: list[InsertRow], to_notify: QueuesToNotify
    ) -> list[InsertResult]:
        firsts: dict[str, int] = {}
        """The index of the first job with each unique key. Later jobs with the same key are not
        sent."""
        sent: list[int] = []
        sent_rows = rows
        for index, row in enumerate(rows):
            if row.unique_key is None or firsts.setdefault(row.unique_key, index) == index:
                sent.append(index)
            elif row.replace is not None:
                sent_rows = [*rows] if sent_rows is rows else sent_rows
                first = firsts[row.unique_key]
                sent_rows[first] = merge_replacing_row(sent_rows[first], row)
        if firsts:
            sent.sort(key=lambda index: _get_row_sort_key(rows[index]))
        size = count_row_bytes([sent_rows[index] for index in sent])
        if size > INSERT_STATEMENT_BYTES_MAX:
            raise InsertError(
                f"the batch has {size:,} bytes, but one statement can carry "
                f"{INSERT_STATEMENT_BYTES_MAX:,}: insert it in parts, or with insert_many_fast"
            )
        found, notified = await job_insert(
            connection,
            self._schema,
            [sent_rows[index] for index in sent],
            to_notify=to_notify,
        )
        self._log_notification_queue_state(to_notify.queues, notified)
        results = dict(zip(sent, found, strict=True))
        return [
            results[index]
            if index in results
            else _make_duplicate_result(results[firsts[row.unique_key or ""]], row)
            for index, row in enumerate(rows)
        ]

    async def _send_copy_statement(
        self, connection: Transaction, rows: list[InsertRow], to_notify: QueuesToNotify
    ) -> int:
        require_copy_support(connection)
        rows = sorted(rows, key=_get_row_sort_key)
        is_in_transaction = connection.is_in_transaction()
        with translate_insert_errors(connection if is_in_transaction else None, in_savepoint=True):
            async with savepoint(connection) if is_in_transaction else connection.transaction():
                await job_insert_with_copy(
                    connection, self._schema, rows, timeout=INSERT_STATEMENT_TIMEOUT
                )
                if to_notify.queues:
                    count = await notify_queues_of_inserts(connection, self._schema, to_notify)
                    self._log_notification_queue_state(to_notify.queues, count)
        return len(rows)

    def _log_notification_queue_state(self, queues: list[str], notified_count: int) -> None:
        """Log that the server's notification queue has become full, or is no longer full. The
        notification queue is full if fewer job queues were notified than `queues` contains."""
        if queues:
            self._notification_queue_log.log_queue_state(is_full=notified_count < len(queues))
