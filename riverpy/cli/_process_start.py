"""The script that starts a worker process: `python _process_start.py PIPE SOCKET NUMBER MODULE
ARGUMENT…`.

The supervisor of `riverpy worker --processes` runs this script. PIPE and SOCKET are descriptors of
the supervisor's stop pipe and health socket. The first line in the pipe is the `sys.path` of the
supervisor, as JSON. MODULE is the module whose function `main` runs the command.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module


def main() -> None:
    """Connect to the supervisor, and run the command `riverpy` with the ARGUMENTs."""
    stop_pipe, health_socket, number = map(int, sys.argv[1:4])
    with os.fdopen(stop_pipe, "rb", buffering=0, closefd=False) as pipe:
        sys.path[:] = json.loads(pipe.readline())
    from riverpy.cli._supervision import connect_to_supervisor

    connect_to_supervisor(stop_pipe, health_socket, number)
    import_module(sys.argv[4]).main(sys.argv[5:], prog_name="riverpy")


if __name__ == "__main__":
    main()
