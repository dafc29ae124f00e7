"""Asking: one HTTP request to the health server of a worker, for the commands that read it."""

from __future__ import annotations

import os
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, cast
from urllib.parse import urlsplit

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream

from riverpy._tools.health.address import LOOPBACK, Address

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

TIMEOUT = 5.0
"""Seconds to connect, and for the head of the answer."""
BODY_MAX = 16 * 1024 * 1024
LINE_MAX = 64 * 1024
PORT_DEFAULT = 8378
NO_HEALTH_SERVER = "what listens there is no health server"
_SILENT = f"no answer within {TIMEOUT:g} s"


class Answer(NamedTuple):
    """What a server answered."""

    status: int
    stream: BufferedByteReceiveStream

    async def body(self) -> bytes:
        """All of it, within the time limit.

        Raises:
            TimeoutError: it did not end in time.
        """
        parts: list[bytes] = []
        with anyio.fail_after(TIMEOUT, reason="the answer did not end"):
            try:
                while sum(map(len, parts)) < BODY_MAX:
                    parts.append(await self.stream.receive())
            except anyio.EndOfStream:
                pass
        return b"".join(parts)


def parse_address(url: str) -> Address:
    """Where `http://HOST:PORT`, `HOST:PORT`, `:PORT` or `PORT` leads.

    Raises:
        ValueError: the text is none of these.
    """
    if "://" not in url:
        return Address.parse(url)
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.path not in {"", "/"}:
        raise ValueError(f"{url!r} is not http://HOST:PORT")
    return Address(parts.hostname or LOOPBACK, parts.port or PORT_DEFAULT)


@asynccontextmanager
async def http_get(address: Address, target: str) -> AsyncGenerator[Answer]:
    """The answer to `GET target`.

    Raises:
        OSError: nobody answers there, or no health server does. The text does not name the address.
        TimeoutError: nobody answers in time.
    """
    with anyio.fail_after(TIMEOUT, reason=_SILENT):
        try:
            stream = await anyio.connect_tcp(address.host, address.port)
        except OSError as error:
            raise ConnectionError(_reason(error)) from error
    async with stream:
        buffered = BufferedByteReceiveStream(stream)
        with anyio.fail_after(TIMEOUT, reason=_SILENT):
            await stream.send(f"GET {target} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
            try:
                head = await buffered.receive_until(b"\r\n\r\n", LINE_MAX)
            except (anyio.IncompleteRead, anyio.DelimiterNotFound, anyio.BrokenResourceError):
                raise ConnectionError(NO_HEALTH_SERVER) from None
        words = head.split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
            raise ConnectionError(NO_HEALTH_SERVER)
        yield Answer(int(words[1]), buffered)


def _reason(error: OSError) -> str:
    """Why there is no connection; of several addresses of a name, to the last of them."""
    cause = error.__cause__
    if isinstance(cause, BaseExceptionGroup):
        cause = cast("BaseExceptionGroup[OSError]", cause).exceptions[-1]
    if not isinstance(cause, OSError):
        cause = error
    if cause.errno is None or isinstance(cause, socket.gaierror):
        return cause.strerror or str(cause)
    return os.strerror(cause.errno).lower()
