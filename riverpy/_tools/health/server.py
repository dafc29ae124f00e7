"""Server: answers HTTP requests about one worker, and outlives whatever its clients do.

A connection carries one request. One that is slow to send it or to read the answer is cut; beyond
the limit of connections the one that has waited longest to send its request is, so that idle
connections never keep a probe out.
"""

from __future__ import annotations

import errno
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING

import anyio
from anyio.abc import SocketAttribute, SocketListener, TaskGroup

from riverpy._error_text import error_text
from riverpy._lifecycle import single_error
from riverpy._log import RepeatedFailureLog, get_logger
from riverpy._log_events import (
    HEALTH_CONNECTION_FAILED,
    HEALTH_REQUEST_FAILED,
    HEALTH_SERVER_STARTED,
)
from riverpy._tools.health.http import HEAD_MAX, HttpError, Response, parse

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from anyio.abc import SocketStream

    from riverpy._tools.health.address import Address
    from riverpy._tools.health.http import Body, Request

CONNECTIONS_MAX = 64
REQUEST_TIMEOUT = 5.0
"""Seconds that a client has to send its request."""
SEND_TIMEOUT = 10.0
"""Seconds that a client has to take the next part of an answer."""
PART = 64 * 1024
"""Bytes of an answer that are sent at a time."""
LINGER = 1.0
"""Seconds that a client has, after its answer, to close: cutting a connection with unread input
would take the answer with it."""
ACCEPT_RETRY = 0.5
"""Seconds until connections are accepted again after that failed, as without descriptors."""
_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)


class _Connection:
    """One connection."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.has_asked = False


class Server:
    """Serves while `serving` is entered."""

    def __init__(
        self, address: Address, routes: Mapping[str, Callable[[Request], Awaitable[Response]]]
    ) -> None:
        """Make it; nothing listens yet.

        Args:
            address: where to listen.
            routes: what answers which path.
        """
        self._address, self._routes = address, routes
        self._visits: list[_Connection] = []
        self._log = get_logger()

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Answer meanwhile. Leaving cuts whoever is still connected.

        Raises:
            OSError: the address cannot be listened on; the text says what to do.
        """
        listeners = await self._listen()
        try:
            async with anyio.create_task_group() as tasks:
                for listener in listeners:
                    tasks.start_soon(self._accept, listener, tasks, name="riverpy health")
                yield
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise single_error(group) from None
        finally:
            for listener in listeners:
                with anyio.CancelScope(shield=True):
                    await listener.aclose()

    async def _listen(self) -> list[SocketListener]:
        host, port = self._address
        try:
            found = await anyio.create_tcp_listener(local_host=host, local_port=port)
        except OSError as error:
            hint = (
                "another process listens there: give --health another port"
                if error.errno == errno.EADDRINUSE
                else error.strerror or error_text(error)
            )
            raise OSError(f"cannot serve health on {self._address}: {hint}") from error
        listeners = [one for one in found.listeners if isinstance(one, SocketListener)]
        for listener in listeners:
            bound = listener.extra(SocketAttribute.local_port)  # noqa: S610 (it is not Django's)
            self._log.info(HEALTH_SERVER_STARTED, host=host, port=bound)
        return listeners

    async def _accept(self, listener: SocketListener, tasks: TaskGroup) -> None:
        failures = RepeatedFailureLog(self._log)
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                failures.failed(HEALTH_CONNECTION_FAILED, error=error_text(error))
                await anyio.sleep(ACCEPT_RETRY)
                continue
            failures.recovered()
            self._make_room()
            visit = _Connection()
            self._visits.append(visit)
            tasks.start_soon(self._serve, stream, visit, name="riverpy health connection")

    def _make_room(self) -> None:
        if len(self._visits) >= CONNECTIONS_MAX:
            waiting = (visit for visit in self._visits if not visit.has_asked)
            oldest = next(waiting, self._visits[0])
            oldest.scope.cancel()
            self._visits.remove(oldest)

    async def _serve(self, stream: SocketStream, visit: _Connection) -> None:
        try:
            with visit.scope:
                await self._answer(stream, visit)
        except _GONE:
            pass
        except Exception:  # one answer is no reason to end the worker
            self._log.exception(HEALTH_REQUEST_FAILED)
        finally:
            if visit in self._visits:
                self._visits.remove(visit)
            with anyio.CancelScope(shield=True):  # it does not wait
                await stream.aclose()

    async def _answer(self, stream: SocketStream, visit: _Connection) -> None:
        is_head_only = False
        try:
            request = parse(await _read_head(stream))
            visit.has_asked = True
            is_head_only = request.method == "HEAD"
            response = await self._respond(request)
        except HttpError as refused:
            response = refused.response
        visit.has_asked = True
        try:
            await _send(stream, response.head())
            if not is_head_only:
                await _send_body(stream, response.body)
        finally:
            if not isinstance(response.body, bytes):
                with anyio.CancelScope(shield=True):
                    await response.body.aclose()
        await _send_end(stream)
        await _linger(stream)

    async def _respond(self, request: Request) -> Response:
        if self._address.is_loopback and not request.is_for_local:
            raise HttpError(HTTPStatus.FORBIDDEN, "ask for localhost, or for an address")
        route = self._routes.get(request.path)
        if route is None:
            known = " ".join(self._routes)
            raise HttpError(HTTPStatus.NOT_FOUND, f"there are {known}")
        return await route(request)


async def _read_head(stream: SocketStream) -> bytes:
    head = b""
    with anyio.move_on_after(REQUEST_TIMEOUT):
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            if len(head) > HEAD_MAX:
                raise HttpError(
                    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                    f"a request has at most {HEAD_MAX} bytes",
                )
            head += await stream.receive(HEAD_MAX)
        return head
    raise HttpError(HTTPStatus.REQUEST_TIMEOUT, f"the request took more than {REQUEST_TIMEOUT:g} s")


async def _send(stream: SocketStream, part: bytes) -> None:
    with anyio.fail_after(SEND_TIMEOUT):
        await stream.send(part)


async def _send_end(stream: SocketStream) -> None:
    try:
        await stream.send_eof()
    except RuntimeError as error:  # so says uvloop where the client has reset the connection
        raise anyio.BrokenResourceError from error


async def _send_body(stream: SocketStream, body: Body) -> None:
    if isinstance(body, bytes):
        for start in range(0, len(body), PART):
            await _send(stream, body[start : start + PART])
    else:
        await _send_parts(stream, body)


async def _send_parts(stream: SocketStream, parts: AsyncGenerator[bytes, None]) -> None:
    """Send parts as they come, until there are no more or the client is gone."""
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when_closed, stream, tasks.cancel_scope)
            async for part in parts:
                await _send(stream, part)
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise single_error(group) from None


async def _cancel_when_closed(stream: SocketStream, scope: anyio.CancelScope) -> None:
    try:
        while True:
            await stream.receive()
    except _GONE:
        scope.cancel()


async def _linger(stream: SocketStream) -> None:
    with anyio.move_on_after(LINGER):
        while True:
            await stream.receive()
