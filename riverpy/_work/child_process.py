"""ChildProcess: a process that runs blocking jobs one at a time for a worker, which is the process
of the client.

Worker and child communicate over two pipes. What a job writes to stdout or stderr appears on the
worker's stderr. The child ends when the worker ends: on Linux the kernel kills the child, and on
every platform the child ends when its pipe from the worker is closed.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.spawn import get_executable, prepare
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any, NoReturn

import anyio

from riverpy._work.failure import make_storable_error_text, make_storable_trace
from riverpy.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from riverpy._postgres.jobs import ClaimKey
    from riverpy._work.attempt import Attempt

IDLE_CHILD_TIMEOUT = 300.0
"""Seconds that an idle child process is kept for the next job."""
CHILD_EXIT_TIMEOUT = 0.4
"""Seconds to wait for the end of killed child processes."""
CHILD_EXIT_POLL_INTERVAL = 0.005
"""Seconds between two checks whether a killed child has ended."""
_PR_SET_PDEATHSIG = 1
_MESSAGE_LENGTH_FORMAT = struct.Struct("!Q")
"""The format of the length field that precedes each message."""
_CANCEL_MESSAGE = b""
"""The message that cancels the child's job. Every other message is a job."""
_STARTED_MESSAGE = b""
"""The message that a child sends before it runs a job. Its next message is the result."""


