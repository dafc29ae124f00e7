"""Collect the exit codes of orphaned processes when the supervisor is process 1 of a container.

When a worker ends, the system makes process 1 the parent of the programs that its jobs started and
that still run. If no parent collected their exit codes, they would stay in the process table as
zombies.
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
    """Collect the exit codes of orphans until the task is cancelled. If this process is not process
    1, do nothing. `list_own_processes` returns the ids of the worker processes. Other code collects
    their exit codes."""
    if os.getpid() != 1 or not hasattr(os, "waitid"):
        return
    while True:
        collect_orphan_exit_codes_once(list_own_processes())
        await anyio.sleep(ORPHAN_CHECK_INTERVAL)


def collect_orphan_exit_codes_once(own_processes: Container[int]) -> None:
    """Collect the exit codes of the orphans that have ended. If one of `own_processes` has ended,
    stop: other code must collect its exit code first."""
    with suppress(ChildProcessError):  # this process has no children
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in own_processes:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
