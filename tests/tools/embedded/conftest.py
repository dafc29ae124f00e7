"""A directory for the servers of one test, and processes that use them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from riverpy.embedded import EmbeddedPostgres

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    ClientStarter = Callable[[], subprocess.Popen[str]]

# Only root can be another user.
collect_ignore = [] if os.geteuid() == 0 else ["test_account.py"]

CLIENT = """
import sys
from pathlib import Path
from riverpy.embedded import EmbeddedPostgres

server = EmbeddedPostgres("t", base_dir=Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
print(server.start(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def base() -> Generator[Path]:
    """A directory for servers that any user can enter. Its servers are removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="rp-", dir="/tmp"))
    path.chmod(0o711)
    yield path
    for directory in path.glob("*-pg*"):
        EmbeddedPostgres(directory.name.rpartition("-")[0], base_dir=path).remove()
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def cluster() -> Generator[Path]:
    """The data of a server that has never run. A copy is faster than initdb."""
    path = Path(tempfile.mkdtemp(prefix="rp-", dir="/tmp"))
    path.chmod(0o711)
    server = EmbeddedPostgres("t", base_dir=path)
    server.start()
    server.stop()
    yield server.directory / "data"
    shutil.rmtree(path)


@pytest.fixture
def server(base: Path, cluster: Path) -> EmbeddedPostgres:
    """A server that does not run."""
    server = EmbeddedPostgres("t", base_dir=base)
    server.directory.mkdir()
    subprocess.run(["cp", "-a", cluster, server.directory], check=True)
    return EmbeddedPostgres("t", base_dir=base)


@pytest.fixture
def new_client(base: Path) -> Generator[ClientStarter]:
    """Return a function that starts a process which holds the server `t` until it is killed or
    its stdin is closed. The process prints a line when it is ready, waits for a line, starts the
    server and prints its URL."""
    clients: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(base)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        clients.append(client)
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        return client

    yield start
    for client in clients:
        client.kill()
        client.communicate()
