"""The event loop in which pytest-asyncio or anyio runs a test."""

from __future__ import annotations

import inspect
from contextlib import asynccontextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import pytest

from _riverpy_pytest.failures import fail

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, Generator
    from contextlib import AbstractAsyncContextManager

_LOOP_SCOPES: Final = ("function", "class", "module", "package", "session")
_ValueT = TypeVar("_ValueT")


@asynccontextmanager
async def _open_loop() -> AsyncGenerator[asyncio.AbstractEventLoop]:
    """Register the running event loop as a loop that runs tests, and yield the loop. At the exit,
    close the connections that were kept open for later tests in this loop."""
    import asyncio

    from riverpy.testing.kept_connections import open_loops

    await open_loops.register_running_loop()
    yield asyncio.get_running_loop()
    await open_loops.unregister_running_loop()


def make_asyncio_loops() -> ModuleType:
    """Return a pytest plugin with one fixture for each scope of pytest-asyncio's event loops, such
    as `function` or `session`. The fixture returns the loop of this scope."""
    import pytest_asyncio

    plugin = ModuleType("riverpy_asyncio_loops")
    for scope in _LOOP_SCOPES:

        async def get_loop() -> AsyncGenerator[asyncio.AbstractEventLoop]:
            async with _open_loop() as loop:
                yield loop

        name = f"_riverpy_{scope}_loop"
        setattr(
            plugin, name, pytest_asyncio.fixture(get_loop, scope=scope, loop_scope=scope, name=name)
        )
    return plugin


@pytest.fixture
async def _riverpy_anyio_loop(anyio_backend: object) -> AsyncGenerator[asyncio.AbstractEventLoop]:
    del anyio_backend
    async with _open_loop() as loop:
        yield loop


def open_in_loop(
    request: pytest.FixtureRequest, manager: AbstractAsyncContextManager[_ValueT]
) -> Generator[_ValueT]:
    """Enter and exit a context manager in the event loop of the test."""
    if _is_in_running_loop():
        name = request.fixturename
        fail(f"a running test cannot open {name}: name it in the arguments of the test")
    loop = _find_loop(request)
    value = loop.run_until_complete(manager.__aenter__())
    try:
        yield value
    finally:
        loop.run_until_complete(manager.__aexit__(None, None, None))


def _find_loop(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoop:
    """Return the loop in which pytest-asyncio or anyio runs the test."""
    import unittest

    item, name = request.node, request.fixturename
    marker = item.get_closest_marker("asyncio")
    if isinstance(request.instance, unittest.TestCase):
        fail(
            f"a test of unittest cannot have {name}, because unittest runs it in an event loop of "
            "its own: connect to riverpy_url in asyncSetUp, and pass the connection as tx to "
            "riverpy.testing; or write a test of pytest"
        )
    if not is_async(request.function):
        fail(
            f"{name} is for async tests: write `async def {item.name}`, or use a fixture for code "
            "that is not async, such as riverpy_sync_client"
        )
    if marker is not None and request.config.pluginmanager.hasplugin("asyncio"):
        scope = marker.kwargs.get("loop_scope") or marker.kwargs.get("scope")
        scope = scope or request.config.getini("asyncio_default_test_loop_scope")
        return request.getfixturevalue(f"_riverpy_{scope}_loop")
    if "anyio_backend" not in request.fixturenames:
        fail(
            f"{name} needs a plugin that runs async tests: install pytest-asyncio and set "
            "`asyncio_mode = auto` in the settings of pytest or mark the test with "
            "@pytest.mark.asyncio; or mark it with @pytest.mark.anyio"
        )
    backend: object = request.getfixturevalue("anyio_backend")
    backend = cast("tuple[object, ...]", backend)[0] if isinstance(backend, tuple) else backend
    if backend != "asyncio":
        fail(
            f"{name} needs asyncio, and the test runs on {backend}: write a fixture "
            "`anyio_backend` that returns 'asyncio'"
        )
    return request.getfixturevalue("_riverpy_anyio_loop")


def is_async(function: Any) -> bool:
    inner = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    return inspect.iscoroutinefunction(inner)


def _is_in_running_loop() -> bool:
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
