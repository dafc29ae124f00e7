"""WorkerProcess: the supervisor's object for one worker process."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import anyio
import msgspec

from riverpy._tools.health.private_connections import PrivateHttpClient
from riverpy._tools.health.worker_health import WorkerProcessStatus
from riverpy.config import HARD_STOP_TIMEOUT_DEFAULT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anyio.abc import Process

SOFT_STOP_MESSAGE = b"s"
"""The message that starts a soft stop, unless a stop has started. The end of the pipe has the same
meaning."""
HARD_STOP_MESSAGE = b"h"
"""The message that starts a hard stop, unless a hard stop has started."""
STATUS_TIMEOUT = 2.0
"""Seconds within which a worker must answer a request for its status."""
EXIT_MARGIN = 10.0
"""Seconds that a worker may take to end after its own time limits. The worker ends itself some
seconds after these limits; only a process that cannot do so is killed."""


class WorkerCommand(NamedTuple):
    """How to start a worker process."""

    program: Sequence[str]
    """The program. Its arguments are two descriptors (the pipe that stops it, and the socket of its
    health server) and the number of the process, and then `arguments`."""
    arguments: Sequence[str]
    """The name of the module that runs the command, and the arguments of the command."""
    environ: Mapping[str, str]
    python_path: Sequence[str]
    """The `sys.path` of the process."""


class WorkerProcess:
    """One worker process. It is in a session of its own, so that Ctrl-C in a terminal reaches only
    the supervisor, which then sends a message. A message has no effect the second time, so a
    worker that also receives a signal, for example from systemd, is not stopped twice.
    """

    def __init__(self, process: Process, stop_pipe: int, health: PrivateHttpClient) -> None:
        """Create the object of a started process. `start` calls this."""
        self._process, self._stop_pipe = process, stop_pipe
        self.health = health
        self._started_at = anyio.current_time()
        self._status: WorkerProcessStatus | None = None

    @classmethod
    async def start(cls, command: WorkerCommand, number: int) -> WorkerProcess:
        """Start a process. `number` counts from 1.

        Raises:
            OSError: the system cannot start another process.
        """
        stop_reader, stop_writer = os.pipe()
        own, other = socket.socketpair()
        try:
            os.set_blocking(stop_writer, False)
            os.write(stop_writer, json.dumps(list(command.python_path)).encode() + b"\n")
            descriptors = (stop_reader, other.fileno())
            process = await anyio.open_process(
                [*command.program, *map(str, descriptors), str(number), *command.arguments],
                env=command.environ,
                stdin=subprocess.DEVNULL,
                stdout=None,
                stderr=None,
                pass_fds=descriptors,
                start_new_session=True,
            )
        except BaseException:
            os.close(stop_writer)
            own.close()
            raise
        finally:
            os.close(stop_reader)
            other.close()
        return cls(process, stop_writer, PrivateHttpClient(own))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return anyio.current_time() - self._started_at

    @property
    def has_reported_status(self) -> bool:
        """Whether the process has reported its status."""
        return self._status is not None

    @property
    def exit_timeout(self) -> float:
        """The longest time from the start of a soft stop until the process ends by itself, in
        seconds."""
        status = self._status
        if status is None:
            return self.hard_stop_exit_timeout
        return (
            math.inf
            if status.soft_stop_timeout is None
            else status.soft_stop_timeout + self.hard_stop_exit_timeout
        )

    @property
    def hard_stop_exit_timeout(self) -> float:
        """The longest time from the start of a hard stop until the process ends by itself, in
        seconds."""
        if self._status is None:
            return HARD_STOP_TIMEOUT_DEFAULT.total_seconds() + EXIT_MARGIN
        return self._status.hard_stop_timeout + EXIT_MARGIN

    async def read_status(self) -> WorkerProcessStatus | None:
        """Request the status of the worker; None: it does not answer."""
        try:
            async with self.health.get("/status", STATUS_TIMEOUT) as response:
                self._status = msgspec.json.decode(
                    await response.read_body(), type=WorkerProcessStatus
                )
        except (OSError, ValueError):  # a TimeoutError is an OSError, a DecodeError a ValueError
            return None
        return self._status

    async def wait(self) -> int:
        """Wait for the end of the process. Return its exit code, or -N if signal N killed it."""
        try:
            return await self._process.wait()
        finally:
            os.close(self._stop_pipe)
            self._stop_pipe = -1  # the system may give the old number to another file
            self.health.close()

    def request_stop(self) -> None:
        """Start a soft stop, unless a stop has started."""
        self._send_message(SOFT_STOP_MESSAGE)

    def request_hard_stop(self) -> None:
        """Start a hard stop, unless a hard stop has started."""
        self._send_message(HARD_STOP_MESSAGE)

    def abort(self) -> None:
        """Let the process print the tracebacks of its threads and end."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGABRT)

    def kill(self) -> None:
        """Kill the process, and the programs in its process group that its jobs started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _send_message(self, message: bytes) -> None:
        with suppress(OSError):  # the process has ended
            os.write(self._stop_pipe, message)
