"""Blocking jobs: plain functions in threads, or in processes that can be killed."""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_process

from riverpy._work.failure import error_text, trace_text
from riverpy.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._work.attempt import Attempt

THREADS_MAX = 1_000_000
"""More than there can be slots; a thread is made only when no other is free."""


class BlockingRunner:
    """Runs the blocking jobs of one client. A job in a slot has its thread or process at once, so
    the slots alone bound how many there are."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._processes: anyio.CapacityLimiter | None = None

    async def in_thread(self, function: Callable[[Job[Any]], None], attempt: Attempt) -> None:
        """Run it in a thread, to its end: a thread cannot be stopped, so a cancellation waits for
        it.

        What the function returned or raised counts; the cancellation only where it raised nothing.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="riverpy job")
        context = contextvars.copy_context()
        future = asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: context.run(_work, function, attempt)
        )
        try:
            # A cancelled scope of a middleware's would end the wait at every turn of the loop.
            with anyio.CancelScope(shield=True):
                while not future.done():
                    try:
                        await asyncio.wait([future])
                    except asyncio.CancelledError:
                        continue  # the cause is on the attempt; the thread still works
            future.result()
        finally:
            del future  # its exception holds this frame

    async def in_process(self, function: Callable[[Job[Any]], None], attempt: Attempt) -> None:
        """Run it in a process of its own, which a cancellation kills."""
        if self._processes is None:
            self._processes = anyio.CapacityLimiter(math.inf)
        updates, error = await anyio.to_process.run_sync(
            _work_detached,
            pickle.dumps((function, tuple(attempt.columns()), attempt.args)),
            cancellable=True,
            limiter=self._processes,
        )
        for key, text in updates.items():
            attempt.merge_metadata(key, text)
        if error is not None:
            try:
                raise error
            finally:
                del error  # it holds this frame

    def close(self) -> None:
        """Let idle threads end. One that is still at work is left to itself."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _work(function: Callable[[Job[Any]], None], job: Job[Any]) -> None:
    """Run it; as in a coroutine, StopIteration becomes an error that a future can hold."""
    try:
        function(job)
    except StopIteration as error:
        raise RuntimeError("blocking job raised StopIteration") from error


class _DetachedJob(Job[Any]):
    """The job as a process of its own sees it."""

    __slots__ = ()

    def __init__(self, row: tuple[Any, ...], args: Any) -> None:
        self._row, self._args, self._updates = row, args, {}

    @property
    def updates(self) -> dict[str, str]:
        return self._updates or {}


def _work_detached(pickled: bytes) -> tuple[dict[str, str], BaseException | None]:
    """Run it; returns what it recorded, and what it raised with its trace as a note, since a
    traceback cannot leave the process.

    What it takes is read here, since that imports user code, which may take long: first the process
    leaves the terminal, whose Ctrl-C is for the worker alone.
    """
    if hasattr(os, "setsid") and os.getsid(0) != os.getpid():
        os.setsid()
    function, row, args = pickle.loads(pickled)  # noqa: S301 (our own bytes)
    job = _DetachedJob(row, args)
    try:
        function(job)
    except BaseException as error:
        portable = _portable(error)
        portable.add_note(f"In the process of the job:\n{trace_text(error)}")
        return job.updates, portable
    return job.updates, None


def _portable(error: BaseException) -> BaseException:
    """The error, or one that says the same where it cannot be pickled and read back."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 (our own bytes)
    except Exception:
        return RuntimeError(f"{type(error).__qualname__}: {error_text(error)}")
    return error
