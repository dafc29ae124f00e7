"""What processes cost: this one's memory and collector, a server's processor time."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_MIB = 2**20
_PARENT, _USER, _SYSTEM, _CHILDREN_USER, _CHILDREN_SYSTEM = 1, 11, 12, 13, 14
"""Where they are in /proc/PID/stat, counted from after the name."""


def settle_collector() -> None:
    """Take what lives on out of the garbage collector's sight, and let it run less often.

    For a process of ours that has started up: most of what it makes from now on is soon free.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def memory_mib() -> float | None:
    """Memory that this process holds; its peak where the system does not tell the present one.

    None where it tells neither.
    """
    with suppress(OSError):
        pages = int((_PROC / "self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / _MIB
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _MIB if sys.platform == "darwin" else peak / 1024


class ServerProcesses:
    """The processes of a PostgreSQL server on this machine: the postmaster and its children."""

    def __init__(self, postmaster: int) -> None:
        self._postmaster = postmaster

    @classmethod
    def of_backend(cls, pid: int) -> ServerProcesses | None:
        """Those of the server that this backend is of; None if no such process can be seen here."""
        try:
            name = (_PROC / str(pid) / "comm").read_text().strip()
            postmaster = int(_stat(pid)[_PARENT])
            parent_name = (_PROC / str(postmaster) / "comm").read_text().strip()
        except OSError:
            return None
        return cls(postmaster) if name == parent_name == "postgres" else None

    def cpu_seconds(self) -> float:
        """Processor time of all of them, also of those that have ended.

        Raises:
            OSError: the server has ended.
        """
        own = _stat(self._postmaster)
        ticks = sum(map(int, own[_USER : _CHILDREN_SYSTEM + 1]))
        for entry in _PROC.iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    stat = _stat(int(entry.name))
                    if int(stat[_PARENT]) == self._postmaster:
                        ticks += int(stat[_USER]) + int(stat[_SYSTEM])
        return ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """The fields after the name, which may hold anything."""
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
