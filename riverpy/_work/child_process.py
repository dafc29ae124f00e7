"""ChildProcess: a process that runs blocking jobs, one at a time, and ends with its worker.

Worker and child talk over a pipe of their own, so what a job writes to stdout or stderr appears on
the worker's. The child ends when the worker does: the kernel kills it (Linux), and a thread of the
child reads the pipe, whose end is seen on every platform.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

import anyio

from riverpy._work.failure import error_text, trace_text
from riverpy.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.connection import Connection

    from riverpy._db.jobs import Stamp
    from riverpy._work.attempt import Attempt

IDLE_MAX = 300.0
"""Seconds that a child without a job is kept."""
END_TIMEOUT = 0.4
"""Seconds that killed children have to end, at the end of a run or of the worker."""
END_POLL = 0.005
"""Seconds between two checks whether a killed child has ended."""
_PR_SET_PDEATHSIG = 1
_CANCEL = b""
"""The message to a child that its job is cancelled. Any other is a job."""
_STARTED = b""
"""The first message of a child about a job. The second is its result."""


class ChildProcess:
    """One child, as its worker sees it.

    The kernel kills the child when the thread that started it ends: make it in the thread of the
    event loop.
    """

    def __init__(self) -> None:
        # Not fork: the worker has threads.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, os.getpid()), name="riverpy job"
        )
        self._process.start()
        theirs.close()
        self._is_working = False
        self.is_cancelled = False
        """Whether its job was cancelled; then it takes no other."""
        self.idle_since = 0.0
        """Monotonic seconds."""
        atexit.register(self.kill)  # multiprocessing waits for its children at exit

    def work(self, job: bytes) -> bytes:
        """Run a job, and return its result. Blocks; called in a thread.

        Raises:
            ChildProcessError: the process has ended.
        """
        try:
            self._pipe.send_bytes(job)
            self._pipe.recv_bytes()  # _STARTED: from now on the child reads what it is sent
            self._is_working = True
            return self._pipe.recv_bytes()
        except (EOFError, OSError):
            self.kill()  # a child that closed its pipe may still run
            self._process.join()
            raise ChildProcessError(_how_ended(self._process.exitcode)) from None
        finally:
            self._is_working = False

    def cancel(self) -> None:
        """Set the `job.cancelled` of its job; a child whose job does not use it ends. Does not
        block."""
        self.is_cancelled = True
        if not self._is_working:
            self.kill()
            return
        try:
            self._pipe.send_bytes(_CANCEL)
        except OSError:  # it has ended
            self.kill()

    def kill(self) -> None:
        """End the process. Does not wait for it."""
        self.is_cancelled = True
        self._process.kill()
        atexit.unregister(self.kill)

    def join(self, timeout: float) -> None:
        """Wait for the end of the process, for so many seconds at most. Blocks."""
        self._process.join(timeout)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.exitcode is not None


class ChildProcesses:
    """The children of one client: those that run jobs, and idle ones."""

    def __init__(self) -> None:
        self._idle: list[ChildProcess] = []
        self._working: dict[Stamp, ChildProcess] = {}

    def take(self, stamp: Stamp) -> ChildProcess:
        """A child for an attempt: an idle one, or a new one."""
        now = time.monotonic()
        while self._idle and now - self._idle[0].idle_since > IDLE_MAX:
            self._idle.pop(0).kill()
        child: ChildProcess | None = None
        while self._idle and (child is None or child.has_ended):
            child = self._idle.pop()
        if child is None or child.has_ended:
            child = ChildProcess()
        self._working[stamp] = child
        return child

    def release(self, stamp: Stamp) -> None:
        """The attempt has ended, and its child runs no job any more."""
        child = self._working.pop(stamp)
        if child.is_cancelled:
            child.kill()
        else:
            child.idle_since = time.monotonic()
            self._idle.append(child)

    def close(self) -> None:
        """End the idle children."""
        idle, self._idle = self._idle, []
        for child in idle:
            child.kill()
        give_up_at = time.monotonic() + END_TIMEOUT
        for child in idle:
            child.join(max(give_up_at - time.monotonic(), 0.0))

    async def end(self, stamps: Iterable[Stamp]) -> set[Stamp]:
        """End the children that run these attempts. Returns the attempts whose child has not ended
        after `END_TIMEOUT`. May be called from another thread and event loop."""
        left = {stamp: child for stamp in stamps if (child := self._working.get(stamp))}
        for child in left.values():
            child.kill()
        give_up_at = time.monotonic() + END_TIMEOUT
        while True:
            left = {stamp: child for stamp, child in left.items() if not child.has_ended}
            if not left or time.monotonic() >= give_up_at:
                return set(left)
            await anyio.sleep(END_POLL)


def _how_ended(exit_code: int | None) -> str:
    if exit_code is None:
        return "the process of the job has ended"
    if exit_code >= 0:
        return f"the process of the job exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = str(-exit_code)
    return f"the process of the job was killed by signal {name}"


# -- in the worker and in the child


def pack_job(function: Callable[[Job[Any]], None], attempt: Attempt) -> bytes:
    """What a child needs to run the attempt.

    Raises:
        Exception: the function or the args cannot be pickled.
    """
    return pickle.dumps((function, tuple(attempt.columns()), attempt.args))


def unpack_result(result: bytes) -> tuple[dict[str, str], BaseException | None]:
    """What the job recorded, as JSON texts, and what it raised."""
    return pickle.loads(result)  # noqa: S301 (our own child's)


# -- in the child


class _ChildJob(Job[Any]):
    """The job as the child sees it."""

    __slots__ = ()

    def __init__(self, row: tuple[Any, ...], args: Any) -> None:
        self._row, self._args, self._updates = row, args, {}

    @property
    def updates(self) -> dict[str, str]:
        return self._updates or {}

    @property
    def uses_cancelled(self) -> bool:
        """Whether its code has read `cancelled`."""
        return hasattr(self, "_cancelled")

    def set_cancelled(self) -> None:
        """Set `cancelled`."""
        self._cancelled_event().set()


class _Inbox:
    """What the worker sends: read by a thread, which also ends the child with the worker."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.jobs: SimpleQueue[bytes] = SimpleQueue()
        self.job: _ChildJob | None = None
        """The one that runs."""

    def read(self) -> None:
        """Read until the worker ends, then end the process."""
        while True:
            try:
                message = self._pipe.recv_bytes()
            except (EOFError, OSError):
                _end()
            if message == _CANCEL:
                self._cancel()
            else:
                self._pipe.send_bytes(_STARTED)  # nothing else is sent before the job begins
                self.jobs.put(message)

    def _cancel(self) -> None:
        job = self.job
        if job is None or not job.uses_cancelled:
            _end()
        job.set_cancelled()


