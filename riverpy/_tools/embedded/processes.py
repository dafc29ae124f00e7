"""The two processes beside an embedded server: its supervisor and, if it is kept, its holder.

The supervisor is the server's parent. It stops the server when nobody holds a shared lock on
`clients.lock`: the kernel drops a lock at any death, kill -9 included, so no count of clients can
go wrong. The holder holds such a lock until it is told to end, or the server ends by itself: it is
for a server that shall outlive the command that started it.

Both run this file by its path in an isolated interpreter, so it imports the standard library only:
a broken or half-upgraded environment can neither slow nor stop them.

Files in the directory of a server:

    start.lock       exclusive: somebody starts, stops or removes the server
    clients.lock     shared, one per client; exclusive for a moment by the supervisor
    supervisor.lock  exclusive, by the supervisor as long as it lives
    holder.lock      exclusive, by the holder as long as it lives; holds its process id
    data/            the cluster; it appears by a rename once initdb is done
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
from typing import TYPE_CHECKING, NoReturn, TypedDict, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

ResultT = TypeVar("ResultT")

START_LIMIT = 60.0
"""Seconds that a server may take until it answers, crash recovery included."""

STOP_LIMIT = 30.0
"""Seconds for a fast shutdown; then the server is cut off, and recovers at its next start."""

POLL_INTERVAL = 0.02
"""Seconds between two looks at another process: PostgreSQL announces nothing to wait for."""

LOG_SIZE_MAX = 10_000_000
"""Bytes of a log that the next start puts aside."""

SOCKET_NAME = ".s.PGSQL.5432"

_STILL_IN_USE = b"pre-existing shared memory block"
"""PostgreSQL's words when backends outlive a postmaster that was killed; they end by themselves."""


class ServerSpec(TypedDict):
    """What the supervisor needs to know to run a server."""

    directory: str
    socket_directory: str
    command: list[str]
    environment: dict[str, str]
    user: int | None
    group: int | None


# --- waiting and locks


def poll(produce: Callable[[], ResultT | None], limit: float) -> ResultT | None:
    """Ask until there is a result, for at most `limit` seconds."""
    end = time.monotonic() + limit
    while (result := produce()) is None and time.monotonic() < end:
        time.sleep(POLL_INTERVAL)  # noqa: TID251 (no event loop runs here)
    return result


def wait_until(condition: Callable[[], bool], limit: float) -> bool:
    """Look until the condition holds, for at most `limit` seconds. Whether it holds."""
    return poll(lambda: condition() or None, limit) is not None


