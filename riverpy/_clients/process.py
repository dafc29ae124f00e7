"""The name of this process, and checks whether the process with a given name has ended.
ProcessAndLoop: checks that an object, such as a client, is used in the process and event loop that
opened the object."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import NamedTuple

from riverpy.errors import ClientStateError

_ENDED_PROCESS_STATES = {"Z", "X", "x"}
"""The states in `/proc/PID/stat` of a process that has ended."""


class ProcessAndLoop(NamedTuple):
    """The process and event loop that opened an object. The object's sockets belong to the process,
    and its tasks belong to the event loop."""

    pid: int
    loop: asyncio.AbstractEventLoop

    @classmethod
    def current(cls) -> ProcessAndLoop:
        """Return the current process and event loop."""
        return cls(os.getpid(), asyncio.get_running_loop())

    @property
    def is_current_process(self) -> bool:
        """Whether the current process opened the object. False in a fork of that process."""
        return self.pid == os.getpid()

    def require_current(self, object_name: str) -> None:
        """Check that the current process and event loop opened the object.

        Raises:
            ClientStateError: the object was opened in another process or event loop. The error text
                begins with `object_name`.
        """
        if not self.is_current_process:
            raise ClientStateError(
                f"{object_name} was opened in another process, before a fork: open one after the "
                "fork, in the process that uses it"
            )
        if self.loop is not asyncio.get_running_loop():
            raise ClientStateError(
                f"{object_name} was opened in another event loop: open one in each loop, and in "
                "other threads use asyncio.run_coroutine_threadsafe"
            )


def get_own_process_name() -> str | None:
    """Return the name of this process, or None if the system is not Linux. Other processes on this
    machine use the name to check whether this process has ended."""
    pid = os.getpid()
    machine, stat = _read_boot_and_pid_namespace(), _read_process_stat(pid)
    return None if machine is None or stat is None else f"{machine} {pid} {stat[1]}"


def has_process_ended(process_name: str) -> bool:
    """Return whether the process with this name has certainly ended. The result is False for a
    process of another machine or container."""
    machine, _, rest = process_name.partition(" ")
    pid, _, started = rest.partition(" ")
    return (
        machine == _read_boot_and_pid_namespace()
        and pid.isdecimal()
        and _has_pid_ended(int(pid), started)
    )


def is_process_on_this_machine(process_name: str) -> bool:
    """Return whether the process with this name belongs to this machine and container. The process
    may have ended."""
    return process_name.partition(" ")[0] == _read_boot_and_pid_namespace()


def _has_pid_ended(pid: int, start_time: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # /proc may hide the processes of other users
        pass
    stat = _read_process_stat(pid)
    return stat is not None and (stat[0] in _ENDED_PROCESS_STATES or stat[1] != start_time)


def _read_boot_and_pid_namespace() -> str | None:
    """Return a text that identifies the current boot of this machine, and the PID namespace, i.e.
    the container, of this process. Return None if the system is not Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _read_process_stat(pid: int) -> tuple[str, str] | None:
    """Return the state of a process, and its start time in clock ticks since the boot. Return None
    if they cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return None