def _serve(pipe: Connection, worker_pid: int) -> None:
    """Run jobs until the worker ends. The process leaves the terminal first: a Ctrl-C there is for
    the worker alone."""
    _end_with_thread_of(worker_pid)
    if hasattr(os, "setsid"):
        os.setsid()
    inbox = _Inbox(pipe)
    threading.Thread(target=inbox.read, name="riverpy worker watch", daemon=True).start()
    while True:
        pipe.send_bytes(_work(inbox.jobs.get(), inbox))


def _end_with_thread_of(worker_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # where it fails the pipe remains
    if os.getppid() != worker_pid:  # it had ended before
        _end()


def _end() -> NoReturn:
    os._exit(1)


def _work(packed: bytes, inbox: _Inbox) -> bytes:
    """Run a job; returns what it recorded, and what it raised with its traceback as a note, since a
    traceback cannot be pickled."""
    # This imports user code, which may take long.
    function, row, args = pickle.loads(packed)  # noqa: S301 (our own worker's)
    job = inbox.job = _ChildJob(row, args)
    portable: BaseException | None = None
    try:
        function(job)
    except BaseException as error:
        portable = _portable(error)
        portable.add_note(f"In the process of the job:\n{trace_text(error)}")
    finally:
        inbox.job = None
    return pickle.dumps((job.updates, portable))


def _portable(error: BaseException) -> BaseException:
    """The error, or one that says the same where it cannot be pickled and read back."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 (our own bytes)
    except Exception:
        return RuntimeError(f"{type(error).__qualname__}: {error_text(error)}")
    return error
