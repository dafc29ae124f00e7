"""BlockingJobRunner: runs blocking jobs (plain functions) in threads or child processes."""

from __future__ import annotations

import asyncio
import contextvars
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import anyio

from riverpy._main_import import get_main_module_location
from riverpy._plugins import enter_blocking_job_contexts, process_wide_plugins
from riverpy._work.child_pool import IDLE_CHILD_TIMEOUT
from riverpy._work.child_process import (
    PROCESS_START_TIMEOUT,
    JobInChild,
    count_usable_cores,
    pickle_function,
    pickle_job,
)
from riverpy._work.returned_value import record_returned_value
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from riverpy._work.attempt import Attempt
    from riverpy._work.child_pool import ChildProcessPool
    from riverpy._work.child_process import ChildProcess
    from riverpy._work.running_attempts import RunningAttempts
    from riverpy.job import Job
    from riverpy.worker import RegisteredWorker

ArgsT = TypeVarTuple("ArgsT")
ResultT = TypeVar("ResultT")

JOB_THREADS_MAX = 1_000_000
"""The maximum number of threads for jobs. There are never more slots than this, so no job waits for
a thread."""


class BlockingJobRunner:
    """Runs the blocking jobs of one client.

    A job in a thread gets its thread at once, because the slots of the queues (`max_workers`)
    already limit the number of jobs. A job in a process waits until one of `max_processes`
    processes is free. The job that has waited longest gets the next process. The timeout of a job
    does not start during this wait.
    """

    def __init__(
        self,
        child_processes: ChildProcessPool,
        running_attempts: RunningAttempts,
        max_processes: int | None,
        cancel_grace_period: float,
        job_threads: Executor | None = None,
    ) -> None:
        """Create a runner.

        Args:
            max_processes: how many jobs may run in processes at the same time; None: the number of
                cores.
            cancel_grace_period: how many seconds a cancelled job in a process may take to end, if
                it uses `job.cancelled`. Then its process is killed.
            job_threads: the executor that runs blocking jobs; None: the runner makes its own
                threads. Jobs in this executor run without process-wide plugins, because its threads
                and their database connections belong to other code.
        """
        self._child_processes = child_processes
        self._running_attempts = running_attempts
        self._idle_timer: asyncio.TimerHandle | None = None
        """The timer that ends processes that have been idle for too long."""
        self._process_slots = asyncio.Semaphore(max_processes or count_usable_cores())
        self._cancel_grace_period = cancel_grace_period
        self._job_threads = job_threads
        self._thread_pool: ThreadPoolExecutor | None = None

    async def run_in_thread(self, function: Callable[[Job[Any]], object], attempt: Attempt) -> None:
        """Run a job's function in a thread, and record its return value as the job's output.

        A thread cannot be stopped. So after a cancellation, this method sets `job.cancelled` and
        waits until the function ends. Then it returns, or raises the error of the function.
        """
        context = contextvars.copy_context()
        future = asyncio.get_running_loop().run_in_executor(
            self._job_threads or self._get_thread_pool(),
            lambda: context.run(
                _run_function_and_record_output,
                function,
                attempt,
                uses_process_plugins=self._job_threads is None,
            ),
        )
        try:
            await _wait_despite_cancellation(future, attempt.set_cancelled_flag)
            future.result()
        finally:
            del future  # break the reference cycle of its exception and this frame

    async def run_in_process(
        self, function: Callable[[Job[Any]], object], attempt: Attempt
    ) -> None:
        """Run a job's function in a child process, and record its return value as the job's output.

        A cancellation kills the process at once. If the code uses `job.cancelled`, the process is
        killed only after `cancel_grace_period`. If the function ends before the process is killed,
        its result is used.
        """
        self._running_attempts.pause_timeout(attempt)  # until the function is called
        await self._process_slots.acquire()
        try:
            await self._run_in_child(function, attempt)
        finally:
            self._process_slots.release()

    async def _run_in_child(self, function: Callable[[Job[Any]], object], attempt: Attempt) -> None:
        claim_key = attempt.claim_key
        packed = pickle_job(function, attempt)
        job = JobInChild(
            attempt.id, attempt.kind, packed, lambda: None, attempt.report_progress_text
        )
        child = self._child_processes.assign_child(claim_key)
        loop = asyncio.get_running_loop()
        start_timer = loop.call_later(PROCESS_START_TIMEOUT, child.kill_after_start_timeout)

        def restart_attempt_timeout() -> None:
            start_timer.cancel()
            self._running_attempts.restart_timeout(attempt)

        job.on_start = lambda: _call_in_loop(loop, restart_attempt_timeout)
        future = self._submit_to_thread(child.run_job, job)
        try:
            await self._wait_for_job_in_child(future, child)
            error = future.result()
        except ChildProcessError as ended:
            if not child.is_job_cancelled:
                raise
            raise asyncio.CancelledError from ended
        finally:
            start_timer.cancel()
            for key, text in job.metadata.items():
                attempt.record_metadata(key, text)
            self._child_processes.release_child(claim_key)
            self._start_idle_timer()
            del future  # break the reference cycle of its exception and this frame
        if error is not None:
            try:
                raise error
            finally:
                del error  # break the reference cycle between error and this frame

    def _start_idle_timer(self) -> None:
        if self._idle_timer is None:
            self._idle_timer = asyncio.get_running_loop().call_later(
                IDLE_CHILD_TIMEOUT + 1, self._end_long_idle_children
            )

    def _end_long_idle_children(self) -> None:
        self._idle_timer = None
        self._child_processes.end_long_idle_children()
        if self._child_processes.has_idle_children:
            self._start_idle_timer()

    async def check_functions_importable_in_child(
        self, workers: Sequence[RegisteredWorker]
    ) -> None:
        """Check that a child process can import the functions of the workers by their names.

        If child processes import the main module (for example a script), this method starts a child
        process that imports the main module and the functions. This process is kept for the first
        job.

        Raises:
            ConfigError: a function is not found, or the main module cannot be imported.
        """
        packed = [pickle_function(unit) for unit in workers]
        if not get_main_module_location():
            return
        child = self._child_processes.take_child_without_attempt()
        loop = asyncio.get_running_loop()
        start_timer = loop.call_later(PROCESS_START_TIMEOUT, child.kill_after_start_timeout)
        future = self._submit_to_thread(child.find_import_errors, packed)
        try:
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                child.kill()
                await _wait_despite_cancellation(future, child.kill)
                raise
            errors = future.result()
        except ChildProcessError as error:
            raise ConfigError(str(error)) from None
        finally:
            start_timer.cancel()
            self._child_processes.keep_or_end_child(child)
            self._start_idle_timer()
        for unit, error in zip(workers, errors, strict=True):
            if error is not None:
                raise ConfigError(
                    f"a process for jobs cannot import the function of job kind {unit.kind!r}: "
                    f"{error}: define the function and its args class at the top level of a "
                    'module, and not under `if __name__ == "__main__":`'
                )

    async def _wait_for_job_in_child(
        self, future: asyncio.Future[Any], child: ChildProcess
    ) -> None:
        """Wait until the job in the child, or the child itself, has ended.

        If this task is cancelled, cancel the job in the child. Kill the child after
        `cancel_grace_period`, or earlier if this task is cancelled again.
        """
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            child.cancel_job()
            timer = asyncio.get_running_loop().call_later(self._cancel_grace_period, child.kill)
            try:
                await _wait_despite_cancellation(future, child.kill)
            finally:
                timer.cancel()

    def _submit_to_thread(
        self, function: Callable[[*ArgsT], ResultT], *args: *ArgsT
    ) -> asyncio.Future[ResultT]:
        return asyncio.get_running_loop().run_in_executor(self._get_thread_pool(), function, *args)

    def _get_thread_pool(self) -> ThreadPoolExecutor:
        if self._thread_pool is None:
            self._thread_pool = ThreadPoolExecutor(
                JOB_THREADS_MAX, thread_name_prefix="riverpy job"
            )
        return self._thread_pool

    def close(self) -> None:
        """End idle threads and processes. Threads and processes that run a job continue."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._child_processes.end_all_idle_children()
        if self._thread_pool is not None:
            self._thread_pool.shutdown(wait=False, cancel_futures=True)


def _call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Call a function in the thread of the event loop, unless the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


def _run_function_and_record_output(
    function: Callable[[Job[Any]], object], job: Job[Any], *, uses_process_plugins: bool
) -> None:
    """Run a job's function, and record its return value as the job's output. With
    `uses_process_plugins`, the function runs in the context managers of the process-wide plugins.

    A StopIteration becomes a RuntimeError, as in a coroutine, because a future cannot store a
    StopIteration.
    """
    try:
        if uses_process_plugins and process_wide_plugins:
            with enter_blocking_job_contexts():
                record_returned_value(job, function(job))
        else:
            record_returned_value(job, function(job))
    except StopIteration as error:
        raise RuntimeError("blocking job raised StopIteration") from error


async def _wait_despite_cancellation(
    future: asyncio.Future[Any], on_cancel: Callable[[], None]
) -> None:
    """Wait until the future is done. Call `on_cancel` at each cancellation of this task."""
    # Without the shield, a cancelled anyio scope in a middleware would cancel this wait repeatedly.
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                on_cancel()
