"""Executor: runs one attempt and says how it ended."""

from __future__ import annotations

import asyncio
import math
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import anyio
from msgspec import UNSET

from riverpy._lifecycle import StopCause
from riverpy._log import JobLines, get_logger
from riverpy._log_events import (
    ERROR_CLASSIFICATION_FAILED,
    ERROR_HANDLER_FAILED,
    JOB_FAILED,
    RETRY_POLICY_FAILED,
)
from riverpy._plugins import Plugins, plugins_of
from riverpy._work.attempt import Outcome
from riverpy._work.blocking import BlockingRunner
from riverpy._work.failure import (
    error_entry,
    error_text,
    find,
    is_cancellation,
    message_text,
    storable,
    trace_text,
)
from riverpy._work.middleware import WorkStack
from riverpy._work.returns import ReturnLog, returned_type
from riverpy._work.snoozes import SNOOZES_KEY, next_snoozes
from riverpy.context import running_job
from riverpy.errors import JobCancel, JobSnooze
from riverpy.events import EventKind
from riverpy.job import JobColumn, JobState
from riverpy.retry import RETRY_DELAY_MAX, DefaultRetryPolicy, retry_delay
from riverpy.worker import check_timeout

if TYPE_CHECKING:
    from msgspec import UnsetType

    from riverpy._work.attempt import Attempt
    from riverpy._work.child_process import ChildProcesses
    from riverpy._work.running_attempts import RunningAttempts
    from riverpy.config import Config
    from riverpy.worker import Workers, WorkUnit

SOON = timedelta(seconds=5)
"""River's scheduler interval: what is due sooner goes straight back to available."""
ERROR_HANDLER_TIMEOUT = 10.0
"""Seconds."""
CANCEL_GRACE_MAX = 2.0
"""Seconds that a process job which uses `job.cancelled` has to end after its cancellation."""
CANCEL_GRACE_SHARE = 0.3
"""Of the hard stop's time, such a job has no more than this."""
REMOTE_CANCEL = "job cancelled remotely"


class Plan:
    """A work unit with its timeout worked out: what the launch of an attempt needs."""

    __slots__ = ("timeout", "timeout_is_default", "unit")

    def __init__(self, unit: WorkUnit, default: timedelta | None) -> None:
        self.unit = unit
        self.timeout_is_default = unit.timeout is UNSET
        self.timeout = _seconds(default if unit.timeout is UNSET else unit.timeout)


