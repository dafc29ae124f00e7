"""The main function of a child process, which runs jobs for a worker, one at a time.

The pipes of stdin and stdout become the connection to the worker. They are moved to other file
descriptors, so that the code of a job cannot write into them by mistake. What jobs write to stdout
and stderr goes to the pipe of stderr. The worker reads this pipe line by line.
"""

from __future__ import annotations

import contextvars
import faulthandler
import os
import pickle
import select
import signal
import sys
import threading
from contextlib import suppress
from importlib import import_module
from multiprocessing.spawn import prepare
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any, NoReturn

import msgspec

from riverpy._main_import import MainGuardMissingError, mark_main_module_import
from riverpy._plugins import enter_blocking_job_contexts
from riverpy._work.child_messages import (
    CANCEL_JOB,
    CHECK_FUNCTIONS,
    CHILD_READY,
    CHILD_REFUSED,
    CHILD_STARTED,
    FUNCTIONS_CHECKED,
    JOB_ENDED,
    JOB_STARTED,
    METADATA_RECORDED,
    PROGRESS_REPORTED,
    receive_message,
    send_message,
)
from riverpy._work.failure import (
    find_error_of_type,
    make_storable_trace,
    make_storable_type_and_message,
)
from riverpy._work.returned_value import record_returned_value
from riverpy.context import running_job
from riverpy.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from riverpy.progress import JobProgress

PROGRESS_SEND_INTERVAL = 0.1
"""The shortest time between two messages with the progress of a job, in seconds. It protects the
worker from a job that reports its progress very often."""
_C_LINE_BUFFERING = 1
"""The value of C's constant _IOLBF (line buffering) on Linux."""


class _ChildJob(Job[Any]):
    """The job object that the job's function receives in the child process."""

    __slots__ = ("_worker",)

    def __init__(self, row: tuple[Any, ...], args: Any, worker: _WorkerConnection) -> None:
        self._row, self._args, self._metadata_updates, self._worker = row, args, None, worker

    def _record_metadata(self, key: str, json_text: str) -> None:
        """Record a metadata key and its value (JSON text), and send both to the worker at once. So
        the value is stored even if this process is killed."""
        super()._record_metadata(key, json_text)
        self._worker.send_metadata(self, key, json_text)

    def _report_progress(self, progress: JobProgress) -> None:
        self._worker.send_progress(self, msgspec.json.encode(progress))

    @property
    def has_read_cancelled_flag(self) -> bool:
        """Whether the code of the job has read `job.cancelled`."""
        return hasattr(self, "_cancelled_event")

    def set_cancelled_flag(self) -> None:
        """Set the event `job.cancelled`."""
        self._get_cancelled_event().set()


