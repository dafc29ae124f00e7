"""EmbeddedPostgres: shared use, killed processes, and starts after a crash."""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest

from riverpy._tools.embedded import processes
from riverpy._tools.embedded.server import default_base_directory
from riverpy.embedded import EmbeddedPostgres
from riverpy.errors import ConfigError, DatabaseError
from tests.tools.embedded._help import (
    eventually,
    mode,
    parent_pid,
    postmaster_pid,
    query,
    wait_for_end,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests.tools.embedded.conftest import ClientStarter

pytestmark = pytest.mark.timeout(180)  # a test may start a dozen processes on a busy machine

STARTS_NOTHING = """
import os, sys
seen = []
def watch(event, args):
    if event in {"subprocess.Popen", "os.fork", "os.mkdir", "os.exec", "socket.connect"}:
        seen.append(event)
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
        seen.append(f"{event} {args[0]}")
sys.dont_write_bytecode = True
sys.addaudithook(watch)
import riverpy.embedded
assert not seen, seen
"""


def url_of(client: subprocess.Popen[str]) -> str:
    """Let a client start the server. Return the URL that it prints."""
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write("go\n")
    client.stdin.flush()
    return client.stdout.readline().strip()


# --- what it is


def test_import_starts_nothing() -> None:
    """The import starts no process, creates no file and opens no connection."""
    subprocess.run([sys.executable, "-c", STARTS_NOTHING], check=True)


async def test_asyncpg_connects_to_the_url(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncpg connects to the URL, whatever the PG* variables are."""
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGHOST", "nowhere.invalid")
    monkeypatch.setenv("PGDATA", "/nowhere")
    monkeypatch.setenv("PGDATABASE", "nothing")
    with server as url:
        connection = await asyncpg.connect(url)
        assert connection.get_server_version().major == server.version[0]
        await connection.close()


@pytest.mark.usefixtures("server")
def test_is_closed_to_others_and_durable(base: Path) -> None:
    """The server has no TCP port, a private socket directory, and PostgreSQL's own durability."""
    server = EmbeddedPostgres("t", base_dir=base, settings={"max_connections": "33"})
    with server:
        assert query(server, "SHOW listen_addresses") == ""
        assert mode(Path(query(server, "SHOW unix_socket_directories"))) == 0o700
        assert mode(server.log_path) == 0o600
        assert mode(server.directory / "data") == 0o700
        assert query(server, "SHOW fsync") == "on"
        assert query(server, "SHOW synchronous_commit") == "on"
        assert query(server, "SHOW server_encoding") == "UTF8"
        assert query(server, "SHOW timezone") == "UTC"
        assert query(server, "SHOW max_connections") == "33"


def test_data_of_another_major(server: EmbeddedPostgres) -> None:
    """Programs of one major never use the data of another."""
    assert server.directory.name == f"t-pg{server.version[0]}"


@pytest.mark.parametrize("name", ["", "A", "a b", "../x", "-a", "a" * 41])
def test_wrong_names_are_refused(name: str) -> None:
    """A name must be a simple directory name."""
    with pytest.raises(ConfigError, match="lower case letters"):
        EmbeddedPostgres(name)


def test_default_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is RIVERPY_EMBEDDED_DIR, /var/lib for root, XDG_DATA_HOME, the home directory."""
    monkeypatch.delenv("RIVERPY_EMBEDDED_DIR", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_base_directory() == Path("/var/lib/riverpy")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/u")
    assert default_base_directory() == Path("/home/u/.local/share/riverpy")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_base_directory() == Path("/data/riverpy")
    monkeypatch.setenv("RIVERPY_EMBEDDED_DIR", "/elsewhere")
    assert default_base_directory() == Path("/elsewhere")


# --- who stops it


def test_runs_while_a_process_holds_it(server: EmbeddedPostgres, base: Path) -> None:
    """The server keeps running after its first holder and stops with the last one."""
    other = EmbeddedPostgres("t", base_dir=base)
    assert server.start() == other.start()
    pid = postmaster_pid(server)
    server.release()
    assert query(other, "SELECT 1") == "1"
    assert postmaster_pid(other) == pid
    other.release()
    wait_for_end(server)
    assert not server.is_running
    assert "database system is shut down" in server.log_path.read_text()


def test_killed_client_releases_the_server(
    server: EmbeddedPostgres, new_client: ClientStarter
) -> None:
    """When one of two clients is killed the server keeps running. When the other is killed it
    stops."""
    first, second = new_client(), new_client()
    assert url_of(first) == url_of(second) == server.url
    first.kill()
    first.wait()
    assert query(server, "SELECT 1") == "1"
    second.kill()
    wait_for_end(server)
    assert not server.is_running


def test_killed_supervisor_is_replaced(server: EmbeddedPostgres) -> None:
    """A server whose supervisor was killed gets a new one and still stops when it is unused."""
    server.start()
    pid = postmaster_pid(server)
    os.kill(parent_pid(pid), signal.SIGKILL)
    wait_for_end(server)
    assert query(server, "SELECT 1") == "1"
    server.start()
    assert postmaster_pid(server) == pid
    server.release()
    wait_for_end(server)
    assert not server.is_running


def test_stop_ends_a_held_server(server: EmbeddedPostgres, new_client: ClientStarter) -> None:
    """`stop` does not wait for clients, returns whether the server ran, and can be repeated."""
    url_of(new_client())
    assert server.stop()
    assert not server.is_running
    assert not server.stop()
    assert not EmbeddedPostgres("never", base_dir=server.directory.parent).stop()


def test_server_that_does_not_stop_is_an_error(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not stop is an error after a timeout."""
    server.start()
    pid = postmaster_pid(server)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(processes, "SERVER_STOP_TIMEOUT", 0.1)
    try:
        with pytest.raises(DatabaseError, match=rf"process {pid} did not end"):
            server.stop()
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for_end(server)


def test_remove_deletes_all(server: EmbeddedPostgres) -> None:
    """`remove` deletes everything, and the next start creates an empty server."""
    with server:
        query(server, "CREATE TABLE t ()")
    server.remove()
    assert not server.directory.exists()
    server.remove()
    with server:
        assert query(server, "SELECT count(*) FROM pg_class WHERE relname = 't'") == "0"


def test_removed_while_a_process_waits_to_start(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits for the start lock of a removed server locks the new file."""
    lock = processes.lock_file
    locked: list[Path] = []

    def lock_and_lose(path: Path, flags: int) -> int:
        descriptor = lock(path, flags)
        if path.name == "start.lock":
            locked.append(path)
            if len(locked) == 1:
                shutil.rmtree(server.directory)
        return descriptor

    monkeypatch.setattr(processes, "lock_file", lock_and_lose)
    with server:
        assert len(locked) == 2
        assert query(server, "SELECT 1") == "1"


# --- starting


def test_four_starts_at_once(base: Path, new_client: ClientStarter) -> None:
    """Four processes start a new server at once. One server is created, and all get its URL."""
    server = EmbeddedPostgres("t", base_dir=base)
    clients = [new_client() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(url_of, clients)) == {server.url}
    assert server.log_path.read_text().count("starting PostgreSQL") == 1


def test_starter_killed_in_initdb(
    base: Path, new_client: ClientStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An incomplete cluster is never used, and no second one is created while the orphaned
    initdb runs."""
    server = EmbeddedPostgres("t", base_dir=base)
    programs = base / "bin"
    programs.mkdir()
    signal_file = base / "signal"
    os.mkfifo(signal_file)
    signal_file.chmod(0o666)
    (programs / "postgres").symlink_to(server.binaries / "postgres")
    (programs / "initdb").write_text(
        f'#!/bin/sh\necho 1 > "$2/PG_VERSION"\necho $$ > {signal_file}\nexec sleep 1000\n'
    )
    (programs / "initdb").chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("RIVERPY_PG_BIN", str(programs))
        client = new_client()
    assert client.stdin is not None
    client.stdin.write("go\n")
    client.stdin.flush()
    initdb = int(signal_file.read_text())
    client.kill()
    client.wait()
    assert not processes.is_unlocked(server.directory / "start.lock")
    os.kill(initdb, signal.SIGKILL)
    with server:
        assert query(server, "SELECT 1") == "1"


def test_killed_server_recovers(server: EmbeddedPostgres) -> None:
    """A server killed with SIGKILL starts again with all committed data."""
    server.start()
    query(server, "CREATE TABLE t AS SELECT 1 AS n")
    killed = postmaster_pid(server)
    os.kill(killed, signal.SIGKILL)
    wait_for_end(server)
    server.start()
    assert postmaster_pid(server) != killed
    assert query(server, "SELECT n FROM t") == "1"


def test_waits_for_backends_that_outlive_their_server(server: EmbeddedPostgres) -> None:
    """No second server starts on the data while a backend of a killed server runs."""
    server.start()
    with new_backend(server) as backend:
        os.kill(backend, signal.SIGSTOP)
        os.kill(postmaster_pid(server), signal.SIGKILL)
        wait_for_end(server)
        with ThreadPoolExecutor(1) as thread:
            starting = thread.submit(server.start)
            try:
                eventually(lambda: "pre-existing shared memory" in server.log_path.read_text())
                assert not starting.done()
            finally:
                os.kill(backend, signal.SIGCONT)
            starting.result()
    assert query(server, "SELECT 1") == "1"


def test_stale_pid_file(server: EmbeddedPostgres) -> None:
    """A process id that another process has now, as after the restart of a container, does not
    prevent a start."""
    server.start()
    os.kill(postmaster_pid(server), signal.SIGKILL)
    wait_for_end(server)
    with new_other_process(server) as stranger:
        for path in (
            server.directory / "data/postmaster.pid",
            server.directory / "run/.s.PGSQL.5432.lock",
        ):
            _, *rest = path.read_text().splitlines(keepends=True)
            path.write_text("".join([f"{stranger.pid}\n", *rest]))
        assert not server.is_running
        server.start()
        assert query(server, "SELECT 1") == "1"
        assert stranger.poll() is None


@contextmanager
def new_backend(server: EmbeddedPostgres) -> Generator[int]:
    """Return the process id of a backend of an idle psql."""
    with subprocess.Popen(
        [server.binaries / "psql", server.url, "-XAtq"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as psql:
        assert psql.stdin is not None
        assert psql.stdout is not None
        psql.stdin.write("SELECT pg_backend_pid();\n")
        psql.stdin.flush()
        try:
            yield int(psql.stdout.readline())
        finally:
            psql.kill()


@contextmanager
def new_other_process(server: EmbeddedPostgres) -> Generator[subprocess.Popen[bytes]]:
    """Return the process id of another process of the same user."""
    owner = (server.directory / "data").stat()
    as_owner = {"user": owner.st_uid, "group": owner.st_gid} if os.geteuid() == 0 else {}
    with subprocess.Popen(["sleep", "1000"], **as_owner) as stranger:
        try:
            yield stranger
        finally:
            stranger.kill()


@pytest.mark.parametrize("part", ["x" * 100, "with,comma"])
async def test_path_that_no_socket_can_have(base: Path, part: str) -> None:
    """If the path is too long for a socket, the socket is in /tmp, private, and removed with the
    server."""
    server = EmbeddedPostgres("t", base_dir=base / part)
    with server as url:
        connection = await asyncpg.connect(url)
        sockets = Path(await connection.fetchval("SHOW unix_socket_directories"))
        await connection.close()
    assert sockets.parent == Path("/tmp")
    assert mode(sockets) == 0o700
    server.remove()
    assert not sockets.exists()


@pytest.mark.usefixtures("server")
def test_server_that_cannot_start_says_why(base: Path) -> None:
    """The error has the reason from the log and the path of the log, in one line."""
    server = EmbeddedPostgres("t", base_dir=base, settings={"no_such_setting": "1"})
    with pytest.raises(DatabaseError, match="unrecognized configuration") as caught:
        server.start()
    assert str(server.log_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert processes.is_unlocked(server.directory / "clients.lock")
    assert processes.is_unlocked(server.directory / "supervisor.lock")


def test_initdb_that_fails_says_why(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the reason of a failed initdb in one line."""
    programs = base / "bin"
    programs.mkdir()
    (programs / "postgres").symlink_to(EmbeddedPostgres("t").binaries / "postgres")
    (programs / "initdb").write_text("#!/bin/sh\necho no >&2\necho space >&2\nexit 1\n")
    (programs / "initdb").chmod(0o755)
    monkeypatch.setenv("RIVERPY_PG_BIN", str(programs))
    with pytest.raises(DatabaseError, match=r"initdb failed in .*: no space$"):
        EmbeddedPostgres("t", base_dir=base).start()


def test_directory_that_cannot_be_used(base: Path) -> None:
    """A file in place of the directory is a DatabaseError, not an OSError."""
    (base / "file").touch()
    with pytest.raises(DatabaseError, match="cannot use"):
        EmbeddedPostgres("t", base_dir=base / "file").start()


def test_start_lock_that_is_not_released(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start ends with an error if another process holds the lock for starting for too long."""
    monkeypatch.setattr("riverpy._tools.embedded.server.START_LOCK_TIMEOUT", 0.1)
    server.directory.mkdir(parents=True, exist_ok=True)
    other = processes.lock_file(server.directory / "start.lock", fcntl.LOCK_EX)
    try:
        with pytest.raises(DatabaseError, match=r"see which process holds its start\.lock"):
            server.start()
    finally:
        os.close(other)


def test_long_log_is_renamed(server: EmbeddedPostgres) -> None:
    """The next start renames a long log."""
    with server:
        pass
    wait_for_end(server)
    os.truncate(server.log_path, processes.SERVER_LOG_BYTES_MAX + 1)
    with server:
        assert server.log_path.stat().st_size < processes.SERVER_LOG_BYTES_MAX
    assert server.log_path.with_suffix(".log.old").exists()


# --- who runs it


def test_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user id without a name gets an error that says what to do."""
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(DatabaseError, match=r"user id 54321 has no name.*/etc/passwd"):
        EmbeddedPostgres("t")


def test_root_without_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root gets an error that says what to do if there is no user `postgres` or `nobody`."""

    def unknown(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(pwd, "getpwnam", unknown)
    with pytest.raises(DatabaseError, match="does not run as root"):
        EmbeddedPostgres("t")


def test_programs_in_a_private_folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs in a private directory work, and its mode does not change."""
    home = base / "home"
    (home / "lib").mkdir(parents=True)
    monkeypatch.delenv("RIVERPY_PG_BIN", raising=False)
    programs = EmbeddedPostgres("t").binaries
    package = programs.parent.parent
    for part in package.parent.glob(f"{package.name}*"):  # with the libraries beside it
        (home / "lib" / part.name).symlink_to(part)
    (home / "lib").chmod(0o750)
    home.chmod(0o700)
    private_programs = home / "lib" / programs.relative_to(package.parent)
    monkeypatch.setenv("RIVERPY_PG_BIN", str(private_programs))
    private = EmbeddedPostgres("t", base_dir=base)
    with private:
        assert query(private, "SELECT 1") == "1"
    private.remove()
    assert mode(home) == 0o700
    assert mode(home / "lib") == 0o750
