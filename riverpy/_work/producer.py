"""Producer: claims jobs of one queue when some of its `max_workers` slots are free."""

from __future__ import annotations

import asyncio
import math
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from riverpy._clock import Backoff
from riverpy._lifecycle import TestSignal
from riverpy._log import RepeatedFailureLog, get_logger
from riverpy._log_events import CLAIMING_FAILED, CLAIMING_RESTORED, QUEUE_PAUSED, QUEUE_RESUMED
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    describe_error,
    is_permanent_statement_error,
    is_server_statement_timeout,
)
from riverpy._postgres.jobs import (
    job_claim,
    job_get_server_time,
    job_lock_and_get_claim_position,
    job_lock_next,
)
from riverpy._work.claim_cursor import WHOLE_QUEUE_RANGE, ClaimCursor, QueuePosition, QueueRange
from riverpy._work.claim_times import PlannedClaimTimes
from riverpy._work.claimer import CLAIM_TIMEOUT
from riverpy._work.prefetch import PrefetchBuffer
from riverpy._work.unclaimable import UnclaimableJobs
from riverpy.events import EventKind
from riverpy.stats import QueueStats

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractContextManager

    from anyio.abc import TaskStatus
    from asyncpg import Record

    from riverpy._lifecycle import StopScope
    from riverpy._postgres.driver import Connection
    from riverpy._work.claimer import Claimer
    from riverpy._work.completer import Completer
    from riverpy._work.executor import JobExecutor
    from riverpy._work.run_context import RunContext
    from riverpy._work.running_attempts import RunningAttempts
    from riverpy.config import QueueConfig

CLAIM_TIMEOUT_AFTER_STOP = 1.0
"""Seconds that a running claim may still take after a stop was requested."""
CLAIM_SIZE_LIMIT_MIN = 100
"""One claim requests at most this many jobs, or half the number of slots if that is more. With many
slots, the jobs of one claim run while the server works on the next claim."""
EMPTY_CLAIMS_MAX, EMPTY_CLAIM_INTERVAL = 20, 0.02
"""After `EMPTY_CLAIMS_MAX` empty claims in a row, the producer waits `EMPTY_CLAIM_INTERVAL` seconds
between two claims. Many new jobs of kinds that this client does not work can cause such claims."""
CLAIM_RETRY_DELAY_MIN, CLAIM_RETRY_DELAY_MAX = timedelta(milliseconds=50), timedelta(seconds=2)


