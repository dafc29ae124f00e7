"""WorkerProcess: one worker process, as the supervisor sees it."""

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

from riverpy._tools.health.private_connections import WorkerHealthClient
from riverpy._tools.health.worker_health import WorkerProcessStatus
from riverpy.config import HARD_STOP_TIMEOUT_DEFAULT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anyio.abc import Process

SOFT_STOP_MESSAGE = b"s"
"""The message that starts a soft stop. The worker ignores it after a stop has started. If the pipe
is closed, the worker also starts a soft stop."""
HARD_STOP_MESSAGE = b"h"
"""The message that starts a hard stop. The worker ignores it after a hard stop has started."""
STATUS_TIMEOUT = 2.0
"""Seconds within which a worker must answer a request for its status."""
EXIT_MARGIN = 10.0
"""Seconds that the supervisor waits beyond a worker's own stop timeouts. Then it kills the worker.
A worker usually ends by itself some seconds after these timeouts."""


class WorkerStartCommand(NamedTuple):
    """How to start a worker process."""

    program: Sequence[str]
    """The start of the command line: the executable and its first arguments. `WorkerProcess.start`
    appends two file descriptors (the pipe that stops the worker, and the socket of its health
    server), then the number of the process, then `arguments`."""
    arguments: Sequence[str]
    """The name of the module that runs the command, and the arguments of the command."""
    environ: Mapping[str, str]
    python_path: Sequence[str]
    """The `sys.path` of the process."""


class WorkerProcess:
    """One worker process, as the supervisor sees it.

    The process is in a session of its own, so Ctrl-C in a terminal reaches only the supervisor,
    which then sends a message to the worker. If the worker also receives a signal, for example from
    systemd, it still stops only once.
    """

    def __init__(self, process: Process, stop_pipe: int, health: WorkerHealthClient) -> None:
        """Keep the connections to a started process. Only `start` calls this."""
        self._process, self._stop_pipe = process, stop_pipe
        self.health = health
        self._started_at = anyio.current_time()
        self._status: WorkerProcessStatus | None = None

    @classmethod
    async def start(cls, command: WorkerStartCommand, number: int) -> WorkerProcess:
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
        return cls(process, stop_writer, WorkerHealthClient(own))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def age(self) -> float:
        """Seconds since the start of the process."""
        return anyio.current_time() - self._started_at

    @property
    def has_reported_status(self) -> bool:
        """Whether the process has reported its status."""
        return self._status is not None

    @property
    def exit_timeout(self) -> float:
        """Seconds that the supervisor waits after `request_stop` until the process has ended.
        Infinity: no limit."""
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
        """Seconds that the supervisor waits after `request_hard_stop` until the process has
        ended."""
        if self._status is None:
            return HARD_STOP_TIMEOUT_DEFAULT.total_seconds() + EXIT_MARGIN
        return self._status.hard_stop_timeout + EXIT_MARGIN

    async def read_status(self) -> WorkerProcessStatus | None:
        """Request the status of the worker. Return None if it does not answer."""
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
        """Send the message that starts a soft stop."""
        self._send_message(SOFT_STOP_MESSAGE)

    def request_hard_stop(self) -> None:
        """Send the message that starts a hard stop."""
        self._send_message(HARD_STOP_MESSAGE)

    def abort(self) -> None:
        """Send SIGABRT, so that the process prints the tracebacks of its threads and ends."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGABRT)

    def kill(self) -> None:
        """Kill the process. Also kill the programs that its jobs started and that are still in its
        process group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _send_message(self, message: bytes) -> None:
        with suppress(OSError):  # the process has ended
            os.write(self._stop_pipe, message)
