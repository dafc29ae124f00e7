"""The health server with clients that misbehave. It needs no database."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING

import pytest
import structlog

from riverpy._tools.health import server as server_module
from riverpy._tools.health.http import REQUEST_HEAD_BYTES_MAX, Address, Response
from riverpy._tools.health.server import HttpServer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy._tools.health.http import Request

PATIENCE = 20.0
LARGE = 32 * 1024 * 1024
"""Bytes; more than the system keeps for a reader who does not read."""


class Site:
    """A server with a page of each kind."""

    def __init__(self) -> None:
        self.port = 0
        self.asked = asyncio.Event()
        self.stream_ended = asyncio.Event()
        self.server = HttpServer(
            Address("127.0.0.1", 0),
            {
                "/page": self._page,
                "/large": self._large,
                "/stream": self._stream,
                "/bug": self._bug,
            },
        )

    async def _page(self, request: Request) -> Response:
        return Response(HTTPStatus.OK, "text/plain", b"well")

    async def _large(self, request: Request) -> Response:
        return Response(HTTPStatus.OK, "text/plain", b"x" * LARGE)

    async def _bug(self, request: Request) -> Response:
        raise RuntimeError("a bug of ours")

    async def _stream(self, request: Request) -> Response:
        return Response(HTTPStatus.OK, "text/plain", self._parts())

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        try:
            self.asked.set()
            while True:
                yield b"part\n"
                await asyncio.sleep(0.01)
        finally:
            self.stream_ended.set()

    async def ask(self, raw: bytes) -> bytes:
        """Send these bytes and return the whole response."""
        async with asyncio.timeout(PATIENCE):
            reader, writer = await self.connect()
            writer.write(raw)
            answer = await reader.read()
            writer.close()
            return answer

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def is_well(self) -> bool:
        """Return whether a probe is answered."""
        return (await self.ask(get("/page"))).endswith(b"\r\n\r\nwell")


def get(path: str, host: str = "localhost", method: str = "GET") -> bytes:
    """Return the bytes of a request."""
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


def status(answer: bytes) -> int:
    """Return the status of a response."""
    return int(answer.split()[1])


def reset(writer: asyncio.StreamWriter) -> None:
    """Reset the connection, as the end of a process with unread input does."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def serving() -> AsyncGenerator[Site]:
    """Serve a site. The end must not wait for connected clients."""
    site = Site()
    with structlog.testing.capture_logs() as log:
        async with site.server.serve():
            site.port = log[0]["port"]
            yield site
            leaving = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - leaving < PATIENCE


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET / HTTP/2\r\n\r\n", 400),
        (b"GET http://[ HTTP/1.1\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
        (get("/page?" + "&".join(["a=1"] * 200)), 400),
        (b"GET /page HTTP/1.1\r\nx: " + b"a" * (2 * REQUEST_HEAD_BYTES_MAX), 431),
        (get("/page", method="POST"), 405),
        (get("/"), 404),
        (get("/page/../page"), 404),
        (get("/page", host="evil.example"), 403),
        (get("/page", host="localhost.evil.example:80"), 403),
        (get("/page", host="127.0.0.1:8378"), 200),
        (get("/page", host="[::1]:8378"), 200),
        (b"GET /page HTTP/1.0\n\n", 200),
        (get("/page") + get("/page"), 200),
        (b"GET /page HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody", 200),
    ],
)
async def test_requests(raw: bytes, expected: int) -> None:
    """Each request, valid or not, gets one response, and the next probe too. Only GET and HEAD
    with a host of this machine are answered (OP-03, SE-04)."""
    async with serving() as site:
        answer = await site.ask(raw)
        assert status(answer) == expected
        assert answer.count(b"Connection: close") == 1
        assert await site.is_well()


async def test_head() -> None:
    """The response to HEAD has the headers of GET and no body, also for a stream."""
    async with serving() as site:
        whole = await site.ask(get("/page"))
        assert await site.ask(get("/page", method="HEAD")) == whole.removesuffix(b"well")
        assert (await site.ask(get("/stream", method="HEAD"))).endswith(b"\r\n\r\n")


