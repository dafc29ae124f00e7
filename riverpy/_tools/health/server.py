"""The HTTP server of a worker or of a supervisor. It answers health requests.

Each connection has one request. The server disconnects a slow client. If a new connection exceeds
the limit, the server closes the oldest connection that has sent no request or, if all have sent
one, the oldest connection. So idle connections never block a probe.
"""

from __future__ import annotations

import errno
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

import anyio
from anyio.abc import SocketAttribute, SocketListener, TaskGroup

from riverpy._error_text import format_error_with_type
from riverpy._lifecycle import unwrap_single_error
from riverpy._log import RepeatedFailureLog, get_logger
from riverpy._log_events import (
    HEALTH_CONNECTION_FAILED,
    HEALTH_REQUEST_FAILED,
    HEALTH_SERVER_STARTED,
)
from riverpy._tools.health.http import (
    REQUEST_HEAD_BYTES_MAX,
    Address,
    HttpError,
    Response,
    parse_request,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from anyio.abc import ByteStream

    from riverpy._tools.health.http import Request, ResponseBody

CONNECTIONS_MAX = 64
"""The maximum number of open connections."""
REQUEST_TIMEOUT = 5.0
"""Seconds within which a client must send its request."""
SEND_TIMEOUT = 10.0
"""Seconds within which a client must receive the next part of a response."""
RESPONSE_PART_BYTES_MAX = 64 * 1024
"""The maximum number of bytes that are sent at once."""
CLIENT_DISCONNECT_TIMEOUT = 1.0
"""Seconds to wait after a response until the client closes the connection. If the server closed the
connection first, with unread input, the client could lose the response."""
ACCEPT_RETRY_DELAY = 0.5
"""Seconds to wait after `accept` has failed, for example because there are no free file
descriptors."""
_DISCONNECTION_ERRORS = (
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.EndOfStream,
    OSError,
)


class ConnectionListener(Protocol):
    """A source of connections to the server."""

    async def accept(self) -> ByteStream:
        """Wait for the next connection and return it. Raises OSError if it cannot be accepted."""
        ...

    async def aclose(self) -> None:
        """Accept no more connections."""
        ...


class HttpServer:
    """Answers HTTP requests while the context manager `serve` is open.

    Args:
        source: the address to listen on, or a `SupervisorConnectionListener`, which accepts
            connections from a worker's supervisor.
        routes: maps each path to the function that answers its requests.
    """

    def __init__(
        self,
        source: Address | ConnectionListener,
        routes: Mapping[str, Callable[[Request], Awaitable[Response]]],
    ) -> None:
        self._source, self._routes = source, routes
        self._has_request_by_connection: dict[anyio.CancelScope, bool] = {}
        """Whether the request of each connection has arrived. The key is the connection's cancel
        scope. The oldest connection comes first."""
        self._log = get_logger()

    @asynccontextmanager
    async def serve(self) -> AsyncGenerator[None]:
        """Answer requests during the `async with` block. At the end of the block, close all
        connections.

        Raises:
            OSError: the server cannot listen on the address. The error text says what to do.
        """
        listeners = await self._open_listeners()
        try:
            async with anyio.create_task_group() as tasks:
                for listener in listeners:
                    tasks.start_soon(
                        self._accept_connections, listener, tasks, name="riverpy health"
                    )
                yield
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise unwrap_single_error(group) from None
        finally:
            for listener in listeners:
                with anyio.CancelScope(shield=True):
                    await listener.aclose()

    async def _open_listeners(self) -> Sequence[ConnectionListener]:
        if not isinstance(self._source, Address):
            return [self._source]
        host, port = self._source
        try:
            found = await anyio.create_tcp_listener(local_host=host, local_port=port)
        except OSError as error:
            hint = (
                "another process uses the port: choose another one with --health"
                if error.errno == errno.EADDRINUSE
                else error.strerror or format_error_with_type(error)
            )
            raise OSError(f"cannot serve health on {self._source}: {hint}") from error
        listeners = [one for one in found.listeners if isinstance(one, SocketListener)]
        for listener in listeners:
            bound = listener.extra(SocketAttribute.local_port)  # noqa: S610 (it is not Django's)
            self._log.info(HEALTH_SERVER_STARTED, host=host, port=bound)
        return listeners

    async def _accept_connections(self, listener: ConnectionListener, tasks: TaskGroup) -> None:
        failures = RepeatedFailureLog(self._log)
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                failures.log_failure(HEALTH_CONNECTION_FAILED, error=format_error_with_type(error))
                await anyio.sleep(ACCEPT_RETRY_DELAY)
                continue
            failures.log_recovery()
            self._close_oldest_connection_at_limit()
            scope = anyio.CancelScope()
            self._has_request_by_connection[scope] = False
            tasks.start_soon(
                self._serve_connection, stream, scope, name="riverpy health connection"
            )

    def _close_oldest_connection_at_limit(self) -> None:
        if len(self._has_request_by_connection) >= CONNECTIONS_MAX:
            waiting = (
                scope
                for scope, has_request in self._has_request_by_connection.items()
                if not has_request
            )
            oldest = next(waiting, next(iter(self._has_request_by_connection)))
            oldest.cancel()
            del self._has_request_by_connection[oldest]

    async def _serve_connection(self, stream: ByteStream, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                await self._answer_request(stream, scope)
        except _DISCONNECTION_ERRORS:
            pass
        except Exception:  # a failed request must not end the worker
            self._log.exception(HEALTH_REQUEST_FAILED)
        finally:
            self._has_request_by_connection.pop(scope, None)
            with anyio.CancelScope(shield=True):  # safe: `aclose` does not wait
                await stream.aclose()

    async def _answer_request(self, stream: ByteStream, scope: anyio.CancelScope) -> None:
        is_head_only = False
        try:
            request = parse_request(await _read_request_head(stream))
            self._has_request_by_connection[scope] = True
            is_head_only = request.method == "HEAD"
            response = await self._route_request(request)
        except HttpError as refused:
            response = refused.response
        self._has_request_by_connection[scope] = True
        try:
            await _send_bytes(stream, response.encode_status_and_headers())
            if not is_head_only:
                await _send_body(stream, response.body)
        finally:
            if not isinstance(response.body, bytes):
                with anyio.CancelScope(shield=True):
                    await response.body.aclose()
        await _send_eof(stream)
        with anyio.move_on_after(CLIENT_DISCONNECT_TIMEOUT):
            await _wait_for_client_disconnect(stream)

    async def _route_request(self, request: Request) -> Response:
        is_local = not isinstance(self._source, Address) or self._source.is_loopback
        if is_local and not request.is_host_safe_from_rebinding:
            raise HttpError(HTTPStatus.FORBIDDEN, "use localhost or an IP address as the host")
        route = self._routes.get(request.path)
        if route is None:
            known = " ".join(self._routes)
            raise HttpError(HTTPStatus.NOT_FOUND, f"the pages are {known}")
        return await route(request)


async def _read_request_head(stream: ByteStream) -> bytes:
    head = b""
    with anyio.move_on_after(REQUEST_TIMEOUT):
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            if len(head) > REQUEST_HEAD_BYTES_MAX:
                raise HttpError(
                    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                    f"the request is longer than {REQUEST_HEAD_BYTES_MAX} bytes",
                )
            head += await stream.receive(REQUEST_HEAD_BYTES_MAX)
        return head
    raise HttpError(HTTPStatus.REQUEST_TIMEOUT, f"the request took more than {REQUEST_TIMEOUT:g} s")


async def _send_bytes(stream: ByteStream, data: bytes) -> None:
    with anyio.fail_after(SEND_TIMEOUT):
        await stream.send(data)


async def _send_eof(stream: ByteStream) -> None:
    try:
        await stream.send_eof()
    except RuntimeError as error:  # uvloop raises this error if the client has reset the connection
        raise anyio.BrokenResourceError from error


async def _send_body(stream: ByteStream, body: ResponseBody) -> None:
    if isinstance(body, bytes):
        for start in range(0, len(body), RESPONSE_PART_BYTES_MAX):
            await _send_bytes(stream, body[start : start + RESPONSE_PART_BYTES_MAX])
    else:
        await _send_body_parts(stream, body)


async def _send_body_parts(stream: ByteStream, parts: AsyncGenerator[bytes, None]) -> None:
    """Send all parts. Stop if the client disconnects."""
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when_client_disconnects, stream, tasks.cancel_scope)
            async for part in parts:
                await _send_bytes(stream, part)
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise unwrap_single_error(group) from None


async def _cancel_when_client_disconnects(stream: ByteStream, scope: anyio.CancelScope) -> None:
    await _wait_for_client_disconnect(stream)
    scope.cancel()


async def _wait_for_client_disconnect(stream: ByteStream) -> None:
    with suppress(*_DISCONNECTION_ERRORS):
        while True:
            await stream.receive()
