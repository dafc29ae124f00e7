"""Runs riverpy's coroutines in the calling thread, without an event loop.

The methods of a client are coroutines. With a blocking session they never wait, because the session
blocks the thread until the server has answered. So each `await` returns at once, and one `send`
runs the coroutine to its end. A context variable stores the calling thread and task, so that the
called code can check whether it runs this way. The thread may also have a running event loop, as in
a notebook: this changes nothing.

`sleep`, `fail_after` and `move_on_after` of this module work with and without an event loop.
Without an event loop, a timeout has no effect. The server's `lock_timeout` and `statement_timeout`
limit the statements instead.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import anyio

from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
    from contextlib import AbstractContextManager

ResultT = TypeVar("ResultT")
ValueT = TypeVar("ValueT")

_NO_EVENT_LOOP_ERROR_NAMES = {"AsyncLibraryNotFoundError", "NoEventLoopError"}
"""The names of the errors that anyio raises if code needs an event loop and none is running."""
_NO_EVENT_LOOP_ERROR_TEXT = "no running event loop"
"""The text of the RuntimeError that asyncio raises if code needs an event loop and none is
running."""


class _CallingThreadAndTask(NamedTuple):
    """The thread that has called `run_without_loop`, and the asyncio task that was running in this
    thread. The task is None if no task was running."""

    thread_id: int
    task: asyncio.Task[Any] | None


_caller_without_loop: ContextVar[_CallingThreadAndTask | None] = ContextVar(
    "riverpy_caller_without_loop", default=None
)


def run_without_loop(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine to its end in this thread, and return its result.

    Raises:
        ConfigError: the coroutine waits for something.
        BaseException: the coroutine raised this error.
    """
    token = _caller_without_loop.set(
        _CallingThreadAndTask(threading.get_ident(), get_current_task())
    )
    try:
        try:
            coroutine.send(None)
        except StopIteration as ended:
            return ended.value
        with suppress(RuntimeError):  # the coroutine ignored GeneratorExit
            coroutine.close()
    finally:
        _caller_without_loop.reset(token)
    raise ConfigError(
        "a call of a client without an event loop has waited: use riverpy.Client for this"
    )


def iterate_without_loop(values: AsyncGenerator[ValueT]) -> Iterator[ValueT]:
    """Iterate over an async generator in this thread. Each step runs in `run_without_loop`."""

    async def get_next() -> ValueT:
        return await anext(values)

    async def close() -> None:
        await values.aclose()

    try:
        while True:
            try:
                value = run_without_loop(get_next())
            except StopAsyncIteration:
                return
            yield value
    finally:
        run_without_loop(close())


def is_without_loop() -> bool:
    """Return whether the calling code runs inside `run_without_loop`.

    Code in `run_without_loop` may start threads and tasks, which get a copy of the context
    variable. So this function also checks that the current thread and task are the ones that called
    `run_without_loop`.
    """
    caller = _caller_without_loop.get()
    return caller is not None and caller == (threading.get_ident(), get_current_task())


def get_current_task() -> asyncio.Task[Any] | None:
    """Return the current task, or None if the thread has no running event loop or no current
    task."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def get_running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None if there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def sleep(seconds: float) -> None:
    """Wait for some seconds, in the event loop or without one."""
    if is_without_loop():
        time.sleep(seconds)  # noqa: ASYNC251, TID251 (there is no event loop to block)
    else:
        await anyio.sleep(seconds)


def fail_after(seconds: float, reason: str | None = None) -> AbstractContextManager[object]:
    """Raise TimeoutError if the `with` block takes longer than `seconds`, like `anyio.fail_after`.
    Without an event loop, there is no limit."""
    if is_without_loop():
        return nullcontext()
    return anyio.fail_after(seconds, reason=reason)


class _TimeoutScope(Protocol):
    """The object of a `with` block of `move_on_after`. It shows whether the timeout has ended the
    block."""

    @property
    def cancelled_caught(self) -> bool:
        """Whether the timeout has ended the `with` block."""
        ...


class _NoTimeoutScope:
    """The object of a `with` block of `move_on_after` if there is no event loop, and so no
    timeout."""

    cancelled_caught = False


def move_on_after(seconds: float) -> AbstractContextManager[_TimeoutScope]:
    """End the `with` block if it takes longer than `seconds`, like `anyio.move_on_after`. Without
    an event loop, there is no limit."""
    if is_without_loop():
        return nullcontext(_NoTimeoutScope())
    return anyio.move_on_after(seconds)


@asynccontextmanager
async def make_async_context_manager(
    context: AbstractContextManager[ValueT],
) -> AsyncGenerator[ValueT]:
    """Return an async context manager that enters and exits the plain context manager `context`.
    It never suspends the coroutine that uses it."""
    with context as value:
        yield value


class _WaitRefusingAwaitable(Generic[ResultT]):
    """Wraps an awaitable. Raises ConfigError if the awaitable waits."""

    def __init__(self, awaitable: Awaitable[ResultT], get_name: Callable[[], str]) -> None:
        self._awaitable, self._get_name = awaitable, get_name

    def __await__(self) -> Generator[Any, Any, ResultT]:
        steps = self._awaitable.__await__()
        cause: RuntimeError | None = None
        try:
            next(steps)
        except StopIteration as ended:
            return ended.value
        except RuntimeError as error:
            if not _is_missing_event_loop_error(error):
                raise
            cause = error
        else:
            with suppress(RuntimeError):  # the coroutine ignored GeneratorExit
                _close_await_iterator(steps)
        raise ConfigError(
            f"{self._get_name()} waits, which riverpy.sync.Client cannot do: let it await nothing "
            "but do_inner, or insert with riverpy.Client"
        ) from cause
        yield  # this line makes the method a generator


def _close_await_iterator(steps: Generator[Any, Any, Any]) -> None:
    close = getattr(steps, "close", None)
    if close is not None:
        close()


def _is_missing_event_loop_error(error: RuntimeError) -> bool:
    return (
        type(error).__name__ in _NO_EVENT_LOOP_ERROR_NAMES
        or str(error) == _NO_EVENT_LOOP_ERROR_TEXT
    )


def refuse_wait_without_loop(
    awaitable: Awaitable[ResultT], get_name: Callable[[], str]
) -> Awaitable[ResultT]:
    """Make sure that user code does not wait if there is no event loop.

    With an event loop, return `awaitable` unchanged. Without one, return a wrapper that raises
    ConfigError if `awaitable` waits. `get_name` returns the name of the user code, for the text of
    this error.
    """
    return _WaitRefusingAwaitable(awaitable, get_name) if is_without_loop() else awaitable
