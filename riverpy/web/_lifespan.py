"""`riverpy.web.lifespan`: opens and closes a client together with a web application."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from typing import TYPE_CHECKING, TypeAlias, TypeVar, overload

import anyio

from riverpy._lifecycle import unwrap_single_error
from riverpy._log import get_logger
from riverpy._log_events import WEB_WORKER_FAILED
from riverpy.client import Client
from riverpy.errors import ConfigError
from riverpy.web._state import CLIENT_STATE_KEY

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Mapping

    from anyio.abc import TaskStatus

AppT = TypeVar("AppT")
_ClientLifespan: TypeAlias = AbstractAsyncContextManager["dict[str, object]"]
_InnerLifespan: TypeAlias = AbstractAsyncContextManager["Mapping[str, object] | None"]


@overload
def lifespan(client: Client, *, work: bool = False) -> Callable[[object], _ClientLifespan]: ...


@overload
def lifespan(
    client: Client, *, work: bool = False, inner: Callable[[AppT], _InnerLifespan]
) -> Callable[[AppT], _ClientLifespan]: ...


def lifespan(
    client: Client, *, work: bool = False, inner: Callable[[AppT], _InnerLifespan] | None = None
) -> Callable[[AppT], _ClientLifespan]:
    """Return a lifespan function that opens the client when the web application starts, and closes
    it when the application stops. Write `FastAPI(lifespan=riverpy.web.lifespan(client))`, the same
    for Starlette, or `Litestar(lifespan=[riverpy.web.lifespan(client)])`.

    The client is opened before `inner` starts, and closed after `inner` has stopped. Jobs run only
    between the start and the stop of `inner`. If the client or `inner` cannot start, the server
    stops.

    Args:
        client: the client. Requests find it in `request.state.riverpy`.
        work: whether to work jobs in the process of the web server. Default False. When the
            application stops, running jobs may continue for `Config.soft_stop_timeout`. If riverpy
            itself has a fault, the web server stops as after SIGTERM, and the lifespan raises the
            error. If no server handles SIGTERM in this process, as in a test, the lifespan raises
            the error at once.
        inner: the application's own lifespan, a function with `@asynccontextmanager`. The state
            that `inner` yields is part of the state that the returned lifespan yields.

    Raises:
        ConfigError: `client` is not a client, or `inner` is not a function.
    """
    if not isinstance(client, Client):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"the client is a riverpy.Client, got {type(client).__name__}")
    if inner is not None and (
        not callable(inner)  # pyright: ignore[reportUnnecessaryComparison]
        or hasattr(inner, "__aenter__")  # such as `own_lifespan()`, which is callable too
    ):
        raise ConfigError(
            "inner is a function with @asynccontextmanager, as in inner=own_lifespan without "
            f"parentheses, got {type(inner).__name__}"
        )

    @asynccontextmanager
    async def client_lifespan(app: AppT) -> AsyncGenerator[dict[str, object]]:
        worker = _WebWorker(client)
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(client)
            except Exception as error:
                error.add_note("riverpy.web.lifespan could not open the client")
                raise
            stack.enter_context(_client_in_litestar_state(app, client))
            state: Mapping[str, object] = {}
            if inner is not None:
                state = await _start_inner_lifespan(stack, inner, app)
            if work:
                await stack.enter_async_context(worker.working())
            yield {**state, CLIENT_STATE_KEY: client}
        if worker.failure is not None:
            raise worker.failure

    return client_lifespan


async def _start_inner_lifespan(
    stack: AsyncExitStack, inner: Callable[[AppT], _InnerLifespan], app: AppT
) -> Mapping[str, object]:
    """Start the application's own lifespan, and return the state that it yields."""
    started = inner(app)
    if not isinstance(started, AbstractAsyncContextManager):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"inner returned {type(started).__name__}, which has no `async with`: write "
            "@asynccontextmanager above the function of the lifespan"
        )
    state = await stack.enter_async_context(started) or {}
    if CLIENT_STATE_KEY in state:
        raise ConfigError(
            f"the state of the inner lifespan has the key {CLIENT_STATE_KEY!r}, which is the key "
            "of the client: choose another key"
        )
    return state


@contextmanager
def _client_in_litestar_state(app: object, client: Client) -> Generator[None]:
    """In the `with` block, keep the client in `app.state` of a Litestar application.

    Litestar ignores the state that a lifespan yields. For applications of other frameworks, do
    nothing."""
    classes = type(app).__mro__
    if not any(one.__module__.partition(".")[0] == "litestar" for one in classes):
        yield
        return
    state: object = getattr(app, "state")  # noqa: B009 (the type of Litestar is not imported)
    setattr(state, CLIENT_STATE_KEY, client)
    try:
        yield
    finally:
        delattr(state, CLIENT_STATE_KEY)


class _WebWorker:
    """Runs the client, so that it works jobs in the process of a web server."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._has_started = False
        self._ended = anyio.Event()
        self.failure: Exception | None = None
        """The error that ended `Client.run` and made the web server stop; None: no such error. The
        lifespan raises the error at its end, after requests and the inner lifespan have ended."""

    @asynccontextmanager
    async def working(self) -> AsyncGenerator[None]:
        """Work jobs while the `async with` block runs. At the end of the block, stop the client and
        wait for running jobs. If the block is cancelled, cancel running jobs at once."""
        error: BaseException | None = None
        try:
            async with anyio.create_task_group() as tasks:
                await tasks.start(self._run_client)
                self._has_started = True
                try:
                    yield
                except anyio.get_cancelled_exc_class():
                    self._client.stop_and_cancel()  # the server must end at once
                    raise
                finally:
                    self._client.stop()
                    with anyio.CancelScope(shield=True):  # `run` stops within its timeout
                        await self._ended.wait()
        except BaseExceptionGroup as group:
            error = unwrap_single_error(group)
        if error is not None:
            raise error

    async def _run_client(self, *, task_status: TaskStatus[None]) -> None:
        try:
            await self._client.run(task_status=task_status)
        except Exception as error:
            if not self._has_started:
                raise
            get_logger().exception(WEB_WORKER_FAILED, client_id=self._client.id)
            if not _request_server_stop():
                raise
            self.failure = error
        finally:
            self._ended.set()


def _request_server_stop() -> bool:
    """Stop the web server with SIGTERM. If no web server seems to run in this process, send no
    signal and return False.

    A child process of a server, such as a worker of Hypercorn, may have no handler for SIGTERM.
    Then the signal ends the child process at once, and the server reports that it has ended.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    has_handler = callable(signal.getsignal(signal.SIGTERM))
    if not has_handler and multiprocessing.parent_process() is None:
        return False
    signal.raise_signal(signal.SIGTERM)
    return True
