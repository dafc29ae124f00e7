"""InlineJobRunner: works one job for a test, without a running client.

It claims the job by its id. Then a client's executor runs the job, and a client's completer stores
the result. The claim, the executor and the completer use the connection of the test.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from riverpy._clients.heartbeat import HeartbeatWriter
from riverpy._clock import Timer
from riverpy._plugins import PluginLists
from riverpy._postgres import jobs
from riverpy._postgres.driver import LockNotAvailableError, is_data_error
from riverpy._timestamps import decode_wire_microseconds
from riverpy._work.completer import Completer
from riverpy._work.counters import MetricEmitter, RunCounters
from riverpy._work.executor import JobExecutor
from riverpy._work.run_context import RunConnections, RunContext
from riverpy._work.running_attempts import RunningAttempts
from riverpy.context import set_running_client
from riverpy.errors import ClientStateError, NotFoundError, TransactionError
from riverpy.events import EventKind
from riverpy.job import JobColumn, JobRow
from riverpy.testing._inline_connection import InlineConnection
from riverpy.testing._raw_timestamps import RawTimestampConnection
from riverpy.testing.work_result import WorkResult

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, Callable
    from concurrent.futures import Executor

    from riverpy._postgres.driver import Connection
    from riverpy._work.attempt import Attempt
    from riverpy._work.run_context import ClientParts
    from riverpy.client import Client
    from riverpy.retry import JobStuckHandler, StuckJob
    from riverpy.testing._inline_connection import TransactionOpener
    from riverpy.testing._transaction_guard import JobSavepoint

CANCELLED_JOB_TIMEOUT = 5.0
"""How long the code of a job may take to end after its test was cancelled, in seconds."""
RESULT_TIMEOUT = 15.0
"""How long to wait until the result of a job is stored, in seconds."""
_TIMESTAMP_COLUMNS = (
    JobColumn.ATTEMPTED_AT,
    JobColumn.CREATED_AT,
    JobColumn.FINALIZED_AT,
    JobColumn.SCHEDULED_AT,
)
_JOB_EVENT_KINDS = tuple(kind for kind in EventKind if kind.value.startswith("job_"))


class _ResultStoringConnection(InlineConnection):
    """The connection on which the completer stores results. Keeps the error of a failed statement
    so that `work_job` can raise it. The completer does not raise this error: it sends the results
    again."""

    def __init__(self, open_transaction: TransactionOpener) -> None:
        super().__init__("results", open_transaction)
        self.error: Exception | None = None
        """The last error after which a running client would send the results again. If the result
        was not stored, `work_job` raises this error. None: there was no such error."""
        self.on_error: Callable[[], object] | None = None
        """A callback that is called when `error` is set."""

    @asynccontextmanager
    async def acquire(self, purpose: str, timeout: float) -> AsyncGenerator[Connection]:
        """Return a context manager for the connection of the test. Statements on this connection
        read and write timestamps as integers."""
        try:
            async with super().acquire(purpose, timeout) as connection:
                yield RawTimestampConnection.wrap(connection)
        except Exception as error:
            # Record no error that the completer handles: after a data error it replaces the result,
            # and after a lock error it skips the locked rows.
            if not (is_data_error(error) or isinstance(error, LockNotAvailableError)):
                self.error = error
                if self.on_error is not None:
                    self.on_error()
            raise


class _StuckJobRecorder:
    """Records that a cancelled job does not end. It calls `on_stuck`, and then the handler of the
    user's config."""

    def __init__(self, handler: JobStuckHandler | None) -> None:
        self._handler = handler
        self.is_stuck = False
        self.on_stuck: Callable[[], object] | None = None

    def handle_stuck(self, job: StuckJob, /) -> bool:
        """Handle a cancelled job that has not ended in time."""
        self.is_stuck = True
        if self.on_stuck is not None:
            self.on_stuck()
        return self._handler is not None and self._handler.handle_stuck(job)


