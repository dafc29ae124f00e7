"""How long a test and a whole run may take, and what is told when they take longer.

A test that is a coroutine is cancelled at its limit: it fails there, and the other tests run.
What then still hangs ends its process, with the stacks of all threads, by a signal that
faulthandler handles without the GIL; in a parallel run another worker takes its place. A run that
takes longer than `RUN_LIMIT` is ended with the names of the tests that run and the stacks of each
process.
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
"""Seconds for a test without a mark of its own, `@pytest.mark.timeout(seconds)`. One that does not
hang takes a fraction of them, on a machine too that is busy with much else."""
GRACE = 15.0
"""Seconds that a test may take to end once it is cancelled."""
RUN_LIMIT = 70 * 60.0
"""Seconds for the whole run, which takes a quarter of it."""
_STACKS = 30.0
"""Seconds that workers may take to tell their stacks."""


class RunLimit:
    """Ends a run that takes too long: in the process that the user has started."""

    def __init__(self, config: pytest.Config, seconds: float) -> None:
        self._plugins = config.pluginmanager
        self._running: dict[str, None] = {}
        self._workers: list[int] = []
        self._timer = threading.Timer(seconds, self.end)
        self._timer.daemon = True
        self._timer.start()

    def pytest_testnodeready(self, node: WorkerController) -> None:
        """A worker is there."""
        self._workers.append(node.gateway._rinfo().pid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._running[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test has ended."""
        self._running.pop(nodeid, None)

    def pytest_handlecrashitem(self, crashitem: str) -> None:
        """A test has ended with its worker."""
        self._running.pop(crashitem, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A failure is named at once: a run that is cut says nothing at its end."""
        if report.failed:
            reporter = self._reporter()
            if reporter._tw.width_of_current_line:
                reporter.write_line("")
            reporter.write_line(f"FAILED {report.nodeid}", red=True)

    def pytest_unconfigure(self) -> None:
        """The run has ended in time."""
        self._timer.cancel()

    def _reporter(self) -> Any:
        return self._plugins.getplugin("terminalreporter")

    def end(self) -> None:
        """End it."""
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
    """Until they have ended, or for `_STACKS` seconds."""
    until = time.monotonic() + _STACKS
    for pid in children:
        with suppress(ChildProcessError):  # it was waited for
            while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
                time.sleep(0.01)


def pytest_configure(config: pytest.Config) -> None:
    """Begin, while stderr is not captured yet."""
    config.addinivalue_line("markers", "timeout(seconds): how long the test may take")
    faulthandler.register(signal.SIGALRM, file=os.dup(2), all_threads=True, chain=True)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(RunLimit(config, RUN_LIMIT))


def limit(item: pytest.Item) -> float:
    """Seconds that a test may take."""
    marker = item.get_closest_marker("timeout")
    return TEST_LIMIT if marker is None else float(marker.args[0])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the fixtures' part."""
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
    """Limit the fixtures' part."""
    with _killed_later(item):
        return (yield)


@contextmanager
def _killed_later(item: pytest.Item) -> Generator[None]:
    """A timer of the kernel: faulthandler's own is a thread, whose end would be waited for thrice a
    test."""
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
        told = asyncio.get_running_loop().call_later(seconds, _tell_tasks)
        try:
            async with asyncio.timeout(seconds):
                await test(*args, **kwargs)
        finally:
            told.cancel()

    return limited


def _tell_tasks() -> None:
    """Say where each task waits. (`Task.print_stack` tells of its outermost call only.)"""
    for task in asyncio.all_tasks():
        sys.stderr.write(f"{task.get_name()} waits at\n")
        waits: Any = task.get_coro()
        while isinstance(waits, CoroutineType) and waits.cr_frame is not None:
            code = waits.cr_code
            sys.stderr.write(f"  {code.co_filename}:{waits.cr_frame.f_lineno} {code.co_name}\n")
            waits = waits.cr_await
