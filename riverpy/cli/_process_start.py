"""The script of a worker process: `python _process_start.py PIPE SOCKET NUMBER ARGUMENT…`.

The supervisor of `riverpy worker --processes` starts it. The first line in the pipe is the
`sys.path` of the supervisor, as JSON.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Run the command `riverpy` with these arguments."""
    stop_pipe, health_socket, number = map(int, sys.argv[1:4])
    with os.fdopen(stop_pipe, "rb", buffering=0, closefd=False) as pipe:
        sys.path[:] = json.loads(pipe.readline())
    from riverpy.cli import main as run_command
    from riverpy.cli._supervision import start_supervision

    start_supervision(stop_pipe, health_socket, number)
    run_command(sys.argv[4:], prog_name="riverpy")


if __name__ == "__main__":
    main()
