"""SharedStatementSender: inserts the jobs of many calls with few statements.

One statement runs at a time, over a connection that the client reserves for this sender.
Calls that arrive during a statement wait for the next one, which inserts the jobs of all waiting
calls and commits once. If no statement runs, a call is sent at once. A task of the sender sends the
statements.

As long as calls arrive one at a time, the caller's task sends each call itself, because a switch
between tasks takes about as long as the rest of the Python code. As soon as calls arrive at the
same time, the task of the sender takes over. It starts a moment later, and sends all calls that
have arrived.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import math
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from riverpy._clock import Backoff
from riverpy._insert.errors import make_insert_error
from riverpy._insert.insert_backlog import InsertBacklog, InsertCall
from riverpy._insert.retries import (
    ACQUIRE_CONNECTION_TIMEOUT,
    CONNECT_RETRY_DELAY_MAX,
    CONNECT_RETRY_DELAY_MIN,
    POOL_STATEMENT_TIMEOUT,
    ROLLBACK_RETRIES_MAX,
    ROLLBACK_RETRY_DELAY_MAX,
    ROLLBACK_RETRY_DELAY_MIN,
    is_database_unavailable,
    is_rolled_back_for_conflict,
)
from riverpy._postgres.batch_sender import AdaptiveBatchSize, BatchSender, BatchStatement
from riverpy._postgres.connection import may_break_session, require_writable
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    close_connection,
    describe_error,
    is_certain_rollback,
    is_data_error,
    is_notification_queue_full,
    is_permanent_statement_error,
    terminate_on_error,
)
from riverpy._postgres.inserts import (
    InsertPreventedByTriggerError,
    job_insert_for_several_calls,
    list_queues_with_due_jobs,
    notify_queues_of_inserts,
)
from riverpy._postgres.tracing import suppress_tracing
from riverpy.errors import ClientStateError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy._insert.notify_limiter import NotifyLimiter
    from riverpy._log import ServerNotificationQueueLog
    from riverpy._postgres.driver import Connection
    from riverpy._postgres.inserts import InsertRow
    from riverpy.insert_opts import InsertResult

SINGLE_CALL_STATEMENTS_BEFORE_DIRECT_CALL = 10
"""After this many consecutive statements with one call each, the caller's task sends the next call
itself. If another call arrives while a caller's task sends its call, the count starts at zero
again."""
SPLIT_STATEMENT_TIMEOUT = 30.0
"""The timeout in seconds for sending the calls of a failed statement again in smaller parts."""
CALLS_SENT_ALONE_MAX = 10
"""The calls of a failed statement are sent again in smaller parts. If a part with at most this many
calls fails too, each of its calls is sent in a separate statement."""
TEMPORARY_FAILURES_MAX = 3
"""If this many parts of a batch fail in a row with temporary errors, all calls whose jobs are not
inserted yet fail with the last error."""
OVERDUE_NOTIFICATION_DELAY = 0.003
"""The delay in seconds before a separate statement sends an overdue notification. If an insert
statement starts during this delay, the insert statement sends the notification."""
NOTIFY_TIMEOUT = 5.0
"""The timeout of a statement that only notifies queues, in seconds."""
CONNECTION_IDLE_SECONDS_MAX = 300.0
"""A connection that was idle for this number of seconds is replaced, because a firewall may have
dropped it without notice. The connections of the pool have the same limit."""
CLOSE_TIMEOUT = 5.0
"""The maximum number of seconds for which `close` sends waiting jobs."""
CANCEL_TIMEOUT = 1.0
"""Seconds to wait until a cancelled statement or task has ended."""
_CLIENT_CLOSED_TEXT = "the client was closed before the job was inserted"
_MAY_BE_STORED_TEXT = "the job may be stored: make it unique if it must not be inserted twice"


class SharedStatementSender:
    """Sends the jobs of many calls in shared statements, in the order of the calls."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        *,
        schema: str | None,
        notify_limiter: NotifyLimiter,
        notification_queue_log: ServerNotificationQueueLog,
        should_notify: bool,
        trace_internal: bool = False,
    ) -> None:
        """Create the sender without a connection. `connect` opens the reserved connection before
        the first insert, and again if the connection was closed or lost."""
        self._connect, self._schema = connect, schema
        self._notify_limiter, self._should_notify = notify_limiter, should_notify
        self._notification_queue_log = notification_queue_log
        self._trace_internal = trace_internal
        self._connection: Connection | None = None
        self._cancelled_connection: Connection | None = None
        """A connection whose cancelled statement may still run on the server."""
        self._used_at = 0.0
        """The monotonic time at which the connection was made, or its last statement ended."""
        self._connect_error: Exception | None = None
        """The error of the last attempt to connect. None: the attempt succeeded."""
        self._backlog = InsertBacklog()
        self._task: asyncio.Task[None] | None = None
        """The task that sends statements. It runs while calls wait."""
        self._direct_call: InsertCall | None = None
        """The call that its caller's task is sending now, or None."""
        self._single_call_statement_count = 0
        """The number of consecutive statements of `_task` that had only one call each."""
        self._expiry_timer: asyncio.TimerHandle | None = None
        """The timer that ends calls that have waited for too long. One timer serves all calls."""
        self._overdue_timer: asyncio.TimerHandle | None = None
        self._should_notify_now = False
        """Whether to notify the overdue queues now, without waiting for another insert."""
        self._sent_calls: list[InsertCall] = []
        """The calls of the running statement."""
        self._is_statement_abandoned = False
        """Whether the running statement was cancelled because all of its calls were cancelled."""
        self._is_closed = False
        """Whether `close` no longer waits for jobs to be sent. While this is True, no connection is
        opened."""

    async def insert(self, rows: list[InsertRow], size: int) -> list[InsertResult]:
        """Insert the jobs of one call, all or none. `size` is the size of the jobs in bytes. No row
        may have a unique key.

        Raises:
            Exception: see `Inserter.insert_many`.
        """
        self._is_closed = False  # `close` may have set it before the client was opened again
        loop = asyncio.get_running_loop()
        backlog = self._backlog
        if backlog.is_full:
            reason = f"{ACQUIRE_CONNECTION_TIMEOUT:g} s: too many jobs wait to be inserted"
            with anyio.fail_after(
                ACQUIRE_CONNECTION_TIMEOUT, reason=f"not inserted within {reason}"
            ):
                await backlog.wait_for_room()
        call = InsertCall(
            rows, size, loop.create_future(), loop.time() + ACQUIRE_CONNECTION_TIMEOUT
        )
        if self._can_send_in_caller_task():
            return await self._send_in_caller_task(call)
        backlog.add_call(call)
        self._start_task()
        if self._expiry_timer is None:
            self._expiry_timer = loop.call_at(call.give_up_at, self._end_expired_calls)
        try:
            return await call.result
        except asyncio.CancelledError:
            backlog.discard_call(call)
            self._cancel_abandoned_statement()
            raise

    def _can_send_in_caller_task(self) -> bool:
        """Return whether the caller's task can send a call itself: the connection is open, no other
        call waits or is being sent, and the last calls came one at a time."""
        return (
            self._single_call_statement_count >= SINGLE_CALL_STATEMENTS_BEFORE_DIRECT_CALL
            and self._task is None
            and self._direct_call is None
            and self._get_open_connection() is not None
        )

    async def _send_in_caller_task(self, call: InsertCall) -> list[InsertResult]:
        """Send a call in its caller's task. If other calls arrive before the statement ends,
        `_task` sends these calls afterwards."""
        self._direct_call = call
        try:
            with suppress_tracing(trace_internal=self._trace_internal):
                await self._send_and_end_calls([call])
        finally:
            self._direct_call = None
            if self._backlog:
                self._single_call_statement_count = 0
                self._start_task()
            self.notify_overdue_queues_soon()
        return call.result.result()

    def _cancel_abandoned_statement(self) -> None:
        """Cancel the running statement if all of its calls were cancelled."""
        if self._sent_calls and all(call.result.done() for call in self._sent_calls):
            self._sent_calls = []
            self._is_statement_abandoned = True
            if self._task is not None:
                self._task.cancel()

    def notify_overdue_queues_soon(self) -> None:
        """Start a timer for a statement that notifies the overdue queues. If an insert notifies
        these queues earlier, the statement is not needed."""
        if self._notify_limiter.overdue_queues and self._overdue_timer is None:
            self._overdue_timer = asyncio.get_running_loop().call_later(
                OVERDUE_NOTIFICATION_DELAY, self._start_task_for_overdue_queues
            )

    async def close(self) -> None:
        """Send the waiting jobs and overdue notifications, for at most `CLOSE_TIMEOUT` seconds.
        Then close the connection. Calls whose jobs were not sent by then fail with
        ClientStateError."""
        try:
            with anyio.move_on_after(CLOSE_TIMEOUT, shield=True):
                while self._direct_call or self._task or self._notify_limiter.overdue_queues:
                    self._start_task_for_overdue_queues()
                    if running := self._direct_call.result if self._direct_call else self._task:
                        await asyncio.wait([running])
        finally:
            self._is_closed = True
            with anyio.CancelScope(shield=True):
                task = self._task
                if task is not None and not task.done():
                    task.cancel()
                    await asyncio.wait([task], timeout=CANCEL_TIMEOUT)
                self._notify_limiter.overdue_queues.clear()
                for timer in (self._expiry_timer, self._overdue_timer):
                    if timer is not None:
                        timer.cancel()
                self._expiry_timer = self._overdue_timer = None
                for connection in (self._connection, self._cancelled_connection):
                    if connection is not None:
                        await close_connection(connection)
                self._connection = self._cancelled_connection = None
                if self._direct_call is not None:
                    # asyncpg has cancelled the statement of the direct call on the server. Wait
                    # until this call has ended.
                    await asyncio.wait([self._direct_call.result], timeout=CANCEL_TIMEOUT)

    # -- the task that sends statements

    def _start_task(self) -> None:
        """Start the task that sends statements, unless this task is running. If a caller's task is
        sending its own call, do nothing: at the end of its call, the caller's task calls this
        method."""
        if self._direct_call is not None:
            return
        # `_run` sets `_task` to None when it ends. `_task` can be a finished task only if the task
        # was cancelled before `_run` started.
        if self._task is None or self._task.done():
            # An empty context: the task must not inherit the context variables of a caller.
            self._task = asyncio.get_running_loop().create_task(
                self._run(), name="riverpy inserts", context=contextvars.Context()
            )

    def _start_task_for_overdue_queues(self) -> None:
        if self._overdue_timer is not None:
            self._overdue_timer.cancel()
        self._overdue_timer = None
        self._should_notify_now = bool(self._notify_limiter.overdue_queues)
        if self._should_notify_now:
            self._start_task()

    async def _run(self) -> None:
        """Send statements until no call waits. Then start a timer for the notification of overdue
        queues. If an insert notifies these queues earlier, no separate notification is needed."""
        try:
            with suppress_tracing(trace_internal=self._trace_internal):
                while self._backlog or self._should_notify_now:
                    connection = self._get_open_connection()
                    if connection is None and not await self._open_connection_with_retries():
                        continue
                    if calls := self._backlog.take_batch():
                        await self._send_and_end_calls(calls)
                        self._single_call_statement_count += 1
                        if len(calls) > 1:
                            self._single_call_statement_count = 0
                    else:
                        await self._notify_overdue_queues()
        finally:
            self._task = None
            for call in self._backlog.take_all_calls():  # calls are left if the task was cancelled
                call.fail(ClientStateError(_CLIENT_CLOSED_TEXT))
            self.notify_overdue_queues_soon()

    def _end_expired_calls(self) -> None:
        """Let the calls fail that have waited for too long. Then set the timer for the oldest
        waiting call."""
        loop = asyncio.get_running_loop()
        for call in self._backlog.take_expired_calls(loop.time()):
            call.fail(self._make_expiry_error())
        expiry = self._backlog.next_expiry
        self._expiry_timer = (
            None if expiry is None else loop.call_at(expiry, self._end_expired_calls)
        )

    def _make_expiry_error(self) -> Exception:
        if self._connect_error is not None:
            return make_insert_error(copy.copy(self._connect_error))
        return TimeoutError(
            f"the insert was not sent within {ACQUIRE_CONNECTION_TIMEOUT:g} s, so nothing was "
            "stored: the statement before it takes longer. Check that the database answers"
        )

    # -- the connection

    def _get_open_connection(self) -> Connection | None:
        """Return the open connection. Return None if there is no connection, if it was lost, or if
        it was idle for too long."""
        if time.monotonic() - self._used_at > CONNECTION_IDLE_SECONDS_MAX:
            self._terminate_connection()
        connection = self._connection
        return None if connection is None or connection.is_closed() else connection

    async def _open_connection(self) -> Connection:
        """Open the connection. Reuse the connection of a cancelled statement if this statement ends
        soon."""
        if self._is_closed:
            raise ClientStateError(_CLIENT_CLOSED_TEXT)
        cancelled, self._cancelled_connection = self._cancelled_connection, None
        if cancelled is not None:
            # Before asyncpg sends the next statement, it cancels the old one on the server.
            with suppress(*DATABASE_ERRORS), terminate_on_error(cancelled):
                with anyio.fail_after(CANCEL_TIMEOUT):
                    await require_writable(cancelled)
                self._connection = cancelled
                return cancelled
        connection = self._connection = await self._connect()
        self._used_at = time.monotonic()
        return connection

    def _terminate_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def _open_connection_with_retries(self) -> bool:
        """Try to open the connection until this succeeds, or until no call waits any more. Return
        whether the connection is open."""
        backoff = Backoff(CONNECT_RETRY_DELAY_MIN, CONNECT_RETRY_DELAY_MAX)
        while True:
            try:
                await self._open_connection()
            except Exception as error:
                self._connect_error = error
                if not is_database_unavailable(error):
                    for call in self._backlog.take_all_calls():
                        call.fail(make_insert_error(copy.copy(error)))
                if not self._backlog:
                    self._notify_limiter.overdue_queues.clear()  # clients find the jobs by polling
                    self._should_notify_now = False
                    return False
            else:
                self._connect_error = None
                return True
            await anyio.sleep(backoff.next_delay())

    # -- sending

    async def _send_and_end_calls(self, calls: list[InsertCall]) -> None:
        """Insert the jobs of these calls. Each call ends with its results or with an error."""
        try:
            try:
                await self._send_statement(calls)
            except (*DATABASE_ERRORS, InsertPreventedByTriggerError) as error:
                if self._is_closed:
                    raise ClientStateError(_CLIENT_CLOSED_TEXT) from error
                if len(calls) == 1:
                    calls[0].fail(make_insert_error(error))
                else:
                    await _SplitStatementSender(calls, self._send_statement).send()
        except Exception as error:  # a fault in riverpy: the task must continue
            for call in calls:
                call.fail(copy.copy(error))
        finally:
            # If the task was cancelled, some calls have not ended. For ended calls, `fail` does
            # nothing.
            for call in calls:
                call.fail(ClientStateError(_CLIENT_CLOSED_TEXT))

    async def _send_statement(self, calls: list[InsertCall]) -> None:
        """Insert the jobs of these calls with one statement. If the server rolls the statement back
        because of another session, send it again. If the connection is lost, end the calls with an
        error.

        Raises:
            Exception: one of DATABASE_ERRORS, or InsertPreventedByTriggerError; nothing was stored.
        """
        backoff: Backoff | None = None
        should_notify = self._should_notify
        for retries in range(ROLLBACK_RETRIES_MAX + 1):
            calls = [call for call in calls if not call.result.done()]
            if not calls:
                return
            try:
                await self._send_statement_once(calls, should_notify=should_notify)
            except DATABASE_ERRORS as error:
                if is_notification_queue_full(error) and should_notify:
                    should_notify = False
                    continue
                if not is_rolled_back_for_conflict(error) or retries == ROLLBACK_RETRIES_MAX:
                    raise
            else:
                return
            backoff = backoff or Backoff(ROLLBACK_RETRY_DELAY_MIN, ROLLBACK_RETRY_DELAY_MAX)
            await anyio.sleep(backoff.next_delay())

    async def _send_statement_once(self, calls: list[InsertCall], *, should_notify: bool) -> None:
        connection = self._get_open_connection()
        if connection is None:
            connection = await self._open_connection()
        rows = calls[0].rows if len(calls) == 1 else [row for call in calls for row in call.rows]
        selection = self._notify_limiter.select_queues(
            list_queues_with_due_jobs(rows) if should_notify else (),
            counts_running_statements=False,
        )
        is_stored = False
        self._sent_calls = calls
        try:
            results, notified_count = await job_insert_for_several_calls(
                connection,
                self._schema,
                rows,
                to_notify=selection.queues_to_notify,
                timeout=POOL_STATEMENT_TIMEOUT,
            )
            is_stored = True
        except InsertPreventedByTriggerError:
            raise
        except BaseException as error:
            self._sent_calls = []
            is_abandoned = self._uncancel_after_abandoned_statement()
            if is_notification_queue_full(error):
                self._log_notification_queue_state(selection.notified_queues, 0)
            is_lost = isinstance(error, DATABASE_ERRORS) and not is_certain_rollback(error)
            if is_lost or not isinstance(error, Exception):
                for call in calls:
                    call.fail(_make_connection_lost_error(error))
            self._keep_or_close_connection(error)
            if is_lost or is_abandoned:
                return
            raise
        finally:
            self._sent_calls = []
            self._used_at = time.monotonic()
            self._notify_limiter.record_statement_end(selection, is_stored=is_stored)
        self._log_notification_queue_state(selection.notified_queues, notified_count)
        _set_results(calls, results)

    def _keep_or_close_connection(self, error: BaseException) -> None:
        """Keep the connection if it is usable after this error, otherwise close it. After a timeout
        or a cancellation, `_open_connection` checks later whether the connection is usable, because
        callers must not wait for this check."""
        if is_data_error(error) or not may_break_session(error):
            return
        if isinstance(error, (TimeoutError, asyncio.CancelledError)):
            self._cancelled_connection, self._connection = self._connection, None
        else:
            self._terminate_connection()

    def _uncancel_after_abandoned_statement(self) -> bool:
        """Undo the cancellation of the task if only `_cancel_abandoned_statement` has cancelled the
        task. Return whether the cancellation was undone, so that the task continues."""
        is_abandoned, self._is_statement_abandoned = self._is_statement_abandoned, False
        return is_abandoned and self._task is not None and self._task.uncancel() == 0

    async def _notify_overdue_queues(self) -> None:
        """Notify the overdue queues with a separate statement. If this statement fails, clients
        find the jobs of these queues by polling."""
        self._should_notify_now = False
        connection = self._get_open_connection()
        selection = self._notify_limiter.select_queues(())
        if not selection.notified_queues:
            return
        try:
            with anyio.fail_after(NOTIFY_TIMEOUT):
                if connection is not None:
                    await notify_queues_of_inserts(
                        connection, self._schema, selection.queues_to_notify
                    )
        except DATABASE_ERRORS as error:
            if may_break_session(error):
                self._terminate_connection()
        self._notify_limiter.record_statement_end(selection, is_stored=True)

    def _log_notification_queue_state(self, queues: list[str], notified_count: int) -> None:
        if queues:
            self._notification_queue_log.log_queue_state(is_full=notified_count < len(queues))


