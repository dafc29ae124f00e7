"""WorkStack: the hooks and middleware around the attempts at one kind of job.

    the worker's own middleware
      the client's middleware, then that of the args class
        work_begin hooks · decoding · the job's code · work_end hooks

The timeout counts from the decoding to the last work_end hook. Those that it leaves to be called
have `LATE_HOOK_TIMEOUT` each.
"""

from __future__ import annotations

import asyncio
import math
import time
from functools import partial
from typing import TYPE_CHECKING

from riverpy._lifecycle import StopCause
from riverpy._middleware_chain import run_middleware
from riverpy._work.failure import is_cancellation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy._plugins import Plugins
    from riverpy._work.attempt import Attempt
    from riverpy._work.running_attempts import RunningAttempts
    from riverpy.worker import WorkUnit

LATE_HOOK_TIMEOUT = 10.0
"""Seconds that each work_end hook has which is called after the timeout."""
_STOPS = {StopCause.JOB_CANCELLED, StopCause.HARD_STOP}


class WorkStack:
    """What is around the attempts at one kind of job."""

    def __init__(
        self,
        client: Plugins,
        kind: Plugins,
        unit: WorkUnit | None,
        running: RunningAttempts,
        run_code: Callable[[Attempt], Awaitable[None]],
    ) -> None:
        """
        Args:
            client: the client's hooks and middleware.
            kind: those that the args class declares.
            unit: what works the kind; its own middleware is outside of the client's, as in River.
                None: nothing does.
            run_code: decodes the args of an attempt and runs its code.
        """
        self._own = None if unit is None else unit.middleware
        self._middleware = [*client.work, *kind.work]
        self._begins = [*client.work_begin, *kind.work_begin]
        self._ends = [*client.work_end, *kind.work_end]
        self._running, self._run_code = running, run_code

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing around them."""
        return not (self._own or self._middleware or self._begins or self._ends)

    async def work(self, attempt: Attempt) -> None:
        """Run the attempt.

        Raises:
            CancelledError: it was cancelled or stopped before its code ended by itself. No hook and
                no middleware can make anything else of that.
            BaseException: how else it failed.
        """
        attempt.deadline = math.inf
        run, given = _StackRun(attempt, self._running), attempt.encoded_args
        try:
            own = self._own(attempt) if self._own else ()
            await run_middleware(
                [*own, *self._middleware],
                lambda middleware, inner: run.through(partial(middleware.work, attempt, inner)),
                lambda: self._core(run),
                may_catch=True,
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
            if attempt.encoded_args is not given:  # what hooks set is nowhere stored
                attempt.encoded_args = given
        raise asyncio.CancelledError

    async def _core(self, run: _StackRun) -> None:
        attempt, error = run.attempt, None
        if attempt.cause is not None:  # meanwhile, and somebody caught it
            raise asyncio.CancelledError
        for hook in self._begins:
            await hook.work_begin(attempt)
        try:
            run.start_timeout()
            _, error = await run.outcome(lambda: self._run_code(attempt))
            run.has_ended = error is None or not is_cancellation(error)
            for hook in self._ends:
                run.limit_hook()
                is_caught, raised = await run.outcome(partial(hook.work_end, attempt, error))
                error = raised or (None if is_caught is True else error)
            if error is not None:
                raise error
        finally:
            if attempt.cause is None:  # else it is when what is around it counts as stuck
                attempt.deadline = math.inf
            error = raised = None  # they hold this frame


class _StackRun:
    """One attempt on its way through its stack."""

    __slots__ = ("attempt", "has_ended", "running")

    def __init__(self, attempt: Attempt, running: RunningAttempts) -> None:
        self.attempt, self.running = attempt, running
        self.has_ended = False
        """Whether the job's code has ended, by itself or at its timeout."""

    @property
    def is_stopped(self) -> bool:
        """Whether a cancel or a stop came before the job's code had ended."""
        return self.attempt.cause in _STOPS and not self.has_ended

    def start_timeout(self) -> None:
        """The time limit counts from now."""
        self.attempt.deadline = time.monotonic() + self.attempt.timeout
        self.running.watch(self.attempt.deadline)

    def limit_hook(self) -> None:
        """What follows a timeout has a limit of its own: nothing may keep the slot for ever."""
        attempt = self.attempt
        if attempt.deadline == math.inf and attempt.timeout < math.inf:
            attempt.deadline = time.monotonic() + LATE_HOOK_TIMEOUT
            self.running.watch(attempt.deadline)

    async def through(self, run: Callable[[], Awaitable[None]]) -> None:
        """Run a middleware. One that awaits what is inside of it in another task is ended by the
        timeout itself; those around it see TimeoutError all the same."""
        _, error = await self.outcome(run)
        try:
            if error is not None:
                raise error
        finally:
            error = None  # it holds this frame

    async def outcome(
        self, run: Callable[[], Awaitable[object]]
    ) -> tuple[object, BaseException | None]:
        """What it returned or raised; a cancellation by the timeout becomes its error, so that what
        follows runs as usual."""
        try:
            returned, error = await run(), None
        except GeneratorExit:  # the loop is gone
            raise
        except BaseException as raised:
            self.running.set_cause(self.attempt, raised)
            returned, error = None, raised
        try:
            if self._ended_timeout() and error is not None and is_cancellation(error):
                return None, self.attempt.timeout_error().with_traceback(error.__traceback__)
            return returned, error
        finally:
            error = None  # it holds this frame

    def _ended_timeout(self) -> bool:
        """Whether the timeout came, and it is over with now."""
        attempt, task = self.attempt, asyncio.current_task()
        if attempt.cause is not StopCause.JOB_TIMEOUT or task is None or task is not attempt.task:
            return False
        attempt.cause, attempt.deadline = None, math.inf
        task.uncancel()
        return True
