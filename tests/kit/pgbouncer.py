"""A PgBouncer in transaction mode in front of a server, on a Unix socket of its own."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import msgspec
import pytest

from riverpy import Client, Config

if TYPE_CHECKING:
    from collections.abc import Generator

PROGRAMS = ("pgbouncer", "setpriv")
_detours: dict[str, str] = {}
"""URLs of poolers by the URL of their database, for clients that are created without knowing the
pooler."""
START_LIMIT = 20.0
POOL_SIZE = 20
"""Connections to the server, by default."""


def is_installed() -> bool:
    """Return whether PgBouncer can be started on this machine."""
    return all(map(shutil.which, PROGRAMS))


def detour(url: str) -> str:
    """Return the URL by which tests connect to this database: the pooler's, if it has one."""
    return _detours.get(url, url)


@contextmanager
def through_pooler(url: str) -> Generator[None]:
    """Let all clients of this process that are created with this URL use a pooler."""
    init = Client.__init__

    def init_pooled(client: Client, database: Any = None, **options: Any) -> None:
        if isinstance(database, str) and database in _detours:
            config = options.get("config") or Config()
            options["config"] = msgspec.structs.replace(
                config, pooler=True, listen_url=config.listen_url or database
            )
            database = _detours[database]
        init(client, database, **options)

    with pooled(url) as _detours[url], pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "__init__", init_pooled)
        yield
    del _detours[url]


class Pooler:
    """A PgBouncer that can be killed and started again at the same address."""

    def __init__(self, url: str, directory: Path, size: int, settings: dict[str, object]) -> None:
        self.url = f"postgresql://postgres@/db?host={quote(str(directory))}&port=6432"
        """The URL of the database through the pooler."""
        self._directory = directory
        self._user = _account(_host(url))
        self._process: subprocess.Popen[bytes] | None = None
        os.chown(directory, self._user.pw_uid, self._user.pw_gid)
        lines = [f"{name} = {value}" for name, value in settings.items()]
        text = _settings(url, directory, size) + "\n".join([*lines, ""])
        (directory / "pgbouncer.ini").write_text(text)

    def start(self) -> None:
        """Start it, and wait until it accepts connections.

        Raises: RuntimeError: it did not start; the text is its log.
        """
        log, program = self._directory / "log", shutil.which("pgbouncer") or ""
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*_as_user(self._user), program, self._directory / "pgbouncer.ini"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        _wait_for(self._directory / ".s.PGSQL.6432", self._process, log)

    def kill(self) -> None:
        """Kill it. Its connections are cut, and new ones are refused."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        (self._directory / ".s.PGSQL.6432").unlink(missing_ok=True)


@contextmanager
def pooler(url: str, *, size: int = POOL_SIZE, **settings: object) -> Generator[Pooler]:
    """Run a pooler for the database of `url` with at most `size` connections, and other settings of
    `pgbouncer.ini`.

    Raises: RuntimeError: it did not start; the text is its log.
    """
    with tempfile.TemporaryDirectory(prefix="riverpy-pgbouncer-") as place:
        pooler = Pooler(url, Path(place), size, settings)
        try:
            pooler.start()
            yield pooler
        finally:
            pooler.kill()


@contextmanager
def pooled(url: str, *, size: int = POOL_SIZE) -> Generator[str]:
    """Yield the URL of a pooler for the database of `url` with at most `size` connections."""
    with pooler(url, size=size) as made:
        yield made.url


def _host(url: str) -> str:
    parts = urlsplit(url)
    return parts.hostname or parse_qs(parts.query).get("host", ["127.0.0.1"])[0]


def _account(host: str) -> pwd.struct_passwd:
    """Return the account that runs it: not root, and allowed to enter the directory of the server's
    socket."""
    if os.geteuid():
        return pwd.getpwuid(os.geteuid())
    return (
        pwd.getpwuid(Path(host).stat().st_uid) if host.startswith("/") else pwd.getpwnam("nobody")
    )


def _as_user(user: pwd.struct_passwd) -> list[str]:
    command = ["setpriv", "--pdeathsig", "KILL"]  # the kernel ends it with this process
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


def _wait_for(place: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    limit = time.monotonic() + START_LIMIT
    while not _listens(place):
        if process.poll() is not None or time.monotonic() > limit:
            raise RuntimeError(f"PgBouncer did not start: {log.read_text()}")
        time.sleep(0.02)


def _listens(place: Path) -> bool:
    """Return whether it accepts connections. The socket file exists a moment earlier."""
    with socket.socket(socket.AF_UNIX) as tried:
        try:
            tried.connect(str(place))
        except OSError:
            return False
    return True