class _SplitStatementSender:
    """Sends the calls of a failed statement again in smaller parts, so that a call that the server
    refuses does not make the other calls fail."""

    def __init__(
        self, calls: list[InsertCall], send_statement: Callable[[list[InsertCall]], Awaitable[None]]
    ) -> None:
        self._send_statement = send_statement
        self._temporary_failure_count = 0
        self._sender = BatchSender(
            BatchStatement(
                self._send_part,
                get_row_id=id,
                is_row_error=lambda _error: True,
                row_by_row_batch_size_max=CALLS_SENT_ALONE_MAX,
            ),
            batch_size=AdaptiveBatchSize(math.isqrt(len(calls)), POOL_STATEMENT_TIMEOUT),
            skipped_rows=None,
            on_row_skipped=lambda call, error: call.fail(make_insert_error(error)),
            failures_before_pause=sys.maxsize,
        )
        for call in calls:
            self._sender.add_row(call)

    async def send(self) -> None:
        """Send all calls. Each call ends with its results or with an error."""
        if not await self._sender.send_all_due_rows(timeout=SPLIT_STATEMENT_TIMEOUT):
            self._fail_remaining_calls(
                TimeoutError(f"the job was not inserted within {SPLIT_STATEMENT_TIMEOUT:g} s")
            )

    async def _send_part(self, calls: list[InsertCall]) -> None:
        try:
            await self._send_statement(calls)
        except (*DATABASE_ERRORS, InsertPreventedByTriggerError) as error:
            is_permanent = isinstance(
                error, InsertPreventedByTriggerError
            ) or is_permanent_statement_error(error)
            if not is_permanent:
                self._temporary_failure_count += 1
                if self._temporary_failure_count >= TEMPORARY_FAILURES_MAX:
                    self._fail_remaining_calls(error)
                    return
            raise
        self._temporary_failure_count = 0

    def _fail_remaining_calls(self, error: Exception) -> None:
        """Let all calls that are not inserted yet fail with this error."""
        for call in self._sender.unsent_rows:
            call.fail(make_insert_error(copy.copy(error)))
        self._sender.discard_unsent_rows()


def _set_results(calls: list[InsertCall], results: list[InsertResult]) -> None:
    """Give each call the results of its jobs."""
    start = 0
    for call in calls:
        end = start + len(call.rows)
        if not call.result.done():
            call.result.set_result(results[start:end])
        start = end


def _make_connection_lost_error(error: BaseException) -> Exception:
    """Return the error for a statement whose connection was lost. The statement may have
    committed."""
    if not isinstance(error, Exception):
        return ConnectionError(
            f"the client was closed during the insert, and {_MAY_BE_STORED_TEXT}"
        )
    if isinstance(error, TimeoutError):
        reason = f"inserting jobs took longer than {POOL_STATEMENT_TIMEOUT:g} s"
        loss: Exception = TimeoutError(f"{reason}, and {_MAY_BE_STORED_TEXT}")
    else:
        loss = ConnectionError(
            f"the connection was lost during the insert ({describe_error(error)}), and "
            f"{_MAY_BE_STORED_TEXT}"
        )
    loss.__cause__ = error
    return loss
