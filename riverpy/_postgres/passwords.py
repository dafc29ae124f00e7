"""PasswordSource: calls the user's function that returns the password for a new connection."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import parse_qs, urlsplit

import anyio

from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    PasswordFunction: TypeAlias = Callable[[], str | Awaitable[str]]
    """The user's function, async or not. It returns the password for one new connection."""

HANGING_CALLS_MAX = 20
"""The maximum number of threads in which a password function runs at the same time. While this many
calls have not returned, another call that needs a thread fails."""


class PasswordError(ConnectionError):
    """The user's function returned no valid password. The text of this error contains neither the
    password nor the text of the function's error, which may contain the password."""


class PasswordSource:
    """Calls the user's password function for each new connection. It stores no password."""

    def __init__(self, function: PasswordFunction) -> None:
        """Store the function.

        Raises:
            ConfigError: `function` is not a function.
        """
        if not callable(function):
            kind = type(function).__name__
            raise ConfigError(
                f"password must be a function that returns the password, got {kind}: write a fixed "
                "password into the URL, or set PGPASSWORD"
            )
        self._function = function
        self._is_async = any(
            map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None)))  # noqa: B004 (an object with an async __call__)
        )
        self._running_calls = 0
        """The number of threads in which the function runs now."""

    async def fetch_password(self, timeout: float) -> str:
        """Call the function, and return its password. A function that is not async runs in a
        thread, because it may block.

        Raises:
            PasswordError: the function failed, did not return within `timeout` seconds, or returned
                no valid password.
        """
        error_type: type[BaseException] | None = None
        password: object = None
        with anyio.move_on_after(timeout) as scope:
            try:
                password = await self._call_function()
            except PasswordError:
                raise
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                error_type = type(error)  # raised by the function: this task was not cancelled
            except Exception as error:
                error_type = type(error)
        if scope.cancelled_caught:
            raise PasswordError(f"the password function did not return within {timeout:g} s")
        # Raise PasswordError outside the `except` blocks. Otherwise logs would also show the error
        # of the function, and its text may contain the password.
        return _check_password(password, error_type)

    def fetch_password_blocking(self, timeout: float) -> str:
        """Call the function, block until it returns, and return its password. The function runs in
        a thread, with an event loop of its own if it is async.

        Raises:
            PasswordError: for the same reasons as in `fetch_password`.
        """
        self._count_call_or_refuse()
        results: SimpleQueue[tuple[object, type[BaseException] | None]] = SimpleQueue()
        context = contextvars.copy_context()

        def call_function() -> object:
            result = self._function()
            return asyncio.run(_await_result(result)) if inspect.isawaitable(result) else result

        def run_in_thread() -> None:
            result, error = _call_and_catch_error(context, call_function)
            self._running_calls -= 1
            results.put((result, None if error is None else type(error)))

        threading.Thread(target=run_in_thread, name="riverpy password", daemon=True).start()
        try:
            return _check_password(*results.get(timeout=timeout))
        except Empty:
            pass
        raise PasswordError(f"the password function did not return within {timeout:g} s")

    async def _call_function(self) -> object:
        result = self._function() if self._is_async else await self._call_in_thread()
        return await result if inspect.isawaitable(result) else result

    async def _call_in_thread(self) -> object:
        """Call the function in a daemon thread, which does not keep the process alive if the
        function hangs."""
        self._count_call_or_refuse()
        loop, future = asyncio.get_running_loop(), asyncio.Future[object]()
        context = contextvars.copy_context()

        def end_call(result: object, error: Exception | None) -> None:
            self._running_calls -= 1
            if future.done():  # no caller waits for the result
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def run_in_thread() -> None:
            result, error = _call_and_catch_error(context, self._function)
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(end_call, result, error)

        threading.Thread(target=run_in_thread, name="riverpy password", daemon=True).start()
        return await future

    def _count_call_or_refuse(self) -> None:
        """Count one more running call. Raise PasswordError if too many calls are running."""
        if self._running_calls >= HANGING_CALLS_MAX:
            raise PasswordError(
                f"{HANGING_CALLS_MAX} calls of the password function have not returned"
            )
        self._running_calls += 1


async def _await_result(result: Awaitable[object]) -> object:
    """Wrap the awaitable in a coroutine, because `asyncio.run` accepts only coroutines."""
    return await result


def _check_password(password: object, error_type: type[BaseException] | None) -> str:
    """Return the password. Raise PasswordError if the password is not valid, or if the function has
    raised an error. `error_type` is the type of that error, or None."""
    if error_type is not None:
        raise PasswordError(f"the password function raised {error_type.__qualname__}")
    if not isinstance(password, str):
        kind = type(password).__name__
        raise PasswordError(f"the password function must return a str, got {kind}")
    if problem := _find_password_problem(password):
        raise PasswordError(f"the password function returned {problem}")
    return password


def _call_and_catch_error(
    context: contextvars.Context, function: Callable[[], object]
) -> tuple[object, Exception | None]:
    """Call the function. Return its result and None, or None and its error. A RuntimeError replaces
    StopIteration, which a future cannot store, and errors that are no `Exception`, such as
    SystemExit."""
    try:
        return context.run(function), None
    except StopIteration:
        return None, RuntimeError("StopIteration")
    except Exception as error:
        return None, error
    except BaseException as error:  # for example SystemExit, which would end only this thread
        return None, RuntimeError(type(error).__name__)


def _find_password_problem(password: str) -> str | None:
    if not password:
        return "an empty text"
    if "\0" in password:
        return "a text with a NUL character"
    try:
        password.encode()
    except UnicodeEncodeError:
        return "a text that is not valid Unicode"
    return None


def make_password_source(
    function: PasswordFunction | None, database: object, listen_url: str | None = None
) -> PasswordSource | None:
    """Return a PasswordSource for the user's function, or None if there is no function.

    Raises:
        ConfigError: `function` is not a function, `database` is not a URL, or a URL has a password.
    """
    if function is None:
        return None
    source = PasswordSource(function)
    if not isinstance(database, str | None):
        raise ConfigError(
            f"password= needs a database URL, got {type(database).__name__}: a pool has the "
            "argument itself, as in asyncpg.create_pool(url, password=…)"
        )
    for url in (database, listen_url):
        if url is not None and _has_password(url):
            raise ConfigError(
                "a URL has a password, and password= is given too: remove one of them (password= "
                "is used for the database URL and for listen_url)"
            )
    return source


def _has_password(url: str) -> bool:
    parts = urlsplit(url)
    login, _, _ = parts.netloc.rpartition("@")
    return ":" in login or "password" in parse_qs(parts.query, keep_blank_values=True)