class _WorkerConnection:
    """The connection to the worker. A thread reads the worker's messages, and ends this process
    when the worker has ended."""

    def __init__(self, token: str, *, owns_process_group: bool) -> None:
        """`token` is a random text that marks the end of each job's output. If `owns_process_group`
        is True, the worker is not in the process group of this process, so the whole group may be
        killed."""
        self._pid, self._owns_process_group = os.getpid(), owns_process_group
        self._pipe_from_worker, self._pipe_to_worker, self._output = _move_worker_pipes_off_stdio()
        self._end_of_output = f"{token}\n".encode()
        self._send_lock = threading.Lock()
        self._running_job: _ChildJob | None = None
        self._unsent_progress: bytes | None = None
        """The newest progress of the running job, if it is not sent yet."""
        self._progress_timer: threading.Timer | None = None
        """The timer that sends the unsent progress. None if progress may be sent at once."""
        self.requests: SimpleQueue[tuple[bytes, bytes]] = SimpleQueue()
        """The messages from the worker that the main thread handles."""
        self._pipe_to_worker.write(token.encode())
        self.send(CHILD_STARTED, str(self._pid).encode())
        threading.Thread(
            target=self._read_messages, name="riverpy worker watch", daemon=True
        ).start()

    def _read_messages(self) -> None:
        while True:
            try:
                kind, content = receive_message(self._pipe_from_worker)
            except EOFError:  # the worker has ended
                self._kill_process_group()
            except OSError as error:
                with suppress(OSError):
                    os.write(2, f"riverpy: the job closed its worker's pipe: {error}\n".encode())
                self._kill_process_group()
            if kind == CANCEL_JOB:
                self._cancel_job()
            else:
                self.requests.put((kind, content))

    def _cancel_job(self) -> None:
        job = self._running_job
        if job is None or not job.has_read_cancelled_flag:
            self._kill_process_group()
        job.set_cancelled_flag()

    def _kill_process_group(self) -> NoReturn:
        """Kill this process and the programs that its job started."""
        if self._owns_process_group:
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    def send(self, kind: bytes, content: bytes = b"") -> None:
        """Send a message to the worker."""
        with self._send_lock:
            send_message(self._pipe_to_worker, kind, content)

    def send_metadata(self, job: _ChildJob, key: str, text: str) -> None:
        """Send recorded metadata to the worker. Do nothing if the job has ended, or if the calling
        process is a fork of this one."""
        if os.getpid() != self._pid:
            return
        with self._send_lock:
            if job is self._running_job:
                content = pickle.dumps((key, text))
                send_message(self._pipe_to_worker, METADATA_RECORDED, content)

    def send_progress(self, job: _ChildJob, content: bytes) -> None:
        """Send the progress of the job to the worker at once. If progress was sent within the last
        `PROGRESS_SEND_INTERVAL`, send it later, unless newer progress replaces it."""
        if os.getpid() != self._pid:
            return
        with self._send_lock:
            if job is self._running_job:
                self._unsent_progress = content
                if self._progress_timer is None:
                    self._send_newest_progress()

    def _send_newest_progress(self) -> None:
        """Send the unsent progress, if there is any. The caller must hold the lock."""
        self._progress_timer = None
        if self._unsent_progress is None:
            return
        send_message(self._pipe_to_worker, PROGRESS_REPORTED, self._unsent_progress)
        self._unsent_progress = None
        self._progress_timer = threading.Timer(
            PROGRESS_SEND_INTERVAL, self._send_progress_after_interval
        )
        self._progress_timer.daemon = True
        self._progress_timer.start()

    def _send_progress_after_interval(self) -> None:
        with self._send_lock, suppress(OSError):  # the worker may have ended
            # A timer that was started for an earlier job sends nothing.
            if threading.current_thread() is self._progress_timer:
                self._send_newest_progress()

    def report_job_start(self, job: _ChildJob) -> None:
        """Report to the worker that the job starts."""
        self._running_job = job
        self.send(JOB_STARTED)

    def report_job_end(self, result: bytes) -> None:
        """Mark the end of the job's output, then report the result of the job to the worker."""
        if os.getpid() != self._pid:  # this is a process that the job has forked
            os._exit(0)
        with self._send_lock:
            if self._progress_timer is not None:
                self._progress_timer.cancel()
            self._send_newest_progress()
            self._progress_timer = None
            self._running_job = None
        self._write_output_end_marker()
        self.send(JOB_ENDED, result)

    def _write_output_end_marker(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the job may have closed or replaced the stream
                stream.flush()
        self._reopen_closed_output()
        data = self._end_of_output
        while data:
            try:
                data = data[os.write(self._output, data) :]
            except BlockingIOError:  # a program that the job started made the pipe non-blocking
                select.select([], [self._output], [], 1.0)

    def _reopen_closed_output(self) -> None:
        """Open stdout and stderr again for the next job, if the job has closed them."""
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(self._output, number)
            stream = getattr(sys, name)
            if stream is None or getattr(stream, "closed", False):
                setattr(sys, name, os.fdopen(number, "w", buffering=1, errors="backslashreplace"))
        if sys.platform != "win32":
            os.set_blocking(self._output, True)


def run_jobs(
    *,
    main_module: dict[str, str],
    setup_functions: Sequence[str],
    token: str,
    owns_process_group: bool,
) -> NoReturn:
    """Call the setup functions, then run jobs until the worker ends. A setup function is named as
    `module:function`."""
    worker = _WorkerConnection(token, owns_process_group=owns_process_group)
    faulthandler.enable()  # after a crash in C code, the output contains tracebacks
    _enable_c_line_buffering()
    refusal = _call_setup_functions(setup_functions) or _import_main_module(main_module)
    if refusal is None:
        worker.send(CHILD_READY)
    else:
        worker.send(CHILD_REFUSED, refusal.encode("utf-8", "replace"))
    while True:
        kind, content = worker.requests.get()
        if kind == CHECK_FUNCTIONS:
            errors = [_find_import_error(one) for one in pickle.loads(content)]  # noqa: S301
            worker.send(FUNCTIONS_CHECKED, pickle.dumps(errors))
        else:
            _run_job(content, worker)


def _move_worker_pipes_off_stdio() -> tuple[IO[bytes], IO[bytes], int]:
    """Give new file descriptors to the two pipes that connect this process with the worker. Before,
    they were stdin and stdout. Afterwards, stdin is empty, and stdout is the same pipe as stderr.
    Return the pipe from the worker, the pipe to the worker, and a file descriptor for the
    output."""
    from_worker = os.fdopen(os.dup(0), "rb", buffering=0)
    to_worker = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return from_worker, to_worker, os.dup(2)


def _enable_c_line_buffering() -> None:
    """Make C code write each line of stdout at once. By default, C code writes to a pipe only when
    its buffer is full."""
    if sys.platform == "linux":
        import ctypes

        with suppress(ValueError, OSError, AttributeError):
            library = ctypes.CDLL(None)
            stdout = ctypes.c_void_p.in_dll(library, "stdout")
            library.setvbuf(stdout, None, _C_LINE_BUFFERING, 0)


def _call_setup_functions(names: Sequence[str]) -> str | None:
    """Call the setup functions. If one fails, return why this process cannot run jobs. Otherwise
    return None."""
    for name in names:
        module, _, function = name.partition(":")
        try:
            getattr(import_module(module), function)()
        except BaseException as error:
            return f"{name} failed in a process for jobs:\n{make_storable_trace(error)}"
    return None


def _import_main_module(main_module: dict[str, str]) -> str | None:
    """Import the worker's main module. If this fails, return why this process cannot run jobs.
    Otherwise return None."""
    name = next(iter(main_module.values()), "")
    try:
        with mark_main_module_import():
            prepare(main_module)
    except BaseException as error:
        if find_error_of_type(error, MainGuardMissingError) is not None:
            reason = "it would start the client again"
        else:
            text = make_storable_type_and_message(error)
            reason = f"it raises {text}:\n{make_storable_trace(error)}"
        return (
            f"a process for jobs cannot import {name}, which it has to import as a module: "
            f'{reason}\nPut the code that runs once under `if __name__ == "__main__":`'
        )
    return None


def _find_import_error(pickled_function: bytes) -> str | None:
    """Return why this process cannot import a function, or None if it can."""
    try:
        pickle.loads(pickled_function)  # noqa: S301 (our own worker's)
    except BaseException as error:
        return make_storable_type_and_message(error)
    return None


def _run_job(pickled_job: bytes, worker: _WorkerConnection) -> None:
    """Run a job, and report its error (or None) to the worker. The traceback is added to the error
    as a note, because a traceback cannot be pickled."""
    error_to_send: BaseException | None = None
    try:
        # Unpickling imports user code, so it runs in the main thread and before the job starts.
        function, row, args = pickle.loads(pickled_job)  # noqa: S301 (our own worker's)
        job = _ChildJob(row, args, worker)
        worker.report_job_start(job)
        contextvars.copy_context().run(_run_function_and_record_output, function, job)
    except BaseException as error:
        error_to_send = _make_error_picklable(error)
        error_to_send.add_note(f"In the process of the job:\n{make_storable_trace(error)}")
    worker.report_job_end(pickle.dumps(error_to_send))


def _run_function_and_record_output(function: Callable[[Job[Any]], object], job: Job[Any]) -> None:
    running_job.set(job)
    with enter_blocking_job_contexts():
        record_returned_value(job, function(job))


def _make_error_picklable(error: BaseException) -> BaseException:
    """Return `error`. If it cannot be pickled and unpickled, return a RuntimeError with its
    text."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 (our own bytes)
    except Exception:
        return RuntimeError(make_storable_type_and_message(error))
    return error