class Executor:
    """Runs attempts with the workers of one client."""

    def __init__(self, workers: Workers, config: Config, children: ChildProcesses) -> None:
        self._config = config
        self._default_policy = DefaultRetryPolicy()
        hard_stop = config.hard_stop_timeout.total_seconds()
        grace = min(CANCEL_GRACE_MAX, hard_stop * CANCEL_GRACE_SHARE)
        self._blocking = BlockingRunner(children, grace)
        self._log = get_logger()
        self._handler_lines = JobLines(self._log, "exception")
        self._unclear_lines = JobLines(self._log, "exception")
        self._policy_lines = JobLines(self._log, "warning")
        self._returns = ReturnLog()
        self.plans = {kind: self._plan(workers.get(kind)) for kind in workers}
        plugins = Plugins(config.plugins, config.hooks, config.middleware)
        self._stacks, self._client_stack = self._make_stacks(plugins)

    def _plan(self, unit: WorkUnit | None) -> Plan:
        assert unit is not None  # noqa: S101 (the registry gave its own key)
        return Plan(unit, self._config.job_timeout)

    def _make_stacks(
        self, plugins: Plugins
    ) -> tuple[dict[str, WorkStack | None], WorkStack | None]:
        """By kind, what is around its attempts: None for nothing, and no kinds if that is so for
        all. Then that of unknown kinds."""
        stacks = {
            kind: WorkStack(plugins, plugins_of(plan.unit.args_type), plan.unit, self._run_code)
            for kind, plan in self.plans.items()
        }
        used = {kind: None if stack.is_empty else stack for kind, stack in stacks.items()}
        unknown = WorkStack(plugins, Plugins(), None, self._run_code)
        if unknown.is_empty:
            return (used, None) if any(used.values()) else ({}, None)
        return used, unknown

    def close(self) -> None:
        """Let go of the threads."""
        self._blocking.close()

    async def work(self, attempt: Attempt, group: RunningAttempts) -> None:
        """Run the attempt and hand it to the group as finished, whatever happens.

        Between the end of the user's code and `group.finish` nothing awaits but the error handler,
        so no cancellation gets between a result and its record.
        """
        running_job.set(attempt)
        attempt.started = time.monotonic()
        try:
            if attempt.cause is not None:  # stopped between launch and first step
                raise asyncio.CancelledError  # noqa: TRY301
            if attempt.started > group.prompt_until and not attempt.producer.may_begin:
                self.give_back(attempt)
                return
            stack = self._stacks.get(attempt.kind, self._client_stack) if self._stacks else None
            if stack is None:
                await self._run_code(attempt, group)
            else:
                await stack.work(attempt, group)
        except BaseException as error:  # a job's SystemExit is its failure, not ours
            group.find_cause(attempt, error)
            await self._fail(attempt, error)
        finally:
            attempt.ended = time.monotonic()
            group.finish(attempt)

    async def _run_code(self, attempt: Attempt, group: RunningAttempts) -> None:
        """Decode the args and run the code of the job."""
        unit = attempt.unit
        if unit is None:
            raise LookupError(
                f"job kind is not registered in the client's Workers bundle: {attempt.kind}"
            )
        attempt.set_args(unit.decode(attempt.encoded_args))
        if unit.job_timeout is not None:
            self._set_timeout(attempt, unit.job_timeout(attempt), group)
        if unit.blocking is None:
            returned = returned_type(await unit.work(attempt))
        elif unit.blocking == "thread":
            returned = await self._blocking.in_thread(unit.work, attempt)
        else:
            returned = await self._blocking.in_process(unit.work, attempt)
        if returned is not None or attempt.cause is not None:
            self._returns.report(attempt, returned)

    def give_back(self, attempt: Attempt) -> None:
        """Set the outcome of an attempt that does not begin."""
        attempt.started, attempt.ended = 0.0, time.monotonic()
        if attempt.cause is StopCause.JOB_CANCELLED:
            attempt.started = attempt.ended
            attempt.outcome = self._cancelled(attempt, REMOTE_CANCEL)
        else:
            attempt.outcome = self._interrupted(attempt, delay=None)

    def _set_timeout(
        self, attempt: Attempt, timeout: timedelta | UnsetType | None, group: RunningAttempts
    ) -> None:
        if timeout is UNSET:
            return
        check_timeout(attempt.kind, timeout)
        attempt.timeout, attempt.timeout_is_default = _seconds(timeout), False
        attempt.deadline = time.monotonic() + attempt.timeout
        group.watch(attempt.deadline)

    async def _fail(self, attempt: Attempt, error: BaseException) -> None:
        """Set the outcome. It is set at once to something safe: classifying runs code of the
        user's."""
        attempt.outcome = self._failed(attempt, "riverpy could not classify the error", "", 60.0)
        try:
            attempt.outcome = self._classify(attempt, error)
        except BaseException:  # even a SystemExit here would end the loop
            self._unclear_lines.say(ERROR_CLASSIFICATION_FAILED, job_id=attempt.id)
        is_failure = attempt.outcome.event is EventKind.JOB_FAILED
        if is_failure and not isinstance(error, GeneratorExit):  # with it the loop may be gone
            await self._tell_handler(attempt, error, attempt.outcome)

    def _classify(self, attempt: Attempt, error: BaseException) -> Outcome:
        if attempt.cause is StopCause.JOB_CANCELLED:
            return self._cancelled(attempt, REMOTE_CANCEL)
        if (snooze := find(error, JobSnooze)) is not None:
            return self._snoozed(attempt, snooze.delay)
        if (cancel := find(error, JobCancel)) is not None:
            return self._cancelled(attempt, message_text(cancel))
        if is_cancellation(error):
            if attempt.cause is StopCause.HARD_STOP:
                return self._interrupted(attempt)
            if attempt.cause is StopCause.JOB_TIMEOUT:
                error = attempt.timeout_error().with_traceback(error.__traceback__)
        if attempt.unit is None:  # River's text
            text, trace = message_text(error), ""
        else:
            text, trace = error_text(error), trace_text(error)
        outcome = self._failed(attempt, text, trace, self._retry_delay(attempt).total_seconds())
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

    def _snoozed(self, attempt: Attempt, delay: timedelta) -> Outcome:
        count = next_snoozes(attempt.columns()[JobColumn.METADATA])
        attempt.merge_metadata(SNOOZES_KEY, str(count))
        return Outcome(
            event=EventKind.JOB_SNOOZED,
            state=JobState.AVAILABLE if delay <= SOON else JobState.SCHEDULED,
            attempt=max(attempt.attempt - 1, 0),
            final=False,
            delay=min(delay, RETRY_DELAY_MAX).total_seconds(),
        )

    def _interrupted(self, attempt: Attempt, *, delay: float | None = 0.0) -> Outcome:
        return Outcome(
            event=EventKind.JOB_INTERRUPTED,
            state=JobState.AVAILABLE,
            attempt=max(attempt.attempt - 1, 0),
            final=False,
            delay=delay,
        )

    def _cancelled(self, attempt: Attempt, text: str) -> Outcome:
        return Outcome(
            event=EventKind.JOB_CANCELLED,
            state=JobState.CANCELLED,
            attempt=attempt.attempt,
            final=True,
            error=self._entry(attempt, f"JobCancelError: {text}", ""),
        )

    def _failed(self, attempt: Attempt, text: str, trace: str, delay: float) -> Outcome:
        entry = self._entry(attempt, text, trace)
        if attempt.attempt >= attempt.max_attempts:
            return Outcome(
                event=EventKind.JOB_FAILED,
                state=JobState.DISCARDED,
                attempt=attempt.attempt,
                final=True,
                error=entry,
            )
        return Outcome(
            event=EventKind.JOB_FAILED,
            state=JobState.AVAILABLE if delay <= SOON.total_seconds() else JobState.RETRYABLE,
            attempt=attempt.attempt,
            final=False,
            delay=delay,
            error=entry,
        )

    def _entry(self, attempt: Attempt, text: str, trace: str) -> str:
        return error_entry(
            attempt=attempt.attempt,
            seconds_ago=time.monotonic() - attempt.started,
            error=storable(text),
            trace=trace,
        )

    def _retry_delay(self, attempt: Attempt) -> timedelta:
        """The worker's word, else the client's policy; River's formula where these fail or look
        back."""
        unit = attempt.unit
        try:
            return retry_delay(attempt, unit and unit.next_retry, self._config.retry_policy)
        except BaseException as error:
            problem = error_text(error)
        self._policy_lines.say(
            RETRY_POLICY_FAILED,
            effect="the default retry policy is used",
            job_id=attempt.id,
            kind=attempt.kind,
            error=problem,
        )
        return self._default_policy.next_retry(attempt)

    async def _tell_handler(self, attempt: Attempt, error: BaseException, outcome: Outcome) -> None:
        handler = self._config.error_handler
        if handler is None:
            return
        cancel: bool | None = None
        try:
            with anyio.move_on_after(ERROR_HANDLER_TIMEOUT):
                cancel = await handler.handle_error(attempt, error)
        except asyncio.CancelledError:
            pass  # the attempt is over; its outcome stands
        except BaseException:
            self._handler_lines.say(ERROR_HANDLER_FAILED, job_id=attempt.id, kind=attempt.kind)
        if cancel:
            attempt.outcome = Outcome(
                event=EventKind.JOB_CANCELLED,
                state=JobState.CANCELLED,
                attempt=outcome.attempt,
                final=True,
                error=outcome.error,
            )


def _seconds(timeout: timedelta | UnsetType | None) -> float:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else math.inf
