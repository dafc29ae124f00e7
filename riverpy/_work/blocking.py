"""Blocking jobs: plain functions in threads, or in processes that can be killed."""

from __future__ import annotations

import asyncio
import contextvars
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import anyio

from riverpy._work.child_process import pack_job, unpack_result
from riverpy._work.returns import returned_type

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._work.attempt import Attempt
    from riverpy._work.child_process import ChildProcess, ChildProcesses
    from riverpy.job import Job

ArgsT = TypeVarTuple("ArgsT")
ResultT = TypeVar("ResultT")

THREADS_MAX = 1_000_000
"""More than there can be slots; a thread is made only when no other is free."""


class BlockingRunner:
    """Runs the blocking jobs of one client. A job in a slot has its thread or process at once, so
    the slots alone bound how many there are."""

    def __init__(self, children: ChildProcesses, cancel_grace: float) -> None:
        """
        Args:
            children: the client's.
            cancel_grace: seconds between `job.cancelled` in a process and its end.
        """
        self._children = children
        self._cancel_grace = cancel_grace
        self._threads: ThreadPoolExecutor | None = None

    async def in_thread(
        self, function: Callable[[Job[Any]], object], attempt: Attempt
    ) -> str | None:
        """Run it in a thread, to its end: a thread cannot be stopped, so a cancellation waits for
        it. Returns the type of the function's value.

        What the function returned or raised counts; the cancellation only where it raised nothing.
        """
        context = contextvars.copy_context()
        future = self._run(lambda: context.run(_work, function, attempt))
        try:
            await _wait_done(future, attempt.set_cancelled)
            return future.result()
        finally:
            del future  # its exception holds this frame

    async def in_process(
        self, function: Callable[[Job[Any]], object], attempt: Attempt
    ) -> str | None:
        """Run it in a process of its own, which a cancellation kills: at once, or after
        `cancel_grace` where its code uses `job.cancelled`. Returns the type of the function's value
        when the process has ended or is idle.

        What the function returned or raised before that counts, as in a thread.
        """
        job, claim_key = pack_job(function, attempt), attempt.claim_key
        child = self._children.take(claim_key)
        future = self._run(child.work, job)
        try:
            await self._process_end(future, child)
            updates, returned, error = unpack_result(future.result())
        except ChildProcessError as ended:
            if not child.is_cancelled:
                raise
            raise asyncio.CancelledError from ended
        finally:
            self._children.release(claim_key)
            del future  # its exception holds this frame
        for key, text in updates.items():
            attempt.merge_metadata(key, text)
        if error is not None:
            try:
                raise error
            finally:
                del error  # it holds this frame
        return returned

    async def _process_end(self, future: asyncio.Future[bytes], child: ChildProcess) -> None:
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            child.cancel()
            timer = asyncio.get_running_loop().call_later(self._cancel_grace, child.kill)
            try:
                await _wait_done(future, child.kill)
            finally:
                timer.cancel()

    def _run(self, function: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> asyncio.Future[ResultT]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="riverpy job")
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def close(self) -> None:
        """Let idle threads and processes end. One that is still at work is left to itself."""
        self._children.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _work(function: Callable[[Job[Any]], object], job: Job[Any]) -> str | None:
    """Run it; returns the type of its value. As in a coroutine, StopIteration becomes an error that
    a future can hold."""
    try:
        return returned_type(function(job))
    except StopIteration as error:
        raise RuntimeError("blocking job raised StopIteration") from error


async def _wait_done(future: asyncio.Future[Any], cancelled: Callable[[], None]) -> None:
    """Wait until it is done. `cancelled` is called at each cancellation meanwhile."""
    # A cancelled scope of a middleware's would end the wait at every turn of the loop.
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                cancelled()
