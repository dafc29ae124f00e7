"""Inserter: sends the jobs of a client, on its pool or in a transaction of the caller's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import anyio

from riverpy._clock import Backoff
from riverpy._error_text import error_text
from riverpy._insert.copy import copy_rows
from riverpy._insert.errors import sqlstate, translated
from riverpy._insert.middleware import InsertStacks
from riverpy._insert.row import InsertRow, InsertRules, PreparedJob, prepare, prepare_all
from riverpy._lifecycle import is_cancelled
from riverpy._log import NotificationQueueLog
from riverpy._postgres.driver import DATABASE_ERRORS, is_notification_queue_full
from riverpy._postgres.sql_files import query
from riverpy._postgres.transactions import expect_transaction
from riverpy.errors import InsertError, TransactionError
from riverpy.insert_opts import InsertManyParams, InsertOpts, InsertResult
from riverpy.job import JobColumn, JobRow, JobState, RawArgs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from riverpy._clock import Clock
    from riverpy._plugins import Plugins
    from riverpy._postgres.driver import Transaction
    from riverpy.job import JobArgs

T = TypeVar("T")
Args: TypeAlias = "JobArgs | RawArgs"

STATEMENT_SIZE_MAX = 900 * 1024 * 1024
"""Bytes of the args and metadata of one statement: a message to the server ends at 1 GiB."""
NOTIFY_INTERVAL = 0.002
"""Seconds in which the inserts of one client, outside of `tx`, notify a queue at most once."""
SEND_TIMEOUT = 600.0
"""Seconds within which the server must have stored what was sent, unless the pool says less."""
ACQUIRE_TIMEOUT = 10.0
"""Seconds that an insert waits for a connection of the pool, or for the database to be there."""
NO_CONNECTION = (
    f"no connection of the pool was to be had within {ACQUIRE_TIMEOUT:g} s: give the client more "
    "with Config(pool_size=…), or see who keeps them, or whether the database answers"
)
HOOKS_TIMEOUT = 2.0
"""Seconds that hooks and middleware of inserts have before the statement, and after it, where the
transaction is ours."""
CONFLICT_RETRIES_MAX = 10
"""How often an insert of our own is sent again that the server rolled back in favour of another."""
_LIMITER_SIZE_MAX = 1000
_FILE = "river_job_insert"
_ROLLED_BACK = {"40001", "40P01"}
_NOT_NOW = {"53300", "57P03"}
"""Too many connections; the server starts or stops."""
_EXISTED = 18
"""Where a row that the statements return says whether the job existed."""
_NOTIFIED = 19
"""Where it says how many notifications were sent."""
_BYTES = (
    JobColumn.ATTEMPTED_AT,
    JobColumn.CREATED_AT,
    JobColumn.FINALIZED_AT,
    JobColumn.SCHEDULED_AT,
    JobColumn.UNIQUE_KEY,
)


# Notifying


class NotifyLimiter:
    """Lets the inserts of one client notify a queue once in `NOTIFY_INTERVAL`.

    A notification serialises commits. Whoever receives one claims again a few milliseconds later,
    so it stands for the inserts that follow it closely too.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}

    def allowed(self, queues: Iterable[str]) -> list[str]:
        """Those of the queues that may be notified now; they count as notified."""
        now = self._clock.monotonic()
        due = [queue for queue in queues if now - self._last.get(queue, -1e9) > NOTIFY_INTERVAL]
        if len(self._last) > _LIMITER_SIZE_MAX:
            self._last.clear()
        self._last.update(dict.fromkeys(due, now))
        return due


def _queues_to_notify(rows: Iterable[InsertRow]) -> list[str]:
    return list(dict.fromkeys(row.queue for row in rows if row.state == JobState.AVAILABLE))


# Sending


