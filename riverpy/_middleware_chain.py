"""Runs code inside a chain of middleware. Each middleware receives a function `do_inner`, which
runs the next middleware. The `do_inner` of the last middleware runs the code."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from riverpy._lifecycle import run_despite_cancellation
from riverpy._plugins import plugin_name
from riverpy._without_loop import get_current_task, refuse_wait_without_loop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

MiddlewareT = TypeVar("MiddlewareT")
ResultT = TypeVar("ResultT")


class DoInner(Generic[ResultT]):
    """The function `do_inner` that one middleware receives and must call exactly once. It runs the
    inner code: the next middleware or, in the last middleware, the code that the chain wraps."""

    result: ResultT
    """The result of the inner code. This attribute is set when the inner code has returned."""

    __slots__ = (
        "_has_inner_ended",
        "_has_inner_started",
        "_inner",
        "_inner_error",
        "_inner_task",
        "_is_closed",
        "_middleware",
        "result",
    )

    def __init__(self, middleware: object, inner: Callable[[], Awaitable[ResultT]]) -> None:
        self._middleware, self._inner = middleware, inner
        self._inner_task: asyncio.Task[Any] | None = None
        """The task that runs the inner code. None: the inner code has not started, or runs without
        an event loop."""
        self._has_inner_started = self._has_inner_ended = self._is_closed = False
        self._inner_error: BaseException | None = None

    @property
    def _middleware_name(self) -> str:
        return f"middleware {plugin_name(self._middleware)}"

    async def __call__(self) -> ResultT:
        """Run the inner code.

        Raises:
            RuntimeError: the middleware has called `do_inner` before, or has returned.
            BaseException: the inner code raised this error.
        """
        if self._is_closed:
            raise RuntimeError(
                f"{self._middleware_name} called do_inner after it returned: call it once"
            )
        if self._has_inner_started:
            raise RuntimeError(f"{self._middleware_name} called do_inner twice: call it once")
        self._has_inner_started, self._inner_task = True, get_current_task()
        try:
            self.result = await self._inner()
        except BaseException as error:
            self._inner_error = error
            raise
        finally:
            self._has_inner_ended = True
        return self.result

    def get_inner_error(self) -> BaseException | None:
        """Return the error that the inner code raised. None: it raised no error. Call this after
        the middleware has returned.

        Raises:
            RuntimeError: the middleware did not call `do_inner`, or returned before `do_inner` had
                ended.
        """
        if not self._has_inner_started:
            raise RuntimeError(
                f"{self._middleware_name} returned without calling do_inner, so nothing was done: "
                "call do_inner, or raise an exception"
            )
        if not self._has_inner_ended:
            raise RuntimeError(
                f"{self._middleware_name} returned before do_inner had ended: await it"
            )
        return self._inner_error

    async def cancel_inner_code(self) -> None:
        """If the inner code still runs in another task, cancel it and wait for its end. A job's
        code must not continue after the attempt of the job has ended."""
        task = self._inner_task
        if task is None or self._has_inner_ended or task is get_current_task():
            return
        task.cancel()
        await run_despite_cancellation(partial(asyncio.wait, [task]))

    def close(self) -> None:
        """Refuse later calls of `do_inner`. Also delete the stored error, to break the reference
        cycle of this object and the error's traceback."""
        self._is_closed, self._inner_error = True, None


async def run_middleware(
    middleware: Sequence[MiddlewareT],
    call_middleware: Callable[[MiddlewareT, DoInner[ResultT]], Awaitable[None]],
    inner: Callable[[], Awaitable[ResultT]],
    *,
    may_suppress_errors: bool,
) -> ResultT:
    """Run `inner` inside a chain of middleware.

    Args:
        middleware: the middleware of the chain, the outermost first.
        call_middleware: calls one middleware with its `do_inner`.
        inner: the code to run inside all middleware.
        may_suppress_errors: whether a middleware may suppress an error of its inner code. True:
            the result is None if a middleware suppressed an error. False: a suppressed error is
            raised again.

    Raises:
        RuntimeError: a middleware did not call and await `do_inner` exactly once.
        BaseException: the middleware or `inner` raised this error.
    """
    if not middleware:
        return await inner()
    first, *others = middleware
    error: BaseException | None = None
    do_inner = DoInner(
        first,
        partial(
            run_middleware, others, call_middleware, inner, may_suppress_errors=may_suppress_errors
        ),
    )
    try:
        try:
            call = call_middleware(first, do_inner)
            await refuse_wait_without_loop(call, lambda: f"the middleware {plugin_name(first)}")
            error = do_inner.get_inner_error()
        except GeneratorExit:  # the event loop may have ended: do not await
            raise
        except BaseException:
            await do_inner.cancel_inner_code()
            raise
        if error is None:
            return do_inner.result
        if may_suppress_errors:
            return cast("ResultT", None)
        raise error
    finally:
        do_inner.close()
        error = None  # break the reference cycle of the error and this frame
