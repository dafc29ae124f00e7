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
from riverpy._postgres.batch_sender import BatchSender, BatchSize, BatchStatement
from riverpy._postgres.damaged_jobs import DamagedJobTracker
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy._postgres.job_maintenance import JobRescue, job_list_running_of_clients, job_rescue
from riverpy._postgres.skipped_rows import SkippedRows, report_skipped_rows
from riverpy._work.producer import CLAIM_TIMEOUT

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

CHECK_INTERVAL = 30.0
"""Seconds between two checks of pauses, cancels and claims."""
POLLING_CHECK_INTERVAL = 2.0
"""Seconds between two checks of pauses and cancels while no notifications arrive; as in River."""
QUEUE_TOUCH_INTERVAL = 600.0
"""Seconds between two updates of the client's rows in `river_queue`; as in River."""
STATEMENT_TIMEOUT = 10.0
"""Seconds for one statement on the connection for claims."""
RESERVED_STATEMENT_TIMEOUT = 2.0
"""Seconds for one statement on the reserved connection, which leases and heartbeats use too."""
LAST_RELEASE_TIMEOUT = 1.0
"""Seconds for releasing lost claims at the end of a run."""
RETRY_DELAY = 2.0
"""Seconds until the next check after an error of the database."""
STATEMENT_ROWS_MAX = 5_000
"""The maximum number of rows in one statement."""
SEND_TIMEOUT = 15.0
"""Seconds. After this time, one step of a check starts no further statement. The remaining rows
wait for the next check."""
CHECK_TIMEOUT = 90.0
"""Seconds that all statements of one check may take."""
LOST_CLAIM_MARGIN = 0.5
"""Seconds. A claim without an answer counts as lost when this time has passed after its timeout."""
RUNNING_STATES = ("running",)
PAGE_SIZE = 1_000
"""One read returns at most this many jobs of an earlier run."""
Row = TypeVar("Row", bound="ClaimKey | JobRescue | Attempt | str")


