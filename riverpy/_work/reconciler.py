"""Reconciler: compares the state of this process with the database, and corrects differences.

A notification or the answer to a claim can be lost. So the reconciler reads the database after each
reconnect, and at intervals: which queues are paused, which running jobs were cancelled, and which
jobs this client has claimed but does not run. If this run has claimed such a job, the answer to the
claim was lost, and the reconciler releases the job. If an earlier run with the same client id has
claimed the job, the reconciler rescues the job.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio

from riverpy._lifecycle import TestSignal
from riverpy._log import get_logger
from riverpy._log_events import (
    JOB_RELEASE_FAILED,
    JOB_RESCUE_FAILED,
    JOBS_OF_EARLIER_RUN_RESCUED,
    JOBS_OF_LOST_CLAIMS_RELEASED,
    QUEUE_RENEWAL_FAILED,
    RECONCILIATION_FAILED,
)
from riverpy._postgres import jobs, queues
from riverpy._postgres.batch_sender import AdaptiveBatchSize, BatchSender, BatchStatement
from riverpy._postgres.damaged_jobs import DamagedJobTracker
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy._postgres.job_maintenance import JobRescue, job_list_running_of_clients, job_rescue
from riverpy._postgres.skipped_rows import SkippedRows, make_skipped_row_reports
from riverpy._work.claimer import CLAIM_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from anyio.abc import TaskStatus

    from riverpy._lifecycle import StopScope
    from riverpy._postgres.job_maintenance import RunningAttempt
    from riverpy._postgres.jobs import ClaimKey
    from riverpy._postgres.skipped_rows import SkippedRowReport
    from riverpy._work.attempt import Attempt
    from riverpy._work.completer import Completer
    from riverpy._work.producer import Producer
    from riverpy._work.run_context import RunContext
    from riverpy._work.running_attempts import RunningAttempts

RECONCILE_INTERVAL = 30.0
"""Seconds between two checks for paused queues, cancelled jobs and lost claims."""
RECONCILE_INTERVAL_WHEN_POLLING = 2.0
"""Seconds between two checks for paused queues and cancelled jobs while no notifications arrive, as
in River."""
QUEUE_ROW_UPDATE_INTERVAL = 600.0
"""Seconds between two updates of the client's rows in `river_queue`, as in River."""
STATEMENT_TIMEOUT = 10.0
"""The timeout of one statement on the connection for claims, in seconds."""
RESERVED_CONNECTION_STATEMENT_TIMEOUT = 2.0
"""The timeout of one statement on the connection that is reserved for leases and heartbeats, in
seconds."""
CLAIM_RELEASE_TIMEOUT_MIN = 1.0
"""The minimum timeout for releasing lost claims at the end of a run, in seconds."""
RECONCILE_RETRY_DELAY = 2.0
"""Seconds until the next check after a database error."""
ROWS_PER_STATEMENT_MAX = 5_000
"""The maximum number of rows in one statement."""
RECONCILE_STEP_TIMEOUT = 15.0
"""After this many seconds, one step of a check sends no further statement. The remaining rows wait
for the next check."""
RECONCILE_TIMEOUT = 90.0
"""The timeout of all statements of one check together, in seconds."""
LOST_CLAIM_MARGIN = 0.5
"""A claim without an answer counts as lost this many seconds after the timeout of the claim."""
RUNNING_STATES = ("running",)
RESCUE_PAGE_SIZE = 1_000
"""The maximum number of jobs of an earlier run that one statement reads."""
RowT = TypeVar("RowT", bound="ClaimKey | JobRescue | Attempt | str")


