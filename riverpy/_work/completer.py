"""Completer: stores the results of attempts in batches.

One statement runs at a time. Results that arrive during this statement wait for the next statement.
The completer keeps a result until the database has stored it, or until the attempt no longer
belongs to this client. A lost connection only delays results. If one row is locked, or the database
refuses its result or takes too long to store it, other results are delayed by at most one
statement.

A batch contains either only completions without recorded metadata, or only other results.
Completions without metadata have a faster statement.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import anyio

from riverpy._attempt_errors import parse_error_entry
from riverpy._clock import Backoff
from riverpy._lifecycle import TestSignal, run_despite_cancellation
from riverpy._log import get_logger
from riverpy._log_events import (
    CODE_FAILED_AFTER_ITS_JOB_COMPLETED,
    JOB_CANCELLED_AFTER_ITS_ATTEMPT,
    JOB_ENDED,
    JOB_RESULT_BATCH_FAILED,
    JOB_RESULT_REFUSED,
    JOB_RESULT_REPLACED,
    JOB_RESULTS_REJECTED,
    JOB_RESULTS_TIMED_OUT,
    REJECTED_JOB_RESULTS_STORED,
    RESULT_BATCH_SIZE_REDUCED,
)
from riverpy._postgres import jobs
from riverpy._postgres.batch_sender import (
    AdaptiveBatchSize,
    BatchSender,
    BatchStatement,
    ErrorCause,
    find_error_cause,
)
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    LockNotAvailableError,
    describe_error,
    is_data_error,
    is_untranslatable_text_error,
)
from riverpy._postgres.skipped_rows import SkippedRows
from riverpy._work.outcomes import make_failure_outcome
from riverpy._work.result_notifier import ResultNotifier
from riverpy.events import EventKind
from riverpy.job import JobColumn, JobState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from riverpy._postgres.driver import Connection
    from riverpy._postgres.skipped_rows import SkippedRow
    from riverpy._work.attempt import Attempt
    from riverpy._work.run_context import RunContext

RESULTS_PER_STATEMENT_MAX = 1_000
"""The maximum number of results in one statement."""
RESULT_BACKLOG_MAX = 2_000
"""While more than this number of results wait to be stored, the client claims no jobs. If twice the
number of slots is larger, that is the limit instead. Each waiting result keeps its job in memory
(about 1 KiB or more)."""
CHARACTERS_PER_STATEMENT_MAX = 8 * 1024 * 1024
"""The maximum number of characters of outputs and errors in one statement. A single result that is
larger is still sent."""
RESULT_STATEMENT_TIMEOUT = 10.0
"""The timeout of one statement, in seconds."""
LOCKED_ROW_RETRY_DELAY_MIN = timedelta(milliseconds=100)
LOCKED_ROW_RETRY_DELAY_MAX = timedelta(seconds=2)
LOCKED_ROW_LOG_DELAY = 1.0
"""Seconds that a result waits for a locked row until the delay is logged."""
LOCKED_ROWS_ADVICE = "another transaction holds locks on the rows: see `riverpy doctor`"
STATEMENT_RETRY_DELAY_MIN = timedelta(milliseconds=20)
STATEMENT_RETRY_DELAY_MAX = timedelta(seconds=2)
JOB_RETRY_DELAY_IF_RESULT_UNSTORABLE = 60.0
"""Seconds until the retry of a job whose result the database refused."""
_DELETED_JOB_OUTCOME = jobs.StoredOutcome(jobs.ClaimKey(0, 0, 0), "deleted", 0)


class Completer:
    """Stores the results of attempts, usually in the order in which the attempts end. Results that
    the database refuses or delays are stored later."""

    def __init__(self, run: RunContext, schedule_claim: Callable[[str, float], None]) -> None:
        """`schedule_claim(queue, seconds)` is called after a stored result has made its job
        `available` again. The job is due in `seconds` seconds."""
        self._connection, self._schema = run.connections.results, run.schema
        self.set_slot_count(sum(run.client.slots_per_queue.values()))
        self._should_skip_locked_rows = run.config.pooler
        """Whether each statement skips locked rows. A connection through a pooler needs this,
        because it has no `lock_timeout`."""
        self._counters, self._subscriptions = run.counters, run.client.subscriptions
        self._schedule_claim = schedule_claim
        self._completion_sender = self._make_result_sender()
        """Sends the results of completed jobs without recorded metadata."""
        self._other_result_sender = self._make_result_sender(_count_fitting_results)
        self._senders = self._completion_sender, self._other_result_sender
        self._attempts_with_locked_rows: list[Attempt] = []
        """The attempts whose rows another transaction has locked."""
        self._locked_rows_backoff = Backoff(LOCKED_ROW_RETRY_DELAY_MIN, LOCKED_ROW_RETRY_DELAY_MAX)
        self._locked_rows_retry_at = 0.0
        """The time at which results of locked rows are sent again, in monotonic seconds."""
        self._attempts_logged_as_delayed: set[Attempt] = set()
        """The attempts whose results were logged as delayed."""
        self._result_notifier = ResultNotifier(self._connection, self._schema)
        self._statement_backoff = Backoff(STATEMENT_RETRY_DELAY_MIN, STATEMENT_RETRY_DELAY_MAX)
        self._result_added, self._backlog_reduced, self._sending_ended = (
            asyncio.Event(),
            asyncio.Event(),
            asyncio.Event(),
        )
        self.batches_sent = asyncio.Event()
        """An event that is set each time results were sent. A task that waits for this event must
        clear it first."""
        self._is_closing = False
        self._was_cancelled = False
        """Whether the task of the completer was cancelled. `asyncio.run` cancels all tasks at its
        end."""
        self._sending_scope = anyio.CancelScope(shield=True)
        self._log = get_logger()
        self._should_log_jobs = self._log.is_debug_enabled
        self._limited_log = self._log.with_rate_limit()
        self.flushed = TestSignal("Completer.flushed")

    def set_slot_count(self, slot_count: int) -> None:
        """Set the number of slots of all queues. The maximum number of results that may wait to be
        stored depends on it."""
        self._backlog_max = max(RESULT_BACKLOG_MAX, 2 * slot_count)

    def _make_result_sender(
        self, count_fitting_results: Callable[[list[Attempt]], int] = len
    ) -> BatchSender[Attempt]:
        return BatchSender(
            BatchStatement(
                self._store_and_report_batch,
                get_row_id=_get_job_id,
                get_skipped_row_key=id,
                count_rows_that_fit=count_fitting_results,
            ),
            batch_size=AdaptiveBatchSize(RESULTS_PER_STATEMENT_MAX, RESULT_STATEMENT_TIMEOUT),
            skipped_rows=SkippedRows(),  # `RESULT_BACKLOG_MAX` already limits the results
            on_row_skipped=self._log_failed_result,
            on_batch_too_slow=self._log_slow_batch,
        )

    @property
    def unstored_attempts(self) -> set[Attempt]:
        """The attempts that have ended and whose results are not stored yet."""
        waiting = {
            *self._attempts_with_locked_rows,
            *self._completion_sender.unsent_rows,
            *self._other_result_sender.unsent_rows,
        }
        return {attempt for attempt in waiting if not attempt.stored_at}

    @property
    def waiting_result_count(self) -> int:
        """The number of waiting results. Results in the running statement do not count."""
        return (
            len(self._completion_sender)
            + len(self._other_result_sender)
            + len(self._attempts_with_locked_rows)
        )

    @property
    def results_to_retry(self) -> list[SkippedRow[Attempt]]:
        """The results that the database refused or did not store in time. The completer retries
        them."""
        return [
            *self._completion_sender.skipped_rows.rows,
            *self._other_result_sender.skipped_rows.rows,
        ]

    def add_ended_attempt(self, attempt: Attempt) -> None:
        """Add an attempt that has ended, to store its result. This method does not wait and does
        not fail."""
        self._enqueue_result(attempt)
        self._result_added.set()

    def _enqueue_result(self, attempt: Attempt) -> None:
        is_completion = attempt.is_completed_without_metadata
        (self._completion_sender if is_completion else self._other_result_sender).add_row(attempt)

    @property
    def has_result_backlog_room(self) -> bool:
        """Whether more jobs may be claimed, because the number of waiting results is within its
        limit."""
        return self.waiting_result_count <= self._backlog_max

    async def wait_for_result_backlog_room(self) -> None:
        """Wait until more jobs may be claimed."""
        while not self.has_result_backlog_room:
            self._backlog_reduced.clear()
            await self._backlog_reduced.wait()

    @asynccontextmanager
    async def storing_results(
        self, wait_until_stored: Callable[[asyncio.Event], Awaitable[None]]
    ) -> AsyncGenerator[None]:
        """Store results during the `async with` block. At the end of the block, await
        `wait_until_stored`, and continue to store the remaining results until `wait_until_stored`
        returns.

        `wait_until_stored` receives an event that is set when all results are stored.
        `wait_until_stored` must limit its own time, and must not end when its caller is cancelled.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._send_results_until_closed, name="riverpy completer")
            try:
                yield
            finally:
                self._is_closing = True
                for sender in self._senders:
                    sender.skipped_rows.make_all_rows_due()
                self._result_added.set()
                await wait_until_stored(self._sending_ended)
                self._sending_scope.cancel()
                if self._was_cancelled:
                    await run_despite_cancellation(
                        partial(self._send_results_after_cancellation, wait_until_stored)
                    )

    async def _send_results_until_closed(self) -> None:
        try:
            with self._sending_scope:
                while self.waiting_result_count or not self._is_closing:
                    await self._wait_for_results()
                    self._result_added.clear()
                    await self._send_batches()
        except asyncio.CancelledError:
            self._was_cancelled = True
            raise
        finally:
            self._sending_ended.set()

    async def _send_results_after_cancellation(
        self, wait_until_stored: Callable[[asyncio.Event], Awaitable[None]]
    ) -> None:
        """Store the remaining results after `asyncio.run` has cancelled all tasks. Call this in a
        new task, which is not cancelled."""
        self._sending_ended, self._sending_scope = asyncio.Event(), anyio.CancelScope(shield=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._send_results_until_closed, name="riverpy completer")
            await wait_until_stored(self._sending_ended)
            self._sending_scope.cancel()

    async def _wait_for_results(self) -> None:
        """Wait until a result can be sent."""
        next_at = min(sender.next_send_at for sender in self._senders)
        if self._attempts_with_locked_rows:
            next_at = min(next_at, self._locked_rows_retry_at)
        if next_at:
            with anyio.move_on_after(next_at - time.monotonic()):
                await self._result_added.wait()
        if self._attempts_with_locked_rows and time.monotonic() >= self._locked_rows_retry_at:
            locked, self._attempts_with_locked_rows = self._attempts_with_locked_rows, []
            for attempt in locked:
                self._enqueue_result(attempt)

    async def _send_batches(self) -> None:
        others_are_locked = bool(self._attempts_with_locked_rows)
        for sender in self._senders:
            await self._send_batch(sender)
        await self._result_notifier.send_notifications()
        if not self._attempts_with_locked_rows:
            self._locked_rows_backoff.reset()
        elif not others_are_locked:
            self._locked_rows_retry_at = time.monotonic() + self._locked_rows_backoff.next_delay()
        if self.waiting_result_count < self._backlog_max // 2:
            self._backlog_reduced.set()
        self.batches_sent.set()
        self.flushed.emit()

    async def _send_batch(self, sender: BatchSender[Attempt]) -> None:
        if not sender.can_send_now:
            return
        try:
            await sender.send_batch()
        except DATABASE_ERRORS as error:
            self._log.debug(JOB_RESULT_BATCH_FAILED, error=describe_error(error))
            await anyio.sleep(self._statement_backoff.next_delay())
        except Exception:  # a fault in riverpy must not lose results
            self._log.exception(JOB_RESULT_BATCH_FAILED)
            await anyio.sleep(self._statement_backoff.next_delay())
        else:
            self._statement_backoff.reset()

    async def _store_and_report_batch(self, attempts: list[Attempt]) -> None:
        """Store a batch of results, and report those that were stored. The batch contains either
        only completions without metadata, or only other results. Results of locked rows are sent
        again later.

        Raises:
            Exception: one of DATABASE_ERRORS; nothing was stored.
        """
        attempts.sort(key=_get_job_id)  # lock rows in the same order, to prevent deadlocks
        are_completions = attempts[0].is_completed_without_metadata
        try:
            stored = await self._store_results(attempts, skip_locked=self._should_skip_locked_rows)
        except LockNotAvailableError:
            if self._should_skip_locked_rows:
                raise
            stored = await self._store_results(attempts, skip_locked=True)
        except Exception as error:
            if len(attempts) > 1 or not is_data_error(error) or attempts[0].is_result_replaced:
                raise
            self._replace_unstorable_result(attempts[0], error)
            return
        if not are_completions:
            self._result_notifier.add_queues_with_available_jobs(
                one.queue for one in stored if one.is_job_stored_as_available
            )
        if self._attempts_logged_as_delayed:
            self._forget_delayed_attempts(attempts)
        self._report_stored_results(stored)

    def _log_failed_result(self, attempt: Attempt, error: Exception) -> None:
        """Log a result that cannot be stored, even by a statement that stores no other result."""
        self._log_delayed_results(
            [attempt], describe_error(error), is_slow=find_error_cause(error) is ErrorCause.TIMEOUT
        )

    def _log_delayed_results(
        self, attempts: list[Attempt], error: str, *, is_slow: bool = False
    ) -> None:
        self._attempts_logged_as_delayed.update(attempts)
        self._limited_log.warning(
            JOB_RESULTS_TIMED_OUT if is_slow else JOB_RESULTS_REJECTED,
            count=len(attempts),
            job_ids=[attempt.id for attempt in attempts[:20]],
            error=error,
        )

    def _forget_delayed_attempts(self, attempts: list[Attempt]) -> None:
        """Forget attempts whose delayed results were stored or refused. When no delayed result is
        left, log this."""
        self._attempts_logged_as_delayed.difference_update(
            set(attempts).difference(self._attempts_with_locked_rows)
        )
        if not self._attempts_logged_as_delayed:
            self._log.info(REJECTED_JOB_RESULTS_STORED)

    def _log_slow_batch(self, row_count: int, error: Exception) -> None:
        """Log that a batch took too long. The BatchSender sends its results again in smaller
        batches."""
        if self._connection.outage_tracker.is_outage_logged:
            return
        self._limited_log.warning(
            RESULT_BATCH_SIZE_REDUCED,
            rows=row_count,
            error=describe_error(error),
        )

    def _retry_locked_results_later(self, attempts: list[Attempt]) -> None:
        """Keep results whose rows are locked, to send them again later. Log the results that have
        waited for `LOCKED_ROW_LOG_DELAY`, but only if no result of this batch was logged before."""
        now = time.monotonic()
        late = [attempt for attempt in attempts if now - attempt.ended_at >= LOCKED_ROW_LOG_DELAY]
        if late and self._attempts_logged_as_delayed.isdisjoint(attempts):
            self._log_delayed_results(late, LOCKED_ROWS_ADVICE)
        self._attempts_with_locked_rows += attempts

    def _replace_unstorable_result(self, attempt: Attempt, error: Exception) -> None:
        """Replace a result with a failure, because the database cannot store the result.

        If the database refuses only a character of the error text, keep the result, and convert its
        error text to ASCII.
        """
        if is_untranslatable_text_error(error) and attempt.convert_error_text_to_ascii():
            self._other_result_sender.add_row(attempt)
            return
        self._limited_log.error(
            JOB_RESULT_REPLACED,
            effect="the attempt is stored as failed",
            job_id=attempt.id,
            kind=attempt.kind,
            error=describe_error(error),
        )
        attempt.remove_all_metadata_updates()
        attempt.is_result_replaced = True
        text = "the result of this attempt could not be stored"
        attempt.outcome = make_failure_outcome(
            attempt, text, describe_error(error), JOB_RETRY_DELAY_IF_RESULT_UNSTORABLE
        )
        self._other_result_sender.add_row(attempt)

    def _report_stored_results(self, attempts: list[Attempt]) -> None:
        """Count, log and publish the stored results of a batch. The batch contains either only
        completions without metadata, or only other results."""
        self._counters.count_ended_attempts(attempts)
        self._result_notifier.add_awaited_ended_jobs(attempts)
        if self._should_log_jobs:
            self._log_ended_attempts(attempts)
        if not attempts or attempts[0].is_completed_without_metadata:
            self._subscriptions.publish_attempt_ends(attempts)
            return
        self._subscriptions.publish_attempt_ends(
            [one for one in attempts if one.should_publish_event]
        )
        for attempt in attempts:
            if attempt.outcome is not None and attempt.stored_state == JobState.AVAILABLE:
                self._schedule_claim(attempt.queue, attempt.outcome.seconds_until_due or 0.0)
            if attempt.stored_state == JobState.CANCELLED != attempt.target_state:
                self._limited_log.info(
                    JOB_CANCELLED_AFTER_ITS_ATTEMPT,
                    job_id=attempt.id,
                    kind=attempt.kind,
                    queue=attempt.queue,
                )

    def _log_ended_attempts(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            self._log.debug(
                JOB_ENDED,
                job_id=attempt.id,
                kind=attempt.kind,
                queue=attempt.queue,
                attempt=attempt.attempt,
                outcome=attempt.event_kind.value,
                state=attempt.stored_state,
                seconds=round(attempt.ended_at - (attempt.started_at or attempt.ended_at), 6),
            )

    async def _store_results(self, attempts: list[Attempt], *, skip_locked: bool) -> list[Attempt]:
        """Store results. With `skip_locked`, omit rows that other transactions have locked. Return
        the attempts whose results are stored."""
        async with self._connection.acquire(
            "storing job results", RESULT_STATEMENT_TIMEOUT
        ) as connection:
            if not skip_locked:
                states = await self._send_results_statement(connection, attempts)
            else:
                states = await self._send_results_of_unlocked_rows(connection, attempts)
            stored = attempts
            if len(states) != len(attempts):
                stored = await self._find_stored_and_retry_locked_results(
                    connection, attempts, states
                )
        now = time.monotonic()
        for attempt in stored:
            attempt.stored_at = now
            attempt.stored_state = states[attempt.id]
        return stored

    async def _send_results_of_unlocked_rows(
        self, connection: Connection, attempts: list[Attempt]
    ) -> dict[int, str]:
        async with connection.transaction():
            ids = [attempt.id for attempt in attempts]
            free = await jobs.job_lock_running(connection, self._schema, ids)
            unlocked = [attempt for attempt in attempts if attempt.id in free]
            return await self._send_results_statement(connection, unlocked) if unlocked else {}

    async def _send_results_statement(
        self, connection: Connection, attempts: list[Attempt]
    ) -> dict[int, str]:
        """Send one statement. Returns the stored state of each changed row, by job id."""
        now = time.monotonic()
        if not attempts[0].is_completed_without_metadata:
            results = [attempt.make_attempt_result(now) for attempt in attempts]
            return await jobs.job_store_results(connection, self._schema, results)
        ids, numbers, times = map(
            list, zip(*[attempt.claim_key for attempt in attempts], strict=True)
        )
        ages = [now - attempt.ended_at for attempt in attempts]
        done = await jobs.job_complete(
            connection,
            self._schema,
            ids=ids,
            attempts=numbers,
            attempted_ats=times,
            seconds_since_end=ages,
        )
        return dict.fromkeys(done, JobState.COMPLETED.value)

    async def _find_stored_and_retry_locked_results(
        self, connection: Connection, attempts: list[Attempt], stored_states: dict[int, str]
    ) -> list[Attempt]:
        """Handle the rows that the statement did not change. Returns the attempts whose results are
        stored.

        If a row already has the result, an earlier statement has stored the result, but its answer
        was lost. If a row is still running with the claim key of the attempt, another transaction
        has locked the row. The result of this attempt is then sent again. If another session has
        cancelled, completed or discarded the job during the attempt, the job keeps that state.
        """
        missing = [attempt.id for attempt in attempts if attempt.id not in stored_states]
        found = await jobs.job_get_stored_outcomes(connection, self._schema, missing)
        stored: list[Attempt] = []
        locked: list[Attempt] = []
        late: list[Attempt] = []
        for attempt in attempts:
            if attempt.id in stored_states:
                stored.append(attempt)
                continue
            outcome = found.get(attempt.id, _DELETED_JOB_OUTCOME)
            is_ours = attempt.is_outcome_stored(outcome)
            if outcome.claim_key == attempt.claim_key and outcome.state == JobState.RUNNING:
                locked.append(attempt)
            elif is_ours and not (outcome.is_final and attempt.metadata_updates_json):
                stored_states[attempt.id] = outcome.state
                stored.append(attempt)
            elif outcome.claim_key == attempt.claim_key and outcome.is_final:
                if attempt.is_completed_in_transaction and outcome.state == JobState.COMPLETED:
                    attempt.remove_outcome_metadata()
                late.append(attempt)
            else:
                self._log_refused_result(attempt, outcome.state)
        if late:
            locked += await self._merge_metadata_of_ended_jobs(connection, late)
        self._retry_locked_results_later(locked)
        return stored

    def _log_refused_result(self, attempt: Attempt, state: str) -> None:
        self._counters.refused_result_count += 1
        self._limited_log.warning(
            JOB_RESULT_REFUSED,
            reason="the attempt no longer belongs to this client",
            job_id=attempt.id,
            kind=attempt.kind,
            attempt=attempt.attempt,
            outcome=attempt.event_kind.value,
            state=state,
        )

    def _log_failure_after_completion(self, attempt: Attempt) -> None:
        """Log that the job's code has called `complete_tx` and then raised an error. If a stop of
        the client has caused the error, log nothing, because the code did not fail."""
        outcome = attempt.outcome
        if outcome is not None and outcome.event_kind is not EventKind.JOB_INTERRUPTED:
            error = "JobSnooze was raised: a completed job does not run again"
            if outcome.error_entry is not None:
                error = parse_error_entry(outcome.error_entry).error
            self._limited_log.warning(
                CODE_FAILED_AFTER_ITS_JOB_COMPLETED,
                job_id=attempt.id,
                kind=attempt.kind,
                attempt=attempt.attempt,
                outcome=outcome.event_kind.value,
                error=error,
            )

    async def _merge_metadata_of_ended_jobs(
        self, connection: Connection, attempts: list[Attempt]
    ) -> list[Attempt]:
        """Store the recorded metadata of attempts whose jobs another session has cancelled,
        completed or discarded. Returns the attempts whose rows are locked."""
        rows = await jobs.job_merge_ended_metadata(
            connection,
            self._schema,
            claim_keys=[attempt.claim_key for attempt in attempts],
            metadata_updates=[attempt.metadata_updates_json for attempt in attempts],
        )
        found, now = {row[JobColumn.ID]: row for row in rows}, time.monotonic()
        ended: list[Attempt] = []
        for attempt in attempts:
            if (row := found.get(attempt.id)) is None:
                continue
            if row[JobColumn.STATE] != attempt.target_state:
                if (
                    attempt.is_completed_in_transaction
                    and row[JobColumn.STATE] == JobState.COMPLETED
                ):
                    self._log_failure_after_completion(attempt)
                else:
                    self._log_refused_result(attempt, row[JobColumn.STATE])
            attempt.set_outcome_from_row(tuple(row))
            attempt.stored_at, attempt.stored_state = now, row[JobColumn.STATE]
            ended.append(attempt)
        self._report_stored_results(ended)
        return [attempt for attempt in attempts if attempt.id not in found]


def _count_fitting_results(attempts: list[Attempt]) -> int:
    """Return how many results from the start of the list fit into one statement."""
    size = 0
    for index, attempt in enumerate(attempts):
        size += attempt.result_length
        if size > CHARACTERS_PER_STATEMENT_MAX and index:
            return index
    return len(attempts)


def _get_job_id(attempt: Attempt) -> int:
    return attempt.id
