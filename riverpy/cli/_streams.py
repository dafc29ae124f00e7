"""The standard streams of the process, also where who started it has closed some."""

from __future__ import annotations

import os
import sys

_MODES = ("r", "w", "w")


def open_missing_streams() -> None:
    """Put the null device where stdin, stdout or stderr is closed.

    Else the next descriptor that is opened, of a socket or an event loop, becomes a standard
    stream: what is meant for the terminal goes to the database, or the process is aborted.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < len(_MODES):
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    streams = [
        stream or open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 (it stays)
        for number, (stream, mode) in enumerate(
            zip((sys.stdin, sys.stdout, sys.stderr), _MODES, strict=True)
        )
    ]
    sys.stdin, sys.stdout, sys.stderr = streams