class InlineJobRunner:
    """Works one job. Create it in the task that calls `work_job`, because the job receives a copy
    of this task's context variables."""

    def __init__(
        self,
        client: Client,
        parts: ClientParts,
        open_transaction: TransactionOpener,
        guard: JobSavepoint | None,
        job_threads: Executor | None = None,
    ) -> None:
        """Prepare the executor and the completer.

        Args:
            client: the client that `current_client` returns to the job.
            parts: the settings, workers and other parts of this client.
            open_transaction: opens a savepoint in the test's transaction, or a transaction on a
                pool.
            guard: keeps the test's transaction usable if the job aborts it. None: there is no such
                transaction, because the job uses a pool.
            job_threads: runs blocking jobs. None: the threads of the executor do.
        """
        self._parts, self._open_transaction, self._guard = parts, open_transaction, guard
        connections = RunConnections(parts, lambda: None)
        self._connection = connections.results = _ResultStoringConnection(open_transaction)
        heartbeat = HeartbeatWriter(
            parts.make_registration(),
            parts.config,
            connections.all_connections,
            Timer(),
            on_client_id_lost=lambda: None,
        )
        context = RunContext(
            parts,
            connections,
            heartbeat,
            RunCounters(parts.workers, parts.queues),
            MetricEmitter(PluginLists().metric_emit_hooks),
        )
        self._completer = Completer(context, lambda _queue, _seconds: None)
        self._ended_attempts: list[Attempt] = []
        self._error_by_attempt: dict[Attempt, BaseException] = {}
        self._stuck_handler = _StuckJobRecorder(parts.config.job_stuck_handler)
        config = msgspec.structs.replace(parts.config, job_stuck_handler=self._stuck_handler)
        self._running = RunningAttempts(config, self._ended_attempts.append)
        with set_running_client(client):  # the executor copies the context variables for its jobs
            self._executor = JobExecutor(
                parts.workers,
                parts.config,
                parts.child_processes,
                self._running,
                lambda: True,
                parts.attempt_store,
                self._error_by_attempt.__setitem__,
                job_threads,
            )

    def close(self) -> None:
        """Stop the idle threads and child processes that run jobs."""
        self._executor.close()

    async def work_job(self, job_id: int) -> WorkResult:
        """Work one waiting job, and return how the attempt ended. Call this only once.

        Raises:
            ClientStateError: the job is pending, running or ended; or its code does not end after
                it was cancelled.
            NotFoundError: there is no job with this id.
            TransactionError: the code of the job has ended or aborted the test's transaction.
            JobDamagedError: the server cannot read the job.
        """
        row = await self._claim_job(job_id)
        error: Exception | None = None
        async with self._parts.subscriptions.subscribe(_JOB_EVENT_KINDS, 2) as events:
            # Raise an error only after this block: inside, it would become an exception group.
            async with self._completer.storing_results(self._wait_until_stored):
                try:
                    await self._run_attempt(row)
                except Exception as raised:
                    error = raised
                else:
                    self._store_ended_attempt()
            if error is not None:
                raise error
            (attempt,) = self._ended_attempts
            self._require_stored(attempt)
            event = await anext(events)
        return WorkResult(event, await self._read_job(job_id), self._error_by_attempt.get(attempt))

    async def _run_attempt(self, row: list[Any]) -> None:
        """Run the code of a claimed job. If this task is cancelled, cancel the job too.

        Raises:
            ClientStateError: the code does not end after it was cancelled.
            TransactionError: the code has ended or aborted the test's transaction.
        """
        context = nullcontext() if self._guard is None else await self._guard.begin()
        try:
            with context:
                self._executor.make_and_start_attempts([row], lambda: None, 1)
                (attempt,) = self._running
                with anyio.CancelScope() as scope:
                    self._stuck_handler.on_stuck = scope.cancel
                    await self._running.stop_attempts(None, self._get_cancelled_job_timeout)
        except BaseException:
            if self._guard is None:
                self._store_ended_attempt()
            raise
        if not self._ended_attempts:
            raise ClientStateError(
                f"job {attempt.id} ({attempt.kind}) still runs "
                f"{self._parts.config.job_stuck_threshold.total_seconds():g} s after it was "
                "cancelled: let its code end when it gets a CancelledError or, in a thread, when "
                "job.cancelled is set"
            )
        if self._guard is not None:
            await self._guard.end(
                has_failed=attempt.outcome is not None, error=self._error_by_attempt.get(attempt)
            )

    def _store_ended_attempt(self) -> None:
        for attempt in self._ended_attempts:
            self._completer.add_ended_attempt(attempt)

    def _get_cancelled_job_timeout(self) -> float:
        """Return how many seconds to wait for a cancelled job; 0 if the job is already stuck."""
        return 0.0 if self._stuck_handler.is_stuck else CANCELLED_JOB_TIMEOUT

    async def _claim_job(self, job_id: int) -> list[Any]:
        parts = self._parts
        async with self._open_transaction(isolation="autocommit") as connection:
            found = await jobs.job_claim_one(
                connection, parts.config.schema, job_id, client_id=parts.id
            )
        if found is None:
            job = await self._read_job(job_id)
            raise ClientStateError(
                f"job {job_id} is {job.state}, so it cannot be worked: only jobs that are "
                "available, retryable or scheduled can"
            )
        row = list(found)
        for column in _TIMESTAMP_COLUMNS:
            if row[column] is not None:
                row[column] = decode_wire_microseconds(row[column])
        return row

    async def _wait_until_stored(self, ended: asyncio.Event) -> None:
        """Wait until the completer has stored the result, or its SQL statement has failed. Wait at
        most `RESULT_TIMEOUT` seconds. The completer sets `ended` when all results are stored."""
        self._connection.on_error = ended.set
        if self._connection.error is None:
            with anyio.move_on_after(RESULT_TIMEOUT, shield=True):
                await ended.wait()

    def _require_stored(self, attempt: Attempt) -> None:
        if attempt.stored_at:  # ignore a later error: only a notification can have failed
            return
        if (error := self._connection.error) is not None:
            raise error
        raise TransactionError(
            f"the result of job {attempt.id} could not be stored: its code has deleted or "
            "changed the row of the job, or has rolled back the transaction given as tx"
        )

    async def _read_job(self, job_id: int) -> JobRow:
        async with self._open_transaction(isolation="autocommit") as connection:
            row = await jobs.job_get(connection, self._parts.config.schema, job_id)
        if row is None:
            raise NotFoundError(f"there is no job {job_id}")
        return JobRow(tuple(row))
