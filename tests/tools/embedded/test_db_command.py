"""The command `riverpy db`."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from riverpy._tools.embedded import processes
from riverpy.embedded import EmbeddedPostgres
from riverpy.errors import DatabaseError
from tests.tools.embedded._help import postmaster_pid, query, wait_for_end

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(180)  # a test may start a dozen processes on a busy machine

RIVERPY = [sys.executable, "-m", "riverpy"]


@pytest.fixture(autouse=True)
def place(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment with the directory of the servers."""
    monkeypatch.setenv("RIVERPY_EMBEDDED_DIR", str(base))


def db(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command without a terminal. Check its exit code and that it prints at most one
    line."""
    done = subprocess.run(
        [*RIVERPY, "db", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") <= 1
    return done


def test_start_url_stop(server: EmbeddedPostgres) -> None:
    """The server keeps running after `start`, `url` finds it, and `stop` ends it and its holder."""
    assert db("start", "t").stdout.strip() == server.url
    assert query(server, "SELECT 1") == "1"
    assert not processes.is_unlocked(server.directory / "holder.lock")
    assert db("start", "t").stdout.strip() == server.url
    assert db("url", "t").stdout.strip() == server.url
    shown = json.loads(db("url", "t", "--json").stdout)
    assert shown["url"] == server.url
    assert shown["directory"] == str(server.directory)
    assert db("stop", "t").stderr == "t: stopped\n"
    assert processes.is_unlocked(server.directory / "holder.lock")
    assert processes.is_unlocked(server.directory / "clients.lock")
    assert not server.is_running
    assert db("stop", "t").stderr == "t: was not running\n"


def test_kept_server_outlives_all_clients(server: EmbeddedPostgres) -> None:
    """The end of a client does not stop a server that `start` started."""
    db("start", "t")
    with server:
        pass
    assert server.is_running


def test_holder_ends_with_its_server(server: EmbeddedPostgres) -> None:
    """The holder ends when its server ends."""
    db("start", "t")
    os.kill(postmaster_pid(server), signal.SIGKILL)
    os.close(processes.lock_file(server.directory / "holder.lock", fcntl.LOCK_EX))
    assert not server.is_running


def test_url_of_a_server_that_does_not_run(server: EmbeddedPostgres) -> None:
    """`url` prints no URL of a stopped server. It says how to start the server."""
    done = db("url", "t", code=1)
    assert done.stdout == ""
    assert "t is not running: start it with `riverpy db start t`" in done.stderr


def test_no_such_server(base: Path) -> None:
    """A wrong name creates no server: `stop`, `url` and `psql` report that there is none."""
    for command in ("stop", "url", "psql"):
        done = db(command, "typo", code=1)
        assert done.stdout == ""
        assert "there is no embedded server typo" in done.stderr
        assert "riverpy db start typo" in done.stderr
    assert list(base.iterdir()) == []


def test_server_of_another_major(
    base: Path, server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`url` and `stop` find a server that runs with programs of another version."""
    db("start", "t")
    programs = base / "other"
    programs.mkdir()
    for name in ("postgres", "initdb"):
        (programs / name).write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 99.1'\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("RIVERPY_PG_BIN", str(programs))
    assert db("url", "t").stdout.strip() == server.url
    shown = json.loads(db("url", "t", "--json").stdout)
    assert (shown["version"], shown["source"]) == (str(server.version[0]), None)
    (other,) = EmbeddedPostgres.existing("t", base_dir=base)
    with pytest.raises(DatabaseError, match="but the programs in"):
        other.start()
    assert db("stop", "t").stderr == "t: stopped\n"
    assert not server.is_running


def test_psql_holds_the_server(server: EmbeddedPostgres) -> None:
    """`psql` starts the server, and the psql process keeps it running."""
    command = [*RIVERPY, "db", "psql", "t", "-XAtq"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as psql:
        assert psql.stdin is not None
        assert psql.stdout is not None
        psql.stdin.write("SELECT 41 + 1;\n")
        psql.stdin.flush()
        assert psql.stdout.readline() == "42\n"
        assert not processes.is_unlocked(server.directory / "clients.lock")
        psql.stdin.close()
    assert psql.returncode == 0
    wait_for_end(server)
    assert not server.is_running


def test_psql_arguments_without_a_name(base: Path) -> None:
    """Arguments that begin with a dash go to psql on the default server. The command returns its
    exit code."""
    assert db("psql", "-XAtqc", "SELECT 'a b'").stdout == "a b\n"
    db("psql", "-Xqc", r"\no-such-command", code=1)


def test_no_psql(
    base: Path, server: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without psql the error says what to install."""
    programs = base / "bin"
    programs.mkdir()
    for name in ("postgres", "initdb"):
        (programs / name).symlink_to(server.binaries / name)
    monkeypatch.setenv("RIVERPY_PG_BIN", str(programs))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "install PostgreSQL's client" in db("psql", "t", code=1).stderr


def test_reset_asks(server: EmbeddedPostgres) -> None:
    """`reset` deletes nothing without a confirmation, by option or at the terminal."""
    db("start", "t")
    assert "--yes" in db("reset", "t", code=2).stderr
    assert server.is_running
    assert reset_at_terminal("n\n") != 0
    assert server.is_running
    assert reset_at_terminal("y\n") == 0
    assert not server.directory.exists()


def test_reset_with_yes(server: EmbeddedPostgres) -> None:
    """`reset --yes` stops and deletes the server, even if clients use it. The server need not
    exist."""
    server.start()
    db("reset", "t", "--yes")
    assert not server.directory.exists()
    db("reset", "t", "--yes")


def test_errors_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing PostgreSQL is a failure in one line. Wrong usage and a wrong name have exit code
    2."""
    assert "lower case letters" in db("start", "NAME", code=2).stderr
    db("start", "a", "b", code=2)
    monkeypatch.setenv("RIVERPY_PG_BIN", "/nowhere")
    assert "RIVERPY_PG_BIN=/nowhere" in db("start", "t", code=1).stderr


def reset_at_terminal(answer: str) -> int:
    """Run `reset` with a terminal and answer its question. Return the exit code."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, answer.encode())
        return subprocess.run(
            [*RIVERPY, "db", "reset", "t"], stdin=theirs, capture_output=True
        ).returncode
    finally:
        os.close(ours)
        os.close(theirs)
