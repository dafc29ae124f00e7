"""A TCP proxy in front of PostgreSQL that delays, drops, cuts or refuses connections by their name,
or breaks the whole path like a broken network."""

from __future__ import annotations

import asyncio
import struct
from contextlib import asynccontextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, urlsplit

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

EVERY = ""
"""Stands for connections of every name."""
_CHUNK = 65536


class Partition(Enum):
    """The ways to break the network, for old and new connections. Neither side is notified, so a
    peer that ends still seems alive."""

    REQUESTS_LOST = "requests lost"
    """The data that the client sends is dropped; answers on their way arrive."""
    ANSWERS_LOST = "answers lost"
    """The server executes requests, and its answers are dropped."""
    HELD = "held"
    """Nothing passes either way until the network is healed; then everything is delivered late."""


class _Link:
    """One proxied connection."""

    def __init__(self, client: asyncio.StreamWriter) -> None:
        self.name = ""
        self.answers = 0
        self.has_lost = False
        """Whether some of its bytes were dropped, so that it is unusable."""
        self.client = client
        self.server: asyncio.StreamWriter | None = None

    def cut(self) -> None:
        self.client.transport.abort()
        if self.server is not None:
            self.server.transport.abort()


class Proxy:
    """Passes bytes on, unless told otherwise by its attributes and methods."""

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
        self._idle = asyncio.Event()
        self._idle.set()
        self.url = ""
        self.accepted = 0
        """Number of attempted connections."""
        self.most = 0
        """The largest number of connections at once."""
        self.refusing = False
        """Whether new connections are cut at once."""
        self.held = asyncio.Event()
        """Set when an answer is held back."""
        self.lost_next_answer: str | None = None
        """Cut the connection of this name instead of passing on its next answer. It is None after
        that."""
        self.partition: Partition | None = None
        """How the network is broken now. Set it to break the network; `heal` ends it."""

    async def start(self) -> None:
        """Listen. `url` is set from then on."""
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._listening.sockets[0].getsockname()[1]
        user = quote(self._user, safe=":%")
        self.url = f"postgresql://{user}@127.0.0.1:{port}{self._database}?sslmode=disable"

    @property
    def connections(self) -> int:
        """The current number of connections."""
        return len(self._links)

    async def close(self) -> None:
        """Cut every connection and stop listening."""
        self._listening.close()
        await self.release()
        await self.heal()
        self.cut()
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self._idle.wait()

    def hold(self, name: str = EVERY, *, after: int = 0) -> None:
        """Hold back the server's answers on these connections, from the `after`-th chunk on."""
        self._holds[name] = after
        self.held.clear()

    async def release(self) -> None:
        """Deliver what is held back, and pass all later data on."""
        self._holds.clear()
        async with self._changed:
            self._changed.notify_all()

    async def heal(self) -> None:
        """End the partition: held data is delivered, and connections that lost bytes are reset."""
        self.partition = None
        for link in self._links:
            if link.has_lost:
                link.cut()
        async with self._changed:
            self._changed.notify_all()

    def cut(self, name: str = EVERY) -> int:
        """Reset these connections, and return how many there were."""
        links = [link for link in self._links if name in {EVERY, link.name}]
        for link in links:
            link.cut()
        return len(links)

    def _is_held(self, link: _Link) -> bool:
        limits = [self._holds[name] for name in (EVERY, link.name) if name in self._holds]
        return any(link.answers >= limit for limit in limits)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        link = _Link(writer)
        self._links.add(link)
        self.most = max(self.most, len(self._links))
        self._idle.clear()
        try:
            if not self.refusing:
                await self._pass(link, reader)
        except* (OSError, EOFError):
            pass
        finally:
            link.cut()
            self._links.discard(link)
            if not self._links:
                self._idle.set()

    async def _pass(self, link: _Link, reader: asyncio.StreamReader) -> None:
        head = await reader.readexactly(4)
        startup = await reader.readexactly(struct.unpack("!I", head)[0] - 4)
        words = startup[4:].split(b"\0")
        link.name = (
            dict(zip(words[::2], words[1::2], strict=False)).get(b"application_name", b"").decode()
        )
        await self._until_passing(link, Partition.REQUESTS_LOST)
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
        while True:
            data = await reader.read(_CHUNK)
            await self._until_passing(link, Partition.REQUESTS_LOST)
            if not data:
                raise EOFError
            link.server.write(data)
            await link.server.drain()

    async def _pump_answers(self, link: _Link, reader: asyncio.StreamReader) -> None:
        while True:
            data = await reader.read(_CHUNK)
            await self._until_passing(link, Partition.ANSWERS_LOST)
            if not data:
                raise EOFError
            if self.lost_next_answer == link.name:
                self.lost_next_answer = None
                raise EOFError
            if self._is_held(link):
                self.held.set()
                async with self._changed:
                    await self._changed.wait_for(lambda: not self._is_held(link))
            if link.client.is_closing():  # uvloop would raise an exception that is no OSError
                raise EOFError
            link.answers += 1
            link.client.write(data)
            await link.client.drain()

    async def _until_passing(self, link: _Link, losing: Partition) -> None:
        """Return when bytes of this direction pass. A connection that lost bytes is already cut."""
        while self.partition in {losing, Partition.HELD}:
            link.has_lost |= self.partition is losing
            async with self._changed:
                await self._changed.wait()
        if link.has_lost and self.partition is None:
            raise EOFError


@asynccontextmanager
async def proxied(url: str) -> AsyncGenerator[Proxy]:
    """Run a proxy in front of the server of this URL."""
    proxy = Proxy(url)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