def lock(path: Path, mode: int) -> int:
    """A descriptor that holds the lock. Close it to let go.

    Raises:
        BlockingIOError: `mode` has LOCK_NB and the lock is taken.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_free(path: Path) -> bool:
    """Whether nobody holds the lock."""
    try:
        os.close(lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


# --- the postmaster


def postmaster_pid(data: Path) -> int | None:
    """The process id of this cluster's living postmaster.

    The pid file alone proves nothing: it outlives a crash, and process ids are used again, in
    containers at once. The postmaster of this cluster, and no other process, names its directory.
    """
    try:
        pid = int((data / "postmaster.pid").read_text().splitlines()[0])
    except (OSError, ValueError, IndexError):
        return None
    return pid if f" -D {data} " in f"{_command_line(pid)} " else None


def _command_line(pid: int) -> str:
    """The command line of a process; empty if there is none, or if it is a zombie."""
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
    """Whether the postmaster lives and says that it accepts connections."""
    if postmaster_pid(data) is None:
        return False
    try:
        return (data / "postmaster.pid").read_text().splitlines()[7].strip() == "ready"
    except (OSError, IndexError):
        return False


def drop_misleading_files(data: Path, socket_directory: Path) -> None:
    """Remove the lock files of a dead postmaster whose process id belongs to a stranger by now.

    PostgreSQL would take the stranger for a postmaster. It sees through all other stale files, and
    finds backends that outlive their postmaster without such a file too.
    """
    for path in (data / "postmaster.pid", socket_directory / f"{SOCKET_NAME}.lock"):
        try:
            pid = abs(int(path.read_text().splitlines()[0]))
        except (OSError, ValueError, IndexError):
            continue
        if _command_line(pid):
            path.unlink(missing_ok=True)


def stop_postmaster(data: Path) -> bool:
    """Shut the server down and wait until it has ended. Whether it ran.

    Raises:
        TimeoutError: it has not ended.
    """
    pid = postmaster_pid(data)
    if pid is None:
        return False
    for kind in (signal.SIGINT, signal.SIGQUIT):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, kind)
        if wait_until(lambda: postmaster_pid(data) != pid, STOP_LIMIT):
            return True
    raise TimeoutError(f"process {pid} did not end within {2 * STOP_LIMIT:.0f} s")


# --- the supervisor


def supervise(spec: ServerSpec) -> str | None:
    """Start the server, or adopt a running one, and watch it from a detached process.

    Returns when the server is ready, or says what failed. None also if somebody supervises already.
    """
    return detached(_Supervisor(spec).run)


class _Supervisor:
    def __init__(self, spec: ServerSpec) -> None:
        self._spec = spec
        self._directory = Path(spec["directory"])
        self._data = self._directory / "data"
        self._log = self._directory / "postgres.log"
        self._log_offset = 0
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, report: Callable[[str], None]) -> None:
        with contextlib.suppress(BlockingIOError):
            lock(self._directory / "supervisor.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._supervise(report)

    def _supervise(self, report: Callable[[str], None]) -> None:
        if postmaster_pid(self._data) is None:
            self._start()
        if not wait_until(self._is_settled, START_LIMIT):
            report(f"the server was not ready after {START_LIMIT:.0f} s")
        elif self._has_ended():
            report("the server ended at once")
            return
        report("")
        threading.Thread(target=self._end_with_server, daemon=True).start()
        self._stop_when_unused()

    def _start(self) -> None:
        drop_misleading_files(self._data, Path(self._spec["socket_directory"]))
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

    def _is_settled(self) -> bool:
        """Whether the server is ready or has failed; started anew while old backends are ending."""
        if not self._has_ended():
            return is_ready(self._data)
        if _STILL_IN_USE not in self._log.read_bytes()[self._log_offset :]:
            return True
        self._start()
        return False

    def _has_ended(self) -> bool:
        if self._process is not None:
            return self._process.poll() is not None
        return postmaster_pid(self._data) is None

    def _end_with_server(self) -> None:
        """End when the server does, however that comes, so that the next starter takes over."""
        if self._process is not None:
            self._process.wait()
        else:
            wait_until(self._has_ended, float("inf"))
        os._exit(0)

    def _stop_when_unused(self) -> None:
        clients = self._directory / "clients.lock"
        while True:
            os.close(lock(clients, fcntl.LOCK_EX))  # the last client has gone
            start = lock(self._directory / "start.lock", fcntl.LOCK_EX)
            if is_free(clients):  # a new client takes its lock while it holds start.lock
                stop_postmaster(self._data)
                return
            os.close(start)


# --- the holder


def hold(directory: str) -> str | None:
    """Hold the server of this directory from a detached process until SIGTERM or its end."""
    return detached(lambda report: _hold(Path(directory), report))


def _hold(directory: Path, report: Callable[[str], None]) -> None:
    try:
        holder = lock(directory / "holder.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # it is held already
        return
    lock(directory / "clients.lock", fcntl.LOCK_SH)
    os.ftruncate(holder, 0)
    os.pwrite(holder, str(os.getpid()).encode(), 0)
    report("")
    lock(directory / "supervisor.lock", fcntl.LOCK_SH)  # the server has ended


def end_holder(directory: Path) -> None:
    """End the holder of this directory, if there is one."""
    path = directory / "holder.lock"
    if is_free(path):
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(path.read_text()), signal.SIGTERM)
    wait_until(lambda: is_free(path), STOP_LIMIT)


# --- detaching


def detached(body: Callable[[Callable[[str], None]], None]) -> str | None:
    """Run `body` in a process of its own session that init adopts.

    `body` gets a function to report with. This call waits for its first report, or its end, and
    returns the text, or None if that is empty.
    """
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        _run_and_exit(body, writing)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8", errors="replace") as stream:
        return stream.read() or None


def _run_and_exit(body: Callable[[Callable[[str], None]], None], writing: int) -> NoReturn:
    os.setsid()
    with Path(os.devnull).open("r+b", buffering=0) as nothing:
        for standard in range(3):  # the pipes of our parent would keep their reader waiting
            os.dup2(nothing.fileno(), standard)
    pipe = [writing]

    def report(text: str) -> None:
        if pipe:
            descriptor = pipe.pop()
            os.write(descriptor, text.encode("utf-8", "replace"))
            os.close(descriptor)

    status = 1
    try:
        body(report)
        status = 0
    except BaseException as error:
        report(f"{type(error).__name__}: {error}")
    finally:
        os._exit(status)


def main(role: str, argument: str) -> int:
    """Play the role; what failed goes to stderr and makes the exit code 1."""
    failure = supervise(json.loads(argument)) if role == "supervise" else hold(argument)
    if failure:
        sys.stderr.write(failure)
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
