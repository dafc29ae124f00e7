"""Connections between a supervisor and the health server of one of its workers.

The supervisor and the worker share a pair of connected sockets. For each request, the supervisor
creates a new pair, sends one socket of the new pair to the worker, and sends the request over the
other socket. So the connections need no port and no file, and no other process can connect.
"""

from __future__ import annotations

import math
import os
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
from anyio.abc import UNIXSocketStream

from riverpy._tools.health.http_client import send_get_request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy._tools.health.http_client import HttpResponse

_HOST_HEADER = "localhost"
_SOCKET_MESSAGE = b"+"
"""The data of the message that carries a socket. A message must contain at least one byte."""
_NO_ANSWER_ERROR = "no answer"


class SupervisorConnectionListener:
    """Accepts the supervisor's connections in the worker process."""

    def __init__(self, shared_socket: socket.socket) -> None:
        shared_socket.setblocking(False)
        self._shared_socket = shared_socket

    async def accept(self) -> UNIXSocketStream:
        """Wait for the next connection. If the supervisor has ended, wait forever."""
        while True:
            await anyio.wait_readable(self._shared_socket)
            try:
                message, descriptors, *_ = socket.recv_fds(
                    self._shared_socket, len(_SOCKET_MESSAGE), 1
                )
            except BlockingIOError:
                continue
            if not message:
                await anyio.sleep_forever()
            for descriptor in descriptors:  # empty if this process has too many open files
                os.set_inheritable(descriptor, False)
                connection = socket.socket(fileno=descriptor)
                connection.setblocking(False)
                return await UNIXSocketStream.from_socket(connection)

    async def aclose(self) -> None:
        """Accept no more connections."""
        self._shared_socket.close()


class WorkerHealthClient:
    """Sends requests from the supervisor to the health server of one worker."""

    def __init__(self, shared_socket: socket.socket) -> None:
        shared_socket.setblocking(False)
        self._shared_socket = shared_socket
        self._unanswered_connection: socket.socket | None = None
        """The connection of a request that timed out, or None. Until the worker answers this
        request, the worker counts as blocked, and the supervisor sends it no other requests."""

    @asynccontextmanager
    async def get(self, target: str, timeout: float) -> AsyncGenerator[HttpResponse]:
        """Send `GET target`, and yield the response when its headers have arrived.

        Raises:
            OSError: the worker has ended, or is not able to answer.
            TimeoutError: there was no response within `timeout` seconds, or the worker has not yet
                answered an earlier request that timed out.
        """
        if self._is_worker_blocked():
            raise TimeoutError(_NO_ANSWER_ERROR)
        own, other = socket.socketpair()
        own.setblocking(False)  # before `dup`, so that the copy is non-blocking too
        # `stream` closes `own`, but this copy stays open. After a timeout, the worker's late answer
        # arrives here.
        answer = own.dup()
        try:
            socket.send_fds(self._shared_socket, [_SOCKET_MESSAGE], [other.fileno()])
            stream = await UNIXSocketStream.from_socket(own)
            with anyio.move_on_after(timeout) as scope:
                async with send_get_request(stream, _HOST_HEADER, target) as response:
                    scope.deadline = math.inf
                    other.close()  # not earlier: macOS can lose a sent socket that is closed early
                    yield response
            if scope.cancelled_caught:
                self._replace_unanswered_connection(answer.dup())
                raise TimeoutError(_NO_ANSWER_ERROR)
        finally:
            for one in (own, other, answer):
                one.close()

    def close(self) -> None:
        """Close the supervisor's sockets. The supervisor calls this when the worker has ended."""
        self._shared_socket.close()
        self._replace_unanswered_connection(None)

    def _is_worker_blocked(self) -> bool:
        if self._unanswered_connection is None:
            return False
        try:
            self._unanswered_connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:  # the worker has closed the connection
            pass
        self._replace_unanswered_connection(None)
        return False

    def _replace_unanswered_connection(self, connection: socket.socket | None) -> None:
        if self._unanswered_connection is not None:
            self._unanswered_connection.close()
        self._unanswered_connection = connection
