"""Helpers of the tests of the embedded PostgreSQL."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from riverpy._tools.embedded import processes

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy.embedded import EmbeddedPostgres


def wait_for_end(server: EmbeddedPostgres) -> None:
    """Wait until the supervisor has ended, by its lock."""
    os.close(processes.lock_file(server.directory / "supervisor.lock", fcntl.LOCK_EX))


def postmaster_pid(server: EmbeddedPostgres) -> int:
    """Return the process id of the running server."""
    pid = processes.find_postmaster_pid(server.directory / "data")
    assert pid is not None
    return pid


def parent_pid(pid: int) -> int:
    """Return the parent of a process."""
    status = Path(f"/proc/{pid}/stat")
    if status.exists():  # small systems have no ps
        return int(status.read_text().rpartition(")")[2].split()[1])
    command = ["ps", "-o", "ppid=", "-p", str(pid)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def query(server: EmbeddedPostgres, sql: str) -> str:
    """Return the output of psql for a statement."""
    command = [server.binaries / "psql", server.url, "-XAtqc", sql]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return shown.stdout.strip()


def mode(path: Path) -> int:
    """Return the permission bits of a file."""
    return path.stat().st_mode & 0o7777


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds. For conditions without a signal."""
    assert processes.wait_until(condition, 40)
