"""The order of tests, and how a parallel run deals them out to its workers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests._limits import TEST_LIMIT, limit

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

ONE_WORKER = (
    "tests/faults/test_connections.py",
    "tests/faults/test_failover.py",
    "tests/faults/test_server.py",
    "tests/faults/test_users.py",
    "tests/maintenance/test_plans.py",
    "tests/work/test_plans.py",
)
"""Files whose tests share a fleet, or a table that takes long to fill."""


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


WORKERS_PER_PROCESSOR = 2
"""Half of the time a test waits: for the server, for other processes, for a limit to expire."""


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
