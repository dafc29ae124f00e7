"""An HTTP client for the health server of a worker."""

from __future__ import annotations

import os
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, cast
from urllib.parse import urlsplit

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream

from riverpy._tools.health.http import LOOPBACK_HOST, Address

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from anyio.abc import ByteStream

HTTP_TIMEOUT = 5.0
"""The timeout, in seconds, of each step of a request: opening the connection, receiving the
headers, and receiving the body."""
RESPONSE_BODY_BYTES_MAX = 16 * 1024 * 1024
LINE_BYTES_MAX = 64 * 1024
HEALTH_PORT_DEFAULT = 8378
NO_HEALTH_SERVER_ERROR = "the program that listens there is not a health server"
_NO_ANSWER_ERROR = f"no answer within {HTTP_TIMEOUT:g} s"


class HttpResponse(NamedTuple):
    """The response of a server. The body is not read yet."""

    status: int
    body_stream: BufferedByteReceiveStream

    async def read_body(self) -> bytes:
        """Return the whole body. Raises TimeoutError if it does not end within `HTTP_TIMEOUT`."""
        parts: list[bytes] = []
        with anyio.fail_after(HTTP_TIMEOUT, reason="the response did not end"):
            try:
                while sum(map(len, parts)) < RESPONSE_BODY_BYTES_MAX:
                    parts.append(await self.body_stream.receive())
            except anyio.EndOfStream:
                pass
        return b"".join(parts)


def parse_address_or_url(url: str) -> Address:
    """Parse `http://HOST:PORT`, `HOST:PORT`, `:PORT` or `PORT`. Raises ValueError if the text is
    not an address."""
    if "://" not in url:
        return Address.parse(url)
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.path not in {"", "/"}:
        raise ValueError(f"{url!r} is not http://HOST:PORT")
    return Address(parts.hostname or LOOPBACK_HOST, parts.port or HEALTH_PORT_DEFAULT)


@asynccontextmanager
async def http_get(address: Address, target: str) -> AsyncGenerator[HttpResponse]:
    """Send `GET target`, and yield the response when its headers have arrived.

    Raises:
        OSError: the connection failed, or the program that listens there is not a health server.
            The text of the error does not contain the address.
        TimeoutError: there was no response within `HTTP_TIMEOUT`.
    """
    with anyio.fail_after(HTTP_TIMEOUT, reason=_NO_ANSWER_ERROR):
        try:
            stream = await anyio.connect_tcp(address.host, address.port)
        except OSError as error:
            raise ConnectionError(_describe_connection_error(error)) from error
    async with send_get_request(stream, str(address), target) as response:
        yield response


@asynccontextmanager
async def send_get_request(
    stream: ByteStream, host: str, target: str
) -> AsyncGenerator[HttpResponse]:
    """Send `GET target` on the new connection `stream`, and yield the response when its headers
    have arrived. Close the connection at the end. Raises the same errors as `http_get`."""
    async with stream:
        buffered = BufferedByteReceiveStream(stream)
        with anyio.fail_after(HTTP_TIMEOUT, reason=_NO_ANSWER_ERROR):
            await stream.send(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            try:
                head = await buffered.receive_until(b"\r\n\r\n", LINE_BYTES_MAX)
            except (anyio.IncompleteRead, anyio.DelimiterNotFound, anyio.BrokenResourceError):
                raise ConnectionError(NO_HEALTH_SERVER_ERROR) from None
        words = head.split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
            raise ConnectionError(NO_HEALTH_SERVER_ERROR)
        yield HttpResponse(int(words[1]), buffered)


def _describe_connection_error(error: OSError) -> str:
    """Return why a connection failed. If the host has several addresses, return the reason for the
    last address."""
    cause = error.__cause__
    if isinstance(cause, BaseExceptionGroup):
        cause = cast("BaseExceptionGroup[OSError]", cause).exceptions[-1]
    if not isinstance(cause, OSError):
        cause = error
    if cause.errno is None or isinstance(cause, socket.gaierror):
        return cause.strerror or str(cause)
    return os.strerror(cause.errno).lower()
