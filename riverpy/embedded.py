"""A private PostgreSQL for development, demos and tests. It needs no setup.

    with EmbeddedPostgres("demo") as url:
        ...

Importing this module starts no server. The server listens on a Unix socket in a directory that only
its owner can enter, so it needs no port and no password. Several processes can use it at the same
time. The server stops when no process uses it any more, even if the last process was killed. The
command `riverpy db` does the same from a shell.

It needs Linux or macOS. On other systems, give riverpy the URL of a PostgreSQL.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    raise ImportError(
        "the embedded PostgreSQL runs on Linux and macOS: on Windows give the URL of a PostgreSQL"
    )

from riverpy._tools.embedded.server import EmbeddedPostgres

__all__ = ["EmbeddedPostgres"]