class Reconciler:
    """Checks for paused queues, cancelled jobs and lost claims while the producers of one client
    run."""

    name = "reconciler"

    def __init__(
        self,
        run: RunContext,
        *,
        running: RunningAttempts,
        completer: Completer,
        producers: Mapping[str, Producer],
        is_listening: Callable[[], bool],
        abandoned_claim_keys: frozenset[ClaimKey],
    ) -> None:
        """`is_listening` returns whether notifications arrive. `abandoned_claim_keys` are the claim
        keys of attempts of earlier runs in this process whose code may still run. The reconciler
        does not release them."""
        self._schema, self._client_id = run.schema, run.client.id
        self._reserved_connection = run.connections.reserved
        self._claim_connection = run.connections.claims
        self._running_attempts, self._completer, self._heartbeat = running, completer, run.heartbeat
        self._producers, self._is_listening = producers, is_listening
        self._abandoned_claim_keys = abandoned_claim_keys
        quiet = run.config.quiet_interval
        self._quiet_interval = 0.0 if quiet is None else quiet.total_seconds()
        self._queues_changed_by_notification: set[str] = set()
        """The queues that a notification has paused or resumed since the paused queues were last
        read."""
        self._wakeup = asyncio.Event()
        self._next_claim_check_at = 0.0
        self._failed_claim_lost_at = 0.0
        """The monotonic time from which the server no longer runs the last failed claim."""
        self.has_unanswered_claim = False
        """Whether a claim without an answer may have claimed jobs that do not run."""
        self._next_queue_update_at = 0.0
        self._last_read_id: int | None = 0
        """The last job id read in the search for jobs of an earlier run; None: all were read."""
        self._skipped_row_getters: list[Callable[[], list[SkippedRowReport]]] = []
        self._release_sender = self._make_row_sender(
            "release", self._send_release_statement, lambda claim_key: claim_key.id
        )
        self._rescue_sender = self._make_row_sender(
            "rescue", self._send_rescue_statement, lambda rescue: rescue.claim_key.id
        )
        self._queue_update_sender = self._make_row_sender(
            "queue heartbeat", self._send_queue_updates, str
        )
        self._cancel_check_sender = self._make_row_sender(
            "cancel check", self._cancel_attempts_if_requested, lambda attempt: attempt.id
        )
        self._queue_update_error: Exception | None = None
        """The last error of a statement that updates the row of one queue only."""
        self._changed_job_count = 0
        """The number of jobs that the current check has released or rescued."""
        self._removed_queues: set[str] = set()
        """The removed queues whose jobs may have been claimed by a claim without an answer."""
        self._pause_lock = anyio.Lock()
        """A lock that is held from a read of the paused queues until their producers are paused."""
        self._paused_queues: set[str] = set()
        """The paused queues that the current check has found so far."""
        self._log = get_logger()
        self._damaged_jobs = DamagedJobTracker("finding lost claims", self._log)
        self._limited_log = self._log.with_rate_limit()
        self.ran = TestSignal("Reconciler.ran")

    def _make_row_sender(
        self,
        purpose: str,
        send_rows: Callable[[list[RowT]], Awaitable[None]],
        get_name: Callable[[RowT], int | str],
    ) -> BatchSender[RowT]:
        """Return an object that sends rows in batches. If the statement for a single row fails, the
        row is skipped for a while. From the second failure on, the property `skipped_rows` reports
        the row, with `purpose` as the purpose of the statement. `get_name` returns the job id or
        the queue of a row."""
        sender = BatchSender[RowT](
            BatchStatement(send_rows, get_row_id=lambda row: row),
            batch_size=AdaptiveBatchSize(ROWS_PER_STATEMENT_MAX, STATEMENT_TIMEOUT),
            # The number of skipped rows needs no limit, because the client's jobs and queues are
            # limited.
            skipped_rows=SkippedRows(),
            on_row_skipped=lambda row, error: self._log_failed_row(purpose, get_name(row), error),
        )
        self._skipped_row_getters.append(
            lambda: make_skipped_row_reports(purpose, sender.skipped_rows.rows, get_name)
        )
        return sender

    def _log_failed_row(self, purpose: str, row_name: int | str, error: Exception) -> None:
        log, text = self._limited_log, describe_error(error)
        if purpose == "queue heartbeat":
            self._queue_update_error = error
            log.warning(QUEUE_RENEWAL_FAILED, queue=row_name, error=text)
        elif purpose == "rescue":
            log.warning(JOB_RESCUE_FAILED, job_id=row_name, error=text)
        elif purpose == "release":
            log.warning(JOB_RELEASE_FAILED, job_id=row_name, error=text)
        else:
            log.warning(RECONCILIATION_FAILED, what=purpose, job_id=row_name, error=text)

    @property
    def skipped_rows(self) -> list[SkippedRowReport]:
        """The rows that the reconciler skips for a while, because statements on these rows fail."""
        return [
            *self._damaged_jobs.skipped_job_reports,
            *(row for report in self._skipped_row_getters for row in report()),
        ]

    @property
    def check_interval(self) -> float:
        """Seconds between two checks while notifications arrive."""
        return max(RECONCILE_INTERVAL, self._quiet_interval)

    def resync(self) -> None:
        """Check soon, because a connection was lost and opened again."""
        self._schedule_lost_claim_check()
        self._wake_producers()

    def schedule_check_after_failed_claim(self) -> None:
        """Check for lost claims, because a claim without an answer may have claimed jobs."""
        self.has_unanswered_claim = True
        self._schedule_lost_claim_check()

    def _schedule_lost_claim_check(self) -> None:
        """Plan a check for the time at which a claim that has failed just now counts as lost. A
        check that is already planned for an earlier time still runs, and this check runs later."""
        self._failed_claim_lost_at = time.monotonic() + CLAIM_TIMEOUT + LOST_CLAIM_MARGIN
        self._next_claim_check_at = min(self._next_claim_check_at, self._failed_claim_lost_at)
        self._wakeup.set()

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Read the paused queues, then run checks until stopped."""
        await self._update_queue_rows()
        self._next_claim_check_at = time.monotonic() + self.check_interval
        await self._run_step_and_log_error("jobs of an earlier run", self._rescue_earlier_run_jobs)
        task_status.started()
        is_done = True
        while True:
            interval = (
                self.check_interval if self._is_listening() else RECONCILE_INTERVAL_WHEN_POLLING
            )
            if not is_done:
                interval = RECONCILE_RETRY_DELAY
            wait = min(interval, max(self._next_claim_check_at - time.monotonic(), 0.0))
            scope.set_progress_deadline(within=wait + RECONCILE_TIMEOUT)
            with anyio.move_on_after(wait):
                await self._wakeup.wait()
            if self._wakeup.is_set():  # wait, so that several reconnects cause one check
                self._wakeup.clear()
                await anyio.sleep(LOST_CLAIM_MARGIN)
            is_done = await self._run_step_and_log_error("pauses", self._check_paused_queues)
            is_done = (
                await self._run_step_and_log_error("cancels", self._check_cancelled_jobs)
                and is_done
            )
            if time.monotonic() >= self._next_claim_check_at:
                await self._check_for_lost_claims()
            self.ran.emit()

    async def _check_for_lost_claims(self) -> None:
        """Release lost claims, and set the time of the next check."""
        began = time.monotonic()
        release = partial(self._release_lost_claims, min_age_seconds=CLAIM_TIMEOUT)
        if not (
            await self._run_step_and_log_error(
                "jobs of an earlier run", self._rescue_earlier_run_jobs
            )
            and await self._run_step_and_log_error("lost claims", release)
        ):
            self._next_claim_check_at = began + RECONCILE_RETRY_DELAY
        elif self._failed_claim_lost_at > began:
            self._next_claim_check_at = self._failed_claim_lost_at
        else:
            self._next_claim_check_at = began + self.check_interval
            self.has_unanswered_claim = bool(self._release_sender.skipped_rows)
            if not self.has_unanswered_claim:
                self._removed_queues.clear()
        if retry_at := min(self._release_sender.next_send_at, self._rescue_sender.next_send_at):
            self._next_claim_check_at = min(
                self._next_claim_check_at, max(retry_at, began + RECONCILE_RETRY_DELAY)
            )

    async def _run_step_and_log_error(
        self, step_name: str, step: Callable[[], Awaitable[None]]
    ) -> bool:
        """Run a step. After a database error, log the error and return False."""
        try:
            await step()
        except DATABASE_ERRORS as error:
            self._log.debug(RECONCILIATION_FAILED, what=step_name, error=describe_error(error))
            return False
        return True

    def set_queue_paused(self, queue: str, *, paused: bool) -> None:
        """Apply a notification that a queue was paused or resumed. `*` means all queues."""
        for name, producer in self._producers.items():
            if queue in {name, "*"}:
                self._queues_changed_by_notification.add(name)
                producer.set_paused(paused)

    async def write_added_queue_row(self, queue: str) -> None:
        """Write the row of a queue that was added, and pause its producer if the queue is paused.

        Raises:
            Exception: one of DATABASE_ERRORS.
        """
        async with self._pause_lock:
            self._queues_changed_by_notification.discard(queue)
            async with self._claim_connection.acquire(
                "adding a queue", STATEMENT_TIMEOUT
            ) as connection:
                rows = await queues.queue_upsert(connection, self._schema, [queue])
            if queue not in self._queues_changed_by_notification and queue in self._producers:
                self._producers[queue].set_paused(rows.get(queue, False))

    def forget_removed_queue(self, queue: str) -> None:
        """Stop updating the row of a removed queue. If a claim without an answer may have claimed
        jobs of this queue, these jobs are still released."""
        self._queue_update_sender.forget_skipped_row(queue)
        if self.has_unanswered_claim:
            self._removed_queues.add(queue)

    async def _update_queue_rows(self) -> None:
        async with self._pause_lock:
            await self._update_queue_rows_under_lock()

    async def _update_queue_rows_under_lock(self) -> None:
        """Update the client's rows in `river_queue`, and read which queues are paused. After
        `RECONCILE_STEP_TIMEOUT`, the remaining queues wait for the next check.

        Raises:
            Exception: one of DATABASE_ERRORS: the database failed, or no row can be updated.
        """
        self._queues_changed_by_notification.clear()
        self._paused_queues.clear()
        self._queue_update_sender.add_missing_rows(self._producers)
        is_done = await self._queue_update_sender.send_all_due_rows(RECONCILE_STEP_TIMEOUT)
        failing = len(self._queue_update_sender.skipped_rows)
        if is_done and not failing:
            self._pause_and_resume_queues(self._paused_queues)
        elif failing == len(self._producers) and self._queue_update_error is not None:
            raise self._queue_update_error
        else:
            await self._refresh_paused_queues_under_lock()
        if is_done:
            self._next_queue_update_at = time.monotonic() + QUEUE_ROW_UPDATE_INTERVAL

    async def _send_queue_updates(self, queue_names: list[str]) -> None:
        async with self._claim_connection.acquire(
            "renewing queues", STATEMENT_TIMEOUT
        ) as connection:
            rows = await queues.queue_upsert(connection, self._schema, queue_names)
        self._paused_queues.update(name for name, paused in rows.items() if paused)

    async def _check_paused_queues(self) -> None:
        """Read which queues are paused. Every ten minutes, also update the rows of the queues."""
        if time.monotonic() >= self._next_queue_update_at:
            await self._update_queue_rows()
        else:
            await self._refresh_paused_queues()

    async def _refresh_paused_queues(self) -> None:
        async with self._pause_lock:
            await self._refresh_paused_queues_under_lock()

    async def _refresh_paused_queues_under_lock(self) -> None:
        self._queues_changed_by_notification.clear()
        async with self._reserved_connection.acquire(
            "reading pauses", RESERVED_CONNECTION_STATEMENT_TIMEOUT
        ) as connection:
            paused = await queues.queue_find_paused(connection, self._schema, list(self._producers))
        self._pause_and_resume_queues(paused)

    def _pause_and_resume_queues(self, paused_queues: set[str]) -> None:
        """Pause and resume queues after the paused queues were read. If a notification about a
        queue arrived during the read, the queue is not changed, because the notification is
        newer."""
        for name, producer in self._producers.items():
            if name not in self._queues_changed_by_notification:
                producer.set_paused(name in paused_queues)

    async def _check_cancelled_jobs(self) -> None:
        self._cancel_check_sender.add_missing_rows(self._running_attempts)
        await self._cancel_check_sender.send_all_due_rows(RECONCILE_STEP_TIMEOUT)

    async def _cancel_attempts_if_requested(self, attempts: list[Attempt]) -> None:
        ids = [attempt.id for attempt in attempts]
        async with self._reserved_connection.acquire(
            "reading cancels", RESERVED_CONNECTION_STATEMENT_TIMEOUT
        ) as connection:
            marked = set(await jobs.job_find_cancel_requested(connection, self._schema, ids))
        # Cancel only the attempts that were checked, not a new attempt of the same job.
        self._running_attempts.cancel_attempts(
            attempt for attempt in attempts if attempt.id in marked
        )

    async def release_unanswered_claims(self, timeout: float) -> None:
        """Release the jobs of claims without an answer at the end of the run.

        Call this method after the producers have ended. Its timeout is `timeout` seconds, but at
        least `CLAIM_RELEASE_TIMEOUT_MIN`.
        """
        if not self.has_unanswered_claim:
            return
        with anyio.move_on_after(max(timeout, CLAIM_RELEASE_TIMEOUT_MIN), shield=True):
            release = partial(self._release_lost_claims, min_age_seconds=0.0)
            self.has_unanswered_claim = not await self._run_step_and_log_error(
                "last claims", release
            )

    async def _release_lost_claims(self, *, min_age_seconds: float) -> None:
        """Release the jobs that this client claimed more than `min_age_seconds` ago, that do not
        run, and that have no result to store.

        The rows are read over the connection for claims. So no claim runs at the same time, and all
        running attempts are known.
        """
        async with self._claim_connection.acquire(
            "finding lost claims", STATEMENT_TIMEOUT
        ) as connection:

            async def read(skipped: list[int]) -> list[ClaimKey]:
                """Read the claim keys of the jobs that this client has claimed long enough ago."""
                return await jobs.job_list_claimed_by_client(
                    connection,
                    self._schema,
                    queues=[*self._producers, *self._removed_queues],
                    client_id=self._client_id,
                    claimed_longer_than=min_age_seconds,
                    skipped_ids=skipped,
                )

            claimed = await self._damaged_jobs.read_jobs(
                connection, self._schema, RUNNING_STATES, read
            )
            known = self._collect_active_claim_keys() | {
                rescue.claim_key for rescue in self._rescue_sender.unsent_rows
            }
            lost = [claim_key for claim_key in claimed if claim_key not in known]
            if lost and not await self._heartbeat.is_run_still_registered(connection):
                return
        self._release_sender.discard_unsent_rows()
        for claim_key in lost:
            self._release_sender.add_row(claim_key)
        self._changed_job_count = 0
        try:
            if not await self._release_sender.send_all_due_rows(RECONCILE_STEP_TIMEOUT):
                raise TimeoutError("releasing lost claims continues in the next check")
        finally:
            if self._changed_job_count:
                self._log.warning(JOBS_OF_LOST_CLAIMS_RELEASED, count=self._changed_job_count)
                self._wake_producers()

    async def _send_release_statement(self, claim_keys: list[ClaimKey]) -> None:
        async with self._claim_connection.acquire(
            "releasing lost claims", STATEMENT_TIMEOUT
        ) as connection:
            self._changed_job_count += len(
                await jobs.job_release(connection, self._schema, claim_keys)
            )

    async def _rescue_earlier_run_jobs(self) -> None:
        """Rescue the jobs of an earlier run with the same client id.

        A client with a configured id has the same id after a crash. The leader does not rescue its
        jobs, because this run writes heartbeats under the same id. A job belongs to an earlier run
        if it was claimed before this run registered itself in the table `riverpy_client`. If this
        run is not registered, it cannot recognize these jobs, and releases them as lost claims.
        """
        registered_at = self._heartbeat.registered_at
        if registered_at is None:
            self._last_read_id = None
        self._changed_job_count = 0
        try:
            while self._rescue_sender.has_due_rows or self._last_read_id is not None:
                if not await self._rescue_sender.send_all_due_rows(RECONCILE_STEP_TIMEOUT):
                    raise TimeoutError("rescuing jobs continues in the next check")
                if self._last_read_id is None or registered_at is None:
                    return
                await self._enqueue_jobs_to_rescue(registered_at, self._last_read_id)
        finally:
            if self._changed_job_count:
                self._log.warning(JOBS_OF_EARLIER_RUN_RESCUED, count=self._changed_job_count)
                self._wake_producers()

    async def _enqueue_jobs_to_rescue(self, registered_at: int, after_job_id: int) -> None:
        """Read a page of jobs, with ids above `after_job_id`, that were claimed under this client's
        id before `registered_at`. The connection for claims is used, so that no claim runs at the
        same time."""
        async with self._claim_connection.acquire(
            "finding jobs to rescue", STATEMENT_TIMEOUT
        ) as connection:

            async def read(skipped: list[int]) -> list[RunningAttempt]:
                """Read the next page of running jobs of this client."""
                return await job_list_running_of_clients(
                    connection,
                    self._schema,
                    client_ids=[self._client_id],
                    queue_filter=None,
                    after_id=after_job_id,
                    limit=RESCUE_PAGE_SIZE,
                    skipped_ids=skipped,
                )

            claims = await self._damaged_jobs.read_jobs(
                connection, self._schema, RUNNING_STATES, read
            )
            active = self._collect_active_claim_keys()
            if claims and not await self._heartbeat.is_run_still_registered(connection):
                return
        for claim_key, client_id in claims:
            if claim_key.attempted_at < registered_at and claim_key not in active:
                self._rescue_sender.add_row(JobRescue(claim_key, client_id))
        self._last_read_id = claims[-1].claim_key.id if len(claims) == RESCUE_PAGE_SIZE else None

    async def _send_rescue_statement(self, rescues: list[JobRescue]) -> None:
        async with self._claim_connection.acquire("rescuing jobs", STATEMENT_TIMEOUT) as connection:
            done = await job_rescue(connection, self._schema, rescues)
        self._changed_job_count += len(done)

    def _collect_active_claim_keys(self) -> set[ClaimKey]:
        """Return the claim keys of attempts that run in this process, or whose results are not
        stored yet."""
        unstored = {attempt.claim_key for attempt in self._completer.unstored_attempts}
        return self._running_attempts.collect_claim_keys() | self._abandoned_claim_keys | unstored

    def _wake_producers(self) -> None:
        for producer in self._producers.values():
            producer.wake_after_notification()
