"""RunningAttempts: owns the running attempts of a client, their tasks, deadlines and cancellation.

A job is one plain task: a task group and a cancel scope for each would halve the rate. Cause and
deadline are kept on the attempt, and one timer watches the live ones. The deadline of one that was
cancelled is when it counts as stuck.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from datetime import timedelta
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import anyio

from riverpy._lifecycle import StopCause
from riverpy._log import JobLines, get_logger, tells_of_jobs
from riverpy._log_events import (
    JOB_STARTED,
    RUNNING_JOBS_CANCELLED,
    STUCK_JOB_ENDED,
    STUCK_JOB_FOUND,
    STUCK_JOB_HANDLER_FAILED,
)
from riverpy._work.attempt import Attempt
from riverpy._work.failure import is_cancellation
from riverpy.job import JobColumn
from riverpy.stuck import StuckJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from riverpy._postgres.jobs import ClaimKey
    from riverpy._work.executor import Executor
    from riverpy._work.producer import Producer
    from riverpy.config import Config

SCAN_INTERVAL_MIN = 0.01
"""Seconds between two looks at the deadlines, at least."""
PROMPT = 0.1
"""Seconds within which a task takes its first step, unless the process stood still."""
_start_order = itemgetter(JobColumn.PRIORITY, JobColumn.SCHEDULED_AT, JobColumn.ID)


class RunningAttempts:
    """The running attempts. `finished` is called with each one that ended, in the loop turn in
    which it did."""

    def __init__(
        self, executor: Executor, config: Config, finished: Callable[[Attempt], None]
    ) -> None:
        self._executor = executor
        self._stuck_after = config.job_stuck_threshold.total_seconds()
        self._stuck_handler = config.job_stuck_handler
        self._finished = finished
        self._context = contextvars.copy_context()
        """Each job begins in a copy of it, and has nothing of the job that ended and made room."""
        self._attempts: set[Attempt] = set()  # the loop holds tasks weakly
        self._stuck: dict[Attempt, bool] = {}
        """Those that go on in spite of their cancellation: whether they keep their slots."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._timer: asyncio.TimerHandle | None = None
        self._scan_at = math.inf
        self.prompt_until = 0.0
        """A task whose first step is later asks whether it may begin: monotonic seconds."""
        self.owner: asyncio.Task[Any] | None = None
        """The task of the run."""
        self._log = get_logger()
        self._tells_of_jobs = tells_of_jobs(self._log)
        self._stuck_lines = JobLines(self._log, "warning")
        self._unstuck_lines = JobLines(self._log, "info")
        self._handler_lines = JobLines(self._log, "exception")

    def __len__(self) -> int:
        return len(self._attempts)

    @property
    def attempts(self) -> set[Attempt]:
        """The attempts that run now; not to be changed."""
        return self._attempts

    @property
    def stuck(self) -> Mapping[Attempt, bool]:
        """The attempts that go on although they were cancelled long ago: whether each keeps its
        slot."""
        return self._stuck

    def claim_keys(self) -> set[ClaimKey]:
        """The claim keys of the attempts that run now."""
        return {attempt.claim_key for attempt in list(self._attempts)}

    def launch(self, rows: Sequence[Any], producer: Producer, slots: int) -> list[Attempt]:
        """Start an attempt for each claimed row, in the order of their turn, as far as there are
        slots. Returns the attempts that have to wait for one: they are of the group already."""
        plans, now = self._executor.plans, time.monotonic()
        attempts = [
            Attempt(row, plans.get(row[JobColumn.KIND]), producer, now)
            for row in sorted(rows, key=_start_order)
        ]
        self._attempts.update(attempts)
        if attempts:
            self._idle.clear()
        self.begin(attempts[:slots])
        return attempts[slots:]

    def begin(self, attempts: Sequence[Attempt]) -> None:
        """Start attempts, each in its slot. Their time limits count from now."""
        loop, now, first = asyncio.get_running_loop(), time.monotonic(), math.inf
        work = self._executor.work
        if attempts:
            self.prompt_until = now + PROMPT
        if attempts and self._tells_of_jobs:
            self._tell_of(attempts)
        for attempt in attempts:
            deadline = attempt.deadline = now + attempt.timeout
            first = min(first, deadline)
            attempt.task = loop.create_task(work(attempt, self), context=self._context.copy())
        self.watch(first)

    def _tell_of(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            self._log.debug(
                JOB_STARTED,
                job_id=attempt.id,
                kind=attempt.kind,
                queue=attempt.queue,
                attempt=attempt.attempt,
            )

    def give_back(self, attempts: list[Attempt]) -> None:
        """Let attempts go that have not begun: they do not count, and keep their place in the
        queue."""
        for attempt in attempts:
            self._executor.give_back(attempt)
            self._attempts.discard(attempt)
            self._finished(attempt)
        if not self._attempts:
            self._idle.set()

    def finish(self, attempt: Attempt) -> None:
        """Take an attempt that ended out of the group."""
        attempt.task = None  # no cycle from the attempt to its own coroutine
        self._attempts.discard(attempt)
        self._finished(attempt)
        if not self._stuck or self._unstick(attempt):
            attempt.producer.release()
        if not self._attempts:
            self._idle.set()

    def cancel(self, job_id: int, queue: str) -> None:
        """Cancel what runs here of this job, for somebody asked so."""
        self.cancel_attempts(
            [one for one in self._attempts if one.id == job_id and one.queue == queue]
        )

    def cancel_attempts(self, attempts: Iterable[Attempt]) -> None:
        """Cancel those of the attempts that still run, for somebody asked so."""
        for attempt in attempts:
            if attempt in self._attempts:
                self._stop(attempt, StopCause.JOB_CANCELLED)

    @property
    def is_cut(self) -> bool:
        """Whether the task of the run itself was cancelled, as each task is at the end of the event
        loop."""
        return self.owner is not None and self.owner.cancelling() > 0

    def find_cause(self, attempt: Attempt, error: BaseException) -> None:
        """Set the cause of a cancellation that came with that of the run: it is a stop."""
        if attempt.cause is None and self.is_cut and is_cancellation(error):
            attempt.cause = StopCause.HARD_STOP

    def stop_all(self, cause: StopCause) -> None:
        """Cancel every attempt."""
        for attempt in list(self._attempts):
            self._stop(attempt, cause)

    async def wait_idle(self) -> None:
        """Return when no attempt runs."""
        while self._attempts:
            await self._idle.wait()

    async def drain(
        self, soft: float | None, hard_asked: asyncio.Event, hard: Callable[[], float]
    ) -> None:
        """Wait for the attempts to end; then cancel them and wait once more. What is left did not
        end.

        Args:
            soft: seconds before they are cancelled; None: until `hard_asked`.
            hard_asked: set by somebody who does not want to wait.
            hard: called then; the seconds that they have after that.
        """
        try:
            with anyio.move_on_after(soft):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._cancel_when_set, hard_asked, tasks.cancel_scope)
                    await self.wait_idle()
                    tasks.cancel_scope.cancel()
        finally:
            await self._end(hard)

    async def _end(self, hard: Callable[[], float]) -> None:
        if self._attempts:
            self._log.info(RUNNING_JOBS_CANCELLED, running=len(self._attempts))
            self.stop_all(StopCause.HARD_STOP)
            # Tasks that were cancelled before their first step have run no code of ours.
            self.give_back([one for one in self._attempts if one.task and one.task.done()])
            with anyio.move_on_after(hard(), shield=True):
                await self.wait_idle()
        self._unwatch()

    @staticmethod
    async def _cancel_when_set(event: asyncio.Event, scope: anyio.CancelScope) -> None:
        await event.wait()
        scope.cancel()

    def _stop(self, attempt: Attempt, cause: StopCause) -> None:
        """Record the cause, then cancel. The first cause is kept.

        A task that has not started is left alone: cancelling it would skip its clean-up, and it
            looks for a cause.
        """
        if attempt.cause is None:
            attempt.cause = cause
            attempt.set_cancelled()
            attempt.deadline = time.monotonic() + self._stuck_after
            self.watch(attempt.deadline)
        elif cause is not StopCause.HARD_STOP:
            return
        if attempt.started and attempt.task is not None:
            attempt.task.cancel()

    def watch(self, deadline: float) -> None:
        """Make sure that the deadlines are looked at when this one comes."""
        if deadline >= self._scan_at:
            return
        self._unwatch()
        delay = max(deadline - time.monotonic(), SCAN_INTERVAL_MIN)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(delay, self._scan, context=self._context)
        self._scan_at = deadline

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._scan_at = None, math.inf

    def _scan(self) -> None:
        """Stop the live attempts whose time is over, and tell of those that do not stop. Finished
        ones hold no timer, however far their deadline."""
        self._timer, self._scan_at = None, math.inf
        now, first = time.monotonic(), math.inf
        stuck: list[Attempt] = []
        for attempt in self._attempts:
            if attempt.deadline <= now:
                if left := self._time_left(attempt, now):
                    attempt.deadline = now + left
                elif attempt.cause is None:
                    self._stop(attempt, StopCause.JOB_TIMEOUT)
                else:
                    attempt.deadline = math.inf
                    stuck.append(attempt)
            first = min(first, attempt.deadline)
        self.watch(first)
        for attempt in stuck:
            self._tell_of_stuck(attempt, now)

    def _time_left(self, attempt: Attempt, now: float) -> float:
        """Seconds that an attempt has still at its deadline. That counts from the launch: where the
        loop was held up since, its first step came late, or is to come."""
        if not attempt.started:
            limit = attempt.timeout if attempt.cause is None else self._stuck_after
            return max(limit, SCAN_INTERVAL_MIN)
        left = attempt.started + attempt.timeout - now
        return left if attempt.cause is None and left > SCAN_INTERVAL_MIN else 0.0

    def _tell_of_stuck(self, attempt: Attempt, now: float) -> None:
        running = timedelta(seconds=now - attempt.started)
        self._stuck[attempt] = True
        job = StuckJob(attempt.id, attempt.kind, attempt.queue, running, len(self._stuck))
        keeps_slot = self._stuck[attempt] = not self._grants_slot(job)
        self._stuck_lines.say(
            STUCK_JOB_FOUND,
            job_id=job.id,
            kind=job.kind,
            queue=job.queue,
            reason=attempt.cause and attempt.cause.value,
            seconds=round(running.total_seconds(), 3),
            keeps_slot=keeps_slot,
            stuck=job.total,
        )
        if not keeps_slot:
            attempt.producer.release()

    def _grants_slot(self, job: StuckJob) -> bool:
        if self._stuck_handler is None:
            return False
        try:
            return bool(self._stuck_handler.handle_stuck(job))
        except BaseException:  # it must not end the loop
            self._handler_lines.say(STUCK_JOB_HANDLER_FAILED, job_id=job.id, kind=job.kind)
            return False

    def _unstick(self, attempt: Attempt) -> bool:
        """An attempt has ended. Returns whether it had its slot still."""
        keeps_slot = self._stuck.pop(attempt, None)
        if keeps_slot is None:
            return True
        self._unstuck_lines.say(
            STUCK_JOB_ENDED,
            job_id=attempt.id,
            kind=attempt.kind,
            queue=attempt.queue,
            seconds=round(attempt.ended - attempt.started, 3),
            stuck=len(self._stuck),
        )
        return keeps_slot
