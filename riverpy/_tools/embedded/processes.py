"""The two helper processes of an embedded server: its supervisor and its holder.

The supervisor is the parent process of the server. Each client of the server holds a shared lock on
`clients.lock`. The kernel releases the lock when the client process ends, even after `kill -9`.
When no process holds the lock, the supervisor stops the server. The holder is a process that only
holds this lock. It keeps the server running after the command that started the server has ended.

Both processes run this file by its path in an isolated interpreter. This file imports only the
standard library, so a broken environment cannot stop them.

Files in the directory of a server, and when a process holds a lock on them:

    start.lock       exclusive: while a process starts, stops or removes the server
    clients.lock     shared: by each client and by the holder;
                     exclusive: while the supervisor checks for clients
    supervisor.lock  exclusive: while the supervisor runs
    holder.lock      exclusive: while the holder runs
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

SERVER_START_TIMEOUT = 60.0
"""Seconds within which a started server must accept connections. Crash recovery is included."""

SERVER_STOP_TIMEOUT = 30.0
"""The timeout of a fast shutdown (SIGINT), in seconds. When it expires, the server gets SIGQUIT,
and recovers at its next start."""

CONDITION_POLL_INTERVAL = 0.02
"""Seconds between two checks of a condition in `wait_until`."""

SERVER_LOG_BYTES_MAX = 10_000_000
"""The maximum size of the log in bytes. If the log is larger at the start of the server, it is
renamed to `postgres.log.old`."""

SOCKET_FILE_NAME = ".s.PGSQL.5432"

_OLD_BACKENDS_LOG_TEXT = b"pre-existing shared memory block"
"""PostgreSQL logs this text if it cannot start because backends of a killed postmaster still run.
These backends end soon."""


class ServerSpec(TypedDict):
    """What the supervisor needs to start the server."""

    directory: str
    socket_directory: str
    command: list[str]
    environment: dict[str, str]
    user_id: int | None
    group_id: int | None


# --- waits and locks


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Wait at most `timeout` seconds until the condition is true. Return whether it is true."""
    end = time.monotonic() + timeout
    while not (is_met := condition()) and time.monotonic() < end:
        time.sleep(CONDITION_POLL_INTERVAL)  # noqa: TID251 (no event loop runs here)
    return is_met


