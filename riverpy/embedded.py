"""A private PostgreSQL for development, demos and tests, with nothing to set up.

    with EmbeddedPostgres("demo") as url:
        ...

Importing this package starts nothing. The server listens on a Unix socket in a directory that only
its owner can enter, so it needs neither a port nor a password. It runs while somebody holds it: any
number of processes may, and a process that dies in any way has let go. `riverpy db` is the same
from a shell.

Linux and macOS only. Elsewhere, give riverpy the URL of a PostgreSQL.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    raise ImportError(
        "the embedded PostgreSQL runs on Linux and macOS: on Windows give the URL of a PostgreSQL"
    )

from riverpy._tools.embedded.server import EmbeddedPostgres

__all__ = ["EmbeddedPostgres"]
