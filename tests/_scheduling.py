"""The order of tests, and their distribution over the workers of a parallel run."""

from __future__ import annotations

import fcntl
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests._limits import TEST_LIMIT, limit

if TYPE_CHECKING:
    from collections.abc import Generator

    from xdist.workermanage import WorkerController

SHARING = (
    "tests/repository/test_logs.py",
    "tests/repository/test_properties.py",
    "tests/repository/test_tree.py",
    "tests/repository/test_wheel.py",
    "tests/maintenance/test_plans.py",
    "tests/typing/test_mypy.py",
    "tests/work/test_plans.py",
)
"""Files whose tests share a table that takes long to fill, a wheel, syntax trees, or a run of mypy.
The tests of each file run on one worker."""
DJANGO = "tests/django/"
"""Tests that share a database with the tables of Django. They run on one worker."""
QUIET = (
    "tests/faults/test_connections.py",
    "tests/faults/test_failover.py",
    "tests/faults/test_processes.py",
    "tests/faults/test_server.py",
    "tests/faults/test_users.py",
    "tests/network/",
    "tests/repository/test_chaos",
)
"""Tests that run fleets of their own, with limits that a busy machine exceeds. All of them run on
one worker, one after the other."""


class Scheduling(LoadScopeScheduling):
    """Distributes tests one by one, except those of `SHARING`, `DJANGO` and `QUIET`, and continues
    when a worker dies. (The marks of xdist for this have no effect with this version of pytest.)"""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if nodeid.startswith(QUIET):
            return "quiet"
        if nodeid.startswith(DJANGO):
            return DJANGO
        return file if file in SHARING else nodeid

    def _reschedule(self, node: WorkerController) -> None:
        """Assign tests to a worker. A worker starts a test only when it has the next one, or when
        there is no other. A worker that replaces another is asked once only, so it gets two at
        once."""
        if node not in self.registered_collections:  # it is still collecting
            return
        super()._reschedule(node)
        if not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test that a lost worker was running, and distribute those that it had not
        started. Finished tests would never be reported again, and the running one would end the
        next worker too."""
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
"""A test waits most of the time: for the server, for other processes, for a timeout. With 3 workers
per processor, the processors idled for a tenth of the run."""
FIRST_WORKER = "gw0"
_LOCK = pytest.StashKey[int]()
"""Descriptor of this file's directory, locked while the first worker collects."""


def pytest_configure(config: pytest.Config) -> None:
    """Let the first worker collect before the others, since it compiles the tests for all."""
    workerinput: dict[str, Any] = getattr(config, "workerinput", {})
    if workerinput.get("workerid") == FIRST_WORKER:
        config.stash[_LOCK] = _locked(fcntl.LOCK_EX)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect as the first worker, or wait for it. The garbage collector ignores the collected
    tests, which live as long as the run."""
    lock = session.config.stash.get(_LOCK, None)
    if lock is None and hasattr(session.config, "workerinput"):
        os.close(_locked(fcntl.LOCK_SH))
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)  # a test allocates much that is no garbage
        gc.enable()
        if lock is not None:
            os.close(lock)


def _locked(mode: int) -> int:
    directory = os.open(Path(__file__).parent, os.O_RDONLY)
    fcntl.flock(directory, mode)
    return directory


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers for `-n auto`."""
    return WORKERS_PER_PROCESSOR * (os.cpu_count() or 1)


@pytest.hookimpl(tryfirst=True)  # before the hook that sets a timeout for a build
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the tests whose timeout is longer than most, so that a run does not end with one
    of them."""
    items.sort(key=lambda item: max(limit(item), TEST_LIMIT), reverse=True)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """Return the scheduler for pytest-xdist."""
    return Scheduling(config, log)
