"""JobExecutor: starts claimed attempts, runs the code of their jobs, and sets their outcome."""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import anyio
from msgspec import UNSET

from riverpy._lifecycle import StopCause
from riverpy._log import get_logger
from riverpy._log_events import (
    CANCELLED_JOB_COMPLETED,
    ERROR_CLASSIFICATION_FAILED,
    ERROR_HANDLER_FAILED,
    JOB_FAILED,
    JOB_STARTED,
)
from riverpy._names import EXPIRES_AT_METADATA_KEY
from riverpy._plugins import PluginLists, process_wide_plugins, read_class_plugins
from riverpy._work import outcomes
from riverpy._work.attempt import Attempt, Outcome
from riverpy._work.expiry import EXPIRED_ERROR_TEXT, is_job_expired
from riverpy._work.failure import (
    find_deciding_error,
    make_storable_message,
    make_storable_trace,
    make_storable_type_and_message,
)
from riverpy._work.middleware import MiddlewareStack
from riverpy._work.returned_value import record_returned_value
from riverpy.context import running_job
from riverpy.errors import JobCancel, JobSnooze
from riverpy.events import EventKind
from riverpy.job import JobColumn, JobState
from riverpy.retry import choose_retry_delay
from riverpy.worker import check_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor
    from datetime import timedelta

    from msgspec import UnsetType

    from riverpy._work.attempt_store import AttemptStore
    from riverpy._work.blocking import BlockingJobRunner
    from riverpy._work.child_pool import ChildProcessPool
    from riverpy._work.running_attempts import RunningAttempts
    from riverpy.config import Config
    from riverpy.worker import RegisteredWorker, Workers

TASK_START_DELAY_MAX = 0.1
"""The longest normal time from the creation of a job's task until it runs, in seconds. A task that
runs later first checks whether the client may still work jobs."""
ERROR_HANDLER_TIMEOUT = 10.0
"""The timeout of the user's error handler, in seconds."""
CANCEL_GRACE_PERIOD_MAX = 2.0
"""The longest time, in seconds, that a cancelled job in a child process gets to end by itself if
its code uses `job.cancelled`. After this time, the process is killed."""
CANCEL_GRACE_SHARE_OF_HARD_STOP = 0.3
"""A cancelled job in a process gets at most this fraction of the hard stop timeout to end, and at
most `CANCEL_GRACE_PERIOD_MAX`."""
UNCLASSIFIED_ERROR_RETRY_DELAY = 60.0
"""Seconds until the retry of a job whose outcome could not be chosen, because of a fault in riverpy
or in user code."""
UNKNOWN_KIND_WORKER_AND_TIMEOUT = None, math.inf
"""The values for a job whose kind has no registered worker: None as its worker, and infinity as its
timeout."""
_get_claim_order_key = itemgetter(JobColumn.PRIORITY, JobColumn.SCHEDULED_AT, JobColumn.ID)


