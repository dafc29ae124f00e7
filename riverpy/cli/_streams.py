"""The standard streams of a process that may have been started with some of them closed."""

from __future__ import annotations

import os
import sys

_MODES = ("r", "w", "w")


def open_missing_streams() -> None:
    """Open the null device in place of each closed stdin, stdout and stderr.

    Otherwise the next descriptor that is opened, for example a socket, becomes a standard stream,
    and output for the terminal is sent to the database.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < len(_MODES):
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    streams = [
        stream or open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 (it stays open)
        for number, (stream, mode) in enumerate(
            zip((sys.stdin, sys.stdout, sys.stderr), _MODES, strict=True)
        )
    ]
    sys.stdin, sys.stdout, sys.stderr = streams
