"""The notifications to systemd."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from riverpy._tools.health.systemd import SystemdNotifier

if TYPE_CHECKING:
    from pathlib import Path


def listening(address: str) -> socket.socket:
    """Return a socket that receives notifications."""
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(address)
    manager.settimeout(20)
    return manager


@pytest.mark.parametrize("is_abstract", [False, True])
def test_notify(tmp_path: Path, is_abstract: bool) -> None:
    """Values arrive, one per line, at a socket with a path and at one with an abstract name."""
    name = f"@riverpy-{secrets.token_hex(8)}" if is_abstract else str(tmp_path / "notify")
    with listening(name.replace("@", "\0", 1) if is_abstract else name) as manager:
        SystemdNotifier({"NOTIFY_SOCKET": name}).notify(READY=1, STATUS="working default")
        assert manager.recv(1000) == b"READY=1\nSTATUS=working default"


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": "/nowhere/at/all"}])
async def test_no_receiver(environ: dict[str, str]) -> None:
    """Without a manager, or after it has ended, nothing happens."""
    systemd = SystemdNotifier({**environ, "WATCHDOG_USEC": "1000"})
    systemd.notify(READY=1)
    async with systemd.run_watchdog_pings(lambda: True):
        await asyncio.sleep(0)


async def test_watchdog_while_alive(tmp_path: Path) -> None:
    """The watchdog is notified only while the worker is alive."""
    path = str(tmp_path / "notify")
    is_alive = True
    asked = asyncio.Event()

    def check() -> bool:
        asked.set()
        return is_alive

    with listening(path) as manager:
        systemd = SystemdNotifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "3000"})
        async with systemd.run_watchdog_pings(check):
            assert await asyncio.to_thread(manager.recv, 100) == b"WATCHDOG=1"
            is_alive = False
            for _ in range(2):  # what was sent before is in the socket then
                asked.clear()
                await asked.wait()
            manager.setblocking(False)
            with suppress(BlockingIOError):
                while manager.recv(100):
                    pass
            asked.clear()
            await asked.wait()
            with pytest.raises(BlockingIOError):
                manager.recv(100)


@pytest.mark.parametrize(
    "environ",
    [
        {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": str(os.getppid())},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "0"},
        {},
    ],
)
async def test_no_watchdog(tmp_path: Path, environ: dict[str, str]) -> None:
    """Without a watchdog, or with one for another process, no notification is sent."""
    path = str(tmp_path / "notify")
    with listening(path):
        systemd = SystemdNotifier({"NOTIFY_SOCKET": path, **environ})
        async with systemd.run_watchdog_pings(lambda: pytest.fail("the watchdog asked")):
            await asyncio.sleep(0.005)
