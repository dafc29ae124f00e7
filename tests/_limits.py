"""Timeouts of a test and of a whole run, and the output when they expire.

A test that is a coroutine is cancelled at its timeout: it fails there, and the other tests run. If
it still hangs, its process is ended with the stacks of all threads, by a signal that faulthandler
handles without the GIL; in a parallel run another worker replaces the process. A run that takes
longer than `RUN_LIMIT` ends with the names of its running tests and the stacks of each process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import inspect
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from types import CoroutineType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from xdist.workermanage import WorkerController

TEST_LIMIT = 120.0
"""Timeout in seconds of a test without `@pytest.mark.timeout(seconds)`. A test that does not hang
needs a fraction of it, even on a busy machine."""
GRACE = 15.0
"""Seconds for a test to end after it was cancelled."""
RUN_LIMIT = 70 * 60.0
"""Timeout of the whole run in seconds. A run needs a quarter of it."""
_STACKS = 30.0
"""Seconds for workers to print their stacks."""


class RunLimit:
    """Ends a run that takes too long. It runs in the process that the user started."""

    def __init__(self, config: pytest.Config, seconds: float) -> None:
        self._plugins = config.pluginmanager
        self._running: dict[str, None] = {}
        self._workers: list[int] = []
        self._timer = threading.Timer(seconds, self.end)
        self._timer.daemon = True
        self._timer.start()

    def pytest_testnodeready(self, node: WorkerController) -> None:
        """Remember the process of a new worker."""
        self._workers.append(node.gateway._rinfo().pid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Remember a running test."""
        self._running[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Forget a finished test."""
        self._running.pop(nodeid, None)

    def pytest_handlecrashitem(self, crashitem: str) -> None:
        """Forget a test that ended with its worker."""
        self._running.pop(crashitem, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print a failure at once, since a run that is cut prints no summary."""
        if report.failed:
            reporter = self._reporter()
            if reporter._tw.width_of_current_line:
                reporter.write_line("")
            reporter.write_line(f"FAILED {report.nodeid}", red=True)

    def pytest_unconfigure(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def _reporter(self) -> Any:
        return self._plugins.getplugin("terminalreporter")

    def end(self) -> None:
        """Print failures, running tests and stacks, and exit."""
        try:
            reporter = self._reporter()
            reporter.summary_failures()
            reporter.section("The run takes too long", red=True)
            for nodeid in self._running:
                reporter.write_line(f"still running: {nodeid}")
            reporter.flush()
            _signal_all(self._workers, signal.SIGABRT)
            _wait_for_all(self._workers)
            _signal_all(self._workers, signal.SIGKILL)
            faulthandler.dump_traceback(sys.__stderr__ or 2)
        finally:
            os._exit(1)


def _signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait_for_all(children: list[int]) -> None:
    """Wait for the end of all children, for at most `_STACKS` seconds."""
    until = time.monotonic() + _STACKS
    for pid in children:
        with suppress(ChildProcessError):  # it was already waited for
            while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
                time.sleep(0.01)


def pytest_configure(config: pytest.Config) -> None:
    """Register the signal handler while stderr is not yet captured."""
    config.addinivalue_line("markers", "timeout(seconds): how long the test may take")
    faulthandler.register(signal.SIGALRM, file=os.dup(2), all_threads=True, chain=True)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(RunLimit(config, RUN_LIMIT))


def limit(item: pytest.Item) -> float:
    """Return the timeout of a test in seconds."""
    marker = item.get_closest_marker("timeout")
    return TEST_LIMIT if marker is None else float(marker.args[0])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the setup of fixtures."""
    with _killed_later(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the test."""
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = _cancelled_later(item.obj, limit(item))
    with _killed_later(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the teardown of fixtures."""
    with _killed_later(item):
        return (yield)


@contextmanager
def _killed_later(item: pytest.Item) -> Generator[None]:
    """Set a kernel timer that ends the process. faulthandler's own timer is a thread, which would
    be joined three times per test."""
    signal.setitimer(signal.ITIMER_REAL, limit(item) + GRACE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _cancelled_later(
    test: Callable[..., Awaitable[None]], seconds: float
) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def limited(*args: Any, **kwargs: Any) -> None:
        timer = asyncio.get_running_loop().call_later(seconds, _print_tasks)
        try:
            async with asyncio.timeout(seconds):
                await test(*args, **kwargs)
        finally:
            timer.cancel()

    return limited


def _print_tasks() -> None:
    """Print where each task waits. `Task.print_stack` prints only its outermost call."""
    for task in asyncio.all_tasks():
        sys.stderr.write(f"{task.get_name()} waits at\n")
        waits: Any = task.get_coro()
        while isinstance(waits, CoroutineType) and waits.cr_frame is not None:
            code = waits.cr_code
            sys.stderr.write(f"  {code.co_filename}:{waits.cr_frame.f_lineno} {code.co_name}\n")
            waits = waits.cr_await
