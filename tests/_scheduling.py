"""The order of tests, and how a parallel run deals them out to its workers."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests._limits import TEST_LIMIT, limit

if TYPE_CHECKING:
    from collections.abc import Generator

    from xdist.workermanage import WorkerController

ONE_WORKER = (
    "tests/faults/test_connections.py",
    "tests/faults/test_failover.py",
    "tests/faults/test_server.py",
    "tests/faults/test_users.py",
    "tests/repository/test_wheel.py",
    "tests/maintenance/test_plans.py",
    "tests/typing/test_mypy.py",
    "tests/work/test_plans.py",
)
"""Files whose tests share a fleet, a table that takes long to fill, a wheel, or a run of mypy."""


class Scheduling(LoadScopeScheduling):
    """Deals tests out one by one, but for those of `ONE_WORKER` (the marks of xdist for this do
    nothing under this pytest), and goes on to the end whatever worker dies."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if file in ONE_WORKER else nodeid

    def _reschedule(self, node: WorkerController) -> None:
        """A worker begins a test when it knows the next one, or that there is none. One that takes
        the place of another is asked about once only: it needs two at once."""
        if node not in self.registered_collections:  # it is still collecting
            return
        super()._reschedule(node)
        if not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Hand out again what a lost worker has not begun, and nothing else: what has ended would
        be waited for in vain, and what was running, which is returned, would take another worker
        along."""
        workload = self.assigned_work.pop(node)
        left = [
            (scope, nodeid)
            for scope, unit in workload.items()
            for nodeid, is_done in unit.items()
            if not is_done
        ]
        for scope, nodeid in left[1:]:
            self.workqueue.setdefault(scope, {})[nodeid] = False
        for other in self.nodes:
            self._reschedule(other)
        return left[0][1] if left else None


WORKERS_PER_PROCESSOR = 4
"""Most of its time a test waits: for the server, for other processes, for a limit to expire."""
FIRST_WORKER = "gw0"
_LOCK = pytest.StashKey[int]()
"""The directory of this file, open and locked while the first worker collects."""


def pytest_configure(config: pytest.Config) -> None:
    """Let the first worker collect before the others: it compiles the tests for all."""
    workerinput: dict[str, Any] = getattr(config, "workerinput", {})
    if workerinput.get("workerid") == FIRST_WORKER:
        config.stash[_LOCK] = _locked(fcntl.LOCK_EX)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Wait for the first worker, or collect as it."""
    if not hasattr(session.config, "workerinput"):
        return (yield)
    if _LOCK not in session.config.stash:
        os.close(_locked(fcntl.LOCK_SH))
        return (yield)
    try:
        return (yield)
    finally:
        os.close(session.config.stash[_LOCK])


def _locked(mode: int) -> int:
    directory = os.open(Path(__file__).parent, os.O_RDONLY)
    fcntl.flock(directory, mode)
    return directory


def pytest_xdist_auto_num_workers() -> int:
    """The number of workers that `-n auto` starts."""
    return WORKERS_PER_PROCESSOR * (os.cpu_count() or 1)


@pytest.hookimpl(tryfirst=True)  # before a limit that allows for a build
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the tests that have a longer limit than most: a run does not end with one of
    them on one worker."""
    items.sort(key=lambda item: max(limit(item), TEST_LIMIT), reverse=True)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """What pytest-xdist asks."""
    return Scheduling(config, log)
