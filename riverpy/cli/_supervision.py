"""SupervisorConnection: connects a worker process with the supervisor that started it.

The supervisor writes its requests to stop into a pipe. A thread reads the pipe, because a job may
block the event loop. When the supervisor ends, also after `kill -9`, the pipe is closed, and the
worker stops softly. A request has no effect if a stop of its kind has started: so a worker that
also receives signals, for example because systemd signals all processes of a unit, does not count
a stop twice.
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
        stop_pipe: the descriptor of the pipe with requests to stop.
        health_socket: the descriptor of the socket for private connections to the health server.
        number: the number of this process, from 1.
    """

    def __init__(self, stop_pipe: int, health_socket: int, number: int) -> None:
        # A worker without a supervisor does not load these modules.
        from riverpy._tools.health.private_connections import PrivateConnectionListener
        from riverpy._tools.processes.worker_process import HARD_STOP_MESSAGE

        for descriptor in (stop_pipe, health_socket):
            os.set_inheritable(descriptor, False)
        self.number = number
        self.health_listener = PrivateConnectionListener(socket.socket(fileno=health_socket))
        self.soft_stop: Callable[[], object] = _terminate_this_process
        """Called in a thread. It starts a soft stop, unless a stop has started."""
        self.hard_stop: Callable[[], object] = _terminate_this_process
        """Called in a thread. It starts a hard stop, unless a hard stop has started."""
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
    """Let the supervisor stop this process from now on. See SupervisorConnection for the
    arguments."""
    global _supervisor_connection
    _supervisor_connection = SupervisorConnection(stop_pipe, health_socket, number)


def get_supervisor_connection() -> SupervisorConnection | None:
    """Return the connection to the supervisor. None: this process has no supervisor."""
    return _supervisor_connection


def _terminate_this_process() -> None:
    """End this process at once, by a signal, because it does not handle stop requests yet."""
    os.kill(os.getpid(), signal.SIGTERM)
