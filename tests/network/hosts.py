"""Hosts made of network namespaces on one switch.

No namespace has a name, and none touches the network of this machine. Each lives as long as a
process inside, which ends with this process, so that nothing is left after any end.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.kit.fleet import SERVER_SETTINGS, Server, Shutdown

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

PROGRAMS = ("ip", "nsenter", "setpriv", "unshare")
START_LIMIT = 60.0


def run(*command: str) -> None:
    """Run a short command.

    Raises: RuntimeError: it failed; the text is its output.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class Namespace:
    """A network namespace."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        """Id of a process inside."""
        self.enter = ("nsenter", "--target", str(pid), "--net")
        """Command prefix that runs a command inside."""

    def ip(self, *words: str) -> None:
        """Configure the network inside."""
        run(*self.enter, "ip", *words)


@contextmanager
def unshared() -> Generator[Namespace]:
    """Create an empty network namespace."""
    process = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo inside && exec cat"],
        stdin=subprocess.PIPE,  # at any end of this process the pipe closes, and `cat` exits
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        if not process.stdout.readline():
            raise RuntimeError(process.stderr.read().decode().strip())
        yield Namespace(process.pid)


class Host(Namespace):
    """A namespace with one cable to the switch."""

    def __init__(self, pid: int, switch: Namespace, number: int) -> None:
        super().__init__(pid)
        self.address = f"10.0.0.{number}"
        self._switch, self._port = switch, f"port{number}"
        ends = ("type", "veth", "peer", "name", "eth0", "netns", str(pid))
        switch.ip("link", "add", self._port, *ends)
        switch.ip("link", "set", self._port, "up")
        self.ip("address", "add", f"{self.address}/24", "dev", "eth0")
        self.ip("link", "set", "eth0", "up")
        self.heal()

    def cut(self) -> None:
        """Disconnect the cable at the switch. Data is lost both ways, without an error."""
        self._switch.ip("link", "set", self._port, "nomaster")

    def heal(self) -> None:
        """Connect the cable again."""
        self._switch.ip("link", "set", self._port, "master", "switch")


@contextmanager
def connected_hosts(count: int) -> Generator[list[Host]]:
    """Yield hosts that reach each other. The test is skipped where that is not permitted."""
    if os.geteuid() or not all(map(shutil.which, PROGRAMS)):
        pytest.skip(f"network namespaces need root and {', '.join(PROGRAMS)}")
    with ExitStack() as stack:
        try:
            switch = stack.enter_context(unshared())
            switch.ip("link", "add", "switch", "type", "bridge")
            switch.ip("link", "set", "switch", "up")
            namespaces = [stack.enter_context(unshared()) for _ in range(count)]
            hosts = [Host(one.pid, switch, number + 1) for number, one in enumerate(namespaces)]
        except RuntimeError as error:
            pytest.skip(f"network namespaces are not permitted here: {error}")
        yield hosts


def server_url(host: Host) -> str:
    """Run a server on this host, and yield its URL for other hosts."""
    return f"postgresql://postgres@{host.address}/postgres?sslmode=disable"


class HostServer(Server):
    """A fleet's server that listens on a host's address, and on its usual Unix socket."""

    def __init__(self, directory: Path, host: Host) -> None:
        super().__init__(directory)
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Create the cluster as usual, and run it on the host instead.

        The embedded server treats the new process as its own, and stops it at the end.
        """
        await super().start()
        await self.shut_down(Shutdown.FAST)
        postgres = self._postgres
        data = postgres.directory / "data"
        with (data / "pg_hba.conf").open("a") as rules:
            rules.write("host all all 10.0.0.0/24 trust\n")
        owner = data.stat()
        settings = SERVER_SETTINGS | {
            "listen_addresses": self._host.address,
            "unix_socket_directories": parse_qs(urlsplit(postgres.url).query)["host"][0],
        }
        with postgres.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *self._host.enter,
                    *("setpriv", "--reuid", str(owner.st_uid), "--regid", str(owner.st_gid)),
                    *("--clear-groups", postgres.binaries / "postgres"),
                    *(word for item in settings.items() for word in ("-c", "=".join(item))),
                    *("-D", data),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
            )
        async with asyncio.timeout(START_LIMIT):
            while not postgres.is_running:
                assert self._process.poll() is None, postgres.log_path.read_text()
                await asyncio.sleep(0.02)
        await self.come_back()

    async def remove(self) -> None:
        """Stop it and delete its data."""
        await super().remove()
        if self._process is not None:
            self._process.wait(START_LIMIT)
