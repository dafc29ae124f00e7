"""Process: a text that names a process of a machine, by which another one of that machine knows
whether it is gone."""

from __future__ import annotations

import os
from pathlib import Path

_ENDED = {"Z", "X", "x"}
"""States of a process that runs no more, whether its parent has noticed or not."""


def own_process() -> str | None:
    """The text of this process. None: the system does not say, as elsewhere than on Linux."""
    pid = os.getpid()
    place, stat = _place(), _stat(pid)
    return None if place is None or stat is None else f"{place} {pid} {stat[1]}"


def is_gone(process: str) -> bool:
    """Whether a process has certainly ended. False also if that cannot be known here, as of a
    process of another machine or container."""
    place, _, rest = process.partition(" ")
    pid, _, started = rest.partition(" ")
    return place == _place() and pid.isdecimal() and _has_ended(int(pid), started)


def is_here(process: str) -> bool:
    """Whether it is a process of this machine and container, so that `is_gone` is certain."""
    return process.partition(" ")[0] == _place()


def _has_ended(pid: int, started: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's, which /proc may hide
        pass
    stat = _stat(pid)
    return stat is not None and (stat[0] in _ENDED or stat[1] != started)


def _place() -> str | None:
    """The running kernel, and the namespace in which a pid has its meaning."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _stat(pid: int) -> tuple[str, str] | None:
    """The state of a process, and when it was started in ticks since the machine's start."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return None