class Producer:
    """Claims and starts the jobs of one queue."""

    name = "producer"
    _scope: StopScope | None = None
    """The scope of the running producer; None: it has not started."""
    _turn_seconds_max = CLAIM_TIMEOUT
    """The producer counts as stuck if a claim and the wait after it take more seconds than this."""
    _shared_claim_limit = 0
    """The maximum number of jobs that the running statement of the claimer requests for this queue;
    0: no such statement runs."""

    def __init__(
        self,
        queue: str,
        config: QueueConfig,
        run: RunContext,
        *,
        executor: JobExecutor,
        running: RunningAttempts,
        completer: Completer,
        claimer: Claimer,
        check_after_failed_claim: Callable[[], None],
    ) -> None:
        """`claimer` claims jobs of this queue together with jobs of other queues.
        `check_after_failed_claim` is called after a claim without an answer, because the server may
        have claimed jobs."""
        self.queue = queue
        self._counters = run.counters.counters_by_queue[queue]
        self._metric_emitter = run.metric_emitter
        self._client_id, self._schema = run.client.id, run.schema
        self._kinds_to_claim = run.kinds_to_claim
        self._claim_connection, self._heartbeat = run.connections.claims, run.heartbeat
        self._executor, self._running_attempts, self._completer = executor, running, completer
        self._subscriptions = run.client.subscriptions
        self._claimer, self._check_after_failed_claim = claimer, check_after_failed_claim
        self._slot_count = self._free_slot_count = config.max_workers
        self._consecutive_empty_claims = 0
        self._last_claim_ended_at = 0.0
        """The end of the last successful claim, in monotonic seconds. Before the first claim: the
        start of the producer. 0: the producer has not started."""
        buffer = PrefetchBuffer(config.max_workers, running.release_attempts)
        self._prefetch_buffer = buffer if config.prefetch else None
        self._claim_size_limit = max(CLAIM_SIZE_LIMIT_MIN, config.max_workers // 2)
        self._fetch_cooldown = (config.fetch_cooldown or timedelta(0)).total_seconds()
        interval = config.fetch_poll_interval or run.config.fetch_poll_interval
        self._poll_group = claimer.polls.get_or_create_group(interval.total_seconds())
        self._claim_backoff = Backoff(CLAIM_RETRY_DELAY_MIN, CLAIM_RETRY_DELAY_MAX)
        # The events are separate: a free slot must not wake a producer that waits for jobs.
        self.slot_freed, self._wakeup, self._resumed = (asyncio.Event() for _ in range(3))
        self._resumed.set()
        self._is_notified = False
        """Whether a notification arrived since the last claim started."""
        self._is_poll_due = False
        """Whether to poll this queue now, together with another queue of its poll group."""
        self._is_woken_with_other_clients = True
        """Whether this client was woken at the same time as other clients, for example by a
        notification."""
        self._ids_cancelled_during_claim: set[int] | None = None
        """The ids of the jobs that were cancelled during the running claim; None: no claim runs."""
        self._planned_claim_times = PlannedClaimTimes()
        self._log = get_logger(queue=queue)
        self.unclaimable_jobs = UnclaimableJobs(self._claim_size_limit, CLAIM_TIMEOUT, self._log)
        self._claiming_job_id: int | None = None
        """The id of the only job that the running claim requests; None: the claim requests several
        jobs, or the id of the job was not read yet."""
        self._claim_cursor = ClaimCursor()
        self._claim_failure_log = RepeatedFailureLog(self._log)
        self.claimed = TestSignal(f"Producer({queue}).claimed")

    @property
    def is_paused(self) -> bool:
        """Whether the queue is paused."""
        return not self._resumed.is_set()

    @property
    def running_job_count(self) -> int:
        """The number of slots in which a job runs."""
        return self._slot_count - self._free_slot_count

    def set_slot_count(self, slot_count: int) -> None:
        """Change the number of slots. With fewer slots than running jobs, the producer claims again
        when enough jobs have ended."""
        self._free_slot_count += slot_count - self._slot_count
        self._slot_count = slot_count
        self._claim_size_limit = max(CLAIM_SIZE_LIMIT_MIN, slot_count // 2)
        self.unclaimable_jobs.set_claim_size_limit(self._claim_size_limit)
        if self._prefetch_buffer is not None:
            self._prefetch_buffer.set_slot_count(slot_count)
        self.slot_freed.set()

    def stats(self) -> QueueStats:
        """Return the current state and the counts of the queue."""
        counters, claimed_at = self._counters, self._last_claim_ended_at
        return QueueStats(
            slots=self._slot_count,
            running=self.running_job_count,
            paused=self.is_paused,
            poll_interval=self._poll_group.interval,
            claim_age=time.monotonic() - claimed_at if claimed_at else None,
            claims=counters.claim_times.build_histogram(),
            batches=counters.claim_sizes.build_histogram(),
            claim_failures=counters.claim_failure_count,
            waits=counters.wait_times.build_histogram(),
            set_aside=tuple(self.unclaimable_jobs.skipped_job_ids),
        )

    def wake_after_notification(self, notify_interval_ms: float | None = None) -> None:
        """Claim now, because a notification was received or may have been lost. Claim again after
        `notify_interval_ms`, as the sender may insert without a notification; None: River in Go."""
        self._planned_claim_times.plan_follow_up_claims(notify_interval_ms)
        self.wake()

    def cancel_job_if_being_claimed(self, job_id: int) -> None:
        """Cancel a job if the running claim returns this job."""
        if self._ids_cancelled_during_claim is not None:
            self._ids_cancelled_during_claim.add(job_id)

    def schedule_claim(self, delay: float) -> None:
        """Claim again after `delay` seconds, when a job becomes due without a notification."""
        if delay <= 0:
            self.wake()
        else:
            self._planned_claim_times.plan_due_job_claim(delay)
            self._wakeup.set()

    def wake(self) -> None:
        """Claim now, without waiting for the next poll."""
        self._is_notified = self._is_woken_with_other_clients = True
        self._wakeup.set()

    def release_slot(self) -> None:
        """Free a slot, and start a prefetched job in it."""
        self._free_slot_count += 1
        self.slot_freed.set()
        if self._prefetch_buffer is not None:
            self._prefetch_buffer.count_ended_job()
            self._start_prefetched_job(self._prefetch_buffer)

    def _start_prefetched_job(self, prefetch_buffer: PrefetchBuffer) -> None:
        """Start a prefetched job, if there is one."""
        if not self._heartbeat.can_claim_jobs:
            prefetch_buffer.release_all_attempts()
        elif self._free_slot_count > 0 and (attempt := prefetch_buffer.pop_next_attempt()):
            self._free_slot_count -= 1
            self._executor.start_attempts([attempt])

    def set_paused(self, paused: bool) -> None:
        """Stop or resume claiming. Running jobs keep running."""
        if paused == self.is_paused:
            return
        if paused:
            self._resumed.clear()
            self._release_prefetched_jobs()
        else:
            self._resumed.set()
            self.wake()
        self._log.info(QUEUE_PAUSED if paused else QUEUE_RESUMED)
        kind = EventKind.QUEUE_PAUSED if paused else EventKind.QUEUE_RESUMED
        self._subscriptions.publish_queue_event(kind, self.queue)

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Claim until stopped. A stop waits for a running claim, so that the jobs of this claim do
        not stay claimed."""
        task_status.started()
        self._last_claim_ended_at = time.monotonic()
        self._claimer.queue_count += 1
        self._scope = scope
        try:
            await self._claim_until_stopped(scope)
        finally:
            self._claimer.queue_count -= 1
            self._release_prefetched_jobs()

    async def _claim_until_stopped(self, scope: StopScope) -> None:
        self._turn_seconds_max = (
            CLAIM_TIMEOUT
            + self._fetch_cooldown
            + 2 * max(self._poll_group.interval, CLAIM_RETRY_DELAY_MAX.total_seconds())
        )
        while True:
            scope.clear_progress_deadline()
            await self._resumed.wait()
            await self._wait_for_free_slot()
            await self._completer.wait_for_result_backlog_room()
            if not self._heartbeat.can_claim_jobs:
                await self._heartbeat.wait_until_can_claim_jobs()
            # A stop cannot cancel the claim, so check for a stop before the claim.
            await anyio.lowlevel.checkpoint_if_cancelled()
            scope.set_progress_deadline(within=self._turn_seconds_max)
            self._is_notified = False  # before the claim: a notification during it must be kept
            started = time.monotonic()
            self._planned_claim_times.forget_past_times(started)
            try:
                drained = await self._claim_jobs(scope)
            except DATABASE_ERRORS as error:
                self._log_failed_claim(error)
                await anyio.sleep(self._claim_backoff.next_delay())
                continue
            if drained:
                await self._wait_until_next_claim()
            pause = max(
                self._fetch_cooldown,
                EMPTY_CLAIM_INTERVAL if self._consecutive_empty_claims > EMPTY_CLAIMS_MAX else 0.0,
            )
            if pause:
                await anyio.sleep(max(0.0, started + pause - time.monotonic()))
            elif not drained:
                await asyncio.sleep(0)  # noqa: TID251 (a turn for the started jobs, no delay)

    async def _wait_for_free_slot(self) -> None:
        while not self._count_jobs_to_claim():
            self.slot_freed.clear()
            await self.slot_freed.wait()

    def _count_jobs_to_claim(self) -> int:
        """Return how many jobs may be claimed: the free slots and the jobs to prefetch."""
        if self._prefetch_buffer is None:
            return max(self._free_slot_count, 0)
        return max(self._free_slot_count + self._prefetch_buffer.count_extra_jobs_to_claim(), 0)

    def _release_prefetched_jobs(self) -> None:
        if self._prefetch_buffer is not None:
            self._prefetch_buffer.release_all_attempts()

    def _log_failed_claim(self, error: Exception) -> None:
        """Count and log a failed claim. The connection itself logs that it was lost."""
        self._record_failed_claim(error)
        is_refused = is_permanent_statement_error(error) or is_server_statement_timeout(error)
        self._claim_failure_log.log_failure(
            CLAIMING_FAILED, is_cause_logged=not is_refused, error=describe_error(error)
        )

    async def _claim_jobs(self, scope: StopScope) -> bool:
        """Claim and start jobs. Returns whether the queue had fewer jobs than requested."""
        if self._claimer.queue_count > 1 and not self._must_claim_alone:
            return await self._claim_with_other_queues(scope)
        retry, began = self.unclaimable_jobs.choose_job_id_to_retry(), time.monotonic()
        # Claim at least one job. Claimed jobs without a free slot are prefetched or released.
        limit = self._claim_size_limit if retry is None else 1
        wanted = min(max(self._count_jobs_to_claim(), 1), limit)
        limit, self._claiming_job_id = self.unclaimable_jobs.choose_claim_size(wanted), None
        is_single_claim = retry is not None or (
            limit == 1 and self.unclaimable_jobs.is_claiming_one_by_one
        )
        try:
            with self._shield_claim_from_stop(scope, CLAIM_TIMEOUT):
                async with self._claim_connection.acquire(
                    "claiming jobs", CLAIM_TIMEOUT
                ) as connection:
                    if self.is_paused:  # the queue was paused during the wait for the connection
                        return True
                    if not self._heartbeat.can_claim_jobs:  # the heartbeat stopped during the wait
                        return False
                    if is_single_claim:
                        return await self._claim_one_job(connection, retry)
                    return await self._claim_many_jobs(connection, limit, scope)
        except DATABASE_ERRORS as error:
            took = time.monotonic() - began
            if self._is_caused_by_outage(error) or not self.unclaimable_jobs.record_failed_claim(
                limit, self._claiming_job_id, error, took
            ):
                raise
            self._record_failed_claim(error)
            return False

    def _shield_claim_from_stop(
        self, scope: StopScope, timeout: float
    ) -> AbstractContextManager[None]:
        """Protect a claim from the cancellation by a stop, for at most `timeout` seconds. After a
        stop was requested, the claim may take `CLAIM_TIMEOUT_AFTER_STOP`."""
        return scope.shield_from_stop(
            timeout + CLAIM_TIMEOUT_AFTER_STOP, timeout_after_stop=CLAIM_TIMEOUT_AFTER_STOP
        )

    def _is_caused_by_outage(self, error: Exception) -> bool:
        """Return whether a claim timed out during an outage, in which the server answers no
        statements. If so, no job has caused the error."""
        tracker = self._claim_connection.outage_tracker
        return isinstance(error, TimeoutError) and tracker.is_outage_logged

    # -- claims together with other queues

    @property
    def _must_claim_alone(self) -> bool:
        """Whether this queue could make a claim of several queues fail or take long."""
        return self._claim_cursor.must_claim_alone or self.unclaimable_jobs.may_include_failing_job

    async def _claim_with_other_queues(self, scope: StopScope) -> bool:
        """Claim and start jobs with the `Claimer`, together with other queues. Returns whether the
        queue had fewer jobs than requested."""
        self._shared_claim_limit = 0
        self._ids_cancelled_during_claim = set()
        try:
            # The claimer limits the time of each claim.
            with self._shield_claim_from_stop(scope, math.inf):
                is_full = await self._claimer.claim_jobs(self)
            return self.is_paused if is_full is None else not is_full
        except DATABASE_ERRORS as error:
            limit = self._shared_claim_limit
            if self._is_caused_by_outage(error) or not (
                limit and self.unclaimable_jobs.record_failed_multi_queue_claim(limit, error)
            ):
                raise
            self._record_failed_claim(error)
            return False
        except asyncio.CancelledError:  # the server may have claimed the jobs anyway
            if self._shared_claim_limit:
                self._check_after_failed_claim()
            raise
        finally:
            self._ids_cancelled_during_claim = None

    def choose_claim_limit(self) -> int:
        """Return how many jobs of this queue the next claim of several queues may claim; 0: none.
        The claimer calls this just before it sends the claim."""
        scope = self._scope
        if (
            scope is None
            or scope.cause is not None
            or self.is_paused
            or not self._heartbeat.can_claim_jobs
            or not self._completer.has_result_backlog_room
        ):
            return 0
        scope.set_progress_deadline(within=self._turn_seconds_max)
        self._is_notified = False  # before the claim: a notification during it must be kept
        self._planned_claim_times.forget_past_times(time.monotonic())
        self._shared_claim_limit = min(self._count_jobs_to_claim(), self._claim_size_limit)
        return self._shared_claim_limit

    def receive_claimed_jobs(
        self, rows: list[Record], limit: int, seconds: float, *, is_alone: bool
    ) -> bool:
        """Start jobs that the claimer has claimed. Returns whether the queue takes part in the
        claimer's next claim. `is_alone`: whether the claim was for no other queue."""
        job_count, self._shared_claim_limit = len(rows), 0
        self._start_claimed_jobs(rows, self._ids_cancelled_during_claim or set())
        self._ids_cancelled_during_claim = set()
        self._record_claim_metrics(job_count, seconds)
        self._record_successful_claim(job_count, limit, seconds)
        if is_alone:  # after a slow or large claim, the next one is without the claimer
            self._claim_cursor.record_claim_and_check_slow(WHOLE_QUEUE_RANGE, job_count, seconds)
            self._claim_cursor.record_claim_and_check_backlog(WHOLE_QUEUE_RANGE, rows, limit)
        return job_count == limit and not self._fetch_cooldown and not self._must_claim_alone

    def release_claimed_jobs(self, rows: list[Record]) -> None:
        """Release jobs that were claimed after this queue was stopped."""
        attempts = self._executor.make_and_start_attempts(rows, self.release_slot, 0)
        self._free_slot_count -= len(attempts)
        self._running_attempts.release_attempts(attempts)

    def request_claim_speed_check(self) -> None:
        """Make the next claim for this queue alone, to find out whether its claims are slow."""
        self._claim_cursor.is_speed_check_due = True

    # -- claims of this queue alone

    def _record_failed_claim(self, error: Exception) -> None:
        """Count a failed claim. If it may have claimed jobs, let the reconciler find them later."""
        if not is_permanent_statement_error(error) and not is_server_statement_timeout(error):
            self._check_after_failed_claim()
        self._counters.claim_failure_count += 1

    async def _claim_one_job(self, connection: Connection, retried_job_id: int | None) -> bool:
        """Claim one job. `retried_job_id` is the id of a job whose claim failed before; None: claim
        the next job. Returns True if there is no next job."""
        claim = self._find_and_claim_row(connection, retried_job_id)
        rows, took = await self._claim_and_start(claim)
        if retried_job_id is not None:
            self.unclaimable_jobs.stop_skipping_job(retried_job_id)
            return False
        self._record_successful_claim(len(rows), 1, took)
        return not rows

    async def _claim_many_jobs(self, connection: Connection, limit: int, scope: StopScope) -> bool:
        """Claim up to `limit` jobs. Return whether the queue had fewer jobs than `limit`."""
        sent, found = time.monotonic(), 0
        for part in self._claim_cursor.choose_claim_ranges(sent):
            found += await self._claim_range(connection, limit - found, part)
            if found == limit or scope.cause is not None:
                break
        wait = self._claim_cursor.seconds_until_whole_queue_claim(self._last_claim_ended_at)
        if wait is not None and found < limit:
            self.schedule_claim(wait)
        self._record_successful_claim(found, limit, self._last_claim_ended_at - sent)
        return found < limit

    def _record_successful_claim(self, job_count: int, limit: int, seconds: float) -> None:
        self._claim_backoff.reset()
        self._claim_failure_log.log_recovery(CLAIMING_RESTORED)
        self.unclaimable_jobs.record_successful_claim(job_count, limit, seconds)
        self._consecutive_empty_claims = 0 if job_count else self._consecutive_empty_claims + 1
        self.claimed.emit()

    async def _claim_range(self, connection: Connection, limit: int, part: QueueRange) -> int:
        """Claim up to `limit` jobs in the range `part` of the queue. Return how many it claimed."""
        claim = self._send_claim(connection, limit, part, self.unclaimable_jobs.skipped_job_ids)
        rows, took = await self._claim_and_start(claim)
        is_full, now = len(rows) == limit, self._last_claim_ended_at
        is_slow, cursor = self._record_and_check_if_slow(part, len(rows), took), self._claim_cursor
        if cursor.record_claim_and_check_backlog(part, rows, limit) or is_slow:
            server_time = await job_get_server_time(connection, self._schema)
            seen_at = server_time - int((time.monotonic() - now + took) * 1e6)
            cursor.start_using_positions(
                rows,
                is_slow=is_slow,
                is_limit_reached=is_full,
                server_time=seen_at,
                duration=took,
                now=now,
            )
        else:
            cursor.update_positions(part, rows, is_limit_reached=is_full, now=now)
        return len(rows)

    def _record_and_check_if_slow(self, part: QueueRange, row_count: int, seconds: float) -> bool:
        """Record a claim. Return whether the last two were slow because of this queue."""
        is_slow = self._claim_cursor.record_claim_and_check_slow(part, row_count, seconds)
        if self._claimer.queue_count > 1:
            finder = self._claimer.slow_queue_finder
            finder.record_single_queue_claim(seconds)
            if is_slow and not finder.is_queue_slow(seconds):
                self._claim_cursor.forget_slow_claims()
                return False
        return is_slow

    async def _claim_and_start(self, claim: Awaitable[list[Record]]) -> tuple[list[Record], float]:
        """Await a claim and start its jobs. Returns the claimed rows, and the duration of the claim
        in seconds."""
        sent = time.monotonic()
        self._ids_cancelled_during_claim = set()
        try:
            rows = await claim
            self._start_claimed_jobs(rows, self._ids_cancelled_during_claim)
        except asyncio.CancelledError:  # the server may have claimed the jobs anyway
            self._check_after_failed_claim()
            raise
        finally:
            self._ids_cancelled_during_claim = None
        took = time.monotonic() - sent
        self._record_claim_metrics(len(rows), took)
        return rows, took

    def _record_claim_metrics(self, job_count: int, seconds: float) -> None:
        self._last_claim_ended_at = time.monotonic()
        self._counters.count_claim(job_count, seconds)
        self._metric_emitter.emit_claim_metrics(self.queue, job_count, seconds)

    def _start_claimed_jobs(self, job_rows: list[Record], cancelled_job_ids: set[int]) -> None:
        may_start = self._heartbeat.can_claim_jobs  # False: the heartbeat stopped during the claim
        # `set_slot_count` may have removed slots during the claim.
        slots = max(self._free_slot_count, 0) if may_start else 0
        waiting = self._executor.make_and_start_attempts(job_rows, self.release_slot, slots)
        for job_id in cancelled_job_ids:
            self._running_attempts.cancel_job(job_id, self.queue)
        self._free_slot_count -= len(job_rows) - len(waiting)
        if self._prefetch_buffer is not None and may_start and not self.is_paused:
            self._prefetch_buffer.add_attempts(waiting)
        elif waiting:
            self._running_attempts.release_attempts(waiting)

    async def _find_and_claim_row(self, connection: Connection, job_id: int | None) -> list[Record]:
        """Claim the job with the id `job_id`; None: claim the next job.

        The id of the next job is read first, so that the id is known if the claim fails.
        """
        async with connection.transaction():
            if job_id is not None:
                self._claiming_job_id = job_id
                place = await job_lock_and_get_claim_position(
                    connection, self._schema, job_id, queue=self.queue
                )
            else:
                place = await job_lock_next(
                    connection,
                    self._schema,
                    queue=self.queue,
                    kinds=self._kinds_to_claim,
                    skipped_ids=self.unclaimable_jobs.skipped_job_ids,
                )
            if place is None:
                return []
            priority, scheduled_at, self._claiming_job_id = place
            # Start the claim at the job's position, so that it does not return an earlier job.
            after = QueuePosition(priority, scheduled_at, self._claiming_job_id - 1)
            skipped = [one for one in self.unclaimable_jobs.skipped_job_ids if one != job_id]
            return await self._send_claim(
                connection, 1, WHOLE_QUEUE_RANGE._replace(start_after=after), skipped
            )

    async def _send_claim(
        self, connection: Connection, limit: int, part: QueueRange, skipped_ids: list[int]
    ) -> list[Record]:
        return await job_claim(
            connection,
            self._schema,
            queue=self.queue,
            kinds=self._kinds_to_claim,
            skipped_ids=skipped_ids,
            after_position=part.start_after,
            priority_max=part.last_priority,
            limit=limit,
            client_id=self._client_id,
        )

    async def _wait_until_next_claim(self) -> None:
        """Wait until the next claim: after a notification, at the time at which a job is due, or at
        the next poll."""
        poll_at = time.monotonic() + self._poll_group.seconds_to_next_poll(
            is_woken_with_other_clients=self._is_woken_with_other_clients
        )
        self._is_poll_due = False
        self._poll_group.add_waiting_queue(self, self._wake_for_group_poll)
        try:
            while not self._is_notified:
                self._wakeup.clear()
                retry_at = self.unclaimable_jobs.next_retry_at
                next_at = self._planned_claim_times.find_earliest_time(poll_at, retry_at)
                with anyio.move_on_after(next_at - time.monotonic()):
                    await self._wakeup.wait()
                    if not self._is_poll_due or self._is_notified:
                        continue
                    self._is_woken_with_other_clients = False
                    return
                self._is_woken_with_other_clients = next_at < poll_at
                if next_at >= poll_at:
                    self._poll_group.poll_waiting_queues()
                return
        finally:
            self._poll_group.remove_waiting_queue(self)

    def _wake_for_group_poll(self) -> None:
        """Wake the producer for a claim, because another queue of the poll group is polled."""
        self._is_poll_due = True
        self._wakeup.set()
