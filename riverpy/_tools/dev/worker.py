"""The worker process of `riverpy dev`: `riverpy worker`, which does not outlive who started it.

It holds the reading end of a pipe whose other end only the process of `riverpy dev` has. That one's
end, `kill -9` included, is the pipe's: then this one stops as at a SIGTERM. At its end, or when it
does not end in time, it is killed with all that the jobs have started.

    python -m riverpy._tools.dev.worker PIPE SECONDS ARGUMENT…
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading

_orphaned = threading.Event()


def _end_with_parent(pipe: int, limit: float) -> None:
    os.read(pipe, 1)  # nobody writes: it returns at the end of the pipe
    _orphaned.set()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(limit)
    os.killpg(0, signal.SIGKILL)


def _end_group() -> None:
    """What `riverpy dev` does if it lives."""
    if _orphaned.is_set():
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    number, seconds = int(sys.argv[1]), float(sys.argv[2])
    os.set_inheritable(number, False)
    atexit.register(_end_group)  # the first to be registered is the last to be called
    threading.Thread(target=_end_with_parent, args=(number, seconds), daemon=True).start()
    sys.argv = ["riverpy", *sys.argv[3:]]
    runpy.run_module("riverpy", run_name="__main__")
