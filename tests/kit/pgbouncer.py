"""A PgBouncer in transaction mode before a server, on a Unix socket of its own."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Generator

PROGRAMS = ("pgbouncer", "setpriv")
START_LIMIT = 20.0
POOL_SIZE = 20
"""Connections to the server, unless told otherwise."""


def is_installed() -> bool:
    """Whether it can be started here."""
    return all(map(shutil.which, PROGRAMS))


@contextmanager
def pooled(url: str, *, size: int = POOL_SIZE) -> Generator[str]:
    """The URL of a pooler that leads to the database of `url`, by at most `size` connections.

    Raises:
        RuntimeError: it did not start; the text is its log.
    """
    with tempfile.TemporaryDirectory(prefix="riverpy-pgbouncer-") as place:
        directory = Path(place)
        user = _account(_host(url))
        os.chown(directory, user.pw_uid, user.pw_gid)
        (directory / "pgbouncer.ini").write_text(_settings(url, directory, size))
        log = directory / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*_as_user(user), shutil.which("pgbouncer") or "", directory / "pgbouncer.ini"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        with process:
            try:
                _wait_for(directory / ".s.PGSQL.6432", process, log)
                yield f"postgresql://postgres@/db?host={quote(place)}&port=6432"
            finally:
                process.kill()


def _host(url: str) -> str:
    parts = urlsplit(url)
    return parts.hostname or parse_qs(parts.query).get("host", ["127.0.0.1"])[0]


def _account(host: str) -> pwd.struct_passwd:
    """Who runs it: not root, and somebody who may enter the directory of the server's socket."""
    if os.geteuid():
        return pwd.getpwuid(os.geteuid())
    return (
        pwd.getpwuid(Path(host).stat().st_uid) if host.startswith("/") else pwd.getpwnam("nobody")
    )


def _as_user(user: pwd.struct_passwd) -> list[str]:
    command = ["setpriv", "--pdeathsig", "KILL"]  # it ends with this process, however that ends
    if not os.geteuid():
        command += ["--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--clear-groups"]
    return command


def _settings(url: str, directory: Path, size: int) -> str:
    parts = urlsplit(url)
    options = {name: values[0] for name, values in parse_qs(parts.query).items()}
    target = {
        "host": _host(url),
        "port": str(parts.port or options.get("port", 5432)),
        "dbname": unquote(parts.path[1:]),
        "user": unquote(parts.username or "postgres"),
        "password": unquote(parts.password or ""),
    }
    words = " ".join(f"{name}='{value}'" for name, value in target.items() if value)
    return f"""[databases]
db = {words}
[pgbouncer]
listen_addr =
listen_port = 6432
unix_socket_dir = {directory}
auth_type = any
pool_mode = transaction
default_pool_size = {size}
max_client_conn = 400
"""


def _wait_for(socket: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    limit = time.monotonic() + START_LIMIT
    while not socket.exists():
        if process.poll() is not None or time.monotonic() > limit:
            raise RuntimeError(f"PgBouncer did not start: {log.read_text()}")
        time.sleep(0.02)
