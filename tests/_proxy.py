"""A TCP proxy before PostgreSQL that holds back, cuts or refuses connections, by their name."""

from __future__ import annotations

import asyncio
import struct
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, urlsplit

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

EVERY = ""
"""Stands for the connections of every name."""


class _Link:
    """One proxied connection."""

    def __init__(self, client: asyncio.StreamWriter) -> None:
        self.name = ""
        self.answers = 0
        self.client = client
        self.server: asyncio.StreamWriter | None = None

    def cut(self) -> None:
        self.client.transport.abort()
        if self.server is not None:
            self.server.transport.abort()


class Proxy:
    """Passes bytes on until it is told otherwise."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        options = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self._host = parts.hostname or options.get("host", "127.0.0.1")
        self._port = parts.port or int(options.get("port", 5432))
        self._user = parts.netloc.rpartition("@")[0] or "postgres"
        self._database = parts.path
        self._links: set[_Link] = set()
        self._holds: dict[str, int] = {}
        self._changed = asyncio.Condition()
        self.url = ""
        self.refusing = False
        """Whether new connections are cut at once."""
        self.held = asyncio.Event()
        """Set when an answer was held back."""
        self.lost_next_answer: str | None = None
        """Cut the connection of this name instead of passing on its next answer; then None."""

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        user = quote(self._user, safe=":%")
        self.url = f"postgresql://{user}@127.0.0.1:{port}{self._database}?sslmode=disable"
        return server

    def hold(self, name: str = EVERY, *, after: int = 0) -> None:
        """Keep back the server's answers on these connections, from the `after`-th chunk on."""
        self._holds[name] = after
        self.held.clear()

    async def release(self) -> None:
        """Pass on what is held, and all that comes."""
        self._holds.clear()
        async with self._changed:
            self._changed.notify_all()

    def cut(self, name: str = EVERY) -> int:
        """Reset these connections; returns how many."""
        links = [link for link in self._links if name in {EVERY, link.name}]
        for link in links:
            link.cut()
        return len(links)

    def _is_held(self, link: _Link) -> bool:
        limits = [self._holds[name] for name in (EVERY, link.name) if name in self._holds]
        return any(link.answers >= limit for limit in limits)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(writer)
        self._links.add(link)
        try:
            if not self.refusing:
                await self._pass(link, reader)
        except* (OSError, EOFError):
            pass
        finally:
            self._links.discard(link)
            link.cut()

    async def _pass(self, link: _Link, reader: asyncio.StreamReader) -> None:
        head = await reader.readexactly(4)
        startup = await reader.readexactly(struct.unpack("!I", head)[0] - 4)
        words = startup[4:].split(b"\0")
        link.name = (
            dict(zip(words[::2], words[1::2], strict=False)).get(b"application_name", b"").decode()
        )
        if self._host.startswith("/"):
            opened = await asyncio.open_unix_connection(f"{self._host}/.s.PGSQL.{self._port}")
        else:
            opened = await asyncio.open_connection(self._host, self._port)
        answers, link.server = opened
        link.server.write(head + startup)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pump_questions(link, reader))
            tasks.create_task(self._pump_answers(link, answers))

    async def _pump_questions(self, link: _Link, reader: asyncio.StreamReader) -> None:
        assert link.server is not None
        while data := await reader.read(65536):
            link.server.write(data)
            await link.server.drain()
        raise EOFError

    async def _pump_answers(self, link: _Link, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65536):
            if self.lost_next_answer == link.name:
                self.lost_next_answer = None
                raise EOFError
            if self._is_held(link):
                self.held.set()
                async with self._changed:
                    await self._changed.wait_for(lambda: not self._is_held(link))
            link.answers += 1
            link.client.write(data)
            await link.client.drain()
        raise EOFError


@asynccontextmanager
async def proxied(url: str) -> AsyncGenerator[Proxy]:
    """A proxy before the server of this URL."""
    proxy = Proxy(url)
    server = await proxy.start()
    try:
        yield proxy
    finally:
        server.close()
        await proxy.release()
        proxy.cut()
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                while proxy._links:
                    await asyncio.sleep(0)
