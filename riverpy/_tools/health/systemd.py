"""SystemdNotifier: notifies systemd that the worker is ready, stopping or alive."""

from __future__ import annotations

import os
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio

from riverpy._lifecycle import unwrap_single_error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

WATCHDOG_INTERVAL_FACTOR = 1 / 3
"""The interval between watchdog notifications, as a fraction of systemd's timeout
(`WatchdogSec`)."""


class SystemdNotifier:
    """Notifies systemd, the service manager. If the environment has no NOTIFY_SOCKET, its methods
    do nothing."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        self._socket_path = "\0" + path[1:] if path.startswith("@") else path
        self.watchdog_timeout = _read_watchdog_timeout(environ) if path else 0.0
        """The watchdog timeout in seconds; 0: this process has no watchdog."""

    def notify(self, **values: object) -> None:
        """Send values to systemd, as in `notify(READY=1)`. Do not wait for systemd."""
        if not self._socket_path:
            return
        text = "\n".join(f"{name}={value}" for name, value in values.items())
        with (
            # Ignore the error if systemd does not listen, its buffer is full or AF_UNIX is missing.
            suppress(OSError, AttributeError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        ):
            sender.setblocking(False)
            sender.sendto(text.encode(), self._socket_path)

    @asynccontextmanager
    async def run_watchdog_pings(self, is_alive: Callable[[], bool]) -> AsyncGenerator[None]:
        """Notify the watchdog at regular intervals during the `async with` block, while `is_alive`
        returns true. The event loop sends the notifications. So none is sent while the event loop
        is blocked."""
        if not self.watchdog_timeout:
            yield
            return
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._ping_watchdog_repeatedly, is_alive, name="riverpy watchdog")
                yield
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise unwrap_single_error(group) from None

    async def _ping_watchdog_repeatedly(self, is_alive: Callable[[], bool]) -> None:
        while True:
            if is_alive():
                self.notify(WATCHDOG=1)
            await anyio.sleep(self.watchdog_timeout * WATCHDOG_INTERVAL_FACTOR)


def _read_watchdog_timeout(environ: Mapping[str, str]) -> float:
    """Return the watchdog timeout in seconds; 0: this process has no watchdog."""
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    try:
        return max(int(environ.get("WATCHDOG_USEC", "0")) / 1e6, 0.0)
    except ValueError:
        return 0.0
