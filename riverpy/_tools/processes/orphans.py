"""Collect the exit codes of orphaned processes if the supervisor is PID 1 of a container.

When a worker ends, some programs that its jobs started may still run. The system makes PID 1 the
parent of these programs. If PID 1 did not collect their exit codes, they would stay in the process
table as zombies.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable, Container

ORPHAN_CHECK_INTERVAL = 1.0
"""Seconds between two checks."""


async def collect_orphan_exit_codes(list_own_processes: Callable[[], Container[int]]) -> None:
    """Collect the exit codes of ended orphans until the task is cancelled. Do nothing if this
    process is not PID 1. `list_own_processes` returns the ids of the worker processes.
    `WorkerProcess.wait` collects their exit codes."""
    if os.getpid() != 1 or not hasattr(os, "waitid"):
        return
    while True:
        collect_orphan_exit_codes_once(list_own_processes())
        await anyio.sleep(ORPHAN_CHECK_INTERVAL)


def collect_orphan_exit_codes_once(own_processes: Container[int]) -> None:
    """Collect the exit codes of the orphans that have ended. Stop if one of `own_processes` has
    ended: `WorkerProcess.wait` must collect its exit code first."""
    with suppress(ChildProcessError):  # this process has no children
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in own_processes:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
