"""BlockingJobRunner: runs blocking jobs (plain functions) in threads or child processes."""

from __future__ import annotations

import asyncio
import contextvars
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import anyio

from riverpy._work.child_process import count_usable_cores, get_type_name, pack_job, unpack_result

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._work.attempt import Attempt
    from riverpy._work.child_process import ChildProcess, ChildProcessPool
    from riverpy._work.running_attempts import RunningAttempts
    from riverpy.job import Job

ArgsT = TypeVarTuple("ArgsT")
ResultT = TypeVar("ResultT")

JOB_THREADS_MAX = 1_000_000
"""The maximum number of threads. It is larger than any number of slots, so that no job waits for a
thread."""


class BlockingJobRunner:
    """Runs the blocking jobs of one client. Each job in a thread gets its thread at once, because
    `max_workers` of the queues limits the number of jobs. Jobs in processes wait in their order for
    one of `max_processes` processes, and their timeout does not start while they wait."""

    def __init__(
        self,
        child_processes: ChildProcessPool,
        running: RunningAttempts,
        max_processes: int | None,
        cancel_grace_period: float,
    ) -> None:
        """`max_processes`: how many jobs run in processes at a time; None: the number of cores.
        `cancel_grace_period`: a cancelled job that runs in a process and uses `job.cancelled` gets
        this number of seconds to end. Then its process is killed."""
        self._child_processes = child_processes
        self._running = running
        self._process_slots = asyncio.Semaphore(max_processes or count_usable_cores())
        self._cancel_grace_period = cancel_grace_period
        self._thread_pool: ThreadPoolExecutor | None = None

    async def run_in_thread(
        self, function: Callable[[Job[Any]], object], attempt: Attempt
    ) -> str | None:
        """Run a function in a thread, and return the type name of its return value.

        A thread cannot be stopped, so after a cancellation this method still waits until the
        function ends. Then this method returns or raises as the function did.
        """
        context = contextvars.copy_context()
        future = self._submit_to_thread(lambda: context.run(_call_job_function, function, attempt))
        try:
            await _wait_despite_cancellation(future, attempt.set_cancelled_flag)
            return future.result()
        finally:
            del future  # the exception of the future refers to this frame: a reference cycle

    async def run_in_process(
        self, function: Callable[[Job[Any]], object], attempt: Attempt
    ) -> str | None:
        """Run a function in a process of its own, and return the type name of its return value.

        A cancellation kills the process: at once, or after `cancel_grace_period` if the code uses
        `job.cancelled`. If the function ends before that, its result is used.
        """
        await self._acquire_process_slot(attempt)
        try:
            return await self._run_in_child(function, attempt)
        finally:
            self._process_slots.release()

    async def _acquire_process_slot(self, attempt: Attempt) -> None:
        if not self._process_slots.locked():
            await self._process_slots.acquire()  # this does not wait
            return
        self._running.pause_timeout(attempt)
        await self._process_slots.acquire()
        self._running.restart_timeout(attempt)

    async def _run_in_child(
        self, function: Callable[[Job[Any]], object], attempt: Attempt
    ) -> str | None:
        job, claim_key = pack_job(function, attempt), attempt.claim_key
        child = self._child_processes.assign_child(claim_key)
        future = self._submit_to_thread(child.run_job, job)
        try:
            await self._wait_for_process(future, child)
            updates, returned, error = unpack_result(future.result())
        except ChildProcessError as ended:
            if not child.is_job_cancelled:
                raise
            raise asyncio.CancelledError from ended
        finally:
            self._child_processes.release_child(claim_key)
            del future  # the exception of the future refers to this frame: a reference cycle
        for key, text in updates.items():
            attempt.merge_metadata(key, text)
        if error is not None:
            try:
                raise error
            finally:
                del error  # break the reference cycle between error and this frame
        return returned

    async def _wait_for_process(self, future: asyncio.Future[bytes], child: ChildProcess) -> None:
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
        if self._thread_pool is None:
            self._thread_pool = ThreadPoolExecutor(
                JOB_THREADS_MAX, thread_name_prefix="riverpy job"
            )
        return asyncio.get_running_loop().run_in_executor(self._thread_pool, function, *args)

    def close(self) -> None:
        """End idle threads and processes. Threads and processes that run a job continue."""
        self._child_processes.end_idle_children()
        if self._thread_pool is not None:
            self._thread_pool.shutdown(wait=False, cancel_futures=True)


def _call_job_function(function: Callable[[Job[Any]], object], job: Job[Any]) -> str | None:
    """Run the function, and return the type name of its return value. A StopIteration becomes a
    RuntimeError, as in a coroutine, because a future cannot store a StopIteration."""
    try:
        return get_type_name(function(job))
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
