"""The worker process of `riverpy dev`: runs `riverpy worker`, and ends when its parent ends.

The worker reads from a pipe to the process of `riverpy dev`. When that process ends, even after
`kill -9`, the pipe is closed, and the worker stops as after SIGTERM. When it has stopped, or the
timeout has expired, it kills its process group, i.e. also all processes that its jobs have started.

    python -m riverpy._tools.dev.worker PIPE SECONDS ARGUMENT…
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading

_parent_ended_event = threading.Event()


def _stop_when_parent_ends(pipe_fd: int, kill_timeout: float) -> None:
    """Wait until the parent ends. Then send SIGTERM to this worker. If the worker still runs
    `kill_timeout` seconds later, kill its process group."""
    os.read(pipe_fd, 1)  # this returns when the parent ends, because the parent writes nothing
    _parent_ended_event.set()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(kill_timeout)
    os.killpg(0, signal.SIGKILL)


def _kill_own_process_group_if_parent_ended() -> None:
    """Kill the process group of this worker, if the parent has ended and cannot kill it."""
    if _parent_ended_event.is_set():
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    parent_pipe, kill_timeout = int(sys.argv[1]), float(sys.argv[2])
    os.set_inheritable(parent_pipe, False)
    atexit.register(
        _kill_own_process_group_if_parent_ended
    )  # atexit calls this function last, because it is registered first
    threading.Thread(
        target=_stop_when_parent_ends, args=(parent_pipe, kill_timeout), daemon=True
    ).start()
    sys.argv = ["riverpy", *sys.argv[3:]]
    runpy.run_module("riverpy", run_name="__main__")