class Reconciler:
    """Checks pauses, cancels and claims while the producers of one client run."""

    name = "reconciler"

    def __init__(
        self,
        run: RunContext,
        *,
        running: RunningAttempts,
        completer: Completer,
        producers: Mapping[str, Producer],
        is_notified: Callable[[], bool],
        abandoned: frozenset[ClaimKey],
    ) -> None:
        """`is_notified` returns whether notifications arrive. `abandoned` are attempts of earlier
        runs in this process. Their code may still run, so the reconciler does not release them."""
        self._schema, self._client_id = run.schema, run.client.id
        self._reserved, self._claims = run.connections.reserved, run.connections.claims
        self._running, self._completer, self._heartbeat = running, completer, run.heartbeat
        self._producers, self._is_notified, self._abandoned = producers, is_notified, abandoned
        quiet = run.config.quiet_interval
        self._quiet_interval = 0.0 if quiet is None else quiet.total_seconds()
        self._notified_queues: set[str] = set()
        """The queues that a notification has paused or resumed since the paused queues were last
        read."""
        self._wakeup = asyncio.Event()
        self._next_claim_check = 0.0
        self._claim_lost_at = 0.0
        """The time at which the last failed claim counts as lost, in monotonic seconds."""
        self.has_uncertain_claim = False
        """Whether a claim without an answer may have claimed jobs that do not run."""
        self._touch_at = 0.0
        self._rescue_after_id: int | None = 0
        """The jobs of an earlier run were read up to this id; None: all jobs were read."""
        self._skipped_row_reports: list[Callable[[], list[SkippedRowReport]]] = []
        self._release_sender = self._make_sender(
            "release", self._release_rows, lambda claim_key: claim_key.id
        )
        self._rescue_sender = self._make_sender(
            "rescue", self._rescue_rows, lambda rescue: rescue.claim_key.id
        )
        self._touch_sender = self._make_sender("queue heartbeat", self._touch_rows, str)
        self._cancel_check_sender = self._make_sender(
            "cancel check", self._read_cancel_marks, lambda attempt: attempt.id
        )
        self._touch_error: Exception | None = None
        """The last error of updating the row of a single queue."""
        self._changed_job_count = 0
        """The number of jobs that this check has released or rescued."""
        self._removed_queues: set[str] = set()
        """The removed queues that a claim without an answer may have claimed jobs of."""
        self._pause_lock = anyio.Lock()
        """Held from a read of paused queues until they are applied."""
        self._paused: set[str] = set()
        """The paused queues among the queues that this check has updated."""
        self._log = get_logger()
        self._damaged_jobs = DamagedJobTracker("finding lost claims", self._log)
        self._limited_log = self._log.with_rate_limit()
        self.ran = TestSignal("Reconciler.ran")

    def _make_sender(
        self,
        what: str,
        send: Callable[[list[Row]], Awaitable[None]],
        name: Callable[[Row], int | str],
    ) -> BatchSender[Row]:
        """Return a sender of rows. A row whose statement fails is logged, and reported with the
        purpose `what`. `name` returns the job id or the queue of a row."""
        sender = BatchSender[Row](
            BatchStatement(send, row_id=lambda row: row),
            batch_size=BatchSize(STATEMENT_ROWS_MAX, STATEMENT_TIMEOUT),
            # No limit here: the client's jobs and queues are limited.
            skipped_rows=SkippedRows(),
            on_row_skipped=lambda row, error: self._log_failed_row(what, name(row), error),
        )
        self._skipped_row_reports.append(
            lambda: report_skipped_rows(what, sender.skipped_rows.rows, name)
        )
        return sender

    def _log_failed_row(self, what: str, name: int | str, error: Exception) -> None:
        log, text = self._limited_log, describe_error(error)
        if what == "queue heartbeat":
            self._touch_error = error
            log.warning(QUEUE_RENEWAL_FAILED, queue=name, error=text)
        elif what == "rescue":
            log.warning(JOB_RESCUE_FAILED, job_id=name, error=text)
        elif what == "release":
            log.warning(JOB_RELEASE_FAILED, job_id=name, error=text)
        else:
            log.warning(RECONCILIATION_FAILED, what=what, job_id=name, error=text)

    @property
    def skipped_rows(self) -> list[SkippedRowReport]:
        """The rows that the reconciler skips for a while, because their statements fail."""
        return [
            *self._damaged_jobs.report_skipped_jobs,
            *(row for report in self._skipped_row_reports for row in report()),
        ]

    @property
    def interval(self) -> float:
        """Seconds between two checks while notifications arrive."""
        return max(CHECK_INTERVAL, self._quiet_interval)

    def resync(self) -> None:
        """Check now, because a connection was lost and restored."""
        self._expect_lost_claims()
        self._notify_producers()

    def claim_failed(self) -> None:
        """Check for lost claims, because a claim without an answer may have claimed jobs."""
        self.has_uncertain_claim = True
        self._expect_lost_claims()

    def _expect_lost_claims(self) -> None:
        """Plan a check for the time at which a claim that has just failed counts as lost."""
        self._claim_lost_at = time.monotonic() + CLAIM_TIMEOUT + LOST_CLAIM_MARGIN
        self._next_claim_check = min(self._next_claim_check, self._claim_lost_at)
        self._wakeup.set()

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Read the paused queues, then run checks until stopped."""
        await self._touch_queues()
        self._next_claim_check = time.monotonic() + self.interval
        await self._try_step("jobs of an earlier run", self._rescue_earlier_run)
        task_status.started()
        is_done = True
        while True:
            interval = self.interval if self._is_notified() else POLLING_CHECK_INTERVAL
            if not is_done:
                interval = RETRY_DELAY
            wait = min(interval, max(self._next_claim_check - time.monotonic(), 0.0))
            scope.expect_progress(within=wait + CHECK_TIMEOUT)
            with anyio.move_on_after(wait):
                await self._wakeup.wait()
            if self._wakeup.is_set():  # wait, so that several reconnects cause one check
                self._wakeup.clear()
                await anyio.sleep(LOST_CLAIM_MARGIN)
            is_done = await self._try_step("pauses", self._read_pauses)
            is_done = await self._try_step("cancels", self._read_cancels) and is_done
            if time.monotonic() >= self._next_claim_check:
                await self._check_claims()
            self.ran.emit()

    async def _check_claims(self) -> None:
        """Release lost claims, and set the time of the next check."""
        began = time.monotonic()
        release = partial(self._release_lost_claims, age=CLAIM_TIMEOUT)
        if not (
            await self._try_step("jobs of an earlier run", self._rescue_earlier_run)
            and await self._try_step("lost claims", release)
        ):
            self._next_claim_check = began + RETRY_DELAY
        elif self._claim_lost_at > began:
            self._next_claim_check = self._claim_lost_at
        else:
            self._next_claim_check = began + self.interval
            self.has_uncertain_claim = bool(self._release_sender.skipped_rows)
            if not self.has_uncertain_claim:
                self._removed_queues.clear()
        if retry_at := min(self._release_sender.next_send_at, self._rescue_sender.next_send_at):
            self._next_claim_check = min(self._next_claim_check, max(retry_at, began + RETRY_DELAY))

    async def _try_step(self, what: str, step: Callable[[], Awaitable[None]]) -> bool:
        try:
            await step()
        except DATABASE_ERRORS as error:
            self._log.debug(RECONCILIATION_FAILED, what=what, error=describe_error(error))
            return False
        return True

    def set_paused(self, queue: str, *, paused: bool) -> None:
        """Apply a notification that a queue was paused or resumed. `*` means all queues."""
        for name, producer in self._producers.items():
            if queue in {name, "*"}:
                self._notified_queues.add(name)
                producer.set_paused(paused)

    async def start_queue(self, queue: str) -> None:
        """Write the row of a queue that was added, and pause its producer if the queue is paused.

        Raises:
            Exception: one of DATABASE_ERRORS.
        """
        async with self._pause_lock:
            self._notified_queues.discard(queue)
            async with self._claims.acquire("adding a queue", STATEMENT_TIMEOUT) as connection:
                rows = await queues.queue_touch(connection, self._schema, [queue])
            if queue not in self._notified_queues and queue in self._producers:
                self._producers[queue].set_paused(rows.get(queue, False))

    def forget_queue(self, queue: str) -> None:
        """Update the row of a queue no more, because the queue was removed. If a claim without an
        answer may have claimed its jobs, they are still released."""
        self._touch_sender.forget_skipped_row(queue)
        if self.has_uncertain_claim:
            self._removed_queues.add(queue)

    async def _touch_queues(self) -> None:
        async with self._pause_lock:
            await self._touch_queues_unlocked()

    async def _touch_queues_unlocked(self) -> None:
        """Update the client's rows in `river_queue`, and read which queues are paused. If the time
        is too short, the next check starts with the remaining queues.

        Raises:
            Exception: one of DATABASE_ERRORS: the database failed, or no row can be updated.
        """
        self._notified_queues.clear()
        self._paused.clear()
        self._touch_sender.add_missing_rows(self._producers)
        is_done = await self._touch_sender.send_all_due_rows(SEND_TIMEOUT)
        failing = len(self._touch_sender.skipped_rows)
        if is_done and not failing:
            self._apply_pauses(self._paused)
        elif failing == len(self._producers) and self._touch_error is not None:
            raise self._touch_error
        else:
            await self._read_paused_queues_unlocked()
        if is_done:
            self._touch_at = time.monotonic() + QUEUE_TOUCH_INTERVAL

    async def _touch_rows(self, names: list[str]) -> None:
        async with self._claims.acquire("renewing queues", STATEMENT_TIMEOUT) as connection:
            rows = await queues.queue_touch(connection, self._schema, names)
        self._paused.update(name for name, paused in rows.items() if paused)

    async def _read_pauses(self) -> None:
        if time.monotonic() >= self._touch_at:
            await self._touch_queues()
        else:
            await self._read_paused_queues()

    async def _read_paused_queues(self) -> None:
        async with self._pause_lock:
            await self._read_paused_queues_unlocked()

    async def _read_paused_queues_unlocked(self) -> None:
        self._notified_queues.clear()
        async with self._reserved.acquire(
            "reading pauses", RESERVED_STATEMENT_TIMEOUT
        ) as connection:
            paused = await queues.queue_filter_paused(
                connection, self._schema, list(self._producers)
            )
        self._apply_pauses(paused)

    def _apply_pauses(self, paused: set[str]) -> None:
        """Pause and resume queues after the paused queues were read. If a notification about a
        queue arrived during the read, the queue is not changed, because the notification is
        newer."""
        for name, producer in self._producers.items():
            if name not in self._notified_queues:
                producer.set_paused(name in paused)

    async def _read_cancels(self) -> None:
        self._cancel_check_sender.add_missing_rows(self._running)
        await self._cancel_check_sender.send_all_due_rows(SEND_TIMEOUT)

    async def _read_cancel_marks(self, asked: list[Attempt]) -> None:
        ids = [attempt.id for attempt in asked]
        async with self._reserved.acquire(
            "reading cancels", RESERVED_STATEMENT_TIMEOUT
        ) as connection:
            marked = set(await jobs.job_find_cancel_requested(connection, self._schema, ids))
        # Cancel only the attempts that were checked, not a new attempt of the same job.
        self._running.cancel_attempts(attempt for attempt in asked if attempt.id in marked)

    async def release_last_claims(self, timeout: float) -> None:
        """Release jobs of claims without an answer, at the end of the run.

        Call this method after the producers have ended. Its time limit is `timeout` seconds, but at
        least `LAST_RELEASE_TIMEOUT`.
        """
        if not self.has_uncertain_claim:
            return
        with anyio.move_on_after(max(timeout, LAST_RELEASE_TIMEOUT), shield=True):
            release = partial(self._release_lost_claims, age=0.0)
            self.has_uncertain_claim = not await self._try_step("last claims", release)

    async def _release_lost_claims(self, *, age: float) -> None:
        """Release the jobs that this client claimed more than `age` seconds ago, that do not run,
        and that have no result to store.

        The rows are read over the connection for claims. So no claim runs at the same time, and all
        running attempts are known.
        """
        async with self._claims.acquire("finding lost claims", STATEMENT_TIMEOUT) as connection:

            async def read(skipped: list[int]) -> list[ClaimKey]:
                return await jobs.job_list_claimed_by_client(
                    connection,
                    self._schema,
                    queues=[*self._producers, *self._removed_queues],
                    client_id=self._client_id,
                    claimed_longer_than=age,
                    skipped_ids=skipped,
                )

            claimed = await self._damaged_jobs.read_jobs(
                connection, self._schema, RUNNING_STATES, read
            )
            known = self._active_claim_keys() | {
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
            if not await self._release_sender.send_all_due_rows(SEND_TIMEOUT):
                raise TimeoutError("releasing lost claims continues in the next check")
        finally:
            if self._changed_job_count:
                self._log.warning(JOBS_OF_LOST_CLAIMS_RELEASED, count=self._changed_job_count)
                self._notify_producers()

    async def _release_rows(self, lost: list[ClaimKey]) -> None:
        async with self._claims.acquire("releasing lost claims", STATEMENT_TIMEOUT) as connection:
            self._changed_job_count += len(await jobs.job_release(connection, self._schema, lost))

    async def _rescue_earlier_run(self) -> None:
        """Rescue the jobs of an earlier run with the same client id.

        A client with a configured id has the same id after a crash. The leader does not rescue its
        jobs, because this run writes heartbeats under the same id. If this run is not registered,
        it cannot recognize these jobs. They are released as lost claims.
        """
        registered_at = self._heartbeat.registered_at
        if registered_at is None:
            self._rescue_after_id = None
        self._changed_job_count = 0
        try:
            while not self._rescue_sender.has_no_due_rows or self._rescue_after_id is not None:
                if not await self._rescue_sender.send_all_due_rows(SEND_TIMEOUT):
                    raise TimeoutError("rescuing jobs continues in the next check")
                if self._rescue_after_id is None or registered_at is None:
                    return
                await self._read_jobs_to_rescue(registered_at, self._rescue_after_id)
        finally:
            if self._changed_job_count:
                self._log.warning(JOBS_OF_EARLIER_RUN_RESCUED, count=self._changed_job_count)
                self._notify_producers()

    async def _read_jobs_to_rescue(self, registered_at: int, after: int) -> None:
        """Read a page of jobs, with ids above `after`, that were claimed under this client's id
        before `registered_at`. The connection for claims is used, so that no claim runs at the same
        time."""
        async with self._claims.acquire("finding jobs to rescue", STATEMENT_TIMEOUT) as connection:

            async def read(skipped: list[int]) -> list[RunningAttempt]:
                return await job_list_running_of_clients(
                    connection,
                    self._schema,
                    client_ids=[self._client_id],
                    queue_filter=None,
                    after_id=after,
                    limit=PAGE_SIZE,
                    skipped_ids=skipped,
                )

            claims = await self._damaged_jobs.read_jobs(
                connection, self._schema, RUNNING_STATES, read
            )
            active = self._active_claim_keys()
            if claims and not await self._heartbeat.is_run_still_registered(connection):
                return
        for claim_key, client_id in claims:
            if claim_key.attempted_at < registered_at and claim_key not in active:
                self._rescue_sender.add_row(JobRescue(claim_key, client_id))
        self._rescue_after_id = claims[-1].claim_key.id if len(claims) == PAGE_SIZE else None

    async def _rescue_rows(self, rescues: list[JobRescue]) -> None:
        async with self._claims.acquire("rescuing jobs", STATEMENT_TIMEOUT) as connection:
            done = await job_rescue(connection, self._schema, rescues)
        self._changed_job_count += len(done)

    def _active_claim_keys(self) -> set[ClaimKey]:
        """Return the claim keys of attempts that run in this process, or whose results are not
        stored yet."""
        unstored = {attempt.claim_key for attempt in self._completer.unstored_attempts}
        return self._running.claim_keys() | self._abandoned | unstored

    def _notify_producers(self) -> None:
        for producer in self._producers.values():
            producer.notify()
