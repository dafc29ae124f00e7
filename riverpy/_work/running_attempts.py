"""RunningAttempts: holds the claimed attempts of a client until they end, and enforces their
deadlines.

Each job runs in its own task, but without its own cancel scope: with one, only half as many jobs
would run per second. Instead, an attempt stores its deadline and the cause of its cancellation, and
one timer checks the deadlines of all attempts. A cancelled attempt gets a new deadline. If it is
still running at that deadline, it is stuck.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import anyio

from riverpy._lifecycle import StopCause
from riverpy._log import get_logger
from riverpy._log_events import (
    RUNNING_JOBS_CANCELLED,
    STUCK_JOB_ENDED,
    STUCK_JOB_FOUND,
    STUCK_JOB_HANDLER_FAILED,
)
from riverpy._work.failure import is_cancellation
from riverpy._work.outcomes import set_released_outcome
from riverpy.retry import StuckJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from riverpy._postgres.jobs import ClaimKey
    from riverpy._work.attempt import Attempt
    from riverpy.config import Config

DEADLINE_CHECK_INTERVAL_MIN = 0.01
"""The minimum number of seconds between two checks of the deadlines."""


class RunningAttempts:
    """The claimed attempts that have not ended. Create this object in the task that executes
    `ClientRun.run`."""

    def __init__(self, config: Config, on_attempt_end: Callable[[Attempt], None]) -> None:
        """`on_attempt_end` is called with each attempt that has ended or was released."""
        self._stuck_threshold = config.job_stuck_threshold.total_seconds()
        self._on_attempt_end = on_attempt_end
        self._context = contextvars.copy_context()
        self._run_task = asyncio.current_task()
        self._attempts: set[Attempt] = set()  # keeps tasks alive: asyncio's references are weak
        self._all_attempts_ended = asyncio.Event()
        self._all_attempts_ended.set()
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._next_deadline_check_at = math.inf
        self._soft_stop_scope = anyio.CancelScope()
        self._log = get_logger()
        self._limited_log = self._log.with_rate_limit()
        self._job_stuck_handler = config.job_stuck_handler
        self.stuck_attempts: dict[Attempt, bool] = {}
        """The stuck attempts, i.e. the attempts that keep running after
        `Config.job_stuck_threshold` has passed since their cancellation. The value is True while
        the attempt keeps its slot, and False if the handler of the user has freed the slot."""

    def __len__(self) -> int:
        return len(self._attempts)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._attempts))

    def collect_claim_keys(self) -> set[ClaimKey]:
        """Return the claim keys of all attempts."""
        return {attempt.claim_key for attempt in self}

    @property
    def is_run_cancelled(self) -> bool:
        """Whether the task that executes `ClientRun.run` was cancelled. `asyncio.run` cancels all
        tasks at its end."""
        return self._run_task is not None and self._run_task.cancelling() > 0

    def add_attempts(self, attempts: Sequence[Attempt]) -> None:
        """Add attempts of jobs that this client has just claimed. They stay in this object until
        they end or are released."""
        self._attempts.update(attempts)
        if attempts:
            self._all_attempts_ended.clear()

    def remove_ended_attempt(self, attempt: Attempt) -> None:
        """Remove an attempt that has ended, and free its slot."""
        attempt.task = None  # avoids a reference cycle between the attempt and its coroutine
        self._attempts.discard(attempt)
        self._on_attempt_end(attempt)
        if not self.stuck_attempts or self._remove_ended_stuck_attempt(attempt):
            attempt.release_slot()
        if not self._attempts:
            self._all_attempts_ended.set()

    def release_attempts(self, attempts: Sequence[Attempt]) -> None:
        """Remove attempts that have not started, and release their jobs: each job is `available`
        again at its position in the queue, and the attempt does not count towards `max_attempts`.
        If `job_cancel` was called for a job, the job is cancelled instead."""
        for attempt in attempts:
            set_released_outcome(attempt)
            self._attempts.discard(attempt)
            self._on_attempt_end(attempt)
        if not self._attempts:
            self._all_attempts_ended.set()

    def cancel_job(self, job_id: int, queue: str) -> None:
        """Cancel the claimed attempt of a job of this queue, because `job_cancel` was called. If an
        earlier attempt of the job is still running, for example after a rescue, cancel it too."""
        self.cancel_attempts(one for one in self if one.id == job_id and one.queue == queue)

    def cancel_attempts(self, attempts: Iterable[Attempt]) -> None:
        """Cancel each of these attempts if it is still running, because `job_cancel` was called."""
        for attempt in attempts:
            if attempt in self._attempts:
                self._cancel_attempt(attempt, StopCause.JOB_CANCELLED)

    def set_hard_stop_cause_if_run_cancelled(self, attempt: Attempt, error: BaseException) -> None:
        """Set the stop cause of an attempt to a hard stop if the attempt ended because the task of
        the run was cancelled."""
        if attempt.stop_cause is None and self.is_run_cancelled and is_cancellation(error):
            attempt.stop_cause = StopCause.HARD_STOP

    async def wait_until_all_ended(self) -> None:
        """Wait until all attempts have ended."""
        while self._attempts:
            await self._all_attempts_ended.wait()

    async def stop_attempts(
        self, soft_timeout: float | None, hard_timeout: Callable[[], float]
    ) -> None:
        """Wait until the attempts have ended, for at most `soft_timeout` seconds. None: no limit.

        Then cancel the attempts that are still running, call `hard_timeout`, and wait again for at
        most the number of seconds that it returned.
        """
        if soft_timeout is not None:
            self._soft_stop_scope.deadline = anyio.current_time() + soft_timeout
        try:
            with self._soft_stop_scope:
                await self.wait_until_all_ended()
        finally:
            await self._cancel_all_attempts(hard_timeout)

    def end_soft_stop(self) -> None:
        """Make `stop_attempts` cancel the attempts now."""
        self._soft_stop_scope.cancel()

    async def _cancel_all_attempts(self, hard_timeout: Callable[[], float]) -> None:
        if self._attempts:
            self._log.info(RUNNING_JOBS_CANCELLED, running=len(self._attempts))
            for attempt in self:
                self._cancel_attempt(attempt, StopCause.HARD_STOP)
            # A task that was cancelled before it started did not call `remove_ended_attempt`,
            # so release its job.
            self.release_attempts([one for one in self if one.task and one.task.done()])
            with anyio.move_on_after(hard_timeout(), shield=True):
                await self.wait_until_all_ended()
        self._stop_deadline_timer()

    def _cancel_attempt(self, attempt: Attempt, cause: StopCause) -> None:
        """Store the stop cause in the attempt, then cancel its task. A later cause does not replace
        the first one.

        A task that has not started is not cancelled, because it would end without a call of
        `remove_ended_attempt`. Such a task checks the stop cause when it starts.
        """
        if attempt.stop_cause is None:
            attempt.stop_cause = cause
            attempt.set_cancelled_flag()
            self.set_deadline(attempt, self._stuck_threshold)
        elif cause is not StopCause.HARD_STOP:
            return
        if attempt.started_at and attempt.task is not None:
            attempt.task.cancel()

    def set_deadline(self, attempt: Attempt, seconds_from_now: float) -> None:
        """Set the deadline of an attempt to `seconds_from_now` seconds from now."""
        attempt.deadline = time.monotonic() + seconds_from_now
        self.schedule_deadline_check(attempt.deadline)

    def pause_timeout(self, attempt: Attempt) -> None:
        """Stop the timeout of an attempt until `restart_timeout` is called, because the job's code
        has to wait before it can start."""
        if attempt.stop_cause is None:
            attempt.deadline = math.inf

    def restart_timeout(self, attempt: Attempt) -> None:
        """Restart the timeout of an attempt, because the job's code starts now. The attempt gets
        its whole timeout again, and `started_at` is set to now."""
        if attempt.stop_cause is None:
            attempt.started_at = time.monotonic()
            self.set_deadline(attempt, attempt.timeout)

    def schedule_deadline_check(self, deadline: float) -> None:
        """Make sure that the timer checks the deadlines of all attempts at `deadline` or earlier.
        `deadline` is in seconds of `time.monotonic`."""
        if deadline >= self._next_deadline_check_at:
            return
        self._stop_deadline_timer()
        delay = max(deadline - time.monotonic(), DEADLINE_CHECK_INTERVAL_MIN)
        loop = asyncio.get_running_loop()
        self._deadline_timer = loop.call_later(
            delay, self._cancel_attempts_after_deadline, context=self._context
        )
        self._next_deadline_check_at = deadline

    def _stop_deadline_timer(self) -> None:
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._deadline_timer, self._next_deadline_check_at = None, math.inf

    def _cancel_attempts_after_deadline(self) -> None:
        """Cancel each attempt whose deadline has passed. If it was already cancelled, handle it as
        stuck."""
        self._deadline_timer, self._next_deadline_check_at = None, math.inf
        now, first = time.monotonic(), math.inf
        stuck: list[Attempt] = []
        for attempt in self._attempts:
            if attempt.deadline <= now:
                if left := self._extra_seconds_after_deadline(attempt, now):
                    attempt.deadline = now + left
                elif attempt.stop_cause is None:
                    self._cancel_attempt(attempt, StopCause.JOB_TIMEOUT)
                else:
                    attempt.deadline = math.inf
                    stuck.append(attempt)
            first = min(first, attempt.deadline)
        self.schedule_deadline_check(first)
        for attempt in stuck:
            self._report_stuck_attempt(attempt, now)

    def _extra_seconds_after_deadline(self, attempt: Attempt, now: float) -> float:
        """Return how many seconds an attempt may still run after its deadline.

        The deadline counts from the creation of the task, but the timeout counts from the start of
        the task. If the event loop was blocked, the task started later than it was created.
        """
        if not attempt.started_at:
            limit = attempt.timeout if attempt.stop_cause is None else self._stuck_threshold
            return max(limit, DEADLINE_CHECK_INTERVAL_MIN)
        left = attempt.started_at + attempt.timeout - now
        return left if attempt.stop_cause is None and left > DEADLINE_CHECK_INTERVAL_MIN else 0.0

    def _report_stuck_attempt(self, attempt: Attempt, now: float) -> None:
        """Call the user's handler for a stuck attempt, and log the attempt. If the handler returns
        True, free the slot of the attempt."""
        running = timedelta(seconds=now - attempt.started_at)
        self.stuck_attempts[attempt] = True
        job = StuckJob(attempt.id, attempt.kind, attempt.queue, running, len(self.stuck_attempts))
        gives_slot = False
        if self._job_stuck_handler is not None:
            try:
                gives_slot = bool(self._job_stuck_handler.handle_stuck(job))
            except BaseException:  # user code must not end the event loop
                self._limited_log.exception(STUCK_JOB_HANDLER_FAILED, job_id=job.id, kind=job.kind)
        self.stuck_attempts[attempt] = not gives_slot
        self._limited_log.warning(
            STUCK_JOB_FOUND,
            job_id=job.id,
            kind=job.kind,
            queue=job.queue,
            reason=attempt.stop_cause and attempt.stop_cause.value,
            seconds=round(running.total_seconds(), 3),
            keeps_slot=not gives_slot,
            stuck=job.total,
        )
        if gives_slot:
            attempt.release_slot()

    def _remove_ended_stuck_attempt(self, attempt: Attempt) -> bool:
        """If an attempt that has ended was stuck, remove it from `stuck_attempts`, and log this.
        Return whether the attempt still has its slot."""
        keeps_slot = self.stuck_attempts.pop(attempt, None)
        if keeps_slot is None:  # the attempt was not stuck
            return True
        self._limited_log.info(
            STUCK_JOB_ENDED,
            job_id=attempt.id,
            kind=attempt.kind,
            queue=attempt.queue,
            seconds=round(attempt.ended_at - attempt.started_at, 3),
            stuck=len(self.stuck_attempts),
        )
        return keeps_slot
