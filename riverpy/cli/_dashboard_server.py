"""The web server of the dashboard, for the commands that serve it."""

from __future__ import annotations

import errno
import signal
import socket
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from riverpy.cli._run import EXIT_USAGE_ERROR, CommandError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import FrameType

    from starlette.applications import Starlette

    from riverpy._tools.health.http import Address
    from riverpy.client import Client

DASHBOARD_PORT_DEFAULT = 8080
STOP_TIMEOUT = 5
"""The maximum number of seconds for which the server waits for running requests after a stop
signal."""
DASHBOARD_POOL_SIZE = 4
"""The number of connections in the pool of a client that only the dashboard uses."""


def require_web_packages(command: str) -> None:
    """Check that the packages which the dashboard needs are installed. Raise CommandError if
    not."""
    try:
        import uvicorn  # noqa: F401  # pyright: ignore[reportUnusedImport] (a check)

        from riverpy.web import dashboard  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise CommandError(
            f"{command} needs more packages: pip install 'riverpy-queue[web]' ({error})",
            exit_code=EXIT_USAGE_ERROR,
        ) from error


def open_listening_socket(address: Address, *, option: str = "--port") -> socket.socket:
    """Return a socket that listens on an address. If this fails, raise CommandError. If another
    process uses the port, the error text says that `option` can choose another port."""
    host, port = address
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        hint = (
            f"another process uses the port: choose another one with {option}"
            if error.errno == errno.EADDRINUSE
            else error.strerror or str(error)
        )
        raise CommandError(f"cannot listen on {address}: {hint}") from error


def is_port_free(address: Address) -> bool:
    """Return whether a server can listen on this address."""
    try:
        open_listening_socket(address).close()
    except CommandError:
        return False
    return True


class DashboardServer:
    """Serves the dashboard until a signal arrives."""

    def __init__(self, address: Address, make_app: Callable[[Client], Starlette]) -> None:
        self._address, self._make_app = address, make_app
        self._is_serving = False
        """Whether uvicorn runs the server and handles the signals."""

    async def serve(
        self,
        open_client: Callable[[AsyncExitStack], Awaitable[Client]],
        print_address: Callable[[Address], None],
    ) -> None:
        """Open the client, and serve the dashboard until SIGINT or SIGTERM.

        Args:
            open_client: opens the client, and returns it. It gets an exit stack, to which it adds
                what must be closed when the server has stopped.
            print_address: is called with the address when browsers can connect.
        """
        import uvicorn

        with open_listening_socket(self._address) as listener:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._handle_signal)
            async with AsyncExitStack() as stack:
                client = await open_client(stack)
                config = uvicorn.Config(
                    self._make_app(client),
                    log_config=None,
                    access_log=False,
                    server_header=False,
                    timeout_graceful_shutdown=STOP_TIMEOUT,
                )
                port = listener.getsockname()[1]
                print_address(self._address._replace(port=port))
                self._is_serving = True
                await uvicorn.Server(config).serve(sockets=[listener])

    def _handle_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Exit if the server has not started yet. While the server runs, uvicorn handles the
        signals itself. After the server has stopped, uvicorn raises the signals again, and this
        method ignores them."""
        if not self._is_serving:
            raise SystemExit(0)
