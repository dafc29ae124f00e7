"""MiddlewareStack: the hooks and middleware around the attempts of jobs of one kind. In this
drawing, each line runs inside the line above it:

    the worker's own middleware
      the client's middleware, then the middleware of the args class
        work_begin hooks · decoding · the job's code · work_end hooks

The timeout covers the time from the decoding to the end of the last work_end hook. After the
timeout, each further work_end hook may run for `WORK_END_HOOK_TIMEOUT`.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import TYPE_CHECKING

from riverpy._lifecycle import StopCause
from riverpy._middleware_chain import run_middleware
from riverpy._work.failure import is_cancellation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy._plugins import PluginLists
    from riverpy._work.attempt import Attempt
    from riverpy._work.running_attempts import RunningAttempts
    from riverpy.worker import RegisteredWorker

WORK_END_HOOK_TIMEOUT = 10.0
"""The timeout, in seconds, of each work_end hook that is called after the job has timed out."""
_STOPPING_CAUSES = {StopCause.JOB_CANCELLED, StopCause.HARD_STOP}


class MiddlewareStack:
    """The hooks and middleware around the attempts of jobs of one kind."""

    def __init__(
        self,
        client_plugins: PluginLists,
        kind_plugins: PluginLists,
        worker: RegisteredWorker | None,
        running: RunningAttempts,
        run_job_code: Callable[[Attempt], Awaitable[None]],
    ) -> None:
        """`client_plugins` and `kind_plugins` are the hooks and middleware of the client and of the
        args class. `run_job_code` decodes the args of an attempt and runs its code."""
        self._make_worker_middleware = None if worker is None else worker.middleware
        self._middleware = [*client_plugins.work_middleware, *kind_plugins.work_middleware]
        self._begin_hooks = [*client_plugins.work_begin_hooks, *kind_plugins.work_begin_hooks]
        self._end_hooks = [*client_plugins.work_end_hooks, *kind_plugins.work_end_hooks]
        self._running_attempts, self._run_job_code = running, run_job_code

    @property
    def is_empty(self) -> bool:
        """Whether there are no hooks and no middleware."""
        return not (
            self._make_worker_middleware or self._middleware or self._begin_hooks or self._end_hooks
        )

    async def run_attempt(self, attempt: Attempt) -> None:
        """Run the attempt.

        Raises:
            CancelledError: the attempt was cancelled or stopped before its code ended. Hooks and
                middleware cannot prevent this error.
            BaseException: the attempt failed.
        """
        attempt.deadline = math.inf
        run, given = _AttemptRun(attempt, self._running_attempts), attempt.encoded_args
        try:
            outer = self._make_worker_middleware(attempt) if self._make_worker_middleware else ()
            await run_middleware(
                [*outer, *self._middleware],
                lambda middleware, inner: run.run_one_middleware(
                    partial(middleware.work, attempt, inner)
                ),
                lambda: self._run_hooks_and_code(run),
                may_suppress_errors=True,
            )
        except GeneratorExit:
            raise
        except BaseException:
            if not run.is_stopped:
                raise
        else:
            if not run.is_stopped:
                return
        finally:
            if attempt.encoded_args is not given:  # restore the args that a hook has replaced
                attempt.encoded_args = given
        raise asyncio.CancelledError

    async def _run_hooks_and_code(self, run: _AttemptRun) -> None:
        attempt, error = run.attempt, None
        if attempt.stop_cause is not None:  # a middleware caught the cancellation: raise it again
            raise asyncio.CancelledError
        for hook in self._begin_hooks:
            await hook.work_begin(attempt)
        try:
            run.start_attempt_timeout()
            _, error = await run.call_and_catch_error(lambda: self._run_job_code(attempt))
            run.has_job_code_ended = error is None or not is_cancellation(error)
            for hook in self._end_hooks:
                run.start_late_hook_timeout()
                is_caught, raised = await run.call_and_catch_error(
                    partial(hook.work_end, attempt, error)
                )
                error = raised or (None if is_caught is True else error)
            if error is not None:
                raise error
        finally:
            # A cancelled attempt counts as stuck after its deadline, so keep that deadline.
            if attempt.stop_cause is None:
                attempt.deadline = math.inf
            error = raised = None  # break the reference cycles between the errors and this frame


class _AttemptRun:
    """One attempt that runs inside its hooks and middleware."""

    __slots__ = ("attempt", "has_job_code_ended", "running_attempts")

    def __init__(self, attempt: Attempt, running: RunningAttempts) -> None:
        self.attempt, self.running_attempts = attempt, running
        self.has_job_code_ended = False
        """Whether the code of the job has ended, by itself or by its timeout."""

    @property
    def is_stopped(self) -> bool:
        """Whether the attempt was cancelled or stopped before its code ended."""
        return self.attempt.stop_cause in _STOPPING_CAUSES and not self.has_job_code_ended

    def start_attempt_timeout(self) -> None:
        """Start the timeout of the attempt."""
        self.running_attempts.set_deadline(self.attempt, self.attempt.timeout)

    def start_late_hook_timeout(self) -> None:
        """Limit the time of a hook that is called after the attempt has timed out."""
        attempt = self.attempt
        if attempt.deadline == math.inf and attempt.timeout < math.inf:
            self.running_attempts.set_deadline(attempt, WORK_END_HOOK_TIMEOUT)

    async def run_one_middleware(self, call_middleware: Callable[[], Awaitable[None]]) -> None:
        """Run a middleware.

        The timeout cancels the task of the attempt. If a middleware awaits its inner code
        (`do_inner`) in another task, the middleware itself is cancelled. The next outer middleware
        receives a TimeoutError in this case too.
        """
        _, error = await self.call_and_catch_error(call_middleware)
        try:
            if error is not None:
                raise error
        finally:
            error = None  # the error refers to this frame: a reference cycle

    async def call_and_catch_error(
        self, call_code: Callable[[], Awaitable[object]]
    ) -> tuple[object, BaseException | None]:
        """Await `call_code()`, and return its value and its error. If the timeout of the attempt
        has cancelled the task, the error is a TimeoutError. The cancellation then ends, so that
        later code of the task is not cancelled."""
        try:
            returned, error = await call_code(), None
        except GeneratorExit:  # the event loop has ended, so nothing can be awaited
            raise
        except BaseException as raised:
            self.running_attempts.set_hard_stop_cause_if_run_cancelled(self.attempt, raised)
            returned, error = None, raised
        try:
            if self._end_timeout_cancellation() and error is not None and is_cancellation(error):
                return None, self.attempt.make_timeout_error().with_traceback(error.__traceback__)
            return returned, error
        finally:
            error = None  # the error refers to this frame: a reference cycle

    def _end_timeout_cancellation(self) -> bool:
        """If the timeout has cancelled the attempt, end the cancellation and return True."""
        attempt, task = self.attempt, asyncio.current_task()
        if (
            attempt.stop_cause is not StopCause.JOB_TIMEOUT
            or task is None
            or task is not attempt.task
        ):
            return False
        attempt.stop_cause, attempt.deadline = None, math.inf
        task.uncancel()
        return True
