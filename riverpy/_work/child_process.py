"""ChildProcess: a process that runs blocking jobs for a worker, one at a time. The worker is the
process in which the client runs.

Worker and child communicate over two pipes. A third pipe carries the output of the jobs. The child
ends when the worker ends, together with the programs that its jobs started: see `child_start`.

We do not use the process pool of a library such as pebble. Such a pool cannot send a cancel request
to a running job, because its processes take tasks from one shared queue. It does not kill process
groups, and its processes keep running if the worker is killed. It cannot start processes in a
daemonic process, and it mixes the output of the jobs.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from riverpy._main_import import get_main_module_location
from riverpy._plugins import process_wide_plugins
from riverpy._pydantic_models import decode_model, is_model_class
from riverpy._work.child_messages import (
    CANCEL_JOB,
    CHECK_FUNCTIONS,
    CHILD_REFUSED,
    JOB_ENDED,
    JOB_STARTED,
    METADATA_RECORDED,
    PROGRESS_REPORTED,
    RUN_JOB,
    read_until_token,
    receive_message,
    send_message,
)
from riverpy._work.child_output import ChildOutputLogger
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._work.attempt import Attempt
    from riverpy.job import Job
    from riverpy.worker import RegisteredWorker

PROCESS_START_TIMEOUT = 60.0
"""A new child process must be ready to call the function of its first job within this many
seconds."""
GUARD_PROCESS_EXIT_TIMEOUT = 1.0
"""After the process that runs jobs has ended, its guard (see `child_start`) must end within this
many seconds."""
_CHILD_START_SCRIPT = Path(__file__).with_name("child_start.py")


@dataclass(slots=True)
class JobInChild:
    """A job that a child process runs, with its callbacks and recorded metadata."""

    id: int
    kind: str
    pickled_job: bytes
    """The function, the row and the args, pickled."""
    on_start: Callable[[], None]
    """Called in the thread of `run_job` just before the job's function is called."""
    on_progress: Callable[[str], None]
    """Called in the thread of `run_job` for each progress report of the job, with the progress as
    JSON text."""
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    """The metadata that the job has recorded so far. The values are JSON texts."""