class ChildProcess:
    """The worker's object for one child process.

    Create this object in the thread of the event loop, because the kernel kills the child when the
    thread that created it ends.
    """

    def __init__(self) -> None:
        # We start the child in the same way as multiprocessing. We do not use that module, because
        # it refuses to start children of a daemonic process, such as a worker of some web servers.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from {__name__} import run_jobs; run_jobs({os.getpid()}, {_describe_main_module()!r})"
        )
        self._process = subprocess.Popen(  # noqa: S603 (our own interpreter)
            [get_executable(), "-u", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # In a new session, Ctrl-C in a terminal does not reach the child, and `kill` also ends
            # the programs that the job has started.
            start_new_session=True,
        )
        assert self._process.stdin is not None  # noqa: S101 (it is a pipe)
        assert self._process.stdout is not None  # noqa: S101
        self._pipe_to_child, self._pipe_from_child = self._process.stdin, self._process.stdout
        self._is_running_job = False
        self.is_job_cancelled = False
        """Whether the job of this child was cancelled. After a cancellation the child runs no other
        job."""
        self.idle_since = 0.0
        """The time of the end of the last job, in monotonic seconds."""

    def run_job(self, packed_job: bytes) -> bytes:
        """Run a job and return its result. This call blocks, so call it in a thread.

        Raises:
            ChildProcessError: the process has ended.
        """
        try:
            _send_message(self._pipe_to_child, packed_job)
            _receive_message(
                self._pipe_from_child
            )  # this is _STARTED_MESSAGE: the child can now receive _CANCEL_MESSAGE
            self._is_running_job = True
            return _receive_message(self._pipe_from_child)
        except (EOFError, OSError, ValueError):
            self._kill_process_group()  # the child may still run, although its pipe is closed
            raise ChildProcessError(_describe_exit(self._process.wait())) from None
        finally:
            self._is_running_job = False

    def cancel_job(self) -> None:
        """Set `job.cancelled` in the child, without blocking. If the job does not use
        `job.cancelled`, the child ends."""
        self.is_job_cancelled = True
        if not self._is_running_job:
            self.kill()
            return
        try:
            _send_message(self._pipe_to_child, _CANCEL_MESSAGE)
        except (OSError, ValueError):  # broken pipe: the child has ended
            self.kill()

    def kill(self) -> None:
        """Kill the process and the programs that it started, without waiting for their end."""
        self.is_job_cancelled = True
        self._kill_process_group()

    def _kill_process_group(self) -> None:
        # After the exit code was read, another process may have the same process id.
        if sys.platform != "win32" and self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def kill_and_wait(self, timeout: float) -> None:
        """Kill an idle process, and wait at most `timeout` seconds for its end."""
        self.kill()
        for pipe in (self._pipe_to_child, self._pipe_from_child):
            with suppress(OSError):  # close() flushes data, but the pipe may be broken
                pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    @property
    def has_exited(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None


class ChildProcessPool:
    """The busy and the idle child processes of one client."""

    def __init__(self) -> None:
        self._idle_children: list[ChildProcess] = []
        self._busy_children: dict[ClaimKey, ChildProcess] = {}

    def assign_child(self, claim_key: ClaimKey) -> ChildProcess:
        """Return an idle or a new child for an attempt."""
        now = time.monotonic()
        while self._idle_children and (
            self._idle_children[0].has_exited
            or now - self._idle_children[0].idle_since > IDLE_CHILD_TIMEOUT
        ):
            self._idle_children.pop(0).kill_and_wait(CHILD_EXIT_TIMEOUT)
        child = self._idle_children.pop() if self._idle_children else ChildProcess()
        self._busy_children[claim_key] = child
        return child

    def release_child(self, claim_key: ClaimKey) -> None:
        """Keep the child of an ended attempt for the next job. A child whose job was cancelled is
        ended."""
        child = self._busy_children.pop(claim_key)
        if child.is_job_cancelled or child.has_exited:
            child.kill_and_wait(CHILD_EXIT_TIMEOUT)
        else:
            child.idle_since = time.monotonic()
            self._idle_children.append(child)

    def end_idle_children(self) -> None:
        """End the idle children."""
        idle, self._idle_children = self._idle_children, []
        for child in idle:
            child.kill()
        give_up_at = time.monotonic() + CHILD_EXIT_TIMEOUT
        for child in idle:
            child.kill_and_wait(max(give_up_at - time.monotonic(), 0.0))

    async def kill_children(self, claim_keys: Iterable[ClaimKey]) -> set[ClaimKey]:
        """Kill the children of these attempts. Returns the claim keys of the attempts whose child
        still runs after `CHILD_EXIT_TIMEOUT`. This method may be called in another thread and event
        loop."""
        left = {
            claim_key: child
            for claim_key in claim_keys
            if (child := self._busy_children.get(claim_key))
        }
        for child in left.values():
            child.kill()
        give_up_at = time.monotonic() + CHILD_EXIT_TIMEOUT
        while True:
            left = {claim_key: child for claim_key, child in left.items() if not child.has_exited}
            if not left or time.monotonic() >= give_up_at:
                return set(left)
            await anyio.sleep(CHILD_EXIT_POLL_INTERVAL)


def count_usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _describe_exit(exit_code: int) -> str:
    if exit_code >= 0:
        return f"the process of the job exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = str(-exit_code)
    return f"the process of the job was killed by signal {name}"


def _describe_main_module() -> dict[str, str]:
    """Return the name or the path of the worker's main module, which the child imports. The module
    may contain the functions of jobs."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return {"init_main_from_name": spec.name}
    return {} if path is None else {"init_main_from_path": str(Path(path).absolute())}


# -- messages between worker and child


def _send_message(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(_MESSAGE_LENGTH_FORMAT.pack(len(message)) + message)
    pipe.flush()


def _receive_message(pipe: IO[bytes]) -> bytes:
    """Return the next message.

    Raises:
        EOFError: the other side has ended.
    """
    (length,) = _MESSAGE_LENGTH_FORMAT.unpack(_read_bytes(pipe, _MESSAGE_LENGTH_FORMAT.size))
    return _read_bytes(pipe, length)


def _read_bytes(pipe: IO[bytes], size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = pipe.read(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def get_type_name(value: object) -> str | None:
    """Return the name of the type of a returned value; None: the code returned None."""
    return None if value is None else type(value).__name__


def pack_job(function: Callable[[Job[Any]], object], attempt: Attempt) -> bytes:
    """Return the function, the row and the args of an attempt, pickled.

    Raises:
        Exception: the function or the args cannot be pickled.
    """
    return pickle.dumps((function, tuple(attempt.columns()), attempt.args))


def unpack_result(result: bytes) -> tuple[dict[str, str], str | None, BaseException | None]:
    """Return the recorded metadata as JSON texts, the type name of the returned value, and the
    raised error."""
    return pickle.loads(result)  # noqa: S301 (our own child's)


# -- code that runs in the child


class _ChildJob(Job[Any]):
    """The job object that the function receives in the child."""

    __slots__ = ()

    def __init__(self, row: tuple[Any, ...], args: Any) -> None:
        self._row, self._args, self._updates = row, args, {}

    @property
    def metadata_updates(self) -> dict[str, str]:
        return self._updates or {}

    @property
    def has_read_cancelled_flag(self) -> bool:
        """Whether the code of the job has read `job.cancelled`."""
        return hasattr(self, "_cancelled")

    def set_cancelled_flag(self) -> None:
        """Set the event `job.cancelled`."""
        self._cancelled_event().set()


class _WorkerMessageReader:
    """Reads the worker's messages in a thread, and ends the child when the worker has ended."""

    def __init__(self, pipe_from_worker: IO[bytes], pipe_to_worker: IO[bytes]) -> None:
        self._pipe_from_worker, self._pipe_to_worker = pipe_from_worker, pipe_to_worker
        self.packed_jobs: SimpleQueue[bytes] = SimpleQueue()
        self.running_job: _ChildJob | None = None
        """The running job."""

    def read_messages(self) -> None:
        """Read messages until the worker ends. Then end this process."""
        while True:
            try:
                message = _receive_message(self._pipe_from_worker)
            except (EOFError, OSError):
                _kill_own_process_group()
            if message == _CANCEL_MESSAGE:
                job = self.running_job
                if job is None or not job.has_read_cancelled_flag:
                    _kill_own_process_group()
                job.set_cancelled_flag()
            else:
                _send_message(
                    self._pipe_to_worker, _STARTED_MESSAGE
                )  # no conflict: the main thread sends nothing now
                self.packed_jobs.put(message)


def run_jobs(worker_pid: int, main_module: dict[str, str]) -> None:
    """Run jobs until the worker ends. This is the main function of a child."""
    _exit_when_worker_thread_ends(worker_pid)
    from_worker, to_worker = _move_stdio_pipes()
    inbox = _WorkerMessageReader(from_worker, to_worker)
    threading.Thread(target=inbox.read_messages, name="riverpy worker watch", daemon=True).start()
    prepare(main_module)
    while True:
        result = _run_job(inbox.packed_jobs.get(), inbox)
        _send_message(to_worker, result)


def _move_stdio_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Move the pipes from and to the worker to file descriptors other than stdin and stdout, and
    return them. The output of the job then goes to the worker's stderr."""
    pipes = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return pipes


def _exit_when_worker_thread_ends(worker_pid: int) -> None:
    """Make the kernel kill this process when the thread that started it ends."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(
        _PR_SET_PDEATHSIG, signal.SIGKILL
    )  # if this fails, the closed pipe ends the process
    if os.getppid() != worker_pid:  # the worker has already ended
        _kill_own_process_group()


def _kill_own_process_group() -> NoReturn:
    """Kill this process and the programs that its job started."""
    if sys.platform != "win32" and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _run_job(packed_job: bytes, reader: _WorkerMessageReader) -> bytes:
    """Run a job. Returns the recorded metadata, the type name of the returned value, and the error.
    The traceback is added as a note to the error, because a traceback cannot be pickled."""
    # `pickle.loads` imports user code, so it is called here and not in the thread of the inbox.
    function, row, args = pickle.loads(packed_job)  # noqa: S301 (our own worker's)
    job = reader.running_job = _ChildJob(row, args)
    returned: str | None = None
    error_to_send: BaseException | None = None
    try:
        returned = get_type_name(function(job))
    except BaseException as error:
        error_to_send = _make_error_picklable(error)
        error_to_send.add_note(f"In the process of the job:\n{make_storable_trace(error)}")
    finally:
        reader.running_job = None
    return pickle.dumps((job.metadata_updates, returned, error_to_send))


def _make_error_picklable(error: BaseException) -> BaseException:
    """Return the error. If the error cannot be pickled and unpickled, return a RuntimeError with
    its text."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 (our own bytes)
    except Exception:
        return RuntimeError(make_storable_error_text(error))
    return error
