"""The two processes beside an embedded server: its supervisor and its holder.

The supervisor is the parent process of the server. Each client of the server holds a shared lock on
`clients.lock`. The kernel releases the lock when the client ends, also after `kill -9`. When no
process holds this lock, the supervisor stops the server. The holder is a process that only holds
this lock. It keeps a server running when the command that started the server has ended.

Both processes run this file by its path in an isolated interpreter. This file imports only the
standard library, so a broken environment cannot stop them.

Files in the directory of a server:

    start.lock       exclusive: a process starts, stops or removes the server
    clients.lock     shared: one for each client; exclusive: the supervisor checks for clients
    supervisor.lock  exclusive: the supervisor runs
    holder.lock      exclusive: the holder runs
    data/            the cluster, renamed to this name when initdb has finished
    run/             the socket
    postgres.log
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable

START_TIMEOUT = 60.0
"""The longest time from the start of a server until it answers, in seconds. It includes crash
recovery."""

STOP_TIMEOUT = 30.0
"""The timeout of a fast shutdown (SIGINT), in seconds. When it expires, the server gets SIGQUIT,
and recovers at its next start."""

POLL_INTERVAL = 0.02
"""Seconds between two checks whether a condition is true."""

LOG_SIZE_MAX = 10_000_000
"""The maximum size of the log in bytes. The next start renames a log that is larger."""

SOCKET_NAME = ".s.PGSQL.5432"

_STILL_IN_USE_MESSAGE = b"pre-existing shared memory block"
"""PostgreSQL logs this text if backends of a killed postmaster still run. They end soon."""


class ServerSpec(TypedDict):
    """The arguments of the supervisor."""

    directory: str
    socket_directory: str
    command: list[str]
    environment: dict[str, str]
    user: int | None
    group: int | None


# --- waits and locks


def wait_until(condition: Callable[[], bool], limit: float) -> bool:
    """Wait until the condition is true, for at most `limit` seconds. Return whether it is true."""
    end = time.monotonic() + limit
    while not (is_met := condition()) and time.monotonic() < end:
        time.sleep(POLL_INTERVAL)  # noqa: TID251 (no event loop runs here)
    return is_met


def lock_file(path: Path, mode: int) -> int:
    """Lock a file and return its descriptor. Close the descriptor to release the lock.

    Raises:
        BlockingIOError: `mode` has LOCK_NB and another process holds the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_unlocked(path: Path) -> bool:
    """Return whether no process holds the lock."""
    try:
        os.close(lock_file(path, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


# --- the postmaster


def postmaster_pid(data: Path) -> int | None:
    """Return the process id of this cluster's running postmaster.

    After a crash the pid file still exists, and another process may have that process id. So check
    the command line: only the command line of this cluster's postmaster has the directory.
    """
    pid = _read_pid(data / "postmaster.pid")
    return pid if pid and f" -D {data} " in f"{_command_line(pid)} " else None


def _read_pid(path: Path) -> int | None:
    """Return the process id in a lock file of PostgreSQL. None: there is no such file."""
    try:
        return abs(int(path.read_text().splitlines()[0]))
    except (OSError, ValueError, IndexError):
        return None


def _command_line(pid: int) -> str:
    """Return the command line of a process. It is empty if the process does not run or is a
    zombie."""
    if Path("/proc/self/cmdline").exists():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return ""
        return os.fsdecode(b" ".join(words)).rstrip()
    shown = subprocess.run(  # noqa: S603 (a number)
        ["/bin/ps", "-ww", "-o", "command=", "-p", str(pid)],
        capture_output=True,
        timeout=10,
        check=False,
    )
    return os.fsdecode(shown.stdout).rstrip()


def is_ready(data: Path) -> bool:
    """Return whether the postmaster runs and reports that it accepts connections."""
    with contextlib.suppress(OSError, IndexError):
        status = (data / "postmaster.pid").read_text().splitlines()[7].strip()
        return status == "ready" and postmaster_pid(data) is not None
    return False


def remove_stale_files(data: Path, socket_directory: Path) -> None:
    """Remove the lock files of a dead postmaster if another process now has its process id.

    With these files, PostgreSQL would treat the other process as a postmaster and would not start.
    PostgreSQL itself handles all other stale files, and finds running backends without the files.
    """
    for path in (data / "postmaster.pid", socket_directory / f"{SOCKET_NAME}.lock"):
        pid = _read_pid(path)
        if pid and _command_line(pid):
            path.unlink(missing_ok=True)


def stop_postmaster(data: Path) -> bool:
    """Stop the server and wait for its end. Returns whether the server was running."""
    pid = postmaster_pid(data)
    if pid is None:
        return False
    for kind in (signal.SIGINT, signal.SIGQUIT):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, kind)
        if wait_until(lambda: postmaster_pid(data) != pid, STOP_TIMEOUT):
            return True
    raise TimeoutError(f"process {pid} did not end within {2 * STOP_TIMEOUT:.0f} s")


# --- the supervisor


class _Supervisor:
    def __init__(self, spec: ServerSpec) -> None:
        self._spec = spec
        self._directory = Path(spec["directory"])
        self._data = self._directory / "data"
        self._log = self._directory / "postgres.log"
        self._log_offset = 0
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Start the server if it does not run. Stop it when it has no clients, and return.

        Raises:
            BlockingIOError: the server has another supervisor.
        """
        lock_file(self._directory / "supervisor.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
        if postmaster_pid(self._data) is None:
            self._start()
        if not wait_until(self._has_start_ended, START_TIMEOUT):
            report_start(f"the server was not ready after {START_TIMEOUT:.0f} s")
        elif self._has_ended():
            report_start("the server ended at once")
            return
        report_start("")
        threading.Thread(target=self._exit_when_server_ends, daemon=True).start()
        self._stop_when_unused()

    def _start(self) -> None:
        remove_stale_files(self._data, Path(self._spec["socket_directory"]))
        log = self._open_log()
        self._log_offset = os.fstat(log).st_size
        self._process = subprocess.Popen(  # noqa: S603 (built by EmbeddedPostgres)
            self._spec["command"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self._spec["environment"],
            cwd="/",
            user=self._spec["user"],
            group=self._spec["group"],
            extra_groups=None if self._spec["user"] is None else [],
            start_new_session=True,
        )
        os.close(log)

    def _open_log(self) -> int:
        if self._log.exists() and self._log.stat().st_size > LOG_SIZE_MAX:
            self._log.replace(self._log.with_suffix(".log.old"))
        return os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _has_start_ended(self) -> bool:
        """Return whether the start has ended, because the server is ready or has failed. If
        backends of an earlier server made the start fail, start the server again and return
        False."""
        if not self._has_ended():
            return is_ready(self._data)
        if _STILL_IN_USE_MESSAGE not in self._log.read_bytes()[self._log_offset :]:
            return True
        self._start()
        return False

    def _has_ended(self) -> bool:
        if self._process is not None:
            return self._process.poll() is not None
        return postmaster_pid(self._data) is None

    def _exit_when_server_ends(self) -> None:
        """Exit when the server ends, so that the next start makes a new supervisor."""
        if self._process is not None:
            self._process.wait()
        else:
            wait_until(self._has_ended, float("inf"))
        os._exit(0)

    def _stop_when_unused(self) -> None:
        clients = self._directory / "clients.lock"
        while True:
            os.close(lock_file(clients, fcntl.LOCK_EX))  # this blocks until all clients have ended
            start = lock_file(self._directory / "start.lock", fcntl.LOCK_EX)
            if is_unlocked(clients):  # start.lock is held, so no new client can lock clients.lock
                stop_postmaster(self._data)
                return
            os.close(start)


# --- detached processes


def hold_server(directory: Path) -> None:
    """Hold the lock of a client until the server ends."""
    lock_file(directory / "holder.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
    lock_file(directory / "clients.lock", fcntl.LOCK_SH)
    report_start("")
    lock_file(directory / "supervisor.lock", fcntl.LOCK_SH)  # this blocks until the supervisor ends


def report_start(text: str) -> None:
    """Report to the parent process that the start has ended. The text is the error, if any. The
    parent waits until the standard streams are closed."""
    os.write(1, text.encode("utf-8", "replace"))
    with Path(os.devnull).open("r+b", buffering=0) as nothing:
        for standard in range(3):
            os.dup2(nothing.fileno(), standard)


def main(role: str, argument: str) -> None:
    """Run a supervisor or a holder in a detached process. Errors are written to stdout. If stdout
    is closed and no error was written, a supervisor or holder is ready: this one or an earlier
    one."""
    if os.fork():
        return
    os.setsid()
    try:
        with contextlib.suppress(BlockingIOError):
            if role == "supervise":
                _Supervisor(json.loads(argument)).run()
            else:
                hold_server(Path(argument))
    except BaseException as error:
        report_start(f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