class ChildProcess:
    """The worker's object for one child process: it starts the process, sends jobs to it and kills
    it."""

    def __init__(self) -> None:
        from multiprocessing.spawn import get_executable  # few workers need this

        self._process = subprocess.Popen(  # noqa: S603 (our own interpreter)
            [get_executable(), "-P", "-u", str(_CHILD_START_SCRIPT), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # In a new session, Ctrl-C in a terminal does not reach the child, and `kill` also ends
            # the programs that the job has started.
            start_new_session=True,
        )
        pipes = self._process.stdin, self._process.stdout, self._process.stderr
        self._pipe_to_child, self._pipe_from_child, output = cast("tuple[IO[bytes], ...]", pipes)
        self._token = secrets.token_hex(16)
        setup = {
            "path": sys.path,
            "main_module": get_main_module_location(),
            "token": self._token,
            "setup_functions": [plugin.child_setup_path for plugin in process_wide_plugins],
        }
        with suppress(OSError):  # the child has ended: `run_job` reports it
            self._pipe_to_child.write(json.dumps(setup).encode() + b"\n")
            self._pipe_to_child.flush()
        self._output_log = ChildOutputLogger(output, self._token.encode())
        self._process_group_id: int | None = None
        """The id of the process that runs jobs, and of its process group; None: the child has not
        sent the id yet. On Linux, the guard process (see `child_start`) is in another group. So the
        guard is not killed with the group, and its exit shows how the job process ended."""
        self._is_ready = False
        self._refusal_text: str | None = None
        """The reason why the child cannot run jobs, or None."""
        self._has_sent_job = False
        """Whether a whole job was sent to the child, and its end was not received yet."""
        self._has_started_too_late = False
        self.is_job_cancelled = False
        """Whether the job of this child was cancelled. If so, the child runs no other job."""
        self.idle_since = 0.0
        """The time of the end of the last job, in monotonic seconds."""

    def run_job(self, job: JobInChild) -> BaseException | None:
        """Run a job, and return the error that it raised. This call blocks, so call it in a thread.

        Raises:
            ChildProcessError: the process has ended, or cannot run jobs.
        """
        self._output_log.add_next_job(job.id, job.kind)
        try:
            self._wait_until_ready()
            send_message(self._pipe_to_child, RUN_JOB, job.pickled_job)
            self._has_sent_job = True
            kind, content = receive_message(self._pipe_from_child)
            while kind != JOB_ENDED:
                self._pass_message_to_job(job, kind, content)
                kind, content = receive_message(self._pipe_from_child)
        except (EOFError, OSError, ValueError):
            raise self._kill_and_make_exit_error() from None
        finally:
            self._has_sent_job = False
        return _unpickle(content)

    def _pass_message_to_job(self, job: JobInChild, kind: bytes, content: bytes) -> None:
        """Handle a message about the running job. The message is of any type except JOB_ENDED."""
        if kind == JOB_STARTED:
            job.on_start()
        elif kind == METADATA_RECORDED:
            key, text = _unpickle(content)
            job.metadata[key] = text
        elif kind == PROGRESS_REPORTED:
            job.on_progress(content.decode())

    def find_import_errors(self, packed_functions: list[bytes]) -> list[str | None]:
        """Import functions in the child. Return a list that has, for each function, the text of the
        import error or None. This call blocks, so call it in a thread.

        Raises:
            ChildProcessError: the process has ended, or cannot run jobs.
        """
        try:
            self._wait_until_ready()
            send_message(self._pipe_to_child, CHECK_FUNCTIONS, _pickle(packed_functions))
            return _unpickle(receive_message(self._pipe_from_child)[1])
        except (EOFError, OSError, ValueError):
            raise self._kill_and_make_exit_error() from None

    def _wait_until_ready(self) -> None:
        if self._is_ready:
            return
        # The child writes the token before its first message. Code that Python runs at its start
        # may have written output to this pipe before the token.
        self._output_log.log_startup_output(
            read_until_token(self._pipe_from_child, self._token.encode())
        )
        self._process_group_id = int(receive_message(self._pipe_from_child)[1])
        kind, content = receive_message(self._pipe_from_child)
        if kind == CHILD_REFUSED:
            self._refusal_text = content.decode()
            raise EOFError
        self._is_ready = True

    def _kill_and_make_exit_error(self) -> ChildProcessError:
        """Kill the remaining processes of a child that has closed its pipe. Return the error to
        raise for its job."""
        if sys.platform == "linux":
            with suppress(subprocess.TimeoutExpired):
                # The exit code of the guard shows how the process that runs jobs has ended. Wait
                # for the guard only for a limited time: if a job's code has closed the pipe, the
                # process that runs jobs may keep running.
                self._process.wait(GUARD_PROCESS_EXIT_TIMEOUT)
        self._kill_process_group()
        exit_code = self._process.wait()
        if self._refusal_text is not None:
            return ChildProcessError(self._refusal_text)
        if self._has_started_too_late:
            return ChildProcessError(
                f"the process of the job was not ready after {PROCESS_START_TIMEOUT:g} s: put code "
                'that runs once under `if __name__ == "__main__":`, or import less'
            )
        return ChildProcessError(_describe_exit(exit_code))

    def cancel_job(self) -> None:
        """Cancel the running job, without blocking. If the job uses `job.cancelled`, the child sets
        this event. Otherwise the child ends. The child is killed if the job was not sent to it
        yet, or if it cannot receive the request at once."""
        self.is_job_cancelled = True
        if not self._has_sent_job or not _is_writable(self._pipe_to_child):
            self.kill()
            return
        try:
            send_message(self._pipe_to_child, CANCEL_JOB)
        except (OSError, ValueError):  # broken pipe: the child has ended
            self.kill()

    def kill(self) -> None:
        """Kill the process and the programs that it started, without waiting for their end."""
        self.is_job_cancelled = True
        self._kill_process_group()

    def kill_after_start_timeout(self) -> None:
        """Kill the process, because it was not ready in time."""
        self._has_started_too_late = True
        self._kill_process_group()

    def _kill_process_group(self) -> None:
        # If `returncode` is set, kill nothing: the process has ended, and another process may have
        # its id now.
        if sys.platform == "win32" or self._process_group_id is None:
            self._process.kill()
        elif self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process_group_id, signal.SIGKILL)

    def kill_and_wait(self, timeout: float) -> None:
        """Kill an idle process. Wait at most `timeout` seconds until it has ended and its output is
        logged."""
        self.kill()
        for pipe in (self._pipe_to_child, self._pipe_from_child):
            with suppress(OSError):  # close() flushes data, but the pipe may be broken
                pipe.close()
        give_up_at = time.monotonic() + timeout
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        self._output_log.wait_until_all_logged(max(give_up_at - time.monotonic(), 0.0))

    @property
    def has_exited(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None


def _is_writable(pipe: IO[bytes]) -> bool:
    """Return whether a short message can be written to a pipe without blocking."""
    if sys.platform == "win32":  # It has no such check. A child that is not suspended reads soon.
        return True
    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    return bool(poll.poll(0))


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
    cause = "; the usual cause is too little memory" if name == "SIGKILL" else ""
    return f"the process of the job was killed by signal {name}{cause}"


def _pickle(value: object) -> bytes:
    """Return the pickled value. pickle is imported here, because most workers do not need it."""
    import pickle

    return pickle.dumps(value)


def _unpickle(content: bytes) -> Any:
    """Return the value that our own child has pickled."""
    import pickle

    return pickle.loads(content)  # noqa: S301


def pickle_function(worker: RegisteredWorker) -> bytes:
    """Return the function and the args class of a registered worker, pickled.

    Raises:
        ConfigError: the function or the class is not found by its name.
    """
    try:
        return _pickle(
            (worker.work, worker.args_type if isinstance(worker.args_type, type) else None)
        )
    except Exception as error:
        raise ConfigError(
            f"job kind {worker.kind!r} cannot run in a process, because the process must find its "
            f"function and its args class by their names: {error}. If another decorator replaces "
            "the function, put @workers.blocking_job above it"
        ) from None


def pickle_job(function: Callable[[Job[Any]], object], attempt: Attempt) -> bytes:
    """Return the function, the row and the args of an attempt, pickled.

    Raises:
        Exception: the function or the args cannot be pickled.
    """
    import pickle

    args, columns = attempt.args, tuple(attempt.get_encoded_values())
    try:
        return pickle.dumps((function, columns, args))
    except (pickle.PicklingError, AttributeError):
        args_class: type[Any] = cast("Any", type(args))
        if not is_model_class(args_class):
            raise
        # The args contain a generic model such as Page[int], whose class pickle cannot find by its
        # name. So send the JSON text of the args, which the child decodes again.
        return pickle.dumps(
            (function, columns, _JsonPickledModel(args_class, attempt.encoded_args))
        )


class _JsonPickledModel(NamedTuple):
    """A pydantic model that is pickled as its JSON text. Unpickling returns the model."""

    cls: type[Any]
    text: str

    def __reduce__(self) -> tuple[Callable[[type[Any], str], Any], tuple[type[Any], str]]:
        return decode_model, (self.cls, self.text)
