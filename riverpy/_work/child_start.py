"""The script that a worker starts as a child process: `python child_start.py WORKER_PID`.

On Linux, the started process becomes a guard. It forks the process that runs jobs, and then only
waits:

- When the worker ends, even by SIGKILL, the guard kills the process that runs jobs and its process
  group: the programs that the jobs started.
- When the process that runs jobs ends, the guard kills these programs too, and ends in the same
  way, with the same exit code or signal.

The kernel also kills the process that runs jobs when the guard ends. On other platforms there is no
guard: the started process runs jobs, and ends when its pipe from the worker is closed.

This file imports only small modules of the standard library, so that a guard needs little memory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from types import FrameType

PR_SET_PDEATHSIG = 1
"""The option of Linux's prctl that sets which signal a process receives when its parent dies."""


def main() -> None:
    """Read the setup (one line of JSON) from stdin, and run jobs."""
    is_session_leader = sys.platform != "win32" and os.getsid(0) == os.getpid()
    if sys.platform == "linux" and is_session_leader:
        _fork_and_guard_job_process(int(sys.argv[1]))
    with os.fdopen(0, "rb", buffering=0, closefd=False) as pipe:
        setup = json.loads(pipe.readline())
    sys.path[:] = setup["path"]
    from riverpy._work.child_main import run_jobs

    run_jobs(
        main_module=setup["main_module"],
        setup_functions=setup["setup_functions"],
        token=setup["token"],
        owns_process_group=is_session_leader,
    )


def _fork_and_guard_job_process(worker_pid: int) -> None:
    """Fork the process that runs jobs. This function returns only in the new process. The old
    process becomes the guard of the new process."""
    import ctypes

    prctl, guard_pid = ctypes.CDLL(None).prctl, os.getpid()
    job_process = os.fork()
    if job_process != 0:
        with suppress(OSError):  # the forked process has already called setpgid
            os.setpgid(job_process, job_process)
        # If prctl fails, the closed pipe shows that the worker has ended.
        prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
        _run_guard(worker_pid, job_process)
    os.setpgid(0, 0)  # the guard is not in the group that it kills
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard_pid:  # the guard ended before the call of prctl
        os._exit(1)


def _run_guard(worker_pid: int, job_process: int) -> NoReturn:
    """Wait until the worker or the process that runs jobs has ended. Then kill the remaining
    processes, and end this process."""
    import select

    os.closerange(1, 3)  # only the process that runs jobs uses the pipes to the worker
    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, _ignore_wakeup_signal)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def forward_signal(number: int, _frame: FrameType | None) -> None:
        os.kill(job_process, number)

    signal.signal(signal.SIGTERM, forward_signal)
    poll = select.poll()
    # An event mask of 0 reports no data, only that the worker has closed its end of the pipe.
    poll.register(0, 0)
    poll.register(signals, select.POLLIN)
    while True:
        if os.waitid(os.P_PID, job_process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            # Kill the group before `waitpid`. Afterwards, another process may have this id.
            _kill_process_group(job_process)
            _, status = os.waitpid(job_process, 0)
            _exit_with_code_or_signal(os.waitstatus_to_exitcode(status))
        if os.getppid() != worker_pid:
            _kill_process_group(job_process)
            os._exit(1)
        for descriptor, _ in poll.poll():
            if descriptor == 0:
                _kill_process_group(job_process)
                os._exit(1)
            os.read(signals, 512)


def _kill_process_group(job_process: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(job_process, signal.SIGKILL)


def _ignore_wakeup_signal(_number: int, _frame: FrameType | None) -> None:
    """Do nothing. The signals with this handler only wake `poll`."""


def _exit_with_code_or_signal(exit_code: int) -> NoReturn:
    """End this process with an exit code. If `exit_code` is negative, end it by the signal
    `-exit_code`."""
    if exit_code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL always has its default action
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code if exit_code >= 0 else 1)


if __name__ == "__main__":
    main()
