"""The account of the server. Only root can run these tests."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from riverpy._tools.embedded import account as _account
from riverpy._tools.embedded.account import ServerSystemUser
from riverpy._tools.embedded.binaries import copy_installation_if_not_runnable
from riverpy.embedded import EmbeddedPostgres
from riverpy.errors import DatabaseError
from tests.tools.embedded._help import mode, postmaster_pid, query, wait_for_end

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.timeout(180)  # a test may make two servers on a busy machine

# An ordinary user need not reach this interpreter, so the supervisor is forked and not executed.
AS_ANOTHER_USER = """
import os, socket, sys
from pathlib import Path
from riverpy._tools.embedded import processes as _processes
from riverpy.embedded import EmbeddedPostgres

user, base = int(sys.argv[1]), Path(sys.argv[2])
os.setgroups([])
os.setgid(user)
os.setuid(user)

def detach(self, role, argument):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.dup2(writing, 1)
        os.close(writing)
        _processes.main(role, argument)
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 1000) == b""

EmbeddedPostgres._start_detached_process = detach
"""
STARTS = """
server = EmbeddedPostgres("u", base_dir=base)
server.start()
assert server.is_running
print((server.directory / "data").stat().st_uid)
"""
KNOCKS = """
try:
    socket.socket(socket.AF_UNIX).connect(str(base / ".s.PGSQL.5432"))
except PermissionError:
    print("refused")
"""


def run_as(user: int, script: str, base: Path, programs: Path | None = None) -> str:
    """Run a script as another user. Return its output."""
    shown = subprocess.run(
        [sys.executable, "-c", AS_ANOTHER_USER + script, str(user), str(base)],
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
        env={**os.environ, **({"RIVERPY_PG_BIN": str(programs)} if programs else {})},
    )
    return shown.stdout.strip()


@pytest.mark.parametrize("stand_ins", [("postgres", "nobody"), ("no such user", "nobody")])
def test_root_uses_another_user(
    base: Path, monkeypatch: pytest.MonkeyPatch, stand_ins: Sequence[str]
) -> None:
    """Root runs the server as `postgres` or `nobody`, who owns only the data. With existing data
    the user stays the same, because no other user can run it."""
    with monkeypatch.context() as patch:
        patch.setattr(_account, "_NON_ROOT_USER_NAMES", stand_ins)
        first = EmbeddedPostgres("t", base_dir=base)
        with first:
            assert query(first, "SELECT 1") == "1"
            runner = Path(f"/proc/{postmaster_pid(first)}").stat().st_uid
    assert pwd.getpwuid(runner).pw_name in stand_ins
    assert first.directory.stat().st_uid == 0
    assert mode(first.directory) == 0o711
    assert (first.directory / "data").stat().st_uid == runner
    wait_for_end(first)
    later = EmbeddedPostgres("t", base_dir=base)
    with later:
        assert Path(f"/proc/{postmaster_pid(later)}").stat().st_uid == runner


def test_ordinary_user_runs_it(base: Path, server: EmbeddedPostgres) -> None:
    """An ordinary user runs the server itself, in directories that only this user can enter."""
    user = pwd.getpwnam("nobody").pw_uid
    place = base / "user"
    place.mkdir()
    os.chown(place, user, user)
    account = ServerSystemUser("nobody", user, user)
    programs = copy_installation_if_not_runnable(
        account, server._installation, base
    ).program_directory
    assert run_as(user, STARTS, place, programs) == str(user)
    assert mode(next(place.glob("u-pg*"))) == 0o700


def test_no_other_user_can_connect(base: Path, server: EmbeddedPostgres) -> None:
    """Another user of the machine cannot connect to the socket."""
    with server:
        assert run_as(65533, KNOCKS, server.directory / "run") == "refused"


def test_directory_out_of_reach(base: Path) -> None:
    """A directory that the server's user cannot enter is an error, and its mode does not change."""
    private = base / "private"
    private.mkdir(mode=0o700)
    with pytest.raises(DatabaseError, match=r"initdb failed in .* as user .*Permission denied"):
        EmbeddedPostgres("t", base_dir=private).start()
    assert mode(private) == 0o700


def test_private_umask(base: Path) -> None:
    """With root's umask 077 the server can still enter its directory."""
    script = "import sys; from pathlib import Path; from riverpy.embedded import EmbeddedPostgres\n"
    script += "EmbeddedPostgres('t', base_dir=Path(sys.argv[1])).start()"
    place = base / "new"
    subprocess.run([sys.executable, "-c", script, str(place)], check=True, umask=0o077)
    EmbeddedPostgres("t", base_dir=place).remove()


def test_programs_that_cannot_be_copied(
    base: Path, monkeypatch: pytest.MonkeyPatch, server: EmbeddedPostgres
) -> None:
    """Programs that the user cannot read and that depend on other files are an error. They are
    not copied."""
    private = base / "private"
    (private / "bin").mkdir(parents=True)
    private.chmod(0o700)
    for program in ("postgres", "initdb"):
        (private / "bin" / program).symlink_to(server.binaries / program)
    monkeypatch.setenv("RIVERPY_PG_BIN", str(private / "bin"))
    with pytest.raises(DatabaseError, match="cannot read"):
        EmbeddedPostgres("t", base_dir=base).start()


def test_socket_directory_of_another_user(base: Path) -> None:
    """A directory in /tmp that another user made with the same name is not used."""
    server = EmbeddedPostgres("t", base_dir=base / ("x" * 100))
    sockets = server._socket_directory
    sockets.mkdir()
    os.chown(sockets, 65533, 65533)
    try:
        with pytest.raises(DatabaseError, match="belongs to user id 65533"):
            server.start()
    finally:
        sockets.rmdir()