def _checked(params: object) -> Iterator[InsertManyParams]:
    """The jobs of a batch, which callers that no type checker helps confuse with their args."""
    if not isinstance(params, Iterable):
        raise InsertError(f"params must be a list of InsertManyParams, got {_named(params)}")
    for index, job in enumerate(cast("Iterable[object]", params)):
        if not isinstance(job, InsertManyParams):
            raise InsertError(
                f"params[{index}] must be InsertManyParams(args, opts), got {_named(job)}"
            )
        yield job


def _named(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


class Inserter:
    """Inserts jobs for a client, through its pool or on a transaction of the caller's."""

    def __init__(
        self,
        acquire: Callable[[], AbstractAsyncContextManager[Transaction]],
        *,
        schema: str | None,
        rules: InsertRules,
        plugins: Plugins,
        clock: Clock,
    ) -> None:
        """
        Args:
            acquire: lends a connection of the client's pool.
            schema: where River's tables are. None: the search path decides.
            rules: what the client says about all inserts.
            plugins: what is around them.
            clock: tells the time of unique periods and notifications.
        """
        self._acquire = acquire
        self._schema = schema
        self._rules = rules
        self._stacks = InsertStacks(plugins, rules)
        self._clock = clock
        self._limiter = NotifyLimiter(clock)
        self._queue_log = NotificationQueueLog()

    async def insert(
        self, args: JobArgs | RawArgs, opts: InsertOpts | None, *, tx: Transaction | None
    ) -> InsertResult:
        """Insert one job; see `insert_many`."""
        (result,) = await self.insert_many([InsertManyParams(args, opts)], tx=tx)
        return result

    async def insert_many(
        self, params: Sequence[InsertManyParams], *, tx: Transaction | None
    ) -> list[InsertResult]:
        """Insert all jobs or none, in one statement. The results are in the order of `params`.

        So are the ids of jobs that are not unique; unique ones are numbered in the order of keys.
        A job whose unique key an earlier one of the batch has is a duplicate of that one.

        Raises:
            InsertError, ConfigError: a job was refused; nothing was sent.
            BaseException: what a hook or middleware raised; unless it did so after its inner part,
                nothing was sent.
            TransactionError: `tx` is in no transaction, aborted or closed.
            SchemaMissingError: River's tables are not there.
            TypeError: `tx` is no connection of asyncpg.
            asyncpg.PostgresError, OSError, TimeoutError: the database failed; without `tx` the jobs
                may have been stored if the connection was lost.
        """
        return await self._insert(tx, *self._prepare(params), self._insert_rows)

    def prepare_due(
        self, args: JobArgs | RawArgs, opts: InsertOpts, *, due_at: datetime
    ) -> PreparedJob:
        """Check a job that is due at this time, by a clock that is not ours: available at once, and
        in the unique period of that time, unless its options name another.

        Raises:
            InsertError, ConfigError: it is refused.
        """
        row = prepare(args, opts, rules=self._rules, now=due_at)
        if row.state == JobState.AVAILABLE:
            row = row._replace(scheduled_at=due_at.astimezone(UTC).isoformat())
        return PreparedJob(args, row)

    async def insert_rows(
        self, jobs: list[PreparedJob], *, tx: Transaction | None
    ) -> list[InsertResult]:
        """Insert jobs that are checked already, in a transaction of ours; see `insert_many`.

        Raises:
            InsertError: also where a hook or middleware failed, in whatever way, or all of them
                took longer than `HOOKS_TIMEOUT`.
        """
        args, rows = zip(*jobs, strict=True)
        is_sending = False

        async def send(
            connection: Transaction, rows: list[InsertRow], queues: list[str]
        ) -> list[InsertResult]:
            nonlocal is_sending
            is_sending, scope.deadline = True, math.inf
            results = await self._insert_rows(connection, rows, queues)
            is_sending, scope.deadline = False, anyio.current_time() + HOOKS_TIMEOUT
            return results

        with anyio.move_on_after(HOOKS_TIMEOUT) as scope:
            try:
                return await self._insert(tx, args, list(rows), send)
            except (InsertError, TransactionError, GeneratorExit):
                raise
            except BaseException as error:  # not even a SystemExit may end a service of ours
                if is_cancelled(error) or (is_sending and isinstance(error, DATABASE_ERRORS)):
                    raise
                who = "the insert" if is_sending else "a hook or middleware of inserts"
                raise InsertError(f"{who} raised {error_text(error)}") from error
        raise InsertError(
            f"hooks and middleware of inserts took longer than {HOOKS_TIMEOUT:g} s; here they hold "
            "a transaction open"
        )

    async def insert_many_fast(
        self, params: Sequence[InsertManyParams], *, tx: Transaction | None
    ) -> int:
        """Insert all jobs or none by COPY, and return their number.

        Raises:
            UniqueConflictError: a job exists, or is twice in the batch; with `tx` the transaction
                lives.
            Exception: as `insert_many`.
        """
        send = partial(
            copy_rows, schema=self._schema, timeout=SEND_TIMEOUT, notified=self._notified
        )
        return await self._insert(tx, *self._prepare(params), send)

    def _prepare(self, params: Sequence[InsertManyParams]) -> tuple[list[Args], list[InsertRow]]:
        now = self._clock.now()
        jobs = list(_checked(params))
        if not jobs:
            raise InsertError("nothing to insert: give at least one job")
        rows = prepare_all(jobs, rules=self._rules, now=now)
        return [job.args for job in jobs], rows

    async def _insert(
        self,
        tx: Transaction | None,
        args: Sequence[Args],
        rows: list[InsertRow],
        send: Callable[[Transaction, list[InsertRow], list[str]], Awaitable[T]],
    ) -> T:
        if self._stacks.is_empty_for(args):
            return await self._run(tx, rows, send)
        jobs = [PreparedJob(*job) for job in zip(args, rows, strict=True)]
        return await self._stacks.insert(jobs, lambda rows: self._run(tx, rows, send))

    async def _run(
        self,
        tx: Transaction | None,
        rows: list[InsertRow],
        send: Callable[[Transaction, list[InsertRow], list[str]], Awaitable[T]],
    ) -> T:
        queues = _queues_to_notify(rows) if self._rules.notify else []
        if tx is None:
            return await self._run_on_pool(rows, self._limiter.allowed(queues), send)
        expect_transaction(tx)
        with translated(tx):
            return await send(tx, rows, queues)

    async def _run_on_pool(
        self,
        rows: list[InsertRow],
        queues: list[str],
        send: Callable[[Transaction, list[InsertRow], list[str]], Awaitable[T]],
    ) -> T:
        backoff = Backoff(timedelta(milliseconds=5), timedelta(milliseconds=200))
        for retries in range(CONFLICT_RETRIES_MAX + 1):
            try:
                return await self._send(rows, queues, send)
            except DATABASE_ERRORS as error:
                if queues and is_notification_queue_full(error):
                    self._notified(queues, 0)
                    queues = []
                    continue
                if sqlstate(error) not in _ROLLED_BACK or retries == CONFLICT_RETRIES_MAX:
                    raise
            await anyio.sleep(backoff.next())
        raise AssertionError("unreachable")

    async def _send(
        self,
        rows: list[InsertRow],
        queues: list[str],
        send: Callable[[Transaction, list[InsertRow], list[str]], Awaitable[T]],
    ) -> T:
        """Send on a connection of the pool. Getting one is tried again until `ACQUIRE_TIMEOUT` is
        over.

        One scope bounds both steps in turn: it is a good part of what a single insert costs.
        """
        lent: AbstractAsyncContextManager[Transaction] | None = None
        step = NO_CONNECTION
        try:
            with anyio.CancelScope() as scope, translated(None):
                scope.deadline = anyio.current_time() + ACQUIRE_TIMEOUT
                lent, connection = await self._lend()
                step = f"inserting jobs took longer than {SEND_TIMEOUT:g} s"
                scope.deadline = anyio.current_time() + SEND_TIMEOUT
                return await send(connection, rows, queues)
        finally:
            if lent is not None:
                await lent.__aexit__(None, None, None)
        raise TimeoutError(step)

    def _notified(self, queues: list[str], count: int) -> None:
        """Of these queues so many were notified: all, or none if the server's queue is full."""
        if queues:
            self._queue_log.report(is_full=count < len(queues))

    async def _lend(self) -> tuple[AbstractAsyncContextManager[Transaction], Transaction]:
        """A connection of the pool, and what takes it back."""
        backoff: Backoff | None = None
        while True:
            lent = self._acquire()
            try:
                return lent, await lent.__aenter__()
            except DATABASE_ERRORS as error:
                if not isinstance(error, OSError) and sqlstate(error) not in _NOT_NOW:
                    raise
            backoff = backoff or Backoff(timedelta(milliseconds=50), timedelta(seconds=1))
            await anyio.sleep(backoff.next())

    async def _insert_rows(
        self, connection: Transaction, rows: list[InsertRow], queues: list[str]
    ) -> list[InsertResult]:
        firsts: dict[str, int] = {}
        sent: list[int] = []
        for index, row in enumerate(rows):
            if row.unique_key is None or firsts.setdefault(row.unique_key, index) == index:
                sent.append(index)
        if firsts:
            sent.sort(key=lambda index: rows[index].lock_order)
        records = await self._fetch(connection, [rows[index] for index in sent], queues)
        self._notified(queues, int(records[0][_NOTIFIED]))
        results = {
            index: InsertResult(_job(record), record[_EXISTED] == "t")
            for index, record in zip(sent, records, strict=True)
        }
        return [
            results[index]
            if index in results
            else InsertResult(results[firsts[row.unique_key or ""]].job, True)
            for index, row in enumerate(rows)
        ]

    async def _fetch(
        self, connection: Transaction, rows: list[InsertRow], queues: list[str]
    ) -> Sequence[Any]:
        size = sum(row.size for row in rows)
        if size > STATEMENT_SIZE_MAX:
            raise InsertError(
                f"the batch has {size:,} bytes, one statement can carry {STATEMENT_SIZE_MAX:,}: "
                "insert it in parts, or with insert_many_fast"
            )
        shared = rows[0].shared()
        is_uniform = all(row.shared() == shared for row in rows[1:])
        values = rows[0]._asdict() if is_uniform else _columns(rows)
        values["args"] = [row.args for row in rows]
        values["unique_key"] = [row.unique_key for row in rows]
        name = "job_insert" if is_uniform else "job_insert_mixed"
        statement = query(_FILE, name, self._schema)
        return await connection.fetch(
            statement.text,
            *statement.arguments({**values, "notify": queues}),
        )


def _job(record: Sequence[Any]) -> JobRow:
    """The job of a record whose numbers, times and key crossed as texts."""
    row = [*record[:_EXISTED]]
    row[JobColumn.ID] = int(row[JobColumn.ID])
    row[JobColumn.ATTEMPT] = int(row[JobColumn.ATTEMPT])
    row[JobColumn.MAX_ATTEMPTS] = int(row[JobColumn.MAX_ATTEMPTS])
    row[JobColumn.PRIORITY] = int(row[JobColumn.PRIORITY])
    for at in _BYTES:
        if row[at] is not None:
            row[at] = bytes.fromhex(row[at])
    mask = row[JobColumn.UNIQUE_STATES]
    if mask is not None:
        row[JobColumn.UNIQUE_STATES] = int(mask, 2)
    return JobRow(row)


def _columns(rows: Sequence[InsertRow]) -> dict[str, Any]:
    columns = zip(*rows, strict=True)
    return {name: list(values) for name, values in zip(InsertRow._fields, columns, strict=True)}
