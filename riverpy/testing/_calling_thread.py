"""CallingThreadExecutor: runs an async function for a test that is not async.

The function runs in an event loop in another thread. SQL statements on the test's session, and
blocking jobs, run in the test's thread. This is necessary because Django's connections can be used
only in their own thread, and only if no event loop runs in this thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from riverpy._postgres.sessions.session import (
    CallerSession,
    NestedTransaction,
    make_no_transaction_error,
)
from riverpy._postgres.transactions import validate_and_adapt_tx
from riverpy._without_loop import run_without_loop

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine
    from contextlib import AbstractAsyncContextManager

    from riverpy._postgres.sessions.records import Record
    from riverpy._postgres.sessions.session import CallerTransactionState

T = TypeVar("T")


class _Call(NamedTuple):
    """A function to run in the calling thread, and the future that receives its result."""

    future: Future[Any]
    function: Callable[[], object]

    def run(self) -> None:
        """Call the function, and store its result or error in the future."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function())
        except BaseException as error:
            self.future.set_exception(error)
            if isinstance(error, KeyboardInterrupt):
                raise


class CallingThreadExecutor(Executor):
    """Runs an async function in an event loop of another thread. During this time, the calling
    thread (the thread that called `run_in_event_loop_thread`) executes the functions that are
    passed to `submit` and `call_in_calling_thread`."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Queue a function for the calling thread, and return the future of its result."""
        future: Future[T] = Future()
        self._calls.put(_Call(future, lambda: fn(*args, **kwargs)))
        return future

    async def call_in_calling_thread(self, function: Callable[[], T]) -> T:
        """Run a function in the calling thread, and return its result."""
        return await asyncio.wrap_future(self.submit(function))

    def run_in_event_loop_thread(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run an async function to its end in another thread, and return its result. Until it ends,
        the calling thread executes the functions that are passed to `submit` and
        `call_in_calling_thread`."""
        result: Future[T] = Future()
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=lambda: context.run(self._run_event_loop, function, result), name="riverpy test"
        )
        thread.start()
        try:
            self._serve_calls()
        except BaseException:  # Ctrl-C: cancel the function, and wait until it has ended
            self._cancel_task()
            self._serve_calls()
            raise
        finally:
            thread.join()
        return result.result()

    def _serve_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()

    def _cancel_task(self) -> None:
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)

    def _run_event_loop(
        self, function: Callable[[], Coroutine[Any, Any, T]], result: Future[T]
    ) -> None:
        async def run_function() -> T:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            _set_sync_to_async_executor(self)
            return await function()

        try:
            result.set_result(asyncio.run(run_function()))
        except BaseException as error:
            result.set_exception(error)
        finally:
            self._calls.put(None)


def _set_sync_to_async_executor(executor: Executor) -> None:
    """Make asgiref's `sync_to_async`, which Django's async ORM uses, run its functions in
    `executor` when it is called in the current thread.

    In any other thread, Django would not use the test's connection, but open another one and
    commit on it."""
    if (module := sys.modules.get("asgiref.sync")) is not None:
        module.AsyncToSync.executors.current = executor


async def _adapt_blocking_session(tx: object) -> CallerSession:
    # `validate_and_adapt_tx` returns a CallerSession, except for asyncpg, whose connections are not
    # blocking.
    return cast("CallerSession", validate_and_adapt_tx(tx))


class CallingThreadSession(CallerSession):
    """An async adapter of a blocking session. Code in the event loop uses the adapter, which runs
    the statements in the thread of the session."""

    is_blocking = False

    def __init__(self, tx: object, thread: CallingThreadExecutor) -> None:
        """Create the adapter. Call this in the thread of the session.

        Args:
            tx: the blocking session, in a transaction.
            thread: runs functions in the thread of the session.

        Raises:
            TypeError: riverpy does not know the type of `tx`.
            TransactionError: `tx` is closed, aborted or not in a transaction.
        """
        self._session = run_without_loop(_adapt_blocking_session(tx))
        if not self._session.is_in_transaction():
            raise make_no_transaction_error(is_blocking=True)
        self._thread = thread
        self.library = self._session.library
        self.has_copy = self._session.has_copy
        self.has_transaction_blocks = self._session.has_transaction_blocks
        self.pooler_remedy = self._session.pooler_remedy

    @property
    def native_session(self) -> object:
        return self._session.native_session

    def get_state(self) -> CallerTransactionState:
        """Return the state of the blocking session's transaction."""
        return self._session.get_state()

    async def _run_in_calling_thread(self, make_call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await self._thread.call_in_calling_thread(lambda: run_without_loop(make_call()))

    async def fetch(self, statement: str, *values: object) -> list[Record]:
        return await self._run_in_calling_thread(lambda: self._session.fetch(statement, *values))

    async def flush(self) -> None:
        await self._run_in_calling_thread(self._session.flush)

    def savepoint(self) -> AbstractAsyncContextManager[object]:
        return self._open_in_calling_thread(self._session.savepoint)

    def transaction(self, **_: object) -> AbstractAsyncContextManager[None]:
        return self._open_in_calling_thread(self._session.transaction)

    async def copy_to_table(self, *args: Any, **settings: Any) -> object:
        """Insert rows with COPY. Takes the arguments of the blocking session's `copy_to_table`."""
        copy: Any = getattr(self._session, "copy_to_table")  # noqa: B009 (only some have it)
        return await self._run_in_calling_thread(lambda: copy(*args, **settings))

    async def begin_nested(self) -> NestedTransaction | None:
        nested = await self._run_in_calling_thread(self._session.begin_nested)
        return (
            None if nested is None else _CallingThreadSavepoint(nested, self._run_in_calling_thread)
        )

    @asynccontextmanager
    async def _open_in_calling_thread(
        self, open_context: Callable[[], AbstractAsyncContextManager[Any]]
    ) -> AsyncGenerator[Any]:
        """Enter and exit a context manager in the thread of the session."""
        context = open_context()
        value = await self._run_in_calling_thread(lambda: _enter_context(context))
        try:
            yield value
        except BaseException as error:
            raised = error
            await self._run_in_calling_thread(lambda: _exit_context(context, raised))
            raise
        await self._run_in_calling_thread(lambda: _exit_context(context, None))


async def _enter_context(context: AbstractAsyncContextManager[T]) -> T:
    return await context.__aenter__()


async def _exit_context(
    context: AbstractAsyncContextManager[Any], error: BaseException | None
) -> None:
    if error is None:
        await context.__aexit__(None, None, None)
    else:
        await context.__aexit__(type(error), error, error.__traceback__)


class _CallingThreadSavepoint(NestedTransaction):
    """A savepoint of a blocking session. `end` runs in the thread of the session."""

    def __init__(
        self,
        nested: NestedTransaction,
        run: Callable[[Callable[[], Coroutine[Any, Any, None]]], Coroutine[Any, Any, None]],
    ) -> None:
        self._nested, self._run = nested, run

    async def end(self, *, keep: bool) -> None:
        await self._run(lambda: self._nested.end(keep=keep))