def lock_file(path: Path, lock_flags: int) -> int:
    """Lock a file and return its descriptor. Close the descriptor to release the lock.

    Raises:
        BlockingIOError: `lock_flags` has LOCK_NB and another process holds the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, lock_flags)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_unlocked(path: Path) -> bool:
    """Return whether no process holds the lock of a file."""
    try:
        os.close(lock_file(path, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


# --- the postmaster


def find_postmaster_pid(data_directory: Path) -> int | None:
    """Return the process id of the cluster's running postmaster, or None.

    After a crash the pid file still exists, and its process id may now belong to another process.
    So the function also checks that the command line of the process contains the data directory.
    """
    pid = _read_pid_file(data_directory / "postmaster.pid")
    return pid if pid and _is_postmaster(pid, data_directory) else None


def _is_postmaster(pid: int, data_directory: Path) -> bool:
    return f" -D {data_directory} " in f"{_read_command_line(pid)} "


def _read_pid_file(path: Path) -> int | None:
    """Return the process id in a lock file of PostgreSQL, or None if there is no such file."""
    try:
        return abs(int(path.read_text().splitlines()[0]))
    except (OSError, ValueError, IndexError):
        return None


def _read_command_line(pid: int) -> str:
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


def is_server_ready(data_directory: Path) -> bool:
    """Return whether the postmaster runs and reports that it accepts connections."""
    with contextlib.suppress(OSError, IndexError):
        status = (data_directory / "postmaster.pid").read_text().splitlines()[7].strip()
        return status == "ready" and find_postmaster_pid(data_directory) is not None
    return False


def remove_stale_lock_files(data_directory: Path, socket_directory: Path) -> None:
    """Remove the lock files of a dead postmaster if another process now has its process id.

    With these files, PostgreSQL would treat the other process as a postmaster and would not start.
    PostgreSQL itself handles all other stale lock files. Without the files, it still detects
    running backends of the dead postmaster.
    """
    for path in (data_directory / "postmaster.pid", socket_directory / f"{SOCKET_FILE_NAME}.lock"):
        pid = _read_pid_file(path)
        if pid and _read_command_line(pid):
            path.unlink(missing_ok=True)


def stop_postmaster(data_directory: Path) -> bool:
    """Stop the server and wait until it has ended. Return whether it was running.

    Raises:
        TimeoutError: the server did not end, even after SIGQUIT.
    """
    pid = find_postmaster_pid(data_directory)
    if pid is None:
        return False
    for kind in (signal.SIGINT, signal.SIGQUIT):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, kind)
        # Wait for the end of the process, not for the removal of its pid file: the postmaster
        # removes the file before it writes the last line of its log.
        if wait_until(lambda: not _is_postmaster(pid, data_directory), SERVER_STOP_TIMEOUT):
            return True
    raise TimeoutError(f"process {pid} did not end within {2 * SERVER_STOP_TIMEOUT:.0f} s")


# --- the supervisor


class _ServerSupervisor:
    def __init__(self, spec: ServerSpec) -> None:
        self._server_spec = spec
        self._server_directory = Path(spec["directory"])
        self._data_directory = self._server_directory / "data"
        self._log_path = self._server_directory / "postgres.log"
        self._log_size_at_start = 0
        self._server_process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Start the server if it does not run. When the server has no clients, stop it and return.

        Raises:
            BlockingIOError: the server has another supervisor.
        """
        lock_file(self._server_directory / "supervisor.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
        if find_postmaster_pid(self._data_directory) is None:
            self._start_server()
        if not wait_until(self._check_start_and_retry, SERVER_START_TIMEOUT):
            report_start_result(f"the server was not ready after {SERVER_START_TIMEOUT:.0f} s")
        elif self._has_server_ended():
            report_start_result("the server ended at once")
            return
        report_start_result("")
        threading.Thread(target=self._exit_when_server_ends, daemon=True).start()
        self._stop_server_when_unused()

    def _start_server(self) -> None:
        remove_stale_lock_files(self._data_directory, Path(self._server_spec["socket_directory"]))
        log = self._open_log_file()
        self._log_size_at_start = os.fstat(log).st_size
        self._server_process = subprocess.Popen(  # noqa: S603 (built by EmbeddedPostgres)
            self._server_spec["command"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self._server_spec["environment"],
            cwd="/",
            user=self._server_spec["user_id"],
            group=self._server_spec["group_id"],
            extra_groups=None if self._server_spec["user_id"] is None else [],
            start_new_session=True,
        )
        os.close(log)

    def _open_log_file(self) -> int:
        if self._log_path.exists() and self._log_path.stat().st_size > SERVER_LOG_BYTES_MAX:
            self._log_path.replace(self._log_path.with_suffix(".log.old"))
        return os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _check_start_and_retry(self) -> bool:
        """Return whether the start has ended, i.e. the server is ready or has failed. If the start
        failed because old backends still run, start the server again and return False."""
        if not self._has_server_ended():
            return is_server_ready(self._data_directory)
        if _OLD_BACKENDS_LOG_TEXT not in self._log_path.read_bytes()[self._log_size_at_start :]:
            return True
        self._start_server()
        return False

    def _has_server_ended(self) -> bool:
        if self._server_process is not None:
            return self._server_process.poll() is not None
        return find_postmaster_pid(self._data_directory) is None

    def _exit_when_server_ends(self) -> None:
        """Exit this process when the server ends. The next start of the server then starts a new
        supervisor."""
        if self._server_process is not None:
            self._server_process.wait()
        else:
            wait_until(self._has_server_ended, float("inf"))
        os._exit(0)

    def _stop_server_when_unused(self) -> None:
        """Wait until no client uses the server, then stop it."""
        clients = self._server_directory / "clients.lock"
        while True:
            os.close(lock_file(clients, fcntl.LOCK_EX))  # this blocks until all clients have ended
            start = lock_file(self._server_directory / "start.lock", fcntl.LOCK_EX)
            if is_unlocked(clients):  # start.lock is held, so no new client can lock clients.lock
                stop_postmaster(self._data_directory)
                return
            os.close(start)


# --- detached processes


def hold_client_lock(directory: Path) -> None:
    """Hold a shared lock on `clients.lock`, as each client of the server does, so that the
    supervisor keeps the server running. Return when the supervisor has ended."""
    lock_file(directory / "holder.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
    lock_file(directory / "clients.lock", fcntl.LOCK_SH)
    report_start_result("")
    lock_file(directory / "supervisor.lock", fcntl.LOCK_SH)  # this blocks until the supervisor ends


def report_start_result(error_text: str) -> None:
    """Report the result of the start to the parent process, which waits for it. Write the error
    (empty if there is none) to stdout, then redirect the standard streams to /dev/null."""
    os.write(1, error_text.encode("utf-8", "replace"))
    with Path(os.devnull).open("r+b", buffering=0) as nothing:
        for standard in range(3):
            os.dup2(nothing.fileno(), standard)


def main(role: str, argument: str) -> None:
    """Run the supervisor or the holder in a detached process. `role` is `supervise` or `hold`.

    If the start fails, the process writes the error to stdout. It closes stdout when it is ready,
    or when another process already runs in this role.
    """
    if os.fork():
        return
    os.setsid()
    try:
        with contextlib.suppress(BlockingIOError):
            if role == "supervise":
                _ServerSupervisor(json.loads(argument)).run()
            else:
                hold_client_lock(Path(argument))
    except BaseException as error:
        report_start_result(f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
