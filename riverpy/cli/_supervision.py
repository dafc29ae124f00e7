"""SupervisorConnection: connects a worker process with the supervisor that started it.

The supervisor writes its stop requests into a pipe. A thread of the worker reads the pipe, because
a job may block the event loop. When the supervisor ends, even after `kill -9`, the pipe is closed,
and the worker starts a soft stop.

A request for a soft stop has no effect if a stop has already started. A request for a hard stop has
no effect if a hard stop has already started. So a stop is not counted twice if systemd also sends
the signal to all processes of the unit.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_supervisor_connection: SupervisorConnection | None = None


class SupervisorConnection:
    """The connection of this process to its supervisor.

    Args:
        stop_pipe: the descriptor of the pipe for stop requests.
        health_socket: the descriptor of the socket over which the supervisor passes connections to
            the health server.
        number: the number of this process. The first one is 1.
    """

    def __init__(self, stop_pipe: int, health_socket: int, number: int) -> None:
        # These modules are imported here, because only a worker with a supervisor needs them.
        from riverpy._tools.health.private_connections import SupervisorConnectionListener
        from riverpy._tools.processes.worker_process import HARD_STOP_MESSAGE

        for descriptor in (stop_pipe, health_socket):
            os.set_inheritable(descriptor, False)
        self.number = number
        self.health_listener = SupervisorConnectionListener(socket.socket(fileno=health_socket))
        self.soft_stop: Callable[[], object] = _terminate_this_process
        """Starts a soft stop if no stop has started yet. The thread that reads the pipe calls this
        function."""
        self.hard_stop: Callable[[], object] = _terminate_this_process
        """Starts a hard stop if no hard stop has started yet. The thread that reads the pipe calls
        this function."""
        threading.Thread(
            target=self._read_stop_requests,
            args=(stop_pipe, HARD_STOP_MESSAGE),
            name="riverpy supervision",
            daemon=True,
        ).start()

    def _read_stop_requests(self, stop_pipe: int, hard_stop_message: bytes) -> None:
        while message := os.read(stop_pipe, 1):
            if message == hard_stop_message:
                self.hard_stop()
            else:
                self.soft_stop()
        self.soft_stop()  # the supervisor has ended


def connect_to_supervisor(stop_pipe: int, health_socket: int, number: int) -> None:
    """Connect this process to its supervisor. From now on, the supervisor can stop this process.
    The arguments are those of `SupervisorConnection`."""
    global _supervisor_connection
    _supervisor_connection = SupervisorConnection(stop_pipe, health_socket, number)


def get_supervisor_connection() -> SupervisorConnection | None:
    """Return the connection to the supervisor, or None if this process has no supervisor."""
    return _supervisor_connection


def _terminate_this_process() -> None:
    """Send SIGTERM to this process. Until the worker can handle stop requests, each stop request
    calls this function."""
    os.kill(os.getpid(), signal.SIGTERM)
