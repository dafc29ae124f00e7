"""InlineRun: works single jobs in the calling task, with the parts of a real run.

A job is claimed by its id. Then the executor of a run works it, and the completer of a run stores
its result, over the connection of a test.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from riverpy._clients.heartbeat import HeartbeatWriter
from riverpy._clock import Timer
from riverpy._plugins import PluginLists
from riverpy._postgres import jobs
from riverpy._postgres.connection import DedicatedConnection
from riverpy._postgres.driver import LockNotAvailableError, is_data_error
from riverpy._timestamps import decode_wire_timestamp
from riverpy._work.completer import Completer
from riverpy._work.counters import MetricEmitter, RunCounters
from riverpy._work.executor import JobExecutor
from riverpy._work.run_context import RunConnections, RunContext
from riverpy._work.running_attempts import RunningAttempts
from riverpy.context import calling_client
from riverpy.errors import ClientStateError, NotFoundError, TransactionError
from riverpy.events import EventKind
from riverpy.job import JobColumn, JobRow
from riverpy.testing._raw_timestamps import RawTimestampConnection
from riverpy.testing.work_result import WorkResult

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, Callable
    from contextlib import AbstractAsyncContextManager

    from riverpy._postgres.driver import Connection, Transaction
    from riverpy._postgres.sessions.protocols import CallerTransaction
    from riverpy._work.attempt import Attempt
    from riverpy._work.run_context import ClientParts
    from riverpy.client import Client

    OpenTransaction = Callable[[CallerTransaction | None], AbstractAsyncContextManager[Transaction]]

CANCELLED_JOB_TIMEOUT = 5.0
"""Seconds that the code of a job may take to end after its test was cancelled."""
_TIMESTAMP_COLUMNS = (
    JobColumn.ATTEMPTED_AT,
    JobColumn.CREATED_AT,
    JobColumn.FINALIZED_AT,
    JobColumn.SCHEDULED_AT,
)
_JOB_EVENT_KINDS = tuple(kind for kind in EventKind if kind.value.startswith("job_"))


class _ResultConnection(DedicatedConnection):
    """The connection over which the completer stores results."""

    def __init__(self, open_transaction: OpenTransaction, connections: RunConnections) -> None:
        super().__init__(
            "results", connections.connector.connect_for_results, connections.outage_tracker
        )
        self._open_transaction = open_transaction
        self.error: Exception | None = None
        """The error after which the completer would send the results again."""
        self.on_error: Callable[[], object] | None = None

    @asynccontextmanager
    async def acquire(self, purpose: str, timeout: float) -> AsyncGenerator[Connection]:
        """Use the connection of the test in the `async with` block, in a savepoint or transaction
        of its own."""
        try:
            async with self._open_transaction(None) as connection:
                yield RawTimestampConnection.wrap(connection)
        except Exception as error:
            # The completer handles these two errors: it replaces the result, or skips locked rows.
            if not (is_data_error(error) or isinstance(error, LockNotAvailableError)):
                self.error = error
                if self.on_error is not None:
                    self.on_error()
            raise


class InlineRun:
    """Works jobs, one at a time. Create it in the task that works them."""

    def __init__(
        self, client: Client, parts: ClientParts, open_transaction: OpenTransaction
    ) -> None:
        """`client` is the one that the jobs see, and `parts` are its parts. `open_transaction`
        opens a savepoint in the test's transaction, or a transaction."""
        self._parts, self._open_transaction = parts, open_transaction
        connections = RunConnections(parts, lambda: None)
        self._connection = connections.results = _ResultConnection(open_transaction, connections)
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
        self._running = RunningAttempts(parts.config, self._completer.add_ended_attempt)
        self._error_by_attempt: dict[Attempt, BaseException] = {}
        with calling_client(client):  # the executor copies the context variables for its jobs
            self._executor = JobExecutor(
                parts.workers,
                parts.config,
                parts.child_processes,
                self._running,
                lambda: True,
                parts.attempt_store,
                self._error_by_attempt.__setitem__,
            )

    def close(self) -> None:
        """End idle threads and processes."""
        self._executor.close()

    async def work_job(self, job_id: int) -> WorkResult:
        """Work one job that waits, and return how the attempt ended.

        Raises:
            ClientStateError: the job is pending, runs, or has ended.
            NotFoundError: there is no job with this id.
            TransactionError: the code of the job has ended or aborted the test's transaction.
            JobDamagedError: the server cannot read the job.
        """
        row = await self._claim_job(job_id)
        async with self._parts.subscriptions.subscribe(_JOB_EVENT_KINDS, 2) as events:
            async with self._completer.storing_results(self._wait_until_stored):
                self._executor.launch_attempts([row], lambda: None, 1)
                (attempt,) = self._running
                await self._running.drain(None, lambda: CANCELLED_JOB_TIMEOUT)
            self._expect_stored(attempt)
            event = await anext(events)
        error = self._error_by_attempt.pop(attempt, None)
        return WorkResult(event, await self._read_job(job_id), error)

    async def _claim_job(self, job_id: int) -> list[Any]:
        parts = self._parts
        async with self._open_transaction(None) as connection:
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
                row[column] = decode_wire_timestamp(row[column])
        return row

    async def _wait_until_stored(self, ended: asyncio.Event) -> None:
        """Wait until the result is stored, or its statement has failed."""
        self._connection.on_error = ended.set
        if self._connection.error is None:
            await ended.wait()

    def _expect_stored(self, attempt: Attempt) -> None:
        if (error := self._connection.error) is not None:
            raise error
        if not attempt.stored_at:
            raise TransactionError(
                f"the result of job {attempt.id} could not be stored: its code has deleted or "
                "changed the row of the job, or has rolled back the transaction given as tx"
            )

    async def _read_job(self, job_id: int) -> JobRow:
        async with self._open_transaction(None) as connection:
            row = await jobs.job_get(connection, self._parts.config.schema, job_id)
        if row is None:
            raise NotFoundError(f"there is no job {job_id}")
        return JobRow(tuple(row))