class JobExecutor:
    """Runs attempts with the workers of one client. Create this object in the task that executes
    `ClientRun.run`."""

    def __init__(
        self,
        workers: Workers,
        config: Config,
        children: ChildProcessPool,
        running: RunningAttempts,
        may_start_jobs: Callable[[], bool],
        store: AttemptStore,
        on_error: Callable[[Attempt, BaseException], None] | None = None,
        job_threads: Executor | None = None,
    ) -> None:
        """`may_start_jobs` returns whether the client may still work its claimed jobs. `store`
        writes into the rows of running jobs. `on_error` is called with the attempt and its error
        when an attempt raises. If the error is the cancellation by the job's timeout, `on_error` is
        called a second time, with the TimeoutError. `job_threads` is the executor that runs
        blocking jobs; None: the client makes its own threads."""
        self._on_error = on_error
        self._config, self._running_attempts, self._may_start_jobs = config, running, may_start_jobs
        self._attempt_store = store
        self._child_processes, self._job_threads = children, job_threads
        self._job_context_template = contextvars.copy_context()
        """The context that is copied for each job, so that no job sees the context variables of
        another job."""
        self._task_start_deadline = 0.0
        self._log = get_logger()
        self._should_log_jobs = self._log.is_debug_enabled
        self._limited_log = self._log.with_rate_limit()
        self._worker_and_timeout_by_kind = {
            kind: (unit, _to_timeout_seconds(unit.resolve_timeout(config.job_timeout)))
            for kind in workers
            if (unit := workers.get(kind)) is not None
        }
        plugins = PluginLists(
            [*process_wide_plugins, *config.plugins], config.hooks, config.middleware
        )
        self._stack_by_kind, self._unknown_kind_stack = self._make_middleware_stacks(plugins)

    def _make_middleware_stacks(
        self, plugins: PluginLists
    ) -> tuple[dict[str, MiddlewareStack | None], MiddlewareStack | None]:
        """Return the middleware stack (hooks and middleware) of each kind, in a dict, and the
        middleware stack for unknown kinds. A stack without hooks and middleware is None. If there
        are no hooks and no middleware at all, the dict is empty."""
        stacks = {
            kind: self._make_middleware_stack(plugins, read_class_plugins(unit.args_type), unit)
            for kind, (unit, _) in self._worker_and_timeout_by_kind.items()
        }
        unknown = self._make_middleware_stack(plugins, PluginLists(), None)
        has_any = unknown is not None or any(stacks.values())
        return (stacks if has_any else {}), unknown

    def _make_middleware_stack(
        self, plugins: PluginLists, kind_plugins: PluginLists, worker: RegisteredWorker | None
    ) -> MiddlewareStack | None:
        stack = MiddlewareStack(
            plugins, kind_plugins, worker, self._running_attempts, self._run_job_code
        )
        return None if stack.is_empty else stack

    @cached_property
    def _blocking_runner(self) -> BlockingJobRunner:
        from riverpy._work.blocking import BlockingJobRunner  # most workers have no blocking jobs

        hard_stop = self._config.hard_stop_timeout.total_seconds()
        return BlockingJobRunner(
            self._child_processes,
            self._running_attempts,
            self._config.max_processes,
            min(CANCEL_GRACE_PERIOD_MAX, hard_stop * CANCEL_GRACE_SHARE_OF_HARD_STOP),
            self._job_threads,
        )

    async def check_functions_importable_in_child(self) -> None:
        """Check that child processes can run the jobs whose workers have `executor="process"`.

        Raises:
            ConfigError: a process cannot start, or cannot import a function.
        """
        workers = (worker for worker, _ in self._worker_and_timeout_by_kind.values())
        units = {id(worker): worker for worker in workers if worker.executor == "process"}
        if units:
            await self._blocking_runner.check_functions_importable_in_child(list(units.values()))

    def close(self) -> None:
        """Stop the idle threads and processes that work blocking jobs."""
        if "_blocking_runner" in vars(self):
            self._blocking_runner.close()
        else:  # a job that an earlier run abandoned may have ended: its process is idle
            self._child_processes.end_all_idle_children()

    def make_and_start_attempts(
        self, job_rows: Sequence[Any], release_slot: Callable[[], None], free_slot_count: int
    ) -> list[Attempt]:
        """Make an attempt for each claimed row, and start the first `free_slot_count` attempts.

        Returns the attempts that did not start, in the order in which they should start.
        """
        units, now, store = self._worker_and_timeout_by_kind, time.monotonic(), self._attempt_store
        attempts = [
            Attempt(
                row,
                units.get(row[JobColumn.KIND], UNKNOWN_KIND_WORKER_AND_TIMEOUT),
                release_slot,
                now,
                store,
            )
            for row in sorted(job_rows, key=_get_claim_order_key)
        ]
        self._running_attempts.add_attempts(attempts)
        self.start_attempts(attempts[:free_slot_count])
        return attempts[free_slot_count:]

    def start_attempts(self, attempts: Sequence[Attempt]) -> None:
        """Start attempts and their timeouts. The caller must have a free slot for each attempt."""
        if not attempts:
            return
        loop, now, first = asyncio.get_running_loop(), time.monotonic(), math.inf
        self._task_start_deadline = now + TASK_START_DELAY_MAX
        if self._should_log_jobs:
            self._log_started_attempts(attempts)
        for attempt in attempts:
            deadline = attempt.deadline = now + attempt.timeout
            first = min(first, deadline)
            attempt.task = loop.create_task(
                self._run_attempt(attempt), context=self._job_context_template.copy()
            )
        self._running_attempts.schedule_deadline_check(first)
        if self._attempt_store.events.fleet_outbox is not None:
            self._attempt_store.events.publish_started_jobs(attempts)

    def _log_started_attempts(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            self._log.debug(
                JOB_STARTED,
                job_id=attempt.id,
                kind=attempt.kind,
                queue=attempt.queue,
                attempt=attempt.attempt,
            )

    async def _run_attempt(self, attempt: Attempt) -> None:
        """Run the attempt, set its outcome, and end the attempt, even after an error.

        After the job's code, hooks and middleware have ended, only the error handler is awaited.
        So a later cancellation does not change the outcome.
        """
        running_job.set(attempt)
        attempt.started_at = time.monotonic()
        try:
            if attempt.stop_cause is not None:  # the job was cancelled before this task ran
                raise asyncio.CancelledError  # noqa: TRY301
            if attempt.started_at > self._task_start_deadline and not self._may_start_jobs():
                outcomes.set_released_outcome(attempt)
                return
            if EXPIRES_AT_METADATA_KEY in attempt.metadata_text and _was_job_expired_at_start(
                attempt
            ):
                attempt.outcome = outcomes.make_cancel_outcome(attempt, EXPIRED_ERROR_TEXT)
                return
            stack = (
                self._stack_by_kind.get(attempt.kind, self._unknown_kind_stack)
                if self._stack_by_kind
                else None
            )
            if stack is None:
                await self._run_job_code(attempt)
            else:
                await stack.run_attempt(attempt)
        except BaseException as error:  # a SystemExit in the job's code fails the attempt too
            self._running_attempts.set_hard_stop_cause_if_run_cancelled(attempt, error)
            await self._set_outcome_from_error(attempt, error)
        finally:
            if attempt.step_runner is not None:
                attempt.step_runner.forget_error()
            attempt.ended_at = time.monotonic()
            self._running_attempts.remove_ended_attempt(attempt)

    async def _run_job_code(self, attempt: Attempt) -> None:
        """Decode the args and run the worker's code."""
        unit = attempt.worker
        if unit is None:
            raise LookupError(
                f"job kind is not registered in the client's Workers bundle: {attempt.kind}"
            )
        attempt.set_args(unit.decode_args(attempt.encoded_args))
        if unit.get_job_timeout is not None:
            self._set_attempt_timeout(attempt, unit, unit.get_job_timeout(attempt))
        attempt.read_stored_steps()
        if unit.executor is None:
            returned = await unit.work(attempt)
            if returned is not None:
                record_returned_value(attempt, returned)
        elif unit.executor == "thread":
            await self._blocking_runner.run_in_thread(unit.work, attempt)
        else:
            await self._blocking_runner.run_in_process(unit.work, attempt)
        if attempt.stop_cause is not None:
            self._log_completion_after_cancellation(attempt, attempt.stop_cause)
        if attempt.step_runner is not None:
            attempt.step_runner.check_all_steps_ended(is_stopped=attempt.stop_cause is not None)

    def _log_completion_after_cancellation(self, attempt: Attempt, cause: StopCause) -> None:
        self._limited_log.warning(
            CANCELLED_JOB_COMPLETED,
            job_id=attempt.id,
            kind=attempt.kind,
            queue=attempt.queue,
            reason=cause.value,
            seconds=round(time.monotonic() - attempt.started_at, 3),
        )

    def _set_attempt_timeout(
        self, attempt: Attempt, worker: RegisteredWorker, timeout: timedelta | UnsetType | None
    ) -> None:
        if timeout is UNSET:
            return
        check_timeout(attempt.kind, timeout)
        resolved = worker.resolve_timeout(self._config.job_timeout, timeout)
        attempt.timeout, attempt.has_own_timeout = _to_timeout_seconds(resolved), True
        self._running_attempts.set_deadline(attempt, attempt.timeout)

    async def _set_outcome_from_error(self, attempt: Attempt, error: BaseException) -> None:
        """Set the outcome of an attempt that raised `error`.

        The outcome is set to a failure before the error is classified, because the classification
        calls user code, which may raise.
        """
        if self._on_error is not None:
            self._on_error(attempt, error)
        attempt.outcome = outcomes.make_failure_outcome(
            attempt, "riverpy could not classify the error", "", UNCLASSIFIED_ERROR_RETRY_DELAY
        )
        if attempt.step_runner is not None:
            attempt.step_runner.merge_step_metadata()
        try:
            attempt.outcome = self._make_outcome_from_error(attempt, error)
        except BaseException:  # catch SystemExit too: it would end the event loop
            self._limited_log.exception(ERROR_CLASSIFICATION_FAILED, job_id=attempt.id)
        is_failure = attempt.outcome.event_kind is EventKind.JOB_FAILED
        # After a GeneratorExit the event loop may have ended, so the handler cannot be awaited.
        if is_failure and not isinstance(error, GeneratorExit):
            await self._call_error_handler(attempt, error, attempt.outcome)

    def _make_outcome_from_error(self, attempt: Attempt, error: BaseException) -> Outcome:
        if attempt.stop_cause is StopCause.JOB_CANCELLED:
            return outcomes.make_cancel_outcome(attempt, outcomes.REMOTE_CANCEL_ERROR_TEXT)
        match find_deciding_error(error):
            case JobSnooze() as snooze:
                return outcomes.make_snooze_outcome(attempt, snooze.delay)
            case JobCancel() as cancel:
                return outcomes.make_cancel_outcome(attempt, make_storable_message(cancel))
            case asyncio.CancelledError() if attempt.stop_cause is StopCause.HARD_STOP:
                return outcomes.make_interrupt_outcome(attempt)
            case asyncio.CancelledError() if attempt.stop_cause is StopCause.JOB_TIMEOUT:
                error = attempt.make_timeout_error().with_traceback(error.__traceback__)
                if self._on_error is not None:
                    self._on_error(attempt, error)
            case _:
                pass
        return self._make_failure_outcome(attempt, error)

    def _make_failure_outcome(self, attempt: Attempt, error: BaseException) -> Outcome:
        if attempt.worker is None:  # unknown kind: store the same text as River
            text, trace = make_storable_message(error), ""
        else:
            text, trace = make_storable_type_and_message(error), make_storable_trace(error)
        delay = choose_retry_delay(
            attempt, attempt.worker, self._config.retry_policy, self._limited_log
        ).total_seconds()
        outcome = outcomes.make_failure_outcome(attempt, text, trace, delay)
        self._log.debug(
            JOB_FAILED,
            job_id=attempt.id,
            kind=attempt.kind,
            queue=attempt.queue,
            attempt=attempt.attempt,
            max_attempts=attempt.max_attempts,
            error=text,
            trace=trace,
        )
        return outcome

    async def _call_error_handler(
        self, attempt: Attempt, error: BaseException, outcome: Outcome
    ) -> None:
        handler = self._config.error_handler
        if handler is None:
            return
        cancel: bool | None = None
        try:
            with anyio.move_on_after(ERROR_HANDLER_TIMEOUT):
                cancel = await handler.handle_error(attempt, error)
        except asyncio.CancelledError:
            pass  # the code of the job has ended, so a cancellation does not change the outcome
        except BaseException:
            self._limited_log.exception(ERROR_HANDLER_FAILED, job_id=attempt.id, kind=attempt.kind)
        if cancel:
            attempt.outcome = Outcome(
                event_kind=EventKind.JOB_CANCELLED,
                state=JobState.CANCELLED,
                attempt_to_store=outcome.attempt_to_store,
                is_final=True,
                error_entry=outcome.error_entry,
            )


def _was_job_expired_at_start(attempt: Attempt) -> bool:
    """Return whether the job expired before this attempt started, by the server's clock. The start
    is the server's time of the claim plus the time that has passed since the claim."""
    microseconds = int((attempt.started_at - attempt.claimed_at) * 1e6)
    return is_job_expired(attempt.metadata_text, attempt.claim_key.attempted_at + microseconds)


def _to_timeout_seconds(timeout: timedelta | None) -> float:
    """Return a timeout in seconds. Infinity means no timeout."""
    return math.inf if timeout is None else timeout.total_seconds()