async def test_clients_that_leave() -> None:
    """Half a request, a reset, or an early end of a connection do not affect other clients
    (OP-03)."""
    async with serving() as site:
        for raw in (b"", b"GET /pa", get("/large"), get("/stream")):
            for is_reset in (False, True):
                _, writer = await site.connect()
                writer.write(raw)
                await writer.drain()
                if is_reset:
                    reset(writer)
                else:
                    writer.close()
                assert await site.is_well()


async def test_ends_with_clients_connected() -> None:
    """A stop waits for no client: not for a silent one, one with half a request, one that does
    not read, or one that reads a stream (OP-03)."""
    async with serving() as site:
        readers = [await site.connect() for _ in range(4)]
        for (_, writer), raw in zip(
            readers, (b"", b"GET /pa", get("/large"), get("/stream")), strict=True
        ):
            writer.write(raw)
        async with asyncio.timeout(PATIENCE):
            await site.asked.wait()
    await asyncio.wait_for(site.stream_ended.wait(), PATIENCE)
    for _, writer in readers:
        writer.close()


async def test_stream_ends_with_its_reader() -> None:
    """A stream ends when its reader has disconnected."""
    async with serving() as site, asyncio.timeout(PATIENCE):
        reader, writer = await site.connect()
        writer.write(get("/stream"))
        while not (await reader.readline()).startswith(b"part"):
            pass
        writer.close()
        await site.stream_ended.wait()


async def test_stream_ends_when_its_reader_resets() -> None:
    """A reader that is killed with unread lines causes no error in the log (OP-03)."""
    async with serving() as site, asyncio.timeout(PATIENCE):
        with structlog.testing.capture_logs() as log:
            _, writer = await site.connect()
            writer.write(get("/stream"))
            await site.asked.wait()
            reset(writer)
            while site.server._has_request_by_connection:
                await asyncio.sleep(0.01)
        assert log == []


async def test_slow_requests_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends too slowly receives an error. One that reads too slowly is
    disconnected."""
    monkeypatch.setattr(server_module, "REQUEST_TIMEOUT", 0.05)
    monkeypatch.setattr(server_module, "SEND_TIMEOUT", 0.05)
    async with serving() as site:
        assert status(await site.ask(b"GET /pa")) == 408
        async with asyncio.timeout(PATIENCE):
            _reader, writer = await site.connect()
            writer.transport.pause_reading()
            writer.write(get("/large"))
            while site.server._has_request_by_connection:
                await asyncio.sleep(0.01)
            writer.transport.abort()


async def test_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit, the oldest idle connections are closed, so that a probe is always
    answered."""
    monkeypatch.setattr(server_module, "CONNECTIONS_MAX", 4)
    async with serving() as site:
        idle = [await site.connect() for _ in range(8)]
        assert await site.is_well()
        async with asyncio.timeout(PATIENCE):
            for reader, _ in idle[:4]:
                assert await reader.read() == b""
        for _, writer in idle:
            writer.close()


async def test_error_in_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a page is logged, and the server keeps running."""
    async with serving() as site:
        assert await site.ask(get("/bug")) == b""
        assert await site.is_well()


async def test_port_in_use() -> None:
    """A port in use is an error that says what to do (OP-03)."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(
            OSError, match=r"another process uses the port: choose another one with --health"
        ):
            async with HttpServer(address, {}).serve():
                pass


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("8378", ("127.0.0.1", 8378)),
        (":8378", ("127.0.0.1", 8378)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::]:80", ("::", 80)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_address(text: str, address: tuple[str, int]) -> None:
    """Without a host only this machine can connect. An address is formatted as it was parsed
    (SE-04)."""
    parsed = Address.parse(text)
    assert parsed == address
    assert Address.parse(str(parsed)) == parsed
    assert parsed.is_loopback == (address[0] in {"127.0.0.1", "localhost"})


@pytest.mark.parametrize(
    "text", ["", ":", "host", "host:", "h:99999", "a b:1", "http://h:1", "::1"]
)
def test_wrong_address(text: str) -> None:
    """An invalid address is refused with an example."""
    with pytest.raises(ValueError, match=r"as in 127\.0\.0\.1:8378"):
        Address.parse(text)
