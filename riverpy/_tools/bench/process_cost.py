"""Measures the memory of this process and the processor time of a PostgreSQL server."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from pathlib import Path

_PROC_DIRECTORY = Path("/proc")
_BYTES_PER_MIB = 2**20
(
    _PARENT_PID_FIELD,
    _USER_TIME_FIELD,
    _SYSTEM_TIME_FIELD,
    _CHILDREN_USER_TIME_FIELD,
    _CHILDREN_SYSTEM_TIME_FIELD,
) = 1, 11, 12, 13, 14
"""The index of each field in /proc/PID/stat. The first field after the process name has index 0."""


def reduce_garbage_collection() -> None:
    """Let the garbage collector ignore all present objects and run less often.

    Call this when the process has started. Most objects that exist at that time are used for
    long. Most later objects are used only for a short time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def read_process_memory_mib() -> float | None:
    """Return the resident memory of this process in MiB. None: the system does not report it."""
    try:
        pages = int((_PROC_DIRECTORY / "self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / _BYTES_PER_MIB


class ServerProcesses:
    """The processes of a PostgreSQL server on this machine: the postmaster and its children."""

    def __init__(self, postmaster_pid: int) -> None:
        self._postmaster_pid = postmaster_pid

    @classmethod
    def find_by_backend(cls, backend_pid: int) -> ServerProcesses | None:
        """Return the processes of the server to which the backend with this process id belongs.
        Return None if the server is on another machine."""
        try:
            parent_pid = int(_read_proc_stat_fields(backend_pid)[_PARENT_PID_FIELD])
            pids = backend_pid, parent_pid
            names = {(_PROC_DIRECTORY / str(pid) / "comm").read_text() for pid in pids}
        except OSError:
            return None
        return cls(parent_pid) if names == {"postgres\n"} else None

    def read_cpu_seconds(self) -> float:
        """Return the processor time of all processes of the server, in seconds. Processes that have
        ended count too.

        Raises:
            OSError: the server has ended.
        """
        own = _read_proc_stat_fields(self._postmaster_pid)
        ticks = sum(map(int, own[_USER_TIME_FIELD : _CHILDREN_SYSTEM_TIME_FIELD + 1]))
        for entry in _PROC_DIRECTORY.iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    stat = _read_proc_stat_fields(int(entry.name))
                    if int(stat[_PARENT_PID_FIELD]) == self._postmaster_pid:
                        ticks += int(stat[_USER_TIME_FIELD]) + int(stat[_SYSTEM_TIME_FIELD])
        return ticks / os.sysconf("SC_CLK_TCK")


def _read_proc_stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the process name. The name may contain any
    character."""
    return (_PROC_DIRECTORY / str(pid) / "stat").read_text().rpartition(")")[2].split()
